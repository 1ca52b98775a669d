"""Who is alive, who is dead, and who may write: locks, leases and forks of real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from daemon import eventually
from frozen import lock_word_offset
from living import Living, is_running
from regions import attach, prove_invariants, region

from radixshmem import Geometry, InsertError, QueryStatus, SlotStore, _native
from radixshmem.errors import IndexBusy
from radixshmem.index import QUERY_LOCK, Index, Match
from radixshmem.records import ClientState
from radixshmem.region import open_index
from tests.torture.lock_word import LOCK_WORD_OFFSET, LockWord

FULL = 0
NUM_SLOTS = 256
PATH = np.arange(1, 11, dtype=np.uint64)
GEOMETRY = Geometry(block_size=16, full_slot_bytes=64, full_slots=NUM_SLOTS)
# Copying this index under the lock takes milliseconds.
LARGE = Geometry(block_size=16, full_slot_bytes=64, full_slots=400_000)
STORE = Geometry(block_size=16, full_slot_bytes=4096)
NAMESPACES = [("unshare", "--pid", "--fork"), ("unshare", "--pid", "--fork", "--mount-proc")]
BLOCKED_LIMIT_S = 1.0


@pytest.fixture
def name() -> Iterator[str]:
    with region(GEOMETRY) as name:
        yield name


@pytest.fixture
def survivor(name: str) -> Iterator[Index]:
    with closing(attach(name, "survivor")) as index:
        yield index


def free_slots(index: Index) -> int:
    return index.num_free(FULL)


def timed(verb: Callable[[], object]) -> float:
    start = time.monotonic()
    verb()
    return time.monotonic() - start


def pinned(index: Index) -> Match:
    match = Match()
    index.match(PATH, 1, QUERY_LOCK, match)
    return match


# -- pid namespaces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", NAMESPACES, ids=" ".join)
def test_a_client_killed_in_its_own_namespace_is_reaped(
    name: str, survivor: Index, namespace: tuple[str, ...]
) -> None:
    with Living(name, *namespace) as dead, Living(name, *namespace) as alive:
        assert dead.entry["pid"] == alive.entry["pid"] == 1
        for client in (dead, alive):
            client.call("publish", PATH + np.uint64(100 * client.slot))
            assert client.call("pin", PATH + np.uint64(100 * client.slot)) == len(PATH)
            client.call("stage", 7)
        assert survivor.reap() == (0, 0, 0, 0)
        dead.kill()
        assert survivor.reap() == (1, 1, 7, 0)
        assert survivor.reap() == (0, 0, 0, 0)
        prove_invariants(name)
        alive.call("stage", 3)
        assert survivor.snapshot().summarize().staged[FULL] == 10
        assert survivor.snapshot().summarize().num_pins == 1


@pytest.mark.parametrize(
    "namespace", [(), *NAMESPACES], ids=lambda words: " ".join(words) or "same namespace"
)
def test_the_lock_of_a_dead_holder_is_taken_over(namespace: tuple[str, ...]) -> None:
    with region(GEOMETRY) as name, closing(attach(name, "survivor")) as survivor:
        with Living(name, *namespace) as holder:
            holder.call("start", "change")
            stop_holding_lock(holder, LockWord(name), in_batch=True)
            holder.kill()
            assert timed(lambda: survivor.allocate(FULL, 1)) < BLOCKED_LIMIT_S
            assert survivor.stats()["lock_recoveries"] == 1
            prove_invariants(name)
            assert survivor.reap().clients == 1
            assert survivor.snapshot().summarize().staged[FULL] == 1


# -- a stopped lock holder ----------------------------------------------------------------------------


def stop_holding_lock(client: Living, word: LockWord, in_batch: bool = False) -> None:
    """Stop the client while it holds the index lock (and has changed something that is not committed)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        until = time.monotonic() + 0.05
        while word.owner() != client.slot and time.monotonic() < until:
            pass
        client.stop()
        if word.owner() == client.slot and (word.batch_is_open() or not in_batch):
            return
        client.go_on()
    raise AssertionError("the client was never caught with the lock in its hands")


def test_the_lock_word_is_where_we_look() -> None:
    assert lock_word_offset() == LOCK_WORD_OFFSET


@pytest.mark.parametrize("end", ["SIGCONT", "SIGKILL"])
def test_a_stopped_lock_holder_makes_others_busy_for_as_long(end: str) -> None:
    with region(LARGE) as name, closing(attach(name, "survivor")) as survivor, Living(name) as holder:
        holder.call("publish", PATH)
        held, slots = pinned(survivor), survivor.allocate(FULL, 8)[0]
        holder.call("start", "copy")
        stop_holding_lock(holder, LockWord(name))
        check_everything_is_busy(survivor, held, slots)
        before = survivor.stats()["lock_timeouts"]
        assert before >= 5
        holder.go_on() if end == "SIGCONT" else holder.kill()
        check_everything_works(survivor, held, slots)
        if end == "SIGCONT":
            turns = holder.call("turns")
            eventually(lambda: holder.call("turns") > turns, "the holder goes on")
        else:
            assert survivor.reap().clients == 1


def check_everything_is_busy(index: Index, held: Match, slots: np.ndarray) -> None:
    """Within the deadline, and nothing is lost."""

    def match_only() -> None:
        found = Match()
        index.match(PATH, 1, 0, found)
        assert (found.status, found.full_hit) == (QueryStatus.OK, len(PATH))  # readers need no lock

    def pin() -> None:
        found = pinned(index)
        assert (found.status, found.full_hit, found.common_hit) == (QueryStatus.BUSY, 0, 0)
        assert not found.holds_pin()

    def allocate() -> None:
        got, was_busy = index.allocate(FULL, 5)
        assert len(got) == 0
        assert was_busy

    def insert() -> None:
        error, num_inserted, unused = index.insert(FULL, np.arange(50, 58, dtype=np.uint64), slots, 0, 0)
        assert (error, num_inserted, len(unused)) == (InsertError.BUSY, 0, 0)

    def reset() -> None:
        with pytest.raises(IndexBusy):
            index.reset()

    assert held._pin is not None
    for verb in (match_only, pin, allocate, insert, reset):
        assert timed(verb) < BLOCKED_LIMIT_S, verb.__name__
    assert timed(lambda: index.recycle(FULL, slots)) < BLOCKED_LIMIT_S
    assert not index.release(held._pin)
    assert timed(index.stats) < BLOCKED_LIMIT_S
    assert timed(index.reap) < BLOCKED_LIMIT_S


def check_everything_works(index: Index, held: Match, slots: np.ndarray) -> None:
    """Slots are still staged and the pin still held; both can be given back now."""
    assert timed(lambda: index.allocate(FULL, 1)) < BLOCKED_LIMIT_S
    error, num_inserted, unused = index.insert(FULL, np.arange(50, 58, dtype=np.uint64), slots, 0, 0)
    assert (error, num_inserted, len(unused)) == (InsertError.OK, 8, 0)
    assert held._pin is not None
    assert index.release(held._pin)
    assert index.snapshot().summarize().num_pins == 0
    found = pinned(index)
    assert found.common_hit == len(PATH)
    assert index.snapshot().check() == (0, "")


# -- leases -------------------------------------------------------------------------------------------


def test_slots_stay_while_a_transfer_worker_writes() -> None:
    with region(STORE, data_bytes=64 * 4096) as name, closing(attach(name, "survivor")) as survivor:
        num_slots = survivor.info.config.geometry.pools[FULL].num_slots
        with Living(name) as engine, closing(SlotStore.attach(f"{name}_data")) as store:
            slots = engine.call("stage", 20)
            writer = engine.call("start_writer", slots)
            engine.kill()
            counter = store.slot_view(slots[0]).cast("Q")
            for _ in range(3):
                assert survivor.reap() == (0, 0, 0, 0)
                others = survivor.allocate(FULL, num_slots)[0]
                assert len(others) == num_slots - len(slots)
                assert not set(others.tolist()) & set(slots)
                survivor.recycle(FULL, others)
                before = counter[0]
                eventually(lambda before=before: counter[0] > before, "the writer writes")  # type: ignore[misc]
            os.kill(writer, signal.SIGKILL)
            # Its main thread may be gone while another still holds the descriptors.
            result = eventually(lambda: (r := survivor.reap()).clients and r, "the writer's lease ends")
            assert result == (1, 0, len(slots), 0)
            assert len(survivor.allocate(FULL, num_slots)[0]) == num_slots
            counter.release()


def test_a_worker_keeps_the_lease_of_a_client_that_left() -> None:
    with region(STORE, data_bytes=64 * 4096) as name, closing(attach(name, "survivor")) as survivor:
        with Living(name) as engine:
            slots = engine.call("stage", 4)
            writer = engine.call("start_writer", slots)
            engine.call("close")
            assert survivor.reap() == (0, 0, 0, 0)
            assert survivor.snapshot().summarize().staged[FULL] == len(slots)
            os.kill(writer, signal.SIGKILL)
            eventually(lambda: survivor.reap().clients == 1, "reaped")
            assert survivor.snapshot().summarize().staged[FULL] == 0


def test_a_device_client_waits_out_its_quarantine(name: str, survivor: Index) -> None:
    quarantine_s = survivor.info.config.reap_quarantine_s
    with Living(name) as engine:
        engine.call("publish", PATH)
        engine.call("pin", PATH)
        slots = engine.call("stage", 5)
        engine.call("set_device")
        engine.kill()
    died = time.monotonic()
    assert survivor.reap() == (0, 1, 0, 1)
    assert survivor.snapshot().summarize().num_pins == 0
    assert state_of(name, engine.slot) == ClientState.DYING
    with closing(attach(name, "late")) as late:
        assert late.slot != engine.slot
    while (result := survivor.reap()).clients == 0:
        assert not set(survivor.allocate(FULL, NUM_SLOTS)[0].tolist()) & set(slots)
        assert time.monotonic() < died + quarantine_s + BLOCKED_LIMIT_S
        time.sleep(0.05)
    assert time.monotonic() >= died + quarantine_s
    assert (result.clients, result.slots) == (1, len(slots))
    assert len(survivor.allocate(FULL, len(slots))[0]) == len(slots)


def test_a_device_client_without_staged_slots_goes_at_once(name: str, survivor: Index) -> None:
    with Living(name) as engine:
        engine.call("publish", PATH)
        engine.call("pin", PATH)
        engine.call("set_device")
        engine.kill()
    assert survivor.reap() == (1, 1, 0, 0)


def state_of(name: str, slot: int) -> ClientState:
    fd = open_index(name)
    try:
        return next(c.state for c in _native.peek_clients(fd) if c.slot == slot)
    finally:
        os.close(fd)


# -- forks --------------------------------------------------------------------------------------------


def test_every_verb_refuses_in_a_forked_child(name: str, survivor: Index) -> None:
    with Living(name) as parent:
        parent.call("publish", PATH)
        parent.call("pin", PATH)
        staged = parent.call("stage", 6)
        child, outcomes = parent.call("fork")
        assert outcomes
        assert [line for line in outcomes if not line.endswith(": RadixError")] == []
        parent.call("reap_child", child)
        assert survivor.reap() == (0, 0, 0, 0), "the parent's lease outlives its child"
        assert survivor.snapshot().summarize().staged[FULL] == len(staged)
        assert len(parent.call("stage", 2)) == 2


def test_a_live_child_does_not_keep_its_parents_lease(name: str, survivor: Index) -> None:
    with Living(name) as parent:
        parent.call("publish", PATH)
        parent.call("pin", PATH)
        parent.call("stage", 6)
        child, _ = parent.call("fork")
        try:
            parent.kill()
            assert is_running(child)
            assert survivor.reap() == (1, 1, 6, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_forked_while_others_attach_holds_nothing(name: str, survivor: Index) -> None:
    """Whatever a thread was about to do with a lease when another forked."""
    with Living(name) as parent:
        for _ in range(3):
            parent.call("start", "come_and_go")
        children = parent.call("fork_bare", 60)
        try:
            parent.kill()
            assert all(is_running(child) for child in children)
            eventually(lambda: survivor.reap().clients == 0, "all reaped")
            assert survivor.stats()["num_clients"] == 1
            free = survivor.info.config.max_clients - 1
            guests = [attach(name, "guest") for _ in range(free)]  # every entry can be had
            for guest in guests:
                guest.close()
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_a_stopped_attach_is_no_death(name: str, survivor: Index) -> None:
    with Living(name) as client:
        client.call("stage", 5)
        client.stop()
        assert survivor.reap() == (0, 0, 0, 0)
        client.go_on()
        assert len(client.call("stage", 5)) == 5


# -- threads ------------------------------------------------------------------------------------------


def test_one_client_serves_many_threads(name: str, survivor: Index) -> None:
    """Each thread has its own family of paths; all of them evict each other's."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(150):
                churn(survivor, np.arange(30, dtype=np.uint64) + np.uint64(1000 * number + 40 * (turn % 5)))
        except BaseException as error:  # noqa: BLE001 - the test's own thread raises it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    summary = survivor.snapshot().summarize()
    assert (summary.num_pins, summary.staged[FULL]) == (0, 0)
    assert survivor.snapshot().check() == (0, "")


def churn(index: Index, hashes: np.ndarray) -> None:
    found = Match()
    index.match(hashes, 1, QUERY_LOCK, found)
    slots = index.allocate(FULL, len(hashes) - found.full_hit)[0]
    end = found.full_hit + len(slots)
    error, num_inserted, unused = index.insert(FULL, hashes[:end], slots, found.full_hit, 0)
    assert error == InsertError.OK
    assert num_inserted + len(unused) == len(slots)
    if found._pin is not None and found.holds_pin():
        assert index.release(found._pin)
