"""An engine that does anything at any time, and checks every byte it is served."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import traceback
from collections import deque

import numpy as np

from radixshmem import (
    COMPONENT_MASK_FULL,
    COMPONENT_MASK_MAMBA,
    COMPONENT_MASK_SWA,
    ComponentType,
    InsertError,
    InsertResult,
    QueryResult,
    QueryStatus,
    RadixClient,
    ServerUnavailable,
)
from radixshmem.arrays import I32Array
from radixshmem.errors import IndexBusy, RadixError
from radixshmem.index import Snapshot
from tests.torture.patterns import (
    GEOMETRY,
    MAX_BLOCKS,
    NUM_BRANCHES,
    NUM_FAMILIES,
    SWA_WINDOW,
    U64,
    contents,
    prompt,
)
from tests.torture.seats import Seat

FULL, SWA, MAMBA = ComponentType
ALL = COMPONENT_MASK_FULL | COMPONENT_MASK_SWA | COMPONENT_MASK_MAMBA
MAX_HELD = 6
MAX_HOARD = {FULL: 150, SWA: 20, MAMBA: 6}  # slots, so that all workers together leave some
CONNECT_S = 120.0
DEVICE_SHARE = 0.1  # workers whose staged slots wait out a quarantine


class WrongBytesError(Exception):
    pass


def run(name: str, seat: Seat, seed: int) -> int:
    """Until killed; ends the process only when something is wrong, with its text in the seat."""
    try:
        rng = random.Random(seed)
        client = connect(name)
        if rng.random() < DEVICE_SHARE:
            with contextlib.suppress(IndexBusy):
                client.index.set_device()
        for _ in range(rng.choice([0, 0, 1, 2])):
            threading.Thread(target=work, args=(client, seat, rng.getrandbits(32)), daemon=True).start()
        seat["SLOT"], seat["INCARNATION"] = client.index.slot, client.index.incarnation
        work(client, seat, rng.getrandbits(32))
    except BaseException:  # noqa: BLE001 - whatever it is, the conductor reports it
        seat.fail(traceback.format_exc())
    return 1


def work(client: RadixClient, seat: Seat, seed: int) -> None:
    """One thread of a worker."""
    try:
        Worker(client, seat, seed).work()
    except BaseException:  # noqa: BLE001 - whatever it is, the conductor reports it
        seat.fail(traceback.format_exc())
        os._exit(1)


class Worker:
    def __init__(self, client: RadixClient, seat: Seat, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seat = seat
        seat.watch_this_thread()
        self.client = client
        self.arrays = {c: self.client.store.array(c).view(np.uint64) for c in ComponentType}
        self.held: deque[tuple[U64, QueryResult]] = deque()
        self.staged: dict[ComponentType, list[tuple[int, int]]] = {c: [] for c in ComponentType}

    def work(self) -> None:
        deeds = [self.put] * 30 + [self.get] * 30 + [self.put_swa] * 12 + [self.put_mamba] * 8
        deeds += [self.hold] * 8 + [self.hoard] * 6 + [self.look_around] * 5 + [self.evict] * 2
        while True:
            self.rng.choice(deeds)()
            if self.rng.random() < 0.2:
                time.sleep(0.001)  # leaves a starting server some time
            if self.rng.random() < 0.0002:
                self.reset()

    # -- deeds ----------------------------------------------------------------------------------------

    def put(self) -> None:
        hashes = self.any_prompt()
        hit = self.query(hashes, COMPONENT_MASK_FULL)
        if hit.status == QueryStatus.OK:
            self.publish(hashes, hit)
            self.check(hashes, hit)
        self.release(hit)

    def publish(self, hashes: U64, hit: QueryResult) -> None:
        """Allocate what is missing behind ``hit``, fill it, and insert it from there."""
        start = hit.full_hit
        with self.seat.timed():
            slots = self.client.allocate_slots(len(hashes) - start)
        self.seat.add("SHORT", len(slots) < len(hashes) - start)
        hashes = hashes[: start + len(slots)]
        self.fill(FULL, hashes[start:], slots)
        keep = self.rng.random() < 0.3
        with self.seat.timed():
            result = self.client.insert(hashes, slots, start=start, auto_recycle=not keep)
        self.settle(FULL, slots, result, keep)
        self.seat.add("PUTS")

    def fill(self, component: ComponentType, hashes: U64, slots: I32Array) -> None:
        """Write the blocks' bytes, and see that nobody else writes into staged slots."""
        expected = contents(hashes, component)
        self.arrays[component][slots] = expected
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * 0.01)
        if not np.array_equal(self.arrays[component][slots], expected):
            raise WrongBytesError(f"somebody wrote into staged {component.name} slots of {slots}")

    def settle(self, component: ComponentType, slots: I32Array, result: InsertResult, keep: bool) -> None:
        """Give back what an insert left staged."""
        if result.error == InsertError.BUSY:
            self.seat.add("BUSY")
            left = slots[result.num_inserted + len(result.unused_slots) :]
            self.recycle(component, left)
        if result.error == InsertError.STALE_GENERATION:
            self.seat.add("STALE")
        elif keep:
            self.recycle(component, result.unused_slots)
        if result.error in (InsertError.PREFIX_MISSING, InsertError.FULL_PATH_MISSING):
            self.seat.add("LOST_PREFIX")  # by somebody's reset: the prefix was pinned

    def get(self) -> None:
        hashes = self.any_prompt()
        hit = self.query(hashes, self.rng.choice([1, 1, 3, 5, ALL]))
        self.check(hashes, hit)
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * 0.02)
            self.check(hashes, hit)
        self.release(hit)

    def hold(self) -> None:
        """Keep a pin over other deeds; its bytes must stay."""
        hashes = self.any_prompt()
        self.held.append((hashes, self.query(hashes, self.rng.choice([1, 3, 5, ALL]))))
        if len(self.held) > self.rng.randrange(MAX_HELD):
            hashes, hit = self.held.popleft()
            self.check(hashes, hit)
            self.release(hit)

    def hoard(self) -> None:
        """Keep staged slots over other deeds; their bytes must stay too."""
        component = self.rng.choice(list(ComponentType))
        hoard = self.staged[component]
        if len(hoard) > self.rng.randrange(1, MAX_HOARD[component]):
            slots = np.array([slot for slot, _ in hoard], np.int32)
            marks = np.array([mark for _, mark in hoard], np.uint64)
            if not np.array_equal(self.arrays[component][slots], contents(marks, component)):
                raise WrongBytesError(f"somebody wrote into hoarded {component.name} slots of {slots}")
            hoard.clear()
            self.recycle(component, slots)
            return
        with self.seat.timed():
            slots = self.client.allocate_slots(
                self.rng.randrange(1, 1 + MAX_HOARD[component] // 4), component=component
            )
        marks = np.array([self.rng.getrandbits(64) for _ in slots], np.uint64)
        self.arrays[component][slots] = contents(marks, component)
        hoard += zip(slots.tolist(), marks.tolist(), strict=True)

    def put_swa(self) -> None:
        self.put_side(SWA, SWA_WINDOW + 2)

    def put_mamba(self) -> None:
        self.put_side(MAMBA, 1)

    def put_side(self, component: ComponentType, num: int) -> None:
        hashes = self.any_prompt()
        hit = self.query(hashes, COMPONENT_MASK_FULL)
        hashes = hashes[: hit.full_hit]
        with self.seat.timed():
            slots = self.client.allocate_slots(min(num, len(hashes)), component=component)
        if len(slots):
            self.fill(component, hashes[len(hashes) - len(slots) :], slots)
            with self.seat.timed():
                result = self.client.insert(hashes, slots, component=component)
            self.settle(component, slots, result, keep=False)
        self.release(hit)

    def look_around(self) -> None:
        with self.seat.timed():
            self.client.kvevent_drain(1000)
        with self.seat.timed():
            self.client.stats()
        with contextlib.suppress(IndexBusy), self.seat.timed():
            snapshot = self.client.index.snapshot()  # holds the lock longer than any verb
            if self.rng.random() < 0.1:
                self.check_invariants(snapshot)
        if self.rng.random() < 0.05:
            with contextlib.suppress(ServerUnavailable):  # killed just now
                self.client.status()
            self.seat.add("STATUS_CALLS")

    def check_invariants(self, snapshot: Snapshot) -> None:
        num_violations, report = snapshot.check()
        if num_violations:
            raise AssertionError(report)
        self.seat.add("CHECKS")

    def evict(self) -> None:
        with self.seat.timed():
            self.client.index.evict(self.rng.choice(list(ComponentType)), self.rng.randrange(40), 3)

    def reset(self) -> None:
        try:
            with self.seat.timed():
                self.client.reset()
            self.seat.add("RESETS")
        except IndexBusy:
            self.seat.add("BUSY")

    # -- verbs ----------------------------------------------------------------------------------------

    def any_prompt(self) -> U64:
        rng = self.rng
        family = min(rng.randrange(NUM_FAMILIES), rng.randrange(NUM_FAMILIES))
        return prompt(family, rng.randrange(NUM_BRANCHES), rng.randrange(1, MAX_BLOCKS))

    def query(self, hashes: U64, mask: int) -> QueryResult:
        with self.seat.timed():
            hit = self.client.query(hashes, mask=mask, lock=True)
        self.seat.add("BUSY", hit.status == QueryStatus.BUSY)
        self.seat.add("PIN_LIMITS", hit.status == QueryStatus.PIN_LIMIT)
        self.seat.add("HIT_BLOCKS", hit.common_hit)
        return hit

    def release(self, hit: QueryResult) -> None:
        with self.seat.timed():
            hit.finalize()  # type: ignore[misc]

    def recycle(self, component: ComponentType, slots: I32Array) -> None:
        with self.seat.timed():
            self.client.recycle_slots(slots, component=component)

    def check(self, hashes: U64, hit: QueryResult) -> None:
        """Every byte that the pin promises."""
        end = hit.common_hit
        for _, first, slots in hit.full_fragments:
            self.compare(FULL, hashes[first : first + len(slots)], slots)
        if len(hit.swa_slots):
            self.compare(SWA, hashes[hit.swa_start : end], hit.swa_slots)
        if len(hit.mamba_slots):
            self.compare(MAMBA, hashes[end - 1 : end], hit.mamba_slots)

    def compare(self, component: ComponentType, hashes: U64, slots: I32Array) -> None:
        found, expected = self.arrays[component][slots], contents(hashes, component)
        wrong = (found != expected).any(axis=1)
        if wrong.any():
            raise WrongBytesError(
                f"{component.name}: wrong bytes under a pin in slots {slots[wrong]} of {slots}"
            )
        self.seat.add("VERIFIED_BYTES", found.nbytes)


def connect(name: str) -> RadixClient:
    """An attached client.  The server may be away for a moment, or the index busy with a stopped process."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        client = None
        try:
            client = RadixClient(name, GEOMETRY, label="torture")
            client.wait_ready(CONNECT_S)
            client.index.check_alive()
            return client
        except RadixError:
            if time.monotonic() > deadline:
                raise
            if client is not None:
                client.close()
            time.sleep(0.02)
