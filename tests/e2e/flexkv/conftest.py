"""Fixtures of the tests of an engine with its cache."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many open files that those opened from now on have numbers which select() does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    first = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    files = [first, *(os.dup(first) for _ in range(1024))]
    yield
    for fd in files:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
