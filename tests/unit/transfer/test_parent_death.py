"""An engine killed while its worker copies: the worker goes at once, and the lease with it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shared_engine import EngineRank, kv_part, open_store, stop_rank, wait_for

from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.protocol import RankPlace, Start, TransferConfig, encode
from radixshmem.geometry import ComponentType

NUM_SLOTS = 64


def _try_lock(fd: int) -> bool:
    """Take byte 0 of the file by an open-file-description lock, as leases are."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    except BlockingIOError:
        return False
    return True


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_worker_dies_with_its_engine(stopped: bool, tmp_path: Path) -> None:
    part = kv_part(KVCacheLayoutType.LAYERFIRST, num_blocks=NUM_SLOTS, num_layers=8)
    lease = tmp_path / "lease"
    lease.write_bytes(b"\0")
    with open_store({ComponentType.FULL: part.share_bytes}, NUM_SLOTS) as store:
        config = TransferConfig(store.spec, 1, f"{tmp_path}/register")
        script = Path(__file__).with_name("parent_main.py")
        parent = subprocess.Popen(
            [sys.executable, str(script), str(lease)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(encode(Start(config)))
        parent.stdin.close()
        rank = EngineRank(RankPlace(), [part]).spawn(config.register_endpoint)
        worker_pid = int(parent.stdout.readline())
        with open(lease, "r+b") as file:
            assert not _try_lock(file.fileno()), "the engine holds its lease"
            if stopped:
                os.kill(worker_pid, signal.SIGSTOP)
            parent.kill()
            parent.wait()
            wait_for(lambda: _is_gone(worker_pid), "the worker's end", 5.0)
            wait_for(lambda: _try_lock(file.fileno()), "the lease's release", 5.0)
        before = store.bytes.copy()
        part.tensors[0][...] ^= 0xFF
        assert np.array_equal(store.bytes, before)
        parent.stdout.close()
        stop_rank(rank)
