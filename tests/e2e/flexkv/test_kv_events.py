"""KV events of real engines: what is announced is what a router could hit."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from node import Node

from flexkv_radix import AllBlocksCleared, BlockRemoved, BlockStored

HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
PROMPT = tokens_of(5 * BLOCK)


class Router:
    """Keeps what was announced, as a router would."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.num_cleared = 0
        self._lock = threading.Lock()

    def __call__(self, events: list[object]) -> None:
        with self._lock:
            for event in events:
                self._take(event)

    def _take(self, event: object) -> None:
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                assert block_hash not in self.tokens, "announced twice"
                self.tokens[block_hash] = event.token_ids[
                    index * event.block_size : (index + 1) * event.block_size
                ]
                self.parents[block_hash] = parent
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                assert block_hash >= 0
                del self.tokens[block_hash]
        elif isinstance(event, AllBlocksCleared):
            self.tokens.clear()
            self.num_cleared += 1


def test_stored_with_tokens_and_parents_once_the_bytes_are_there(node: Node, tmp_path: Path) -> None:
    router = Router()
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=1024)
    with small_engine(name, tmp_path, event_collector=router).wait_ready() as engine:
        hashes = engine.hashes(PROMPT).tolist()
        assert any(block_hash >= 1 << 63 for block_hash in hashes), "no hash that a signed int would spoil"
        engine.compute(PROMPT, HERE)
        task_id, _ = engine.manager.put_match(PROMPT)
        engine.put(
            tokens_of(BLOCK, 5), [40]
        )  # its event comes after whatever was announced for the staged one
        eventually(lambda: router.tokens, "the second prompt")
        assert not set(hashes) & set(router.tokens)
        engine.manager.launch([task_id], [engine.slots(HERE)])
        engine.manager.wait([task_id])
        eventually(lambda: set(hashes) <= set(router.tokens), "the first prompt")
        assert [router.parents[block_hash] for block_hash in hashes] == [None, *hashes[:-1]]
        assert np.array_equal(np.concatenate([router.tokens[block_hash] for block_hash in hashes]), PROMPT)


def test_removed_by_whoever_and_only_own_blocks(node: Node, tmp_path: Path) -> None:
    """Two engines on a small cache: the sum of what they announce is what is in the tree."""
    ours, theirs = Router(), Router()
    name = node.serve(data_bytes=12 * SMALL_SLOT_BYTES, kvevent_ring_capacity=4096)
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
    with (
        small_engine(name, tmp_path / "a", event_collector=ours).wait_ready() as a,
        small_engine(name, tmp_path / "b", event_collector=theirs).wait_ready() as b,
    ):
        for turn in range(30):
            (a, b)[turn % 2].put(tokens_of(5 * BLOCK, turn % 7), HERE)
        last = tokens_of(2 * BLOCK, 99)
        b.put(last, HERE[:2])
        eventually(lambda: b.hashes(last).tolist()[-1] in theirs.tokens, "the last prompt")
        tree = {block_hash for name in range(7) for block_hash in present(a, tokens_of(5 * BLOCK, name))}
        tree |= set(b.hashes(last).tolist())
        eventually(lambda: set(ours.tokens) | set(theirs.tokens) == tree, "what is in the tree")
        assert not set(ours.tokens) & set(theirs.tokens)


def present(engine, tokens) -> list[int]:
    hashes = engine.hashes(tokens)
    return hashes[: engine.manager._backend.num_present(hashes)].tolist()


def test_reset_clears(node: Node, tmp_path: Path) -> None:
    router = Router()
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=1024)
    with small_engine(name, tmp_path, event_collector=router).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        eventually(lambda: len(router.tokens) == 5, "the prompt")
        engine.manager.reset()
        eventually(lambda: router.num_cleared == 1, "the reset")
        assert not router.tokens
        engine.put(PROMPT, THERE)
        eventually(lambda: len(router.tokens) == 5, "the prompt with new weights")
        node.join(name).reset()
        eventually(lambda: not router.tokens, "the node's reset")


def test_a_prompt_stored_right_after_a_reset_is_announced(node: Node, tmp_path: Path) -> None:
    router = Router()
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=1024)
    with small_engine(name, tmp_path, event_collector=router).wait_ready() as engine:
        for _ in range(10):
            engine.put(PROMPT, HERE)
            engine.manager.reset()
        engine.put(PROMPT, THERE)
        last = tokens_of(BLOCK, 5)
        engine.put(last, HERE[:1])
        eventually(lambda: tokens_of_all(router, [last.tolist()]), "the prompt behind the last reset")
        assert len(router.tokens) == 6


def tokens_of_all(router: Router, blocks: list[list[int]]) -> bool:
    return all(block in router.tokens.values() for block in blocks)


def test_a_collector_that_fails_is_told_again(node: Node, tmp_path: Path, caplog) -> None:
    router, num_failures = Router(), 0

    def fails_twice(events: list[object]) -> None:
        nonlocal num_failures
        if num_failures < 2:
            num_failures += 1
            raise OSError("the router is away")
        router(events)

    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=1024)
    with small_engine(name, tmp_path, event_collector=fails_twice).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        eventually(lambda: len(router.tokens) == 5, "the prompt that was missed")
        engine.put(tokens_of(BLOCK, 5), THERE[:1])
        eventually(lambda: len(router.tokens) == 6, "a later prompt")
    assert num_failures == 2
    assert caplog.text.count("event collector failed") == 1


def test_a_ring_that_was_overrun_is_announced_again(node: Node, tmp_path: Path) -> None:
    router = Router()
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=16)
    with small_engine(name, tmp_path, event_collector=router).wait_ready() as engine:
        for turn in range(200):
            engine.put(tokens_of(5 * BLOCK, turn % 20), HERE)
        eventually(lambda: router.num_cleared > 0, "an overrun")
        tree = {
            block_hash for name in range(20) for block_hash in present(engine, tokens_of(5 * BLOCK, name))
        }
        eventually(lambda: set(router.tokens) == tree, "what is in the tree")


def test_no_ring_no_events(node: Node, tmp_path: Path) -> None:
    router = Router()
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES, kvevent_ring_capacity=0)
    with small_engine(name, tmp_path, event_collector=router).wait_ready() as engine:
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
    assert not router.tokens
