"""How clients and servers find each other, agree, and part."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
from node import INDEX_ONLY, Node
from paths import path_of
from peer import Peer

from radixshmem import (
    CorruptRegion,
    Geometry,
    GeometryMismatch,
    RadixClient,
    RadixError,
    RadixServer,
    RegionRetired,
    ServerConfig,
    ServerNotReady,
    ServerUnavailable,
)
from radixshmem.region import object_path

DATA = Geometry(16, 5000, swa_slot_bytes=3000, swa_window_blocks=8)


def test_a_client_before_its_server_is_told_at_once(shm_name: str, node: Node) -> None:
    with pytest.raises(ServerUnavailable, match="UNAVAILABLE"):
        RadixClient(shm_name, INDEX_ONLY)
    node.serve(name=shm_name)
    assert node.join(shm_name, INDEX_ONLY).mempool_total() == 2000


def test_a_client_without_geometry_waits_for_another_ones(node: Node) -> None:
    name = node.serve()
    with RadixClient(name) as early:
        assert (early.info.mode, early.geometry) == ("waiting", None)
        with pytest.raises(TimeoutError, match="waiting"):
            early.wait_ready(0.1)
        with pytest.raises(ServerNotReady, match="wait_ready"):
            early.query(path_of(1))
        first = node.join(name, INDEX_ONLY)
        assert early.wait_ready(30).mode == "ready"
        assert early.geometry == first.geometry
        first.insert(path_of(5), first.allocate_slots(5))
        assert early.query(path_of(5)).full_hit == 5


def test_ten_engines_configure_at_once(node: Node) -> None:
    name = node.serve(data_bytes=1 << 24, swa_ratio=0.5)
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name)) for _ in range(10)]
        for peer in peers:
            peer.send("join", DATA)
        geometries = [peer.receive() for peer in peers]
        assert all(geometry == geometries[0] for geometry in geometries)
        for number, peer in enumerate(peers):
            peer.send("insert", path_of(4, number), peer.call("allocate_slots", 4))
        assert {peer.receive().num_inserted for peer in peers} == {4}
        for number in range(10):
            assert peers[0].call("query", path_of(4, number))["full_hit"] == 4


def test_only_one_of_two_geometries_wins(node: Node) -> None:
    name = node.serve(data_bytes=1 << 22)

    def bring(full_slot_bytes: int) -> int:
        try:
            with RadixClient(name, Geometry(16, full_slot_bytes)) as client:
                client.wait_ready(30)
                assert client.geometry is not None
                assert client.geometry["pools"]["full"]["slot_bytes"] == full_slot_bytes
                return full_slot_bytes
        except GeometryMismatch:
            return 0

    with ThreadPoolExecutor(4) as pool:
        winners = set(pool.map(bring, [4096, 8192] * 4)) - {0}
    assert len(winners) == 1


def test_two_servers_side_by_side_share_nothing(node: Node) -> None:
    first = node.client(Geometry(16, 4096), data_bytes=1 << 20)
    second = node.client(Geometry(16, 8192), data_bytes=1 << 20)
    slots = first.allocate_slots(3)
    first.slot_view(int(slots[0]))[:] = b"x" * 4096
    first.insert(path_of(3), slots)
    assert second.query(path_of(3)).full_hit == 0
    assert second.mempool_free() == second.mempool_total() == 128
    assert not second.store.array(0).any()
    assert first.info.epoch != second.info.epoch


def test_another_geometry_is_refused_with_both_shown(node: Node) -> None:
    client = node.client(DATA, data_bytes=1 << 22, swa_ratio=0.5)
    with pytest.raises(GeometryMismatch) as caught:
        RadixClient(client.name, replace(DATA, full_slot_bytes=6000))
    assert "5000" in str(caught.value)
    assert "6000" in str(caught.value)
    assert client.query(path_of(1)).full_hit == 0


@pytest.mark.parametrize(
    ("geometry", "settings", "flag"),
    [
        (Geometry(16, 1 << 21), {"data_bytes": 1 << 20}, "--data-bytes"),
        (DATA, {"data_bytes": 1 << 20}, "--swa-ratio"),
        (Geometry(16, 4096, mamba_slot_bytes=8), {"data_bytes": 1 << 20}, "--mamba-ratio"),
        (Geometry(16, 4096), {}, "full_slots"),
    ],
)
def test_what_the_server_cannot_serve_names_the_flag(
    node: Node, geometry: Geometry, settings: dict[str, float], flag: str
) -> None:
    name = node.serve(**settings)
    with pytest.raises(ValueError, match=flag):
        RadixClient(name, geometry)
    working = Geometry(16, 4096, full_slots=0 if settings else 10)
    assert node.join(name, working).mempool_total() > 0, "the server goes on waiting for one that fits"


def test_counts_and_strides_are_as_planned(node: Node) -> None:
    client = node.client(DATA, data_bytes=1 << 22, swa_ratio=0.25)
    assert client.geometry is not None
    num_swa = (1 << 20) // 4096
    assert client.geometry["pools"] == {
        "full": {"num_slots": ((1 << 22) - num_swa * 4096) // 8192, "slot_bytes": 5000},
        "swa": {"num_slots": num_swa, "slot_bytes": 3000, "window_blocks": 8},
    }
    assert client.store.pool(0).slot_bytes == 8192
    assert len(client.slot_view(0)) == 8192
    assert client.store.epoch.hex() == client.info.epoch


def test_slots_of_odd_strides_do_not_touch(node: Node) -> None:
    client = node.client(Geometry(16, 4097, slot_align=1), data_bytes=10 * 4097)
    assert client.mempool_total() == 10
    array = client.store.array(0)
    assert array.shape == (10, 4097)
    array[4] = 255
    client.slot_view(5)[:] = bytes(4097)
    assert array[4].all()
    assert not array[[0, 1, 2, 3, 5, 6, 7, 8, 9]].any()


# -- the end of a server ---------------------------------------------------------------------------


def serve(name: str, **settings: object) -> RadixServer:
    return RadixServer(ServerConfig(name=name, metrics_address="", **settings)).start()  # type: ignore[arg-type]


def test_a_stopped_server_retires_its_region_and_a_new_one_is_followed(shm_name: str) -> None:
    server = serve(shm_name, data_bytes=1 << 20)
    with RadixClient(shm_name, Geometry(16, 4096), timeout_s=30) as client:
        client.wait_ready(30)
        slots = client.allocate_slots(3)
        client.insert(path_of(3), slots)
        view = client.slot_view(int(slots[0]))
        view[:3] = b"old"
        held = client.query(path_of(3), lock=True)
        server.close()
        for verb in (
            lambda: client.query(path_of(3)),
            lambda: client.allocate_slots(1),
            lambda: client.recycle_slots(slots),
            client.reset,
            client.stats,
            client.mempool_total,
            client.mempool_free,
        ):
            with pytest.raises(RegionRetired):
                verb()
        with pytest.raises(ServerUnavailable):
            client.reattach()
        assert bytes(view[:3]) == b"old"

        with serve(shm_name, data_bytes=1 << 21):
            assert client.reattach().mode == "ready"
            assert client.mempool_total() == 512
            assert client.query(path_of(3)).full_hit == 0
            assert not client.store.array(0).any()
            assert bytes(view[:3]) == b"old"
            assert held.finalize is not None
            held.finalize()
            assert client.stats()["pool"]["full"]["num_pins"] == 0
            before = client.index
            client.reattach()
            assert client.index is before, "regions that serve are kept"
            client.close()


def test_reattach_refuses_another_geometry(shm_name: str) -> None:
    server = serve(shm_name, data_bytes=1 << 20)
    with RadixClient(shm_name, timeout_s=30) as client:
        with RadixClient(shm_name, Geometry(16, 4096)) as first:
            first.wait_ready(30)
        client.wait_ready(30)
        client.query(path_of(1))
        server.close()
        with serve(shm_name, data_bytes=1 << 20):
            with RadixClient(shm_name, Geometry(32, 4096)) as other:
                other.wait_ready(30)
            with pytest.raises(GeometryMismatch, match="block_size"):
                client.reattach()
            with pytest.raises(RegionRetired):
                client.query(path_of(1))


def test_closing_is_told_to_who_waits(shm_name: str) -> None:
    server = serve(shm_name)
    with RadixClient(shm_name) as client:
        stopper = threading.Timer(0.1, server.close)
        stopper.start()
        with pytest.raises(RadixError):
            client.wait_ready(30)
        stopper.join()


def test_a_damaged_header_is_refused(node: Node) -> None:
    client = node.client()
    with open(object_path(client.name), "r+b") as file:
        magic = file.read(8)
        file.seek(0)
        file.write(bytes(8))
        file.flush()
        with RadixClient(client.name, INDEX_ONLY) as late, pytest.raises(CorruptRegion):
            late.query(path_of(1))
        file.seek(0)
        file.write(magic)
