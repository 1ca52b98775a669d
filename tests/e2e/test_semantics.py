"""What the index verbs mean, with a second engine's process where there are two parties."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from node import INDEX_ONLY, Node
from paths import branch_of, path_of
from peer import Peer

from radixshmem import (
    COMPONENT_MASK_FULL,
    COMPONENT_MASK_MAMBA,
    COMPONENT_MASK_SWA,
    ComponentType,
    EventKind,
    Geometry,
    InsertError,
    RadixClient,
)

SWA, MAMBA = ComponentType.SWA, ComponentType.MAMBA
JOINT = COMPONENT_MASK_FULL | COMPONENT_MASK_SWA


@pytest.fixture
def client(node: Node) -> RadixClient:
    """A client of an index of 2000 FULL slots."""
    return node.client()


@pytest.fixture
def peer(client: RadixClient) -> Iterator[Peer]:
    """A second engine on the same index."""
    with Peer(client.name) as peer:
        peer.join(INDEX_ONLY)
        yield peer


def publish(client: RadixClient, hashes: np.ndarray) -> np.ndarray:
    """Publish a whole path; returns its slots."""
    slots = client.allocate_slots(len(hashes))
    assert len(slots) == len(hashes)
    assert client.insert(hashes, slots).error == InsertError.OK
    return slots


# -- round trips --------------------------------------------------------------------------------


def test_round_trip_keeps_exact_counts(client: RadixClient) -> None:
    slots = client.allocate_slots(100)
    assert client.mempool_free() == 1900
    assert len(set(slots.tolist())) == 100
    result = client.insert(path_of(60), slots[:60])
    assert (result.error, result.num_inserted, len(result.unused_slots)) == (InsertError.OK, 60, 0)
    assert client.mempool_free() == 1900
    client.recycle_slots(slots[60:])
    assert client.mempool_free() == 1940
    hit = client.query(path_of(60))
    assert (hit.full_hit, hit.common_hit) == (60, 60)
    [(rank, first, found)] = hit.full_fragments
    assert (rank, first, found.tolist()) == (0, 0, slots[:60].tolist())
    client.reset()
    assert client.mempool_free() == client.mempool_total() == 2000


def test_nothing_matches_before_insert(client: RadixClient, peer: Peer) -> None:
    hashes = path_of(10)
    slots = client.allocate_slots(10)
    assert client.query(hashes).full_hit == 0
    assert peer.call("query", hashes)["full_hit"] == 0
    client.insert(hashes, slots)
    assert peer.call("query", hashes)["slots"] == slots.tolist()


def test_another_engine_reads_the_same_bytes(node: Node) -> None:
    geometry = Geometry(16, 4096)
    client = node.client(geometry, data_bytes=1 << 20)
    with Peer(client.name) as peer:
        peer.join(geometry)
        hashes = path_of(3)
        slots = client.allocate_slots(3)
        for value, slot in enumerate(slots):
            client.slot_view(int(slot))[:] = bytes([value + 1]) * 4096
        client.insert(hashes, slots)
        found = peer.call("query", hashes, lock=True)
        assert [peer.call("read", slot) for slot in found["slots"]] == [bytes([v]) * 4096 for v in (1, 2, 3)]
        peer.call("finalize", found["number"])


def test_match_ends_in_the_middle_of_a_path(client: RadixClient) -> None:
    slots = publish(client, path_of(50))
    assert client.query(path_of(50)[:20]).full_hit == 20
    hit = client.query(branch_of(30, 50, name=0, branch=0))
    assert hit.full_hit == 30
    assert hit.full_fragments[0][2].tolist() == slots[:30].tolist()
    assert client.query(path_of(50)[1:]).full_hit == 0


# -- eviction -----------------------------------------------------------------------------------


def test_allocation_evicts_from_the_tail(client: RadixClient) -> None:
    publish(client, path_of(1500))
    assert len(client.allocate_slots(1500)) == 1500
    assert client.mempool_free() == 0
    assert client.query(path_of(1500)).full_hit == 500


def test_a_pin_of_another_engine_keeps_its_blocks(client: RadixClient, peer: Peer) -> None:
    publish(client, path_of(1500))
    pinned = peer.call("query", path_of(1500), lock=True)
    assert pinned["common_hit"] == 1500
    slots = client.allocate_slots(1500)
    assert len(slots) == 500
    assert client.query(path_of(1500)).full_hit == 1500
    client.recycle_slots(slots)
    peer.call("finalize", pinned["number"])
    assert len(client.allocate_slots(1500)) == 1500
    assert client.query(path_of(1500)).full_hit == 500


def test_least_recently_used_goes_first(client: RadixClient) -> None:
    for name in range(4):
        publish(client, path_of(500, name))
    client.query(path_of(500, 0))
    client.query(path_of(500, 1), update_meta=False)
    client.recycle_slots(client.allocate_slots(1000))
    assert [client.query(path_of(500, name)).full_hit for name in range(4)] == [500, 0, 0, 500]


def test_update_meta_false_changes_nothing(client: RadixClient) -> None:
    publish(client, path_of(100, 0))
    publish(client, path_of(100, 1))
    before = list(client.index.snapshot().nodes())
    queries = client.stats()["queries"]
    assert client.query(path_of(100, 0)[:40], update_meta=False).full_hit == 40
    assert list(client.index.snapshot().nodes()) == before
    assert client.stats()["queries"] == queries + 1
    client.query(path_of(100, 0)[:40])
    assert list(client.index.snapshot().nodes()) != before, "a query that counts must be seen here"


# -- inserting what is there ----------------------------------------------------------------------


def test_identical_insert_returns_exactly_the_redundant_slots(client: RadixClient, peer: Peer) -> None:
    hashes = path_of(80)
    mine = client.allocate_slots(80)
    theirs = peer.call("allocate_slots", 50)
    assert peer.call("insert", hashes[:50], theirs).num_inserted == 50
    result = client.insert(hashes, mine)
    assert (result.error, result.num_inserted) == (InsertError.OK, 30)
    assert result.unused_slots.tolist() == mine[:50].tolist()
    assert client.query(hashes).full_fragments[0][2].tolist() == theirs.tolist() + mine[50:].tolist()
    assert client.mempool_free() == 2000 - 80
    with pytest.raises(ValueError, match="slot"):
        client.recycle_slots(mine[:1])


def test_without_auto_recycle_unused_slots_stay_staged(client: RadixClient) -> None:
    publish(client, path_of(10))
    slots = client.allocate_slots(10)
    result = client.insert(path_of(10), slots, auto_recycle=False)
    assert (result.num_inserted, result.unused_slots.tolist()) == (0, slots.tolist())
    assert client.mempool_free() == 1980
    client.recycle_slots(result.unused_slots)
    assert client.mempool_free() == 1990


def test_insert_goes_on_from_start(client: RadixClient) -> None:
    hashes = path_of(30)
    publish(client, hashes[:10])
    slots = client.allocate_slots(20)
    assert client.insert(hashes, slots, start=10).num_inserted == 20
    assert client.query(hashes).full_hit == 30


def test_start_beyond_what_is_published_is_a_missing_prefix(client: RadixClient) -> None:
    hashes = path_of(30)
    publish(client, hashes[:10])
    slots = client.allocate_slots(15)
    result = client.insert(hashes, slots, start=15)
    assert (result.error, result.num_inserted) == (InsertError.PREFIX_MISSING, 0)
    assert result.unused_slots.tolist() == slots.tolist()
    assert client.mempool_free() == 1990
    assert client.query(hashes).full_hit == 10


# -- sliding window and state ---------------------------------------------------------------------


def swa_client(node: Node, window: int, swa_slots: int = 16) -> RadixClient:
    geometry = Geometry(
        16, 4096, swa_slot_bytes=1024, swa_window_blocks=window, full_slots=100, swa_slots=swa_slots
    )
    return node.client(geometry)


def publish_window(client: RadixClient, hashes: np.ndarray, num: int) -> np.ndarray:
    slots = client.allocate_slots(num, component=SWA)
    assert len(slots) == num
    result = client.insert(hashes, slots, component=SWA)
    assert (result.error, result.num_inserted) == (InsertError.OK, num)
    return slots


def test_joint_hit_ends_where_a_window_is(node: Node) -> None:
    client = swa_client(node, window=8)
    hashes = path_of(20)
    publish(client, hashes)
    before = client.query(hashes, mask=JOINT)
    assert (before.full_hit, before.common_hit, len(before.swa_slots)) == (20, 0, 0)
    slots = publish_window(client, hashes, 8)
    hit = client.query(hashes, mask=JOINT)
    assert (hit.full_hit, hit.common_hit, hit.swa_start) == (20, 20, 12)
    assert hit.swa_slots.tolist() == slots.tolist()
    assert len(hit.full_fragments[0][2]) == 20
    shorter = client.query(hashes[:12], mask=JOINT)
    assert (shorter.full_hit, shorter.common_hit, shorter.full_fragments) == (12, 0, [])
    longer = client.query(branch_of(20, 25, 0, 1), mask=JOINT)
    assert (longer.full_hit, longer.common_hit) == (20, 20)


def test_path_shorter_than_the_window(node: Node) -> None:
    client = swa_client(node, window=8)
    hashes = path_of(5)
    publish(client, hashes)
    publish_window(client, hashes, 5)
    hit = client.query(hashes, mask=JOINT)
    assert (hit.common_hit, hit.swa_start, len(hit.swa_slots)) == (5, 0, 5)


def test_window_of_one_block(node: Node) -> None:
    client = swa_client(node, window=1)
    hashes = path_of(20)
    publish(client, hashes)
    [slot] = publish_window(client, hashes, 1)
    hit = client.query(hashes, mask=JOINT)
    assert (hit.common_hit, hit.swa_start, hit.swa_slots.tolist()) == (20, 19, [slot])
    assert client.query(hashes[:19], mask=JOINT).common_hit == 0


def test_window_slots_come_all_or_none_under_a_pin(node: Node) -> None:
    client = swa_client(node, window=8, swa_slots=16)
    for name in range(2):
        publish(client, path_of(20, name))
        publish_window(client, path_of(20, name), 8)
    assert client.swa_mempool_free() == 0
    with client.query(path_of(20, 0), mask=JOINT, lock=True) as pinned:
        assert pinned.common_hit == 20
        assert len(client.allocate_slots(9, component=SWA)) == 0
        assert client.query(path_of(20, 0), mask=JOINT).common_hit == 20
        slots = client.allocate_slots(8, component=SWA)
        assert len(slots) == 8
        assert set(slots.tolist()).isdisjoint(pinned.swa_slots.tolist())
        client.recycle_slots(slots, component=SWA)
    assert len(client.allocate_slots(16, component=SWA)) == 16
    assert client.query(path_of(20, 0), mask=JOINT).full_hit == 20


def test_window_without_its_path_is_refused_and_recycled(node: Node) -> None:
    client = swa_client(node, window=8)
    slots = client.allocate_slots(8, component=SWA)
    result = client.insert(path_of(20), slots, component=SWA)
    assert (result.error, result.num_inserted) == (InsertError.FULL_PATH_MISSING, 0)
    assert result.unused_slots.tolist() == slots.tolist()
    assert client.swa_mempool_free() == client.swa_mempool_total() == 16


def test_mamba_state_serves_its_boundary_only(node: Node) -> None:
    client = node.client(Geometry(16, 4096, mamba_slot_bytes=512, full_slots=100, mamba_slots=4))
    hashes = path_of(20)
    publish(client, hashes)
    [slot] = client.allocate_slots(1, component=MAMBA)
    client.insert(hashes[:16], np.array([slot], np.int32), component=MAMBA)
    mask = COMPONENT_MASK_FULL | COMPONENT_MASK_MAMBA
    hit = client.query(hashes, mask=mask)
    assert (hit.full_hit, hit.common_hit, hit.mamba_slots.tolist()) == (20, 16, [slot])
    assert client.query(hashes[:15], mask=mask).common_hit == 0
    assert len(client.query(hashes).mamba_slots) == 0


def test_all_three_components_meet(node: Node) -> None:
    geometry = Geometry(16, 4096, 1024, 4, 512, full_slots=100, swa_slots=20, mamba_slots=4)
    client = node.client(geometry)
    hashes = path_of(20)
    publish(client, hashes)
    publish_window(client, hashes[:18], 4)
    publish_window(client, hashes[:12], 4)
    client.insert(hashes[:12], client.allocate_slots(1, component=MAMBA), component=MAMBA)
    hit = client.query(hashes, mask=JOINT | COMPONENT_MASK_MAMBA)
    assert (hit.full_hit, hit.common_hit, hit.swa_start, len(hit.mamba_slots)) == (20, 12, 8, 1)
    assert client.query(hashes, mask=JOINT).common_hit == 18


# -- reset ----------------------------------------------------------------------------------------


def test_reset_while_others_hold_pins_and_staged_slots(node: Node) -> None:
    geometry = Geometry(16, 4096)
    client = node.client(geometry, data_bytes=100 * 4096)
    with Peer(client.name) as peer:
        peer.join(geometry)
        publish(client, path_of(20))
        staged = peer.call("allocate_slots", 10)
        peer.call("fill", int(staged[0]), 7)
        pinned = peer.call("query", path_of(20), lock=True)
        peer.call("fill", pinned["slots"][0], 9)
        client.reset()
        assert client.query(path_of(20)).full_hit == 0
        assert client.mempool_free() == 100 - 20 - 10
        others = client.allocate_slots(70)
        assert set(others.tolist()).isdisjoint(pinned["slots"] + staged.tolist())
        assert len(client.allocate_slots(1)) == 0
        assert peer.call("read", pinned["slots"][0]) == bytes([9]) * 4096
        result = peer.call("insert", path_of(10, 1), staged)
        assert (result.error, result.num_inserted) == (InsertError.STALE_GENERATION, 0)
        assert result.unused_slots.tolist() == staged.tolist()
        assert client.query(path_of(10, 1)).full_hit == 0
        assert client.mempool_free() == 10
        peer.call("finalize", pinned["number"])
        assert client.mempool_free() == 30


def test_stale_slots_are_recycled_even_without_auto_recycle(client: RadixClient, peer: Peer) -> None:
    slots = client.allocate_slots(5)
    peer.call("reset")
    result = client.insert(path_of(5), slots, auto_recycle=False)
    assert result.error == InsertError.STALE_GENERATION
    assert client.mempool_free() == 2000


# -- events ---------------------------------------------------------------------------------------


def test_drained_events_name_exactly_the_evicted_blocks(client: RadixClient, peer: Peer) -> None:
    assert client.kvevent_enabled
    publish(client, path_of(1500))
    hashes, overflow = client.kvevent_drain(10_000)
    assert (len(hashes), overflow) == (0, False)
    peer.call("recycle_slots", peer.call("allocate_slots", 1500))
    assert client.query(path_of(1500)).full_hit == 500
    first, overflow = client.kvevent_drain(400)
    assert (len(first), overflow) == (400, False)
    rest, overflow = client.kvevent_drain(10_000)
    assert not overflow
    assert rest.dtype == np.uint64
    assert sorted(np.concatenate([first, rest]).tolist()) == sorted(path_of(1500)[500:].tolist())
    assert len(client.kvevent_drain(10_000)[0]) == 0


def test_seek_to_head_skips_what_happened(client: RadixClient) -> None:
    publish(client, path_of(10))
    client.reset()
    client.kvevent_seek_to_head()
    assert len(client.kvevent_drain(100)[0]) == 0


def test_rich_events_tell_the_tree(client: RadixClient) -> None:
    hashes = path_of(3)
    cursor, events, overflow = client.events(0)
    assert (events, overflow) == ([], False)
    publish(client, hashes)
    cursor, events, overflow = client.events(cursor)
    assert not overflow
    assert [(event.kind, event.hash, event.parent_hash) for event in events] == [
        (EventKind.STORED, int(hashes[0]), None),
        (EventKind.STORED, int(hashes[1]), int(hashes[0])),
        (EventKind.STORED, int(hashes[2]), int(hashes[1])),
    ]
    assert {event.component for event in events} == {ComponentType.FULL}
    assert [event.number for event in events] == list(range(events[0].number, cursor))
    client.reset()
    _, events, _ = client.events(cursor)
    removed = [event.hash for event in events if event.kind == EventKind.REMOVED]
    assert removed == hashes[::-1].tolist()
    assert [event.kind for event in events].count(EventKind.CLEARED) == 1


def test_overflow_is_told(node: Node) -> None:
    client = node.client(kvevent_ring_capacity=64)
    publish(client, path_of(500))
    assert client.kvevent_drain(1000)[1]
    cursor, events, overflow = client.events(0)
    assert overflow
    assert len(events) == 64
    assert events[-1].number == cursor - 1
    assert events[-1].hash == int(path_of(500)[-1])


def test_a_server_without_events(node: Node) -> None:
    client = node.client(kvevent_ring_capacity=0)
    publish(client, path_of(5))
    assert not client.kvevent_enabled
    assert client.events(0) == (0, [], False)
    hashes, overflow = client.kvevent_drain(10)
    assert (len(hashes), overflow) == (0, False)
