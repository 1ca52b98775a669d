"""Fixtures of the tests of an engine with its cache."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_server import start_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An external KVServer at the endpoint that engines in tmp_path use."""
    process = start_server(tmp_path)
    yield process
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait(20) in (0, -signal.SIGKILL)


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
