"""KVTaskEngine: the tasks of one data-parallel group, in block numbers.

    caller's threads   match, stage, bind, submit; wait in the table        (this file)
    engine's thread    attach, start the worker, results -> answers         (driver.py)

An error of the cache is a miss or a FAILED task, never an exception in the engine's request path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flexkv_radix.attach import adopt_radix_server
from flexkv_radix.config import CacheConfig
from flexkv_radix.driver import Driver
from flexkv_radix.hold import Hold
from flexkv_radix.launching import Launch, check_launch, check_layerwise, num_window_blocks, window_tail
from flexkv_radix.lifecycle import Member, Task, TaskKind, TaskState
from flexkv_radix.matching import Matched, match_get, match_put, no_slot, window_transfer
from flexkv_radix.metrics import Metrics, MetricsEndpoint, NodeCounts
from flexkv_radix.planner import BlockIds, Blocks, Transfer, bind, merge, signal_all
from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.spec import EngineSpec
from flexkv_radix.table import Answer, Entry, TaskTable
from flexkv_radix.tier import CacheEngineRadixShmem
from flexkv_radix.transfer.protocol import TransferOp
from radixshmem import COMPONENT_MASK_FULL, COMPONENT_MASK_SWA, ComponentType, RadixError

logger = logging.getLogger(__name__)

Bound = list[tuple[Transfer, BlockIds]]


class KVTaskEngine:
    """on_change is called, on any thread, when tasks may have ended or readiness changed.

    lifeline_fd: how somebody else knows of the end of transfer workers (TransferHandle).
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        on_change: Callable[[], None] = lambda: None,
        metrics_endpoint: MetricsEndpoint | None = None,
        lifeline_fd: int | None = None,
    ) -> None:
        self._table = TaskTable(spec.task_ttl_s)
        self.metrics = Metrics(spec.dp_client_id, node=self._node_counts)
        self._driver = Driver(spec, self._table, self.metrics, on_change, lifeline_fd)
        self._warned_about = ""
        self._ring_tier: CacheEngineRadixShmem | None = None  # that ring_events() spoke of last
        self._metrics_endpoint = metrics_endpoint
        if metrics_endpoint is not None:
            metrics_endpoint.add(self.metrics)

    # -- life

    def start(self) -> None:
        """Attach and start the worker behind the caller's back; returns at once."""
        self._driver.start()

    def is_ready(self) -> bool:
        """True when matches are served, and also when the cache was turned off.

        RuntimeError with the cause if the worker could not start, or if strict and the cache was refused.
        """
        failure = self._driver.failure
        if failure is not None:
            raise RuntimeError(f"the KV cache could not start: {failure}") from failure
        return self.tier is not None or bool(self.disabled)

    @property
    def tier(self) -> CacheEngineRadixShmem | None:
        """The tier while matches are served."""
        return self._driver.tier

    @property
    def disabled(self) -> str:
        """Why the cache is off; "" if it is not."""
        return self._driver.disabled

    def shutdown(self) -> None:
        """Stop the worker, end all tasks, give everything back.  A second call does nothing."""
        self._driver.stop()
        if self._metrics_endpoint is not None:
            self._metrics_endpoint.remove(self.metrics)
            self._metrics_endpoint = None

    @property
    def region(self) -> str:
        """Epoch of the region that is served from; "" while the cache is off."""
        tier = self.tier
        return "" if tier is None else tier.region

    def adopt_into(self, cache_config: CacheConfig) -> str:
        """Take the server's counts over into cache_config; returns the region that has them.

        "", and nothing done, while the cache is off.
        """
        tier = self.tier
        if tier is None:
            return ""
        adopt_radix_server(tier.client, cache_config)
        return tier.region

    # -- matching

    def get_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]:
        """Match and pin; the task waits for launch() with the blocks returned; without any it is over."""
        matched, tier = None, self._driver.tier
        if tier is not None and len(hashes):
            try:
                matched = match_get(tier, hashes, wanted, swa=swa)
            except RadixError as error:
                self._match_failed(error)
        if matched is None:
            matched = Matched()
        task_id, metrics = self._table.new_id(), self.metrics
        with self._table.lock:
            metrics.hit_blocks += matched.hit
            metrics.miss_blocks += len(hashes) - matched.hit
            self._add(task_id, TaskKind.GET, num_tokens, tier, matched)
        return task_id, matched.blocks

    def put_match(
        self, hashes: Hashes, num_tokens: int, wanted: Blocks, *, swa: bool = False
    ) -> tuple[int, Blocks]:
        """Match, pin and stage slots for what is missing; fewer blocks than that if space is short.

        The task FAILED if there is no space at all.  With swa, a task whose blocks are all there still
        waits for launch() if its window is not.
        """
        task_id, matched, tier, error = self._table.new_id(), Matched(), self.tier, ""
        if tier is not None and len(hashes):
            try:
                matched = match_put(tier, hashes, wanted, swa=swa)
            except RadixError as radix_error:
                error = str(radix_error)
                self._match_failed(radix_error)
        if matched.num_missing and not matched.needs_launch:
            error = no_slot(f"any of {matched.num_missing} blocks")
        with self._table.lock:
            self.metrics.allocated_blocks += matched.num_taken
            self.metrics.no_space_blocks += matched.num_missing
            self._add(task_id, TaskKind.PUT, num_tokens, tier, matched, error)
        return task_id, matched.blocks

    def prefetch(self, hashes: Hashes, num_tokens: int, *, swa: bool = False) -> int:
        """Start to bring blocks of other nodes; the task runs until they are here."""
        task_id, tier, matched, error = self._table.new_id(), self.tier, Matched(), ""
        if tier is not None and len(hashes):
            mask = COMPONENT_MASK_FULL | (COMPONENT_MASK_SWA if swa and tier.swa_window_blocks else 0)
            try:
                job = tier.client.pull_async(hashes, mask, block=False)
                matched = Matched(Hold(job=job), needs_launch=True)
            except (RadixError, TimeoutError) as pull_error:
                error = str(pull_error)
        with self._table.lock:
            entry = self._add(task_id, TaskKind.PREFETCH, num_tokens, tier, matched, error)
            if matched.needs_launch:
                entry.task.launched(1)
                entry.task.submitted()
        if matched.needs_launch:
            self._driver.add_job(entry)
        return task_id

    def _add(
        self, task_id: int, kind: TaskKind, num_tokens: int, tier: CacheEngineRadixShmem | None,
        matched: Matched, error: str = "",
    ) -> Entry:  # fmt: skip
        """Enter a task; it is over if it needs no launch.  Wants the table's lock."""
        now_s = time.monotonic()
        task = Task(task_id, kind, (Member(num_tokens, matched.blocks),), matched.transfers, now_s)
        entry = Entry(task, matched.hold, tier)
        if not matched.needs_launch:
            task.finish(error, now_s)
        self._table.add(entry)
        return entry

    def _match_failed(self, error: RadixError) -> None:
        self.metrics.match_errors += 1
        if str(error) != self._warned_about:
            self._warned_about = str(error)
            logger.warning("the KV cache cannot be asked, which counts as a miss: %s", error)

    # -- launching

    def launch(
        self,
        launches: Sequence[Launch],
        *,
        as_batch: bool = False,
        layerwise: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """Start the transfers of matched tasks; with as_batch several become one new task.

        Returns the ids to wait for.  ValueError, and nothing changed, for an unknown task, one launched
        before, lengths that do not fit, a batch of GETs and PUTs, or a layerwise PUT.  ValueError also
        for a layerwise GET that ended without success, or ends now because its transfers cannot be handed
        over: no layer would be signalled, so its forward must not start.
        """
        with self._table.lock:
            entries = self._launchable(launches, as_batch=as_batch, layerwise=layerwise)
            worker = self._driver.worker
            bound = [self._bind(entry, launch) for entry, launch in zip(entries, launches, strict=True)]
            if as_batch and len(entries) > 1:
                entries, bound = self._merge(entries, bound)
            if layerwise:
                bound = [
                    signal_all(pairs, entry.tier.components if entry.tier else ())
                    for entry, pairs in zip(entries, bound, strict=True)
                ]
            ops: list[TransferOp] = []
            for entry, pairs in zip(entries, bound, strict=True):
                ops += self._driver.register(entry, pairs, layerwise=layerwise, counter_id=counter_id)
        if ops and (error := self._driver.submit(worker, ops, entries)) and layerwise:
            raise ValueError(f"layerwise_transfer: no layer will be signalled: {error}")
        return [entry.task.task_id for entry in entries]

    def _launchable(self, launches: Sequence[Launch], *, as_batch: bool, layerwise: bool) -> list[Entry]:
        """Entries of launches, everything checked that could be refused."""
        entries = []
        for launch in launches:
            entry = self._table.get(launch.task_id)
            if entry is None:
                raise ValueError(f"task_ids: task {launch.task_id} is not known, or was answered before")
            self._driver.drop_if_stale(entry)
            check_launch(entry, launch, entry.tier.swa_window_blocks if entry.tier else 0)
            if layerwise:
                check_layerwise(entry.task)
            entries.append(entry)
        if len({entry.task.task_id for entry in entries}) < len(entries):
            raise ValueError(f"task_ids: a task is named twice: {[launch.task_id for launch in launches]}")
        if as_batch and len({entry.task.kind for entry in entries}) > 1:
            raise ValueError("as_batch: GETs and PUTs cannot become one task; launch them apart")
        return entries

    def _bind(self, entry: Entry, launch: Launch) -> Bound:
        """Pair a task's transfers with the engine's blocks, which check_launch() found to fit."""
        task, tier = entry.task, entry.tier
        if task.state.is_terminal or tier is None:  # a miss, or it ended meanwhile: its answer says so
            return []
        transfers = list(task.transfers)
        if task.kind is TaskKind.PUT and launch.swa_blocks is not None:
            try:
                window = window_transfer(tier, entry.hold, num_window_blocks(launch, tier))
            except RadixError as error:
                self._driver.fail(entry, str(error))
                return []
            self.metrics.no_space_blocks += window.num_missing
            transfers.append(window.transfer)
            if window.num_missing and not any(len(transfer.slots) for transfer in transfers):
                self._driver.fail(entry, entry.hold.staged[0].shortfall)
                return []
        given = [launch.gpu_blocks, *(window_tail(launch, len(t.slots)) for t in transfers[1:])]
        return bind(transfers, given)

    def _merge(self, entries: Sequence[Entry], bound: Sequence[Bound]) -> tuple[list[Entry], list[Bound]]:
        """One task with the members, holds and transfers of all, which are forgotten.

        A batch is done as a whole or not at all: it ends as the first of them that ended without success.
        """
        members = tuple(member for entry in entries for member in entry.task.members)
        task = Task(self._table.new_id(), entries[0].task.kind, members, (), time.monotonic())
        tier = next((entry.tier for entry in entries if entry.tier), None)
        merged = Entry(task, Hold.joined(entry.hold for entry in entries), tier)
        for entry in entries:
            self._table.forget(entry.task.task_id)
        self._table.add(merged)
        for entry in entries:
            if entry.task.state in (TaskState.FAILED, TaskState.CANCELLED):
                self._driver.fail(merged, entry.task.error or "a task of the batch was cancelled")
                return [merged], [[]]
        return [merged], [merge(pair for pairs in bound for pair in pairs)]

    # -- answers

    def poll(self, task_ids: Sequence[int]) -> dict[int, Answer]:
        """Answers of those that are over; unlaunched and running ones are left out."""
        answers, _ = self._table.answers(task_ids)
        return {task_id: answer for task_id, answer in answers.items() if answer.status.is_terminal}

    def answers(self, task_ids: Sequence[int]) -> tuple[dict[int, Answer], list[int]]:
        """(answers of all that do not run, ids of those that do)."""
        return self._table.answers(task_ids)

    def wait(self, task_ids: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """Answers of all; TIMEOUT for those that still run after timeout_s."""
        return self._table.wait(task_ids, timeout_s)

    def cancel(self, task_ids: Sequence[int]) -> None:
        """Unlaunched tasks end now, running ones with their transfers; others stay as they are."""
        with self._table.lock:
            for task_id in task_ids:
                if (entry := self._table.get(task_id)) is not None:
                    self._driver.cancel(entry)

    def cancel_all(self) -> None:
        """Cancel whatever is not over."""
        with self._table.lock:
            for entry in self._table.unfinished():
                self._driver.cancel(entry)

    # -- looking

    def ring_events(self, cursor: int) -> RingEvents | None:
        """What the region says since cursor (events.py).  Overflow when it is another than last time."""
        tier, last = self.tier, self._ring_tier
        if tier is None:
            return None
        is_new = last is not None and last is not tier
        events = tier.ring_events(-1 if is_new else cursor)
        self._ring_tier = tier  # not before: a look that failed has told nobody of the new region
        return replace(events, overflow=True) if events is not None and is_new else events

    def num_present(self, hashes: Hashes) -> int:
        """Blocks of a path that are in the tree."""
        tier = self.tier
        return 0 if tier is None else tier.num_present(hashes)

    def _node_counts(self) -> NodeCounts:
        tier, counts = self.tier, NodeCounts()
        if tier is None:
            return counts
        try:
            stats = tier.client.stats()
        except RadixError:  # closed or retired meanwhile
            return counts
        for component, name in ((ComponentType.FULL, "full"), (ComponentType.SWA, "swa")):
            if tier.num_slots[component]:
                counts.total[component] = tier.num_slots[component]
                counts.free[component] = stats["pool"][name]["num_free"]
        counts.evicted_blocks = sum(stats["evicted_blocks"]["full"].values())
        return counts
