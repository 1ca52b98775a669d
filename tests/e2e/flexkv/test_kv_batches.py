"""A batch answers for each of its requests, however many servers came and went since they were matched."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon import Daemon, eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from kv_server import EXTERNAL, start_server

from flexkv_radix import KVResponseStatus

PROMPT, SHORT, LONG = tokens_of(5 * BLOCK), tokens_of(BLOCK + 3, 1), tokens_of(3 * BLOCK, 2)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
NOWHERE: list[int] = []


class Late:
    """An engine without its cache, until start() brings it."""

    def __init__(self, mode: str, name: str, directory: Path, stack: ExitStack) -> None:
        self._mode, self._name, self._directory, self._stack = mode, name, directory, stack
        if mode != "in process":
            self._serve_node()
        if mode == "replaced KVServer":
            first = start_server(directory)
        self.engine = stack.enter_context(
            small_engine(name, directory, environ={} if mode == "in process" else EXTERNAL)
        )
        if mode == "replaced KVServer":
            self.engine.wait_ready()
            _end(first)
            eventually(lambda: self.engine.manager.disabled, "the end of the KVServer")

    def start(self) -> Engine:
        if self._mode == "in process":
            self._serve_node()
        else:
            self._stack.callback(_end, start_server(self._directory))
        self.engine.wait_ready()
        eventually(lambda: not self.engine.manager.disabled, lambda: self.engine.manager.disabled)
        assert self.engine.put(PROMPT, HERE) == 5 * BLOCK
        return self.engine

    def _serve_node(self) -> None:
        flags = ("--data-bytes", str(64 * SMALL_SLOT_BYTES))
        self._stack.enter_context(Daemon(self._name, *flags)).wait_serving()


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


@pytest.fixture(params=["in process", "late KVServer", "replaced KVServer"])
def late(request: pytest.FixtureRequest, shm_name: str, tmp_path: Path) -> Iterator[Late]:
    with ExitStack() as stack:
        yield Late(request.param, shm_name, tmp_path, stack)


def test_loads_and_misses_in_one_batch(late: Late) -> None:
    """Each request has its mask, in the order of the launch."""
    manager = late.engine.manager
    misses = [manager.get_match(tokens)[0] for tokens in (SHORT, LONG)]
    engine = late.start()
    get, mask = manager.get_match(PROMPT)
    assert mask.all()
    tasks = [misses[0], get, misses[1]]
    slots = [engine.slots(NOWHERE), engine.slots(THERE), engine.slots(NOWHERE)]
    [batch] = manager.launch(tasks, slots, as_batch=True)
    assert batch not in tasks
    masks = engine.expect(batch, KVResponseStatus.SUCCESS).return_mask
    assert [(len(mask), int(mask.sum())) for mask in masks] == [(19, 0), (80, 80), (48, 0)]
    assert engine.wrong_blocks(PROMPT, THERE) == []
    assert {response.status for response in manager.wait(tasks).values()} == {KVResponseStatus.NOT_FOUND}


def test_one_load_and_one_miss_are_a_batch_too(late: Late) -> None:
    miss, _ = late.engine.manager.get_match(LONG)
    engine = late.start()
    get, _ = engine.manager.get_match(PROMPT)
    slots = [engine.slots(THERE), engine.slots(NOWHERE)]
    [batch] = engine.manager.launch([get, miss], slots, as_batch=True)
    masks = engine.expect(batch, KVResponseStatus.SUCCESS).return_mask
    assert [(len(mask), int(mask.sum())) for mask in masks] == [(80, 80), (48, 0)]


def test_a_batch_of_misses_joins_another(late: Late) -> None:
    manager = late.engine.manager
    misses = [manager.put_match(tokens)[0] for tokens in (SHORT, LONG)]
    [missed] = manager.launch(misses, [NOWHERE, NOWHERE], as_batch=True)
    engine = late.start()
    engine.compute(LONG, HERE[:3])
    put, _ = manager.put_match(LONG)
    [batch] = manager.launch([missed, put], [NOWHERE, engine.slots(HERE[:3])], as_batch=True)
    masks = engine.expect(batch, KVResponseStatus.SUCCESS).return_mask
    assert [(len(mask), int(mask.sum())) for mask in masks] == [(19, 0), (48, 0), (48, 48)]
    assert engine.get(LONG, THERE[:3]) == 3 * BLOCK


def test_what_does_not_fit_a_batch_changes_nothing(late: Late) -> None:
    manager = late.engine.manager
    miss, answered = (manager.get_match(LONG)[0] for _ in range(2))
    put_miss, _ = manager.put_match(LONG)
    late.engine.expect(answered, KVResponseStatus.SUCCESS)
    with pytest.raises(ValueError, match="GETs and PUTs"):
        manager.launch([miss, put_miss], [NOWHERE, NOWHERE], as_batch=True)
    engine = late.start()
    get, _ = manager.get_match(PROMPT)
    there = engine.slots(THERE)
    with pytest.raises(ValueError, match="GETs and PUTs"):
        manager.launch([get, put_miss], [there, NOWHERE], as_batch=True)
    with pytest.raises(ValueError, match="answered before"):
        manager.launch([get, answered], [there, NOWHERE], as_batch=True)
    with pytest.raises(ValueError, match="slot_mappings"):
        manager.launch([get, miss], [there, engine.slots([40])], as_batch=True)
    assert manager.launch([get, put_miss, miss], [there, NOWHERE, NOWHERE]) == [get, put_miss, miss]
    for task_id in (get, put_miss, miss):
        engine.expect(task_id, KVResponseStatus.SUCCESS)
