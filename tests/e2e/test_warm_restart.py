"""What a server leaves, and what the next one makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from daemon import Daemon, eventually, run_server
from frozen import frozen_index
from paths import path_of
from peer import Peer
from regions import attach, leftovers, prove_invariants

from radixshmem import (
    ComponentType,
    Geometry,
    GeometryMismatch,
    RadixClient,
    RegionRetired,
    ServerUnavailable,
)
from radixshmem.records import RegionState
from radixshmem.region import open_index, open_object

GEOMETRY = Geometry(block_size=16, full_slot_bytes=65536, fingerprint="model")
BUDGET = ("--data-bytes", "8M")
NUM_SLOTS = 128


def configure(name: str) -> RadixClient:
    client = RadixClient(name, GEOMETRY)
    client.wait_ready(30)
    return client


def publish(client: RadixClient, hashes: np.ndarray) -> None:
    """Publish a path whose slots carry the low byte of their block's hash."""
    slots = client.allocate_slots(len(hashes))
    for slot, block_hash in zip(slots, hashes, strict=True):
        client.slot_view(int(slot))[:] = bytes([int(block_hash) & 0xFF]) * 65536
    assert client.insert(hashes, slots).num_inserted == len(hashes)


def assert_bytes(client: RadixClient, hashes: np.ndarray) -> None:
    """Every block of the path matches, with the bytes that ``publish`` wrote."""
    with client.query(hashes, lock=True) as found:
        assert found.common_hit == len(hashes)
        [(_, _, slots)] = found.full_fragments
        for slot, block_hash in zip(slots, hashes, strict=True):
            assert bytes(client.slot_view(int(slot))) == bytes([int(block_hash) & 0xFF]) * 65536


def leave_region(name: str, *flags: str) -> str:
    """Regions of a killed server with ten blocks; returns the epoch."""
    with Daemon(name, *BUDGET, *flags) as daemon:
        daemon.wait_serving()
        with configure(name) as client:
            publish(client, path_of(10))
            epoch = client.info.epoch
        daemon.kill()
    return epoch


# -- adopted ------------------------------------------------------------------------------------


def test_killed_server_is_followed_without_any_client_noticing(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as first:
        first.wait_serving()
        client = configure(shm_name)
        publish(client, path_of(10))
        held = client.query(path_of(10), lock=True)
        epoch = client.info.epoch
        first.kill()

    with pytest.raises(ServerUnavailable):
        client.status()
    publish(client, path_of(5, name=1))
    assert_bytes(client, path_of(10))

    with Daemon(shm_name, *BUDGET) as second:
        second.wait_mode("ready")
        second.wait_log("adopted the regions of an earlier server with 15 blocks")
        info = client.status()
        assert (info.mode, info.epoch, info.pid) == ("ready", epoch, second.process.pid)
        assert info.geometry == client.geometry
        assert_bytes(client, path_of(5, name=1))
        with configure(shm_name) as newcomer:
            assert_bytes(newcomer, path_of(10))
        assert held.finalize is not None
        held.finalize()
        client.close()
        prove_invariants(shm_name)
        assert second.stop() == 0
    assert leftovers(shm_name) == []


def test_five_kills_leave_exactly_one_pool(shm_name: str) -> None:
    epoch = leave_region(shm_name)
    files = {left: os.stat(f"/dev/shm/{left}").st_ino for left in leftovers(shm_name) if "." not in left}
    assert len(files) == 2
    for _ in range(4):
        with Daemon(shm_name, *BUDGET) as daemon:
            assert daemon.wait_mode("ready").epoch == epoch
            daemon.kill()
    now = {left: os.stat(f"/dev/shm/{left}").st_ino for left in leftovers(shm_name) if "." not in left}
    assert now == files


def test_kept_regions_survive_a_clean_stop(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET, "--keep") as daemon:
        daemon.wait_serving()
        with configure(shm_name) as client:
            publish(client, path_of(10))
            epoch = client.info.epoch
            assert daemon.stop() == 0
            assert_bytes(client, path_of(10))
    assert leftovers(shm_name) == [shm_name[1:], f"{shm_name[1:]}.lock", f"{shm_name[1:]}_data"]
    with Daemon(shm_name, *BUDGET) as daemon:
        assert daemon.wait_mode("ready").epoch == epoch
        with configure(shm_name) as client:
            assert_bytes(client, path_of(10))
        assert daemon.stop() == 0
    assert leftovers(shm_name) == []


def test_keep_without_regions_keeps_nothing(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET, "--keep") as daemon:
        daemon.wait_serving()
        assert daemon.stop() == 0
    assert leftovers(shm_name) == []


def test_adopted_regions_keep_what_they_were_made_with(shm_name: str) -> None:
    leave_region(shm_name)
    with Daemon(shm_name, *BUDGET, "--evict-policy", "fifo", "--max-clients", "32") as daemon:
        daemon.wait_mode("ready")
        daemon.wait_log("--evict-policy lru (not fifo)")
        daemon.wait_log("--max-clients 256 (not 32)")


def test_zeroes_of_a_geometry_mean_what_adopted_regions_were_made_with(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET, "--slot-align", "131072", "--register-chunk-tokens", "64") as first:
        first.wait_serving()
        configure(shm_name).close()
        first.kill()
    with Daemon(shm_name, *BUDGET) as second:
        second.wait_mode("ready")
        with configure(shm_name) as client:
            assert client.store.pool(ComponentType.FULL).slot_bytes == 131072
        with pytest.raises(GeometryMismatch, match="slot_align"):
            RadixClient(shm_name, replace(GEOMETRY, slot_align=4096))


def test_lease_of_a_client_that_died_meanwhile_is_reaped(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as first:
        first.wait_serving()
        with configure(shm_name) as client:
            publish(client, path_of(10))
        peer = Peer(shm_name)
        peer.join()
        peer.call("query", path_of(10), lock=True)
        peer.call("allocate_slots", 7)
        first.kill()
        peer.kill()
    with Daemon(shm_name, *BUDGET) as second:
        second.wait_mode("ready")
        with RadixClient(shm_name) as client:
            eventually(lambda: client.mempool_free() == NUM_SLOTS - 10, "staged slots given back")
            stats = client.stats()
    assert stats["pool"]["full"]["num_pins"] == 0
    assert (stats["reaped_pins"], stats["reaped_slots"]) == (1, 7)


# -- not adopted --------------------------------------------------------------------------------

MISFITS = [
    (("--data-bytes", "4M"), "--data-bytes", ("8388608", "4194304")),
    ((*BUDGET, "--swa-ratio", "0.5"), "--swa-ratio", ("0.0", "0.5")),
    ((*BUDGET, "--data-name", "/t_radix_other_data"), "--data-name", ("_data", "/t_radix_other_data")),
    ((), "--data-bytes", ("8388608",)),
]


@pytest.mark.parametrize(("flags", "named", "numbers"), MISFITS)
def test_misfits_in_use_are_left_alone(
    flags: tuple[str, ...], named: str, numbers: tuple[str, ...], shm_name: str
) -> None:
    leave_region(shm_name)
    with Peer(shm_name + "x"):
        index = attach(shm_name)
        result = run_server("--name", shm_name, *flags)
        assert result.returncode == 6, result.stderr
        assert named in result.stderr
        assert all(number in result.stderr for number in numbers)
        index.check_alive()
        index.close()


@pytest.mark.parametrize(("flags", "named"), [misfit[:2] for misfit in MISFITS[:2]])
def test_misfits_of_the_dead_are_discarded(flags: tuple[str, ...], named: str, shm_name: str) -> None:
    leave_region(shm_name)
    with Daemon(shm_name, *flags) as daemon:
        daemon.wait_mode("waiting")
        daemon.wait_log("discarding")
        assert named in daemon.log
        assert not Path(f"/dev/shm{shm_name}").exists()
        assert not Path(f"/dev/shm{shm_name}_data").exists()


def test_fresh_discards_and_tells_who_is_attached(shm_name: str) -> None:
    epoch = leave_region(shm_name)
    index = attach(shm_name)
    with Daemon(shm_name, *BUDGET, "--fresh") as daemon:
        daemon.wait_mode("waiting")
        with pytest.raises(RegionRetired):
            index.check_alive()
        with configure(shm_name) as client:
            assert client.info.epoch != epoch
            assert client.query(path_of(10)).common_hit == 0
    index.close()


def patch(name: str, offset: int, data: bytes) -> None:
    with open(f"/dev/shm{name}", "r+b") as file:
        file.seek(offset)
        file.write(data)


def forget_store(name: str) -> None:
    Path(f"/dev/shm{name}_data").unlink()


def truncate_store(name: str) -> None:
    os.truncate(f"/dev/shm{name}_data", 4096)


def truncate_index(name: str) -> None:
    os.truncate(f"/dev/shm{name}", 4096)


def break_tree(name: str) -> None:
    """Noise all over the arrays, with the header left alone."""
    path = f"/dev/shm{name}"
    size = os.path.getsize(path)
    noise = np.random.default_rng(1).bytes(4096)
    for offset in range(size // 2, size - 4096, 65536):
        patch(name, offset, noise)


def wipe_header(name: str) -> None:
    patch(name, 0, bytes(4096))


def set_state(name: str, state: RegionState) -> None:
    from radixshmem import _native

    fd = open_index(name)
    _native.region_set_state(fd, state)
    os.close(fd)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (forget_store, "gone"),
        (truncate_store, "SlotStore"),
        (truncate_index, "index"),
        (wipe_header, "corrupt"),
        (break_tree, "violates"),
        (lambda name: set_state(name, RegionState.BUILDING), "BUILDING"),
        (lambda name: set_state(name, RegionState.RETIRED), "RETIRED"),
    ],
    ids=["no-store", "short-store", "short-index", "no-header", "broken-tree", "building", "retired"],
)
def test_what_is_not_provably_valid_is_discarded_with_a_reason(
    damage: Callable[[str], None], reason: str, shm_name: str
) -> None:
    epoch = leave_region(shm_name)
    damage(shm_name)
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_mode("waiting")
        [line] = [line for line in daemon.log.splitlines() if "discarding" in line]
        assert reason in line
        with configure(shm_name) as client:
            assert client.info.epoch != epoch
        assert daemon.stop() == 0
    assert leftovers(shm_name) == []


def test_store_of_other_regions_is_not_adopted(shm_name: str) -> None:
    leave_region(shm_name)
    os.rename(f"/dev/shm{shm_name}_data", f"/dev/shm{shm_name}_earlier")
    leave_region(shm_name, "--fresh")
    os.replace(f"/dev/shm{shm_name}_earlier", f"/dev/shm{shm_name}_data")
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_mode("waiting")
        assert "belongs to other regions" in daemon.log


def test_other_layout_in_use_is_left_alone_and_unused_is_discarded(shm_name: str) -> None:
    leave_region(shm_name)
    index = attach(shm_name)
    offset = layout_version_offset(shm_name)
    patch(shm_name, offset, (99).to_bytes(4, "little"))
    result = run_server("--name", shm_name, *BUDGET)
    assert result.returncode == 6, result.stderr
    assert f"its layout version is 99, this build's is {index.info.layout_version}" in result.stderr
    patch(shm_name, offset, (index.info.layout_version).to_bytes(4, "little"))
    index.close()
    patch(shm_name, offset, (99).to_bytes(4, "little"))
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_mode("waiting")
        assert "version" in daemon.log


def test_stopped_lock_holder_is_not_adopted_over(shm_name: str) -> None:
    leave_region(shm_name)
    with frozen_index(shm_name):
        result = run_server("--name", shm_name, *BUDGET)
        assert result.returncode == 6
        assert "lock" in result.stderr
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_mode("ready")


def test_named_store_of_another_server_is_not_touched(shm_name: str) -> None:
    owner, data_name = shm_name + "o", shm_name + "_shared"
    with Daemon(owner, *BUDGET, "--data-name", data_name) as first:
        first.wait_serving()
        with configure(owner) as client:
            publish(client, path_of(3))
            result = run_server("--name", shm_name, *BUDGET, "--data-name", data_name)
            assert result.returncode == 1
            assert "--data-name" in result.stderr
            assert_bytes(client, path_of(3))


@pytest.mark.parametrize("which", ["", "_data"], ids=["index", "SlotStore"])
def test_regions_that_are_truncated_are_given_up(which: str, shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        with configure(shm_name):
            pass
        os.truncate(f"/dev/shm{shm_name}{which}", 4096)
        info = daemon.wait_mode("failed")
        assert "corrupt" in info.last_error
        with configure(shm_name) as client:
            publish(client, path_of(3))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait_exit() == 0
    assert leftovers(shm_name) == []


def layout_version_offset(name: str) -> int:
    """Where the header keeps its layout version: the only place that makes peek refuse when it changes."""
    from radixshmem import _native
    from radixshmem.errors import LayoutMismatch

    fd = open_object(name)
    try:
        original = os.pread(fd, 64, 0)
        for offset in range(0, 64, 4):
            patch(name, offset, (99).to_bytes(4, "little"))
            try:
                _native.region_peek(fd)
            except LayoutMismatch:
                return offset
            except Exception:  # noqa: BLE001 - another field of the header
                pass
            finally:
                patch(name, offset, original[offset : offset + 4])
    finally:
        os.close(fd)
    raise AssertionError("no field of the header is a layout version")
