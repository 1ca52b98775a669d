from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from regions import attach, leftovers, region

from radixshmem import CorruptRegion, Geometry, RadixError, RegionRetired, ServerNotReady, _native
from radixshmem.geometry import ComponentType, plan_geometry
from radixshmem.names import default_data_name
from radixshmem.prefault import Prefault
from radixshmem.records import RegionConfig, RegionState
from radixshmem.region import (
    Access,
    create_regions,
    object_path,
    open_index,
    open_object,
    plan_files,
    retire_regions,
)
from radixshmem.store_header import read_pools

GEOMETRY = Geometry(16, 5000, swa_slot_bytes=700, swa_window_blocks=4, mamba_slot_bytes=90)


def config_of(name: str, data_bytes: int = 1 << 20) -> RegionConfig:
    plan = plan_geometry(GEOMETRY, data_bytes=data_bytes, swa_ratio=0.25, mamba_ratio=0.125)
    return RegionConfig(
        plan,
        data_bytes=data_bytes,
        swa_ratio=0.25,
        mamba_ratio=0.125,
        data_name=default_data_name(name),
        evict_policy="slru",
        max_clients=7,
        pins_per_client=9,
        event_capacity=128,
        reap_quarantine_s=1.5,
    )


def test_both_files_describe_what_was_asked_for(shm_name: str) -> None:
    made = create_regions(shm_name, config_of(shm_name))
    fd = open_index(shm_name)
    info = _native.region_peek(fd)
    os.close(fd)
    assert info.config == made
    assert (info.state, info.generation) == (RegionState.READY, 0)
    assert replace(made, epoch=bytes(16), geometry=config_of(shm_name).geometry) == config_of(shm_name)
    assert made.epoch != bytes(16)
    fd = open_object(made.data_name)
    store = _native.store_peek(fd)
    assert (store.state, store.epoch) == (RegionState.READY, made.epoch)
    assert store.data_offset == 4096
    assert read_pools(fd, store.total_bytes) == made.geometry.pools
    assert os.fstat(fd).st_size == store.total_bytes
    os.close(fd)


def test_every_epoch_is_new() -> None:
    epochs = set()
    for _ in range(3):
        with region(Geometry(16, 64, full_slots=4)) as name:
            epochs.add(attach(name).info.config.epoch)
    assert len(epochs) == 3


def test_plan_is_what_is_made(shm_name: str) -> None:
    _, index_bytes, store_bytes = plan_files(config_of(shm_name))
    config = create_regions(shm_name, config_of(shm_name), how=Prefault(touch=False))
    assert os.stat(object_path(shm_name)).st_size == index_bytes
    assert os.stat(object_path(config.data_name)).st_size == store_bytes
    slots = sum(pool.num_bytes for pool in config.geometry.pools)
    assert config.data_bytes >= slots
    assert store_bytes >= 4096 + slots


def test_index_only_makes_no_store(shm_name: str) -> None:
    plan = plan_geometry(Geometry(16, 5000, full_slots=10))
    create_regions(shm_name, RegionConfig(plan))
    assert leftovers(shm_name) == [shm_name[1:]]


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_mode_is_exact_whatever_the_umask(shm_name: str, mode: int) -> None:
    before = os.umask(0o077)
    try:
        config = create_regions(shm_name, config_of(shm_name), Access(mode, os.getegid()))
    finally:
        os.umask(before)
    for name in (shm_name, config.data_name):
        status = os.stat(object_path(name))
        assert stat.S_IMODE(status.st_mode) == mode
        assert status.st_gid == os.getegid()


def test_progress_covers_both_files(shm_name: str) -> None:
    seen: list[tuple[int, int]] = []
    create_regions(shm_name, config_of(shm_name), progress=lambda done, total: seen.append((done, total)))
    total = sum(os.stat(Path("/dev/shm", name)).st_size for name in leftovers(shm_name))
    assert {total for _, total in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("after_bytes", [0, 1_000_000])
def test_giving_up_leaves_nothing_behind(shm_name: str, after_bytes: int) -> None:
    def stop(done: int, total: int) -> None:
        if done >= after_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_regions(shm_name, config_of(shm_name), progress=stop)
    assert leftovers(shm_name) == []


def test_an_existing_object_is_never_touched(shm_name: str) -> None:
    data_name = default_data_name(shm_name)
    for name, other in ((data_name, shm_name), (shm_name, data_name)):
        path = Path(object_path(name))
        path.write_bytes(b"somebody's")
        with pytest.raises(FileExistsError, match=name):
            create_regions(shm_name, config_of(shm_name))
        assert path.read_bytes() == b"somebody's"
        assert not Path(object_path(other)).exists()
        path.unlink()


def test_a_link_is_not_followed(shm_name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    Path(object_path(shm_name)).symlink_to(tmp_path / "file")
    with pytest.raises(RadixError, match="not a regular file: remove it"):
        open_index(shm_name)
    with pytest.raises(FileExistsError):
        create_regions(shm_name, config_of(shm_name))


@pytest.mark.parametrize("kind", [stat.S_IFDIR, stat.S_IFSOCK, stat.S_IFIFO])
def test_what_is_no_file_is_named_with_the_fix(shm_name: str, kind: int) -> None:
    path = object_path(shm_name)
    if kind == stat.S_IFDIR:
        os.mkdir(path)
    else:
        os.mknod(path, kind | 0o600)
    try:
        with pytest.raises(RadixError, match=f"{path} is not a regular file: remove it"):
            open_index(shm_name)
    finally:
        os.rmdir(path) if kind == stat.S_IFDIR else os.unlink(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_strangers_region_is_refused_and_left(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    os.chown(object_path(shm_name), 54321, -1)
    with pytest.raises(RadixError, match="54321"):
        open_index(shm_name)
    with pytest.raises(RadixError, match="54321"):
        retire_regions(shm_name)
    assert leftovers(shm_name) == [shm_name[1:], f"{shm_name[1:]}_data"]


# -- the end of a region -------------------------------------------------------------------------


def test_retiring_tells_whoever_is_attached(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    index = attach(shm_name)
    store_fd = open_object(default_data_name(shm_name))
    retire_regions(shm_name)
    assert leftovers(shm_name) == []
    with pytest.raises(RegionRetired):
        index.allocate(ComponentType.FULL, 1)
    assert _native.store_peek(store_fd).state == RegionState.RETIRED
    os.close(store_fd)
    retire_regions(shm_name)


def test_a_region_that_is_being_built_is_not_ready(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    fd = open_index(shm_name)
    _native.region_set_state(fd, RegionState.BUILDING)
    os.close(fd)
    with pytest.raises(ServerNotReady):
        attach(shm_name)


@pytest.mark.parametrize("junk", [b"", b"x" * 100, bytes(1 << 16), os.urandom(1 << 16)])
def test_junk_is_refused_and_can_be_removed(shm_name: str, junk: bytes) -> None:
    Path(object_path(shm_name)).write_bytes(junk)
    with pytest.raises((CorruptRegion, OSError)):
        attach(shm_name)
    retire_regions(shm_name)
    assert leftovers(shm_name) == []


def test_another_layout_version_is_refused(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    with open(object_path(shm_name), "r+b") as file:
        file.seek(8)
        version = file.read(4)
        file.seek(8)
        file.write((int.from_bytes(version, "little") + 1).to_bytes(4, "little"))
    with pytest.raises(CorruptRegion, match="layout version"):
        attach(shm_name)


def test_a_truncated_region_is_refused(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    index = attach(shm_name)
    index.verify_file()
    os.truncate(object_path(shm_name), os.stat(object_path(shm_name)).st_size - 4096)
    with pytest.raises(CorruptRegion):
        index.verify_file()
    with pytest.raises(CorruptRegion):
        attach(shm_name)


def test_more_clients_than_the_table_holds(shm_name: str) -> None:
    create_regions(shm_name, config_of(shm_name))
    clients = [attach(shm_name, f"client {i}") for i in range(7)]
    assert len({index.slot for index in clients}) == 7
    with pytest.raises(RadixError, match="--max-clients"):
        attach(shm_name)
    clients[3].close()
    attach(shm_name).close()
