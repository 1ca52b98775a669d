"""What every eviction policy must keep, whatever its order: invariants, pins, counts and events."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixshmem import (
    ComponentType,
    EventKind,
    EventReason,
    Geometry,
    QueryResult,
    RadixClient,
    RadixServer,
    ServerConfig,
)
from radixshmem.config import EVICT_POLICIES
from radixshmem.records import Node
from tests.model.machine import clients, components, hash_path, masks, picks, sides

SEED = int(os.environ.get("RADIX_MODEL_SEED", "1"))
EXAMPLES = int(os.environ.get("RADIX_POLICY_EXAMPLES", "12"))
FULL = ComponentType.FULL
GEOMETRY = Geometry(16, 64, 64, 3, 64, full_slots=90, swa_slots=20, mamba_slots=8, fingerprint="policies")


class PolicyMachine(RuleBasedStateMachine):
    runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=4)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.clients: list[RadixClient] = []
        self.held: list[tuple[int, list[int], int, QueryResult]] = []
        self.tree = 0
        self.there: Counter[tuple[ComponentType, int]] = Counter()

    @initialize()
    def begin(self) -> None:
        self.clients = [RadixClient(self.name, GEOMETRY) for _ in range(2)]
        for client in self.clients:
            client.wait_ready(30)
        self.clients[0].reset()
        self.cursor = self.clients[0].index.event_head()

    def teardown(self) -> None:
        for *_, result in self.held:
            result.finalize()  # type: ignore[misc]
        for client in self.clients:
            client.close()

    def evictable(self) -> int:
        return self.clients[0].index.snapshot().summarize().evictable[FULL]

    @rule(client=clients, runs=runs, mask=masks, lock=st.booleans())
    def match(self, client: int, runs: list[tuple[int, int]], mask: int, lock: bool) -> None:
        hashes = hash_path(runs, True)
        result = self.clients[client].query(np.array(hashes, np.uint64), mask=mask, lock=lock)
        assert result.status == 0
        if lock:
            self.held.append((self.tree, hashes[: result.common_hit], mask, result))

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        *_, result = self.held.pop(pick % len(self.held))
        result.finalize()  # type: ignore[misc]

    @rule(client=clients, runs=runs)
    def put(self, client: int, runs: list[tuple[int, int]]) -> None:
        engine, hashes = self.clients[client], np.array(hash_path(runs, True), np.uint64)
        hit = engine.query(hashes, lock=True)
        num = len(hashes) - hit.full_hit
        expected = min(num, engine.mempool_free() + self.evictable())
        slots = engine.allocate_slots(num)
        assert len(slots) == expected
        engine.insert(hashes[: hit.full_hit + len(slots)], slots, start=hit.full_hit)
        hit.finalize()  # type: ignore[misc]

    @rule(client=clients, component=sides, runs=runs, num=st.integers(1, 6))
    def put_side(self, client: int, component: ComponentType, runs: list[tuple[int, int]], num: int) -> None:
        engine, hashes = self.clients[client], np.array(hash_path(runs, True), np.uint64)
        hashes = hashes[: engine.query(hashes).full_hit]
        slots = engine.allocate_slots(min(num, len(hashes)), component=component)
        engine.insert(hashes, slots, component=component)

    @rule(client=clients, component=components, num=st.integers(0, 30))
    def evict(self, client: int, component: ComponentType, num: int) -> None:
        evictable = self.evictable()
        num_evicted = self.clients[client].index.evict(component, num, EventReason.REQUEST)
        if component == FULL:
            assert num_evicted == min(num, evictable)

    @rule(client=clients)
    def reset(self, client: int) -> None:
        self.clients[client].reset()
        self.tree += 1

    @invariant()
    def holds(self) -> None:
        if not self.clients:
            return
        snapshot = self.clients[0].index.snapshot()
        num_violations, report = snapshot.check()
        assert num_violations == 0, report
        self.check_events([node for node in snapshot.nodes() if node.is_published])
        self.check_pins()

    def check_events(self, nodes: list[Node]) -> None:
        """Stored less removed is what is there."""
        self.cursor, events, lost = self.clients[0].events(self.cursor)
        assert not lost
        for event in events:
            if event.kind != EventKind.CLEARED:
                self.there[event.component, event.hash] += 1 if event.kind == EventKind.STORED else -1
        expected = Counter((FULL, node.hash) for node in nodes)
        for component in (ComponentType.SWA, ComponentType.MAMBA):
            expected += Counter((component, node.hash) for node in nodes if node.sides[component].slot >= 0)
        assert +self.there == expected

    def check_pins(self) -> None:
        for tree, hashes, mask, result in self.held:
            if tree != self.tree or not hashes:
                continue
            again = self.clients[0].query(np.array(hashes, np.uint64), mask=mask, update_meta=False)
            assert again.common_hit == len(hashes)
            for attribute in ("swa_slots", "mamba_slots"):
                assert list(getattr(again, attribute)) == list(getattr(result, attribute))
            assert list(again.full_fragments[0][2]) == list(result.full_fragments[0][2])


@pytest.fixture(params=EVICT_POLICIES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    config = ServerConfig(
        name=f"/t-policy-{os.getpid()}", metrics_address="", evict_policy=request.param, max_clients=4
    )
    with RadixServer(config):
        yield config.name


@pytest.mark.timeout(0)
def test_policy_keeps_its_promises(name: str) -> None:
    how = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    print(f"seed {SEED}")
    run_state_machine_as_test(seed(SEED)(lambda: PolicyMachine(name)), settings=how)
