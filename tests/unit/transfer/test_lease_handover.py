"""The worker shares the client's lease, and leaves no second descriptor of it in the engine."""

from __future__ import annotations

import os
from pathlib import Path

from shared_engine import EngineRank, kv_part, open_store, start_engine

from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.protocol import RankPlace
from radixshmem.geometry import ComponentType


def num_leases(pid: int) -> int:
    """Descriptors of lease_file() that a process has open."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    return sum(link.startswith("/memfd:lease ") for link in links)


def test_the_lease_is_the_workers_alone(tmp_path: Path) -> None:
    """start_engine() closes its own descriptor, so whatever is left here is the handle's."""
    part = kv_part(KVCacheLayoutType.LAYERFIRST)
    with open_store({ComponentType.FULL: part.share_bytes}, 29) as store:
        with start_engine(store, [EngineRank(RankPlace(), [part])], tmp_path) as engine:
            assert engine.handle.pid is not None
            assert num_leases(engine.handle.pid) == 1
            assert num_leases(os.getpid()) == 0
