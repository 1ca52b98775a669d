"""What must be true of the region: while it is tortured, and when all workers are dead."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing

import numpy as np

from radixshmem import ComponentType, SlotStore, _native
from radixshmem.attachment import Attachment
from radixshmem.index import Match
from radixshmem.records import ClientRecord, Node
from radixshmem.region import open_index
from tests.torture.patterns import contents
from tests.torture.tape import Tape

REAP_LIMIT_S = 2.0
QUARANTINE_S = 0.5  # for workers that said a device may write their slots
FULL = ComponentType.FULL


class AuditError(AssertionError):
    pass


class Auditor:
    """A client that follows the events from the beginning and watches the client table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attached = Attachment(name, "auditor", 0)
        self.index = self.attached.index
        self.tape = Tape(self.index)
        self.worst_reap_s = 0.0
        self._fd = open_index(name)
        self.stalled_s = 0.0  # time in which nobody could have reaped, because the machine was busy elsewhere
        self._dead: dict[int, float] = {}  # incarnation -> when its process was gone, less stalls before

    def close(self) -> None:
        os.close(self._fd)
        self.attached.close()

    # -- while it goes on -----------------------------------------------------------------------------

    def clients(self) -> list[ClientRecord]:
        return _native.peek_clients(self._fd)

    def note_death(self, incarnation: int) -> None:
        self._dead[incarnation] = time.monotonic() - self.stalled_s

    def check_dead_are_reaped(self) -> None:
        now, listed = time.monotonic(), {client.incarnation: client for client in self.clients()}
        for incarnation, since in list(self._dead.items()):
            if incarnation not in listed:
                del self._dead[incarnation]
                continue
            waited = now - self.stalled_s - since
            if not listed[incarnation].device:
                self.worst_reap_s = max(self.worst_reap_s, waited)
            if waited > REAP_LIMIT_S + QUARANTINE_S * listed[incarnation].device:
                reaped = self.index.reap()
                raise AuditError(
                    f"dead for {waited:.1f} s, not reaped: {listed[incarnation]}; we get {reaped}"
                )

    # -- in the end ---------------------------------------------------------------------------------

    def wait_all_returned(self) -> None:
        """Nothing is pinned or staged, and no dead client is left."""
        deadline = time.monotonic() + REAP_LIMIT_S + QUARANTINE_S
        while True:
            held = [
                c for c in self.clients() if c.num_pins or any(c.num_staged) or c.incarnation in self._dead
            ]
            summary = self.index.snapshot().summarize()
            if not held and not summary.num_pins and not any(summary.staged):
                return
            if time.monotonic() > deadline:
                raise AuditError(f"{REAP_LIMIT_S} s after the last death: {summary}, {held}")
            time.sleep(0.02)

    def check_region(self) -> int:
        """All invariants, the balance of the events, every block by a match; returns the published blocks."""
        snapshot = self.index.snapshot()
        num_violations, report = snapshot.check()
        if num_violations:
            raise AuditError(report)
        self.tape.follow()
        nodes = {node.slot: node for node in snapshot.nodes()}
        self._check_balance(nodes.values())
        self._check_matchable(nodes)
        return len(nodes)

    def _check_balance(self, nodes: Iterable[Node]) -> None:
        """Published less removed is what is there."""
        expected = Counter((FULL, node.hash) for node in nodes)
        for node in nodes:
            expected.update(
                (component, node.hash) for component, side in node.sides.items() if side.slot >= 0
            )
        balance = self.tape.balance()
        if balance != expected:
            raise AuditError(f"events and tree differ in {(balance - expected) + (expected - balance)}")

    def _check_matchable(self, nodes: dict[int, Node]) -> None:
        num_matched = set()
        for node in nodes.values():
            if node.num_children:
                continue
            path = [node]
            while path[-1].parent is not None and path[-1].parent >= 0:
                path.append(nodes[path[-1].parent])
            hashes = np.array([n.hash for n in reversed(path)], np.uint64)
            if self._count_match(hashes) != len(path):
                raise AuditError(f"slot {node.slot} is published, but its path of {len(path)} does not match")
            num_matched |= {n.slot for n in path}
        if num_matched != set(nodes):
            raise AuditError("some blocks are on no path")

    def _count_match(self, hashes: np.ndarray) -> int:
        result = Match()
        self.attached.match(hashes, 1, 0, result)
        return result.full_hit

    def check_bytes(self) -> int:
        """Every published slot holds its block's bytes; returns how many bytes."""
        num_bytes = 0
        with closing(SlotStore.attach(f"{self.name}_data")) as store:
            nodes = [node for node in self.index.snapshot().nodes() if node.is_published]
            for component in ComponentType:
                pairs = [(n.slot if component == FULL else n.sides[component].slot, n.hash) for n in nodes]
                slots = [slot for slot, _ in pairs if slot >= 0]
                hashes = np.array([value for slot, value in pairs if slot >= 0], np.uint64)
                found = store.array(component).view(np.uint64)[slots]
                if not np.array_equal(found, contents(hashes, component)):
                    raise AuditError(f"published {component.name} slots hold wrong bytes")
                num_bytes += found.nbytes
                del found
        return num_bytes
