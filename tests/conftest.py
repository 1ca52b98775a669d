"""Fixtures that more than one directory uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from node import Node
from regions import remove_leftovers, unique_name


@pytest.fixture
def node() -> Iterator[Node]:
    """Servers and clients that are closed, clients first, when the test ends."""
    with ExitStack() as stack:
        yield Node(stack)


@pytest.fixture
def shm_name() -> Iterator[str]:
    """A name whose objects are removed when the test ends."""
    name = unique_name()
    yield name
    remove_leftovers(name)
