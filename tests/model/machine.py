"""Hypothesis drives two clients and the reference model through the same verbs and compares all there is."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixshmem import ComponentType, EventKind, EventReason, Geometry, InsertError, QueryResult, RadixClient
from tests.model.blocks import SIDES, Pool
from tests.model.compare import check_counts, check_nodes, check_summary
from tests.model.reference import FULL, Model, ModelEvent

PIN_LIMIT = 2
NOT_SLOTS = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Setup:
    """A server to drive: its name, shapes, and how long paths may be.  ``is_lru``: else fifo."""

    name: str
    geometry: Geometry
    pins_per_client: int
    max_run: int
    is_lru: bool
    ops: Counter[str] = field(default_factory=Counter)

    def pools(self) -> dict[ComponentType, Pool]:
        geometry = self.geometry
        return {c: Pool(geometry.num_slots(c), geometry.window_blocks(c)) for c in ComponentType}


@dataclass
class Held:
    """A result with a pin: who holds it, and the record that the model says it takes."""

    client: int
    result: QueryResult
    record: int | None


clients = st.integers(0, 1)
components = st.sampled_from(list(ComponentType))
sides = st.sampled_from(SIDES)
masks = st.sampled_from([1, 2, 3, 4, 5, 6, 7])
picks = st.integers(0, 1 << 16)  # an index, modulo however many there are


def hash_path(runs: Sequence[tuple[int, int]], is_chained: bool) -> list[int]:
    """Hashes of the path of (token, blocks) ``runs``.

    Unchained, equal tokens give equal hashes all over the tree: entries then differ by their parents alone.
    """
    path: list[int] = []
    for token, num in runs:
        for _ in range(num):
            value = token + 1
            if is_chained:
                value = ((path[-1] if path else 99) * 0x9E3779B97F4A7C15 + value * 0xBF58476D1CE4E5B9) % (
                    1 << 64
                )
            path.append(value)
    return path


class IndexMachine(RuleBasedStateMachine):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.model = Model(setup.pools(), setup.pins_per_client, setup.is_lru)
        self.clients: list[RadixClient] = []
        self.held: list[Held] = []
        self.dropped: list[list[int]] = [[], []]  # records whose results were collected, by client
        self.is_chained = True

    @initialize(is_chained=st.booleans())
    def begin(self, is_chained: bool) -> None:
        self.is_chained = is_chained
        self.clients = [self.connect(), self.connect()]
        self.clients[0].reset()
        self.cursor = self.clients[0].index.event_head()
        for client in self.clients:
            client.kvevent_seek_to_head()
        self.num_drained = [0, 0]
        self.num_seen = 0
        self.before = self.clients[0].stats()

    def connect(self) -> RadixClient:
        client = RadixClient(self.setup.name, self.setup.geometry, label="model")
        client.wait_ready(30)
        return client

    def teardown(self) -> None:
        for client in self.clients:
            client.close()

    # -- what the rules share -------------------------------------------------------------------------

    def use(self, client: int) -> RadixClient:
        """The client, whose verb is going to release first what the collector queued."""
        for record in self.dropped[client]:
            self.model.release(self.entry(client), record)
        self.dropped[client].clear()
        self.setup.ops["verbs"] += 1
        return self.clients[client]

    def entry(self, client: int) -> int:
        return self.clients[client].index.slot

    def paths(self, runs: list[tuple[int, int]]) -> list[int]:
        return hash_path([(token, 1 + num % self.setup.max_run) for token, num in runs], self.is_chained)

    runs = st.lists(st.tuples(st.integers(0, 2), picks), min_size=0, max_size=4)

    # -- match ----------------------------------------------------------------------------------------

    @rule(client=clients, runs=runs, mask=masks, update_meta=st.booleans())
    def look(self, client: int, runs: list[tuple[int, int]], mask: int, update_meta: bool) -> None:
        hashes = self.paths(runs)
        result = self.use(client).query(as_hashes(hashes), mask=mask, update_meta=update_meta)
        self.check_match(result, hashes, mask)
        assert result.finalize is None
        if update_meta:
            self.model.touch(hashes, mask)

    @rule(client=clients, runs=runs, mask=masks, update_meta=st.booleans())
    def match_and_pin(self, client: int, runs: list[tuple[int, int]], mask: int, update_meta: bool) -> None:
        hashes = self.paths(runs)
        result = self.use(client).query(as_hashes(hashes), mask=mask, lock=True, update_meta=update_meta)
        assert result.finalize is not None
        if self.model.match(hashes, mask).common_hit and not self.model.has_pin_room(self.entry(client)):
            assert (result.status, result.full_hit, result.common_hit) == (PIN_LIMIT, 0, 0)
            return
        self.check_match(result, hashes, mask)
        record = None
        if result.common_hit:
            if update_meta:
                self.model.touch(hashes, mask)
            record = self.model.pin(self.entry(client), hashes, mask)
        self.held.append(Held(client, result, record))

    def check_match(self, result: QueryResult, hashes: list[int], mask: int) -> None:
        expected = self.model.match(hashes, mask)
        assert result.status == 0
        assert (result.full_hit, result.common_hit) == (expected.full_hit, expected.common_hit)
        slots = [int(s) for _, _, fragment in result.full_fragments for s in fragment]
        assert (slots, list(result.swa_slots), list(result.mamba_slots)) == expected[2:]
        if mask & 2:
            assert result.swa_start == result.common_hit - len(expected.swa_slots)

    @precondition(lambda self: self.held)
    @rule(pick=picks, how=st.sampled_from(["finalize", "twice", "with", "drop"]))
    def release(self, pick: int, how: str) -> None:
        held = self.held.pop(pick % len(self.held))
        if how == "drop":
            self.drop(held)
            return
        result = held.result
        if how == "with":
            with result:
                pass
        else:
            result.finalize()  # type: ignore[misc]
        if how == "twice":
            result.finalize()  # type: ignore[misc]
        if held.record is not None:
            self.model.release(self.entry(held.client), held.record)

    def drop(self, held: Held) -> None:
        """Let the collector have it: the release is queued, with a warning."""
        client, record = held.client, held.record
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            held.result = None  # type: ignore[assignment]
            gc.collect(0)
        assert [w.category for w in caught] == ([ResourceWarning] if record is not None else [])
        if record is not None:
            self.dropped[client].append(record)

    # -- slots ----------------------------------------------------------------------------------------

    @rule(client=clients, component=components, share=st.integers(0, 100))
    def allocate(self, client: int, component: ComponentType, share: int) -> None:
        num = self.model.pools[component].num_slots * share // 100
        self.take(client, component, num)

    def take(self, client: int, component: ComponentType, num: int) -> list[int]:
        slots = [int(s) for s in self.use(client).allocate_slots(num, component=component)]
        expected = self.model.make_room(self.entry(client), component, num)
        assert len(slots) == expected, (component, num, slots)
        assert slots == sorted(slots)
        self.model.stage(self.entry(client), component, slots)
        return slots

    @rule(client=clients, component=components, picks=st.lists(picks, max_size=12))
    def recycle(self, client: int, component: ComponentType, picks: list[int]) -> None:
        slots = self.choose_staged(client, component, picks)
        self.use(client).recycle_slots(as_slots(slots), component=component)
        self.model.recycle(component, slots)

    @rule(client=clients, component=components)
    def recycle_all(self, client: int, component: ComponentType) -> None:
        slots = self.model.staged_by(self.entry(client), component)
        self.use(client).recycle_slots(np.array(slots, np.int64), component=component)
        self.model.recycle(component, slots)

    def choose_staged(self, client: int, component: ComponentType, picks: Sequence[int]) -> list[int]:
        """Distinct staged slots of the client, in no order."""
        staged = self.model.staged_by(self.entry(client), component)
        return list(dict.fromkeys(staged[pick % len(staged)] for pick in picks)) if staged else []

    # -- insert ---------------------------------------------------------------------------------------

    @rule(client=clients, runs=runs, keep=st.booleans(), update_meta=st.booleans())
    def put(self, client: int, runs: list[tuple[int, int]], keep: bool, update_meta: bool) -> None:
        """What an engine does: match, allocate the rest, publish it from there."""
        hashes = self.paths(runs)
        found = self.use(client).query(as_hashes(hashes), update_meta=update_meta)
        if update_meta:
            self.model.touch(hashes, 1)
        slots = self.take(client, FULL, min(len(hashes) - found.full_hit, self.model.pools[FULL].num_slots))
        self.publish(client, FULL, hashes[: found.full_hit + len(slots)], slots, found.full_hit, keep)

    @rule(client=clients, runs=runs, pick=picks, num=picks, keep=st.booleans())
    def insert(self, client: int, runs: list[tuple[int, int]], pick: int, num: int, keep: bool) -> None:
        """Any staged slots, whatever is there already, from anywhere in the path."""
        hashes = self.paths(runs)
        self.take(client, FULL, min(num % (1 + len(hashes)), self.model.pools[FULL].num_slots))
        staged = self.choose_staged(client, FULL, range(pick, pick + num % (1 + len(hashes))))
        self.publish(client, FULL, hashes, staged, len(hashes) - len(staged), keep)

    @rule(client=clients, component=sides, runs=runs, num=st.integers(0, 14), keep=st.booleans())
    def put_side(
        self, client: int, component: ComponentType, runs: list[tuple[int, int]], num: int, keep: bool
    ) -> None:
        hashes = self.paths(runs)
        hashes = hashes[: len(self.model.walk(hashes))]
        num = min(num, len(hashes), self.model.pools[component].num_slots)
        self.publish(client, component, hashes, self.take(client, component, num), 0, keep)

    @rule(client=clients, component=sides, runs=runs, num=st.integers(0, 14), keep=st.booleans())
    def insert_side(
        self, client: int, component: ComponentType, runs: list[tuple[int, int]], num: int, keep: bool
    ) -> None:
        """Staged side slots, also where the FULL path is missing."""
        hashes = self.paths(runs)
        self.take(client, component, min(num, len(hashes), self.model.pools[component].num_slots))
        staged = self.choose_staged(client, component, range(min(num, len(hashes))))
        self.publish(client, component, hashes, staged, 0, keep)

    def publish(
        self,
        client: int,
        component: ComponentType,
        hashes: list[int],
        slots: list[int],
        start: int,
        keep: bool,
    ) -> None:
        result = self.use(client).insert(
            as_hashes(hashes), as_slots(slots), start=start, auto_recycle=not keep, component=component
        )
        expected = self.model.insert(self.entry(client), component, hashes, slots, start, keep)
        assert (result.error, list(result.unused_slots), result.num_inserted) == expected
        self.setup.ops[f"insert {InsertError(result.error).name}"] += 1

    # -- evict, reset, come and go --------------------------------------------------------------------

    @rule(client=clients, component=components, num=st.integers(0, 20))
    def evict(self, client: int, component: ComponentType, num: int) -> None:
        num_evicted = self.clients[client].index.evict(component, num, EventReason.REQUEST)
        assert num_evicted == self.model.evict(self.entry(client), component, num, EventReason.REQUEST)

    @rule(client=clients)
    def reset(self, client: int) -> None:
        self.use(client).reset()
        self.model.reset(self.entry(client))

    @rule(client=clients, component=components, share=st.integers(0, 100), keep=st.booleans())
    def insert_across_reset(self, client: int, component: ComponentType, share: int, keep: bool) -> None:
        """Slots staged before a reset publish nothing, nor do those that stand beside them."""
        num = self.model.pools[component].num_slots // 3
        old = self.take(client, component, num)
        self.reset(client)
        slots = self.take(client, component, num * share // 100) + old
        self.publish(client, component, hash_path([(0, len(slots))], self.is_chained), slots, 0, keep)

    @rule(client=clients)
    def reconnect(self, client: int) -> None:
        """Close with pins and staged slots in hand."""
        entry = self.entry(client)
        self.clients[client].close()
        self.model.close(entry)
        self.dropped[client].clear()
        for held in [held for held in self.held if held.client == client]:
            self.held.remove(held)
            held.result.finalize()  # type: ignore[misc]
        self.clients[client] = self.connect()
        self.clients[client].kvevent_seek_to_head()
        self.num_drained[client] = len(self.model.events)

    # -- arguments that must change nothing -----------------------------------------------------------

    @rule(
        client=clients,
        component=components,
        pick=picks,
        kind=st.sampled_from(["foreign", "free", "none", "twice"]),
    )
    def name_wrong_slots(self, client: int, component: ComponentType, pick: int, kind: str) -> None:
        mine = self.model.staged_by(self.entry(client), component)
        wrong = self.wrong_slot(client, component, pick, kind)
        if wrong is None:
            return
        slots = as_slots([*mine[:3], wrong])
        hashes = np.arange(100, 100 + len(slots), dtype=np.uint64)
        verbs = self.use(client)
        refuses(ValueError, verbs.recycle_slots, slots, component=component)
        refuses(ValueError, verbs.insert, hashes, slots, component=component)
        refuses(ValueError, verbs.insert, hashes, slots, auto_recycle=False, component=component)

    def wrong_slot(self, client: int, component: ComponentType, pick: int, kind: str) -> int | None:
        pool, mine = self.model.pools[component], self.model.staged_by(self.entry(client), component)
        if kind == "none":
            return (*NOT_SLOTS, pool.num_slots)[pick % 4]
        wrong = {
            "foreign": sorted(set(range(pool.num_slots)) - pool.free - set(mine)),
            "free": sorted(pool.free),
            "twice": mine[:3],
        }[kind]
        return wrong[pick % len(wrong)] if wrong else None

    @rule(client=clients, component=components)
    def pass_wrong_arguments(self, client: int, component: ComponentType) -> None:
        verbs = self.use(client)
        mine = as_slots(self.model.staged_by(self.entry(client), component)[:2])
        hashes = np.arange(100, 100 + len(mine), dtype=np.uint64)
        refuses(ValueError, verbs.insert, hashes[:0], as_slots([0]), component=component)
        refuses(ValueError, verbs.insert, hashes, mine, start=-1, component=component)
        refuses(ValueError, verbs.insert, hashes, mine, start=len(mine) + 1, component=component)
        refuses(TypeError, verbs.insert, hashes.astype(float), mine, component=component)
        refuses(TypeError, verbs.insert, hashes, mine.astype(float), component=component)
        refuses(ValueError, verbs.insert, hashes.reshape(1, -1), mine, component=component)
        refuses(ValueError, verbs.recycle_slots, mine.reshape(1, -1), component=component)
        refuses(ValueError, verbs.recycle_slots, np.array([2**40]), component=component)
        refuses(ValueError, verbs.allocate_slots, -1, component=component)
        refuses(
            ValueError, verbs.allocate_slots, self.model.pools[component].num_slots + 1, component=component
        )
        refuses(ValueError, verbs.allocate_slots, 1, component=3)
        refuses(ValueError, verbs.query, hashes, mask=8)
        refuses(ValueError, verbs.query, hashes, mask=-1)
        refuses(ValueError, verbs.query, np.arange(6, dtype=np.uint64)[::2])
        refuses(TypeError, verbs.query, [1, 2])

    # -- events ---------------------------------------------------------------------------------------

    @rule(client=clients)
    def read_events(self, client: int) -> None:
        self.cursor, events, lost = self.use(client).events(self.cursor)
        assert not lost
        seen = [ModelEvent(e.kind, e.reason, e.hash, e.parent_hash, e.component, e.client) for e in events]
        assert seen == self.model.events[self.num_seen :]
        self.num_seen = len(self.model.events)

    @rule(client=clients, max_hashes=st.sampled_from([1, 5, 1000]))
    def drain_removed(self, client: int, max_hashes: int) -> None:
        got, lost = self.use(client).kvevent_drain(max_hashes)
        assert not lost
        assert len(got) <= max_hashes
        removed = [
            (i, e.hash) for i, e in enumerate(self.model.events) if e[0] == EventKind.REMOVED and e[4] == FULL
        ]
        expected = [(i, value) for i, value in removed if i >= self.num_drained[client]]
        assert list(got) == [value for _, value in expected[: len(got)]]
        if len(got) < min(max_hashes, len(expected)):
            raise AssertionError(f"{len(got)} of {len(expected)} removed hashes were drained")
        self.num_drained[client] = expected[len(got) - 1][0] + 1 if len(got) else len(self.model.events)

    # -- what must hold after every rule --------------------------------------------------------------

    @invariant()
    def equals_the_model(self) -> None:
        if not self.clients:
            return
        self.setup.ops["rules"] += 1
        snapshot = self.clients[0].index.snapshot()
        num_violations, report = snapshot.check()
        assert num_violations == 0, report
        check_nodes(self.model, snapshot)
        check_summary(self.model, snapshot.summarize())
        check_counts(self.model, self.before, self.clients[0].index)


def as_hashes(hashes: list[int]) -> np.ndarray:
    return np.array(hashes, np.uint64)


def as_slots(slots: Sequence[int]) -> np.ndarray:
    return np.array(slots, np.int32)


def refuses(error: type[Exception], verb: Any, *args: Any, **kwargs: Any) -> None:
    try:
        verb(*args, **kwargs)
    except error:
        return
    raise AssertionError(f"{verb.__name__}{args}{kwargs} was accepted")
