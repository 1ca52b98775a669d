"""An engine knows of the end of workers that are not its children."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shared_engine import wait_for

from flexkv_radix.transfer.lifeline import Lifeline

WORKER = """
import os, sys
from flexkv_radix.transfer.lifeline import show_end
show_end(int(sys.argv[1]))
if sys.argv[2] == "lets go":
    os.close(int(sys.argv[1]))
print("shown", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(fd: int, how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(fd), how],
        pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "shown\n"
        yield process
        process.kill()


def test_all_workers_and_the_server_have_to_be_gone() -> None:
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(ours)
    with worker(theirs.fileno(), "holds") as first, worker(theirs.fileno(), "holds") as second:
        first.kill()
        first.wait()
        assert not lifeline.is_over()
        second.kill()
        second.wait()
        assert not lifeline.is_over()
        theirs.close()
        assert lifeline.is_over()
        assert lifeline.is_over()
    lifeline.close()


def test_a_worker_that_let_go_of_its_files_is_not_gone() -> None:
    """As one that dies is, while a device still writes."""
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(ours)
    with worker(theirs.fileno(), "lets go") as process:
        theirs.close()
        assert not lifeline.is_over()
        os.kill(process.pid, 9)
        wait_for(lifeline.is_over, "the worker's end")
    lifeline.close()


def test_a_server_without_workers() -> None:
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(ours)
    assert not lifeline.is_over()
    theirs.close()
    assert lifeline.is_over()
    lifeline.close()
