"""Whose SlotStore is whose: --data-name may give it any name, also another server's default."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from daemon import Daemon, ctl, ctl_json, eventually, run_server
from paths import path_of
from regions import leftovers

from radixshmem import Geometry, RadixClient

GEOMETRY = Geometry(block_size=16, full_slot_bytes=65536, fingerprint="model")
BUDGET = ("--data-bytes", "8M")


def publish(client: RadixClient, hashes: np.ndarray) -> None:
    slots = client.allocate_slots(len(hashes))
    for slot, block_hash in zip(slots, hashes, strict=True):
        client.slot_view(int(slot))[:] = bytes([int(block_hash) & 0xFF]) * 65536
    assert client.insert(hashes, slots).num_inserted == len(hashes)


def assert_served(name: str, hashes: np.ndarray) -> None:
    """A newcomer finds every block of the path, with its bytes."""
    with RadixClient(name, GEOMETRY) as client:
        client.wait_ready(30)
        with client.query(hashes, lock=True) as found:
            assert found.common_hit == len(hashes)
            [(_, _, slots)] = found.full_fragments
            for slot, block_hash in zip(slots, hashes, strict=True):
                assert bytes(client.slot_view(int(slot))) == bytes([int(block_hash) & 0xFF]) * 65536


def serve(name: str, *flags: str) -> Daemon:
    """A server with ten blocks."""
    daemon = Daemon(name, *BUDGET, *flags).wait_serving()
    with RadixClient(name, GEOMETRY) as client:
        client.wait_ready(30)
        publish(client, path_of(10))
    return daemon


def test_a_living_store_under_another_servers_default_name(shm_name: str) -> None:
    """The other server says whose it is and does not start; radixctl rm leaves it alone too."""
    owner, data_name = shm_name + "a", shm_name + "_data"
    with serve(owner, "--data-name", data_name) as daemon:
        for flags in ((), ("--fresh",), ("--data-name", data_name)):
            result = run_server("--name", shm_name, *BUDGET, *flags)
            assert result.returncode == 1, result.stderr
            assert f"/dev/shm{data_name} is the SlotStore of radix-server {owner}" in result.stderr
            assert "--data-name" in result.stderr
        assert data_name not in str(ctl_json("--name", shm_name, "rm"))
        assert_served(owner, path_of(10))
        assert daemon.stop() == 0
    assert leftovers(shm_name) == []


def test_a_kept_store_under_another_servers_default_name(shm_name: str) -> None:
    """Of a dead server too: it is to come back."""
    owner, data_name = shm_name + "a", shm_name + "_data"
    with serve(owner, "--data-name", data_name, "--keep") as daemon:
        assert daemon.stop() == 0
    assert run_server("--name", shm_name, *BUDGET).returncode == 1
    with Daemon(owner, *BUDGET, "--data-name", data_name) as daemon:
        daemon.wait_mode("ready")
        assert_served(owner, path_of(10))
        assert daemon.stop() == 0


def test_a_store_under_another_servers_name(shm_name: str) -> None:
    """It is no index that was damaged."""
    owner = shm_name + "a"
    with serve(owner, "--data-name", shm_name) as daemon:
        result = run_server("--name", shm_name, *BUDGET)
        assert result.returncode == 1, result.stderr
        assert f"/dev/shm{shm_name} is the SlotStore of radix-server {owner}" in result.stderr
        assert "--name" in result.stderr
        assert ctl("--name", shm_name, "rm").returncode == 1
        assert_served(owner, path_of(10))
        assert daemon.stop() == 0
    assert leftovers(shm_name) == [f"{shm_name[1:]}.lock"]


def test_discarding_an_index_spares_the_store_of_another(shm_name: str) -> None:
    """Leftovers with a --data-name of their own do not cost whoever has the default name."""
    owner, data_name = shm_name + "a", shm_name + "_data"
    with serve(shm_name, "--data-name", shm_name + "_mine") as daemon:
        daemon.kill()
    with serve(owner, "--data-name", data_name):
        with Daemon(shm_name, *BUDGET, "--data-name", shm_name + "_mine", "--fresh") as fresh:
            fresh.wait_mode("waiting")
            assert not Path(f"/dev/shm{shm_name}_mine").exists()
            assert_served(owner, path_of(10))


def test_an_own_stray_store_is_discarded(shm_name: str) -> None:
    """Left by a crash between two unlinks, under whatever name."""
    for flags, data_name in (((), shm_name + "_data"), (("--data-name", shm_name + "_x"), shm_name + "_x")):
        with serve(shm_name, *flags) as daemon:
            daemon.kill()
        os.unlink(f"/dev/shm{shm_name}")
        with Daemon(shm_name, *BUDGET, *flags) as daemon:
            daemon.wait_log("discarding")
            daemon.wait_mode("waiting")
            assert not Path(f"/dev/shm{data_name}").exists()
            assert daemon.stop() == 0
        assert leftovers(shm_name) == []


def test_a_store_that_is_being_made_is_nobody_elses(shm_name: str) -> None:
    """Before it says whose it is, also where another server's index names it."""
    data_name = shm_name + "_data"
    with serve(shm_name) as daemon:
        daemon.kill()
    os.unlink(f"/dev/shm{data_name}")
    with Daemon(shm_name + "a", "--data-bytes", "1G", "--data-name", data_name) as maker:
        maker.wait_serving()
        with RadixClient(shm_name + "a", GEOMETRY) as client:
            eventually(lambda: Path(f"/dev/shm{data_name}").exists(), "the SlotStore is being made")
            result = run_server("--name", shm_name, *BUDGET)
            assert result.returncode == 1, result.stderr
            assert f"/dev/shm{data_name} is" in result.stderr
            client.wait_ready(60)
            assert client.query(path_of(1)).common_hit == 0
            assert Path(f"/dev/shm{data_name}").exists()
        assert maker.stop() == 0


def test_a_file_of_no_server_is_left_alone(shm_name: str) -> None:
    path = Path(f"/dev/shm{shm_name}_data")
    path.write_bytes(b"somebody's")
    result = run_server("--name", shm_name, *BUDGET)
    assert result.returncode == 1
    assert str(path) in result.stderr
    assert ctl_json("--name", shm_name, "rm") == {"removed": []}
    assert path.read_bytes() == b"somebody's"
