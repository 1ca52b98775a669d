"""The binding: what the package's own server and tools use beyond the client's verbs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from paths import branch_of, path_of
from regions import attach, region

from radixshmem import ComponentType, EventReason, Geometry, _native
from radixshmem.index import QUERY_LOCK, QUERY_NO_META, QUERY_PROBE, Index, Match, Snapshot
from radixshmem.records import ClientState
from radixshmem.region import object_path, open_index

SWA = ComponentType.SWA
GEOMETRY = Geometry(16, 64, 32, 4, full_slots=100, swa_slots=16)


@pytest.fixture
def name() -> Iterator[str]:
    with region(GEOMETRY) as name:
        yield name


@pytest.fixture
def index(name: str) -> Iterator[Index]:
    index = attach(name)
    yield index
    index.close()


def publish(index: Index, hashes: np.ndarray, num_swa: int = 0) -> None:
    index.insert(0, hashes, index.allocate(0, len(hashes))[0], 0, 0)
    if num_swa:
        index.insert(SWA, hashes, index.allocate(SWA, num_swa)[0], 0, 0)


def test_evict_takes_from_the_tail_and_says_how_many(index: Index) -> None:
    publish(index, path_of(30))
    assert index.evict(0, 10, EventReason.REQUEST) == 10
    match = Match()
    index.match(path_of(30), 1, 0, match)
    assert match.full_hit == 20
    assert index.evict(0, 100, EventReason.BACKGROUND) == 20
    evicted = index.stats()["evicted_blocks"][0]
    assert (evicted[EventReason.REQUEST], evicted[EventReason.BACKGROUND]) == (10, 20)


def test_side_slots_are_evicted_on_their_own(index: Index) -> None:
    publish(index, path_of(30), num_swa=4)
    assert index.evict(SWA, 4, EventReason.REQUEST) == 4
    assert (index.num_free(SWA), index.num_free(0)) == (16, 70)


def test_a_probe_counts_nowhere(index: Index) -> None:
    publish(index, path_of(5))
    before = index.stats()
    index.match(path_of(5), 1, QUERY_NO_META | QUERY_PROBE, Match())
    assert index.stats() == before


def test_events_carry_their_writer(index: Index) -> None:
    publish(index, path_of(3), num_swa=2)
    cursor, events, overflow = index.events(0, 100)
    assert (cursor, overflow) == (len(events), False)
    assert {(event.client, event.incarnation) for event in events} == {(index.slot, index.incarnation)}
    assert [event.component for event in events].count(SWA) == 2
    assert index.events(1, 1)[1] == events[1:2]
    assert index.event_head() == cursor


def test_removed_hashes_agrees_with_events(index: Index) -> None:
    publish(index, path_of(20), num_swa=4)
    index.evict(0, 12, EventReason.REQUEST)
    cursor, events, _ = index.events(0, 1000)
    wanted = [event.hash for event in events if event.kind == 2 and event.component == 0]
    position, hashes, overflow = index.removed_hashes(0, 1000)
    assert (position, hashes.tolist(), overflow) == (cursor, wanted, False)
    assert len(wanted) == 12


# -- snapshots -----------------------------------------------------------------------------------


def test_nodes_describe_the_tree(index: Index) -> None:
    publish(index, path_of(10), num_swa=4)
    publish(index, branch_of(6, 10, 0, 1))
    staged, _ = index.allocate(0, 3)
    match = Match()
    index.match(path_of(10)[:8], 1, QUERY_LOCK, match)
    nodes = {node.slot: node for node in index.snapshot().nodes()}
    published = {node.hash: node for node in nodes.values() if node.is_published}
    assert len(published) == 14
    assert sorted(set(nodes) - {node.slot for node in published.values()}) == sorted(staged.tolist())
    path = [published[int(h)] for h in path_of(10)]
    assert path[0].parent is not None
    assert path[0].parent < 0
    assert [node.parent for node in path[1:]] == [node.slot for node in path[:-1]]
    assert [node.num_children for node in path] == [1] * 5 + [2] + [1] * 3 + [0]
    assert [node.pins for node in path] == [0] * 7 + [1] + [0] * 2
    assert [node.is_path_pinned for node in path] == [True] * 8 + [False] * 2
    assert [node.sides[SWA].slot >= 0 for node in path] == [False] * 6 + [True] * 4
    assert [node.sides[SWA].is_end for node in path] == [False] * 9 + [True]
    summary = index.snapshot().summarize()
    assert (summary.free[0], summary.staged[0], summary.pinned[0], summary.evictable[0]) == (83, 3, 8, 6)
    assert summary.num_pins == 1
    assert index.release(match._pin)


def test_nodes_of_a_large_index_come_in_order() -> None:
    with region(Geometry(16, 64, full_slots=5000)) as name:
        index = attach(name)
        publish(index, path_of(4321))
        slots = [node.slot for node in index.snapshot().nodes()]
        assert (len(slots), slots) == (4321, sorted(slots))
        index.close()


def test_a_region_without_users_can_be_looked_into(name: str, index: Index) -> None:
    publish(index, path_of(10))
    stats = index.stats()
    index.close()
    fd = open_index(name)
    assert Snapshot.peek(fd).check() == (0, "")
    assert _native.peek_stats(fd)["pool"] == stats["pool"]
    assert _native.peek_clients(fd) == []
    os.close(fd)


def test_the_checker_reports_what_is_wrong(name: str, index: Index) -> None:
    """A hash changed behind the index's back must be found, with the invariant's number."""
    publish(index, path_of(10))
    needle = int(path_of(10)[4]).to_bytes(8, "little")
    with open(object_path(name), "r+b") as file:
        content = file.read()
        # The ring of events holds hashes too; the array of hashes is the last place.
        position = content.rindex(needle)
        file.seek(position)
        file.write(b"\xff" * 8)
        file.flush()
        violations, report = index.snapshot().check()
        assert violations > 0
        assert "I6" in report
        file.seek(position)
        file.write(needle)
        file.flush()
    assert index.snapshot().check() == (0, "")


# -- clients -------------------------------------------------------------------------------------

DEAD_CLIENT = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from paths import path_of
from regions import attach
from radixshmem.index import QUERY_LOCK, Match
index = attach(sys.argv[1], "doomed")
index.insert(0, path_of(10), index.allocate(0, 10)[0], 0, 0)
index.allocate(0, 7)
index.match(path_of(10), 1, QUERY_LOCK, Match())
if "device" in sys.argv:
    index.set_device()
if "worker" in sys.argv:  # lives until stdin ends
    subprocess.Popen(["cat"], pass_fds=[os.dup(index.lease_fd())])
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_doomed_client(name: str, *options: str, stdin: int | None = None) -> None:
    support = os.path.join(os.path.dirname(__file__), "..", "support")
    command = [sys.executable, "-c", DEAD_CLIENT, name, support, *options]
    done = subprocess.run(command, stdin=stdin, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def test_reap_gives_back_what_a_killed_client_held(name: str, index: Index) -> None:
    run_doomed_client(name)
    assert index.stats()["pool"][0]["num_staged"] == 7
    reaped = index.reap()
    assert reaped == (1, 1, 7, 0)
    pool = index.stats()["pool"][0]
    assert (pool["num_staged"], pool["num_pins"], pool["num_published"]) == (0, 0, 10)
    assert index.reap() == (0, 0, 0, 0)


def test_reap_if_due_is_rate_limited(name: str, index: Index) -> None:
    index.reap()
    run_doomed_client(name)
    assert index.reap_if_due(3600).clients == 0
    assert index.reap_if_due(0).clients == 1


def test_slots_that_a_device_may_still_write_wait_out_their_quarantine(name: str, index: Index) -> None:
    run_doomed_client(name, "device")
    reaped = index.reap()
    assert (reaped.pins, reaped.slots, reaped.dying) == (1, 0, 1)
    fd = open_index(name)
    [dying] = [record for record in _native.peek_clients(fd) if record.label == "doomed"]
    os.close(fd)
    assert (dying.state, dying.num_staged[0], dying.device) == (ClientState.DYING, 7, True)


def test_a_worker_with_a_dup_of_the_lease_keeps_the_slots(name: str, index: Index) -> None:
    """As long as somebody may still write the slots, the client's own death frees nothing."""
    ours, theirs = os.pipe()
    run_doomed_client(name, "worker", stdin=ours)
    os.close(ours)
    assert index.reap().slots == 0
    assert index.stats()["pool"][0]["num_staged"] == 7
    os.close(theirs)
    deadline = time.monotonic() + 30
    while index.reap().slots == 0:
        assert time.monotonic() < deadline, "the worker is gone but its slots are not"
    assert index.stats()["pool"][0]["num_staged"] == 0


def test_a_fingerprint_is_stored_once(name: str, index: Index) -> None:
    index.set_fingerprint("abc")
    index.set_fingerprint("abc")
    with pytest.raises(ValueError, match="fingerprint"):
        index.set_fingerprint("abd")
    assert index.read_info().config.geometry.fingerprint == "abc"
    other = attach(name)
    assert other.info.config.geometry.fingerprint == "abc"
    other.close()
