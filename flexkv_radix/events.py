"""KV events for routers: which blocks this engine put into the cache, and when they left it.

    put_match()   remembers the tokens behind each hash
    region ring   says in one order what was stored, by whom, and what was removed, by whomever

An engine announces exactly the blocks that it published itself, and their removal.  When the ring was
overrun, nobody knows what was missed: everything is cleared and what is still there announced again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flexkv_radix.ring import Hashes, RingEvents
from flexkv_radix.tokens import Tokens
from radixshmem import RadixError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 1.0
_STOP_TIMEOUT_S = 5.0
_MAX_BLOCKS = 1 << 20  # whose tokens are remembered; with 16 tokens a block that is about 200 MiB
MEDIUM = "CPU"


@dataclass(frozen=True)
class BlockStored:
    """Consecutive blocks became matchable.  Hashes are unsigned; token_ids: those of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = MEDIUM


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str = MEDIUM


@dataclass(frozen=True)
class AllBlocksCleared:
    """None of the blocks announced so far counts any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventCollector(Protocol):
    """Receives events, in order, on a thread of the KVManager."""

    def __call__(self, events: list[KVEvent], /) -> None: ...


class RingReader(Protocol):
    """Where events come from."""

    def ring_events(self, cursor: int) -> RingEvents | None:
        """Events numbered cursor and up (-1: since the reader was made); None without a ring."""

    def num_present(self, hashes: Hashes) -> int:
        """Blocks of a path that are in the tree; counts as no use of them."""


@dataclass(frozen=True)
class _Block:
    path: Hashes  # hashes of the whole sequence, shared by its blocks
    tokens: Tokens  # likewise
    index: int


class EventTracker:
    """Turns ring events into announcements.  Not thread-safe but for remember() and forget()."""

    def __init__(self, tokens_per_block: int, max_blocks: int = _MAX_BLOCKS) -> None:
        self._tokens_per_block = tokens_per_block
        self._max_blocks = max_blocks
        self._known: OrderedDict[int, _Block] = OrderedDict()
        self._live: dict[int, None] = {}  # announced, in order
        self._must_clear = False  # before anything else is announced
        self._lock = threading.Lock()

    def remember(self, tokens: Tokens, hashes: Hashes) -> None:
        """Blocks that may be published soon; tokens are copied."""
        path, kept = hashes.copy(), tokens.copy()
        with self._lock:
            for index, block_hash in enumerate(path.tolist()):
                self._known[block_hash] = _Block(path, kept, index)
                self._known.move_to_end(block_hash)

    def translate(self, events: RingEvents) -> list[KVEvent]:
        """Announcements for ring events, neighbours joined."""
        with self._lock:
            result = self._cleared()
            for kind, block_hash in zip(events.kinds.tolist(), events.hashes.tolist(), strict=True):
                self._apply(kind, block_hash, result)
            return result + self._forget_oldest()

    def forget(self) -> None:
        """The engine's blocks are worth nothing any more, though they may still be in the tree.

        What is announced next begins with AllBlocksCleared; blocks remembered from now on come after it.
        """
        with self._lock:
            self._live.clear()
            self._known.clear()
            self._must_clear = True

    def withdrawals(self) -> list[KVEvent]:
        """What has to be said without any news from the region."""
        with self._lock:
            return self._cleared()

    def _cleared(self) -> list[KVEvent]:
        events: list[KVEvent] = [AllBlocksCleared()] if self._must_clear else []
        self._must_clear = False
        return events

    def announce_again(self, present: Callable[[Hashes], int]) -> list[KVEvent]:
        """Clear, and announce what is in the tree of the blocks whose tokens are known."""
        found = self._present(present)  # without the lock, for put_match() must not wait for it
        with self._lock:
            if self._must_clear:  # meanwhile: what was found is not wanted any more
                found = []
            self._live.clear()
            self._must_clear = False
            result: list[KVEvent] = [AllBlocksCleared()]
            for block in found:
                self._store(block, result)
            return result

    def _present(self, present: Callable[[Hashes], int]) -> list[_Block]:
        by_path: dict[int, list[_Block]] = {}
        with self._lock:
            blocks = list(self._known.values())
        for block in blocks:
            by_path.setdefault(id(block.path), []).append(block)
        found = []
        for blocks in by_path.values():
            num_there = present(blocks[0].path[: max(block.index for block in blocks) + 1])
            found += [block for block in blocks if block.index < num_there]
        return found

    def _apply(self, kind: int, block_hash: int, result: list[KVEvent]) -> None:
        if kind == 0:
            self._live.clear()
            result.append(AllBlocksCleared())
        elif kind > 0 and (block := self._known.get(block_hash)) is not None and block_hash not in self._live:
            self._store(block, result)
        elif kind < 0 and block_hash in self._live:
            del self._live[block_hash]
            self._remove(block_hash, result)

    def _store(self, block: _Block, result: list[KVEvent]) -> None:
        block_hash, size = int(block.path[block.index]), self._tokens_per_block
        self._live[block_hash] = None
        parent = int(block.path[block.index - 1]) if block.index else None
        tokens = block.tokens[block.index * size : (block.index + 1) * size].tolist()
        last = result[-1] if result else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids.extend(tokens)
        else:
            result.append(BlockStored([block_hash], parent, tokens, size))

    @staticmethod
    def _remove(block_hash: int, result: list[KVEvent]) -> None:
        last = result[-1] if result else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(block_hash)
        else:
            result.append(BlockRemoved([block_hash]))

    def _forget_oldest(self) -> list[KVEvent]:
        """Blocks whose tokens are dropped can be announced no more, so they are withdrawn."""
        result: list[KVEvent] = []
        while len(self._known) > self._max_blocks:
            block_hash, _ = self._known.popitem(last=False)
            if block_hash in self._live:
                del self._live[block_hash]
                self._remove(block_hash, result)
        return result


class EventPump:
    """Moves events from the region to a collector, on a thread of its own."""

    def __init__(self, tracker: EventTracker, reader: RingReader, collector: EventCollector) -> None:
        self._tracker = tracker
        self._reader = reader
        self._collector = collector
        self._cursor = -1
        self._is_lost = False  # something that was to be announced
        self._wait_s = _POLL_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flexkv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after what the region says now, unless the collector or the KVServer takes too long."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def clear(self) -> None:
        """The engine was reset: what was announced so far counts no more, what it stores from now on does."""
        self._tracker.forget()

    def _run(self) -> None:
        while True:
            is_last = self._stop.wait(self._wait_s)
            try:
                self._pump()
            except RadixError as error:
                logger.debug("no events: %s", error)
            if is_last:
                return

    def _pump(self) -> None:
        ring = self._reader.ring_events(self._cursor)
        if ring is None:
            events = self._tracker.withdrawals()
        elif ring.overflow or self._is_lost:
            self._tracker.translate(ring)
            events = self._tracker.announce_again(self._reader.num_present)
        else:
            events = self._tracker.translate(ring)
        if ring is not None:
            self._cursor = ring.cursor
        if events:
            self._announce(events)

    def _announce(self, events: list[KVEvent]) -> None:
        """If the collector fails, it is told again, from the beginning, somewhat later."""
        try:
            self._collector(events)
        except Exception:  # of the engine: whatever it is, later events must come
            if not self._is_lost:
                logger.exception("the event collector failed; it is told again until it does not")
            self._is_lost, self._wait_s = True, _RETRY_S
        else:
            self._is_lost, self._wait_s = False, _POLL_S
