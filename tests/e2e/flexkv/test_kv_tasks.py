"""The life of tasks: pins, staged slots, cancel, batches, timeouts, reset, namespaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from node import Node

from flexkv_radix import KVResponseStatus

NUM_SLOTS = 12
PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with ExitStack() as stack:
        name = Node(stack).serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
        yield stack.enter_context(small_engine(name, tmp_path_factory.mktemp("engine"))).wait_ready()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine on a cache of twelve slots, empty; whatever a test leaves is dropped behind it."""
    yield shared_engine
    backend = shared_engine.manager._backend
    backend.cancel_all()
    eventually(lambda: held(shared_engine) == (0, 0), "nothing held")
    backend.tier.client.reset()


def held(engine: Engine) -> tuple[int, int]:
    """(pins, staged slots) of the whole region."""
    full = engine.manager._backend.tier.client.stats()["pool"]["full"]
    return full["num_pins"], full["num_staged"]


def put_task(engine: Engine, tokens=PROMPT, blocks=HERE) -> int:
    engine.compute(tokens, blocks)
    task_id, _ = engine.manager.put_match(tokens)
    return task_id


def test_counts_are_the_servers(engine: Engine) -> None:
    assert engine.cache.num_cpu_blocks == NUM_SLOTS


def test_a_match_pins_until_it_is_over(engine: Engine) -> None:
    engine.put(PROMPT, HERE)
    assert held(engine) == (0, 0)
    task_id, mask = engine.manager.get_match(PROMPT)
    assert held(engine) == (1, 0)
    engine.manager.launch(task_id, engine.slots(THERE))
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert held(engine) == (0, 0)
    assert mask.all()


def test_a_miss_is_over_at_once(engine: Engine) -> None:
    task_id, mask = engine.manager.get_match(PROMPT)
    assert not mask.any()
    response = engine.manager.try_wait([task_id])[task_id]
    assert response.status is KVResponseStatus.SUCCESS
    assert not response.return_mask.any()
    assert engine.manager.try_wait([task_id])[task_id].status is KVResponseStatus.NOT_FOUND


def test_nothing_is_matchable_before_its_bytes_are_there(engine: Engine) -> None:
    task_id = put_task(engine)
    assert held(engine) == (0, 5)
    assert not engine.manager.get_match(PROMPT)[1].any()
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_unlaunched_tasks_are_unready_and_stay(engine: Engine) -> None:
    task_id = put_task(engine)
    assert engine.manager.try_wait([task_id]) == {}
    engine.expect(task_id, KVResponseStatus.UNREADY)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)


def test_cancel_before_launch_gives_everything_back(engine: Engine) -> None:
    engine.put(PROMPT[: 2 * BLOCK], HERE[:2])
    get, _ = engine.manager.get_match(PROMPT)
    put = put_task(engine)
    assert held(engine) == (2, 3)
    engine.manager.cancel([get, put])
    assert held(engine) == (0, 0)
    engine.expect(get, KVResponseStatus.CANCELLED)
    engine.expect(put, KVResponseStatus.CANCELLED)
    engine.expect(put, KVResponseStatus.NOT_FOUND)
    with pytest.raises(ValueError, match="task_ids"):
        engine.manager.launch([put], [engine.slots(HERE)])


def test_cancel_while_it_runs_answers_when_it_is_over(engine: Engine) -> None:
    task_id = put_task(engine)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.manager.cancel([task_id])
    status = engine.manager.wait([task_id])[task_id].status
    assert status in (KVResponseStatus.CANCELLED, KVResponseStatus.SUCCESS)  # it may have been quicker
    assert held(engine) == (0, 0)
    hit = int(engine.manager.get_match(PROMPT)[1].sum())
    assert hit == (5 * BLOCK if status is KVResponseStatus.SUCCESS else 0)


def test_cancel_of_ended_and_unknown_tasks_does_nothing(engine: Engine) -> None:
    task_id = put_task(engine)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.manager.wait([task_id])
    engine.manager.cancel([task_id, 12345])
    assert engine.get(PROMPT, THERE) == 5 * BLOCK


@pytest.mark.parametrize("change", ["short", "long", "unaligned", "negative", "partial"])
def test_a_wrong_slot_mapping_leaves_the_task_untouched(engine: Engine, change: str) -> None:
    task_id = put_task(engine)
    slots = engine.slots(HERE)
    wrong = {
        "short": slots[:-BLOCK],
        "long": np.concatenate([slots, slots[:BLOCK]]),
        "unaligned": slots + 1,
        "negative": slots - 40 * BLOCK,
        "partial": slots[:-1],
    }[change]
    with pytest.raises(ValueError, match="slot_mapping"):
        engine.manager.launch([task_id], [wrong])
    engine.manager.launch([task_id], [slots])
    engine.expect(task_id, KVResponseStatus.SUCCESS)


def test_one_wrong_mapping_of_several_launches_none(engine: Engine) -> None:
    first, second = put_task(engine), put_task(engine, tokens_of(BLOCK, 2), [50])
    with pytest.raises(ValueError, match="slot_mapping"):
        engine.manager.launch([first, second], [engine.slots(HERE), engine.slots(HERE)])
    engine.expect(first, KVResponseStatus.UNREADY)
    engine.manager.launch([first, second], [engine.slots(HERE), engine.slots([50])])
    statuses = {response.status for response in engine.manager.wait([first, second]).values()}
    assert statuses == {KVResponseStatus.SUCCESS}


def test_launch_twice_is_refused(engine: Engine) -> None:
    task_id = put_task(engine)
    with pytest.raises(ValueError, match="twice"):
        engine.manager.launch([task_id, task_id], [engine.slots(HERE)] * 2)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    with pytest.raises(ValueError, match="task_ids"):
        engine.manager.launch([task_id], [engine.slots(HERE)])


def test_a_block_beyond_the_engines_tensors_fails_the_task(engine: Engine) -> None:
    task_id = put_task(engine)
    engine.manager.launch([task_id], [engine.slots([1, 2, 3, 4, 64])])
    response = engine.expect(task_id, KVResponseStatus.FAILED)
    assert "64" in response.error
    assert held(engine) == (0, 0)
    assert not engine.manager.get_match(PROMPT)[1].any()


def test_batches(engine: Engine) -> None:
    prompts = [tokens_of(2 * BLOCK, name) for name in range(3)]
    places = [[10, 11], [20, 21], [30, 31]]
    tasks = [put_task(engine, tokens, at) for tokens, at in zip(prompts, places, strict=True)]
    [batch] = engine.manager.launch(tasks, [engine.slots(at) for at in places], as_batch=True)
    assert batch not in tasks
    masks = engine.expect(batch, KVResponseStatus.SUCCESS).return_mask
    assert [mask.sum() for mask in masks] == [2 * BLOCK] * 3
    for task in tasks:
        engine.expect(task, KVResponseStatus.NOT_FOUND)

    gets = [engine.manager.get_match(tokens)[0] for tokens in prompts]
    goal = [[40, 41], [50, 51], [60, 61]]
    [batch] = engine.manager.launch(gets, [engine.slots(at) for at in goal], as_batch=True)
    engine.expect(batch, KVResponseStatus.SUCCESS)
    for tokens, at in zip(prompts, goal, strict=True):
        assert engine.wrong_blocks(tokens, at) == []
    assert held(engine) == (0, 0)


def test_a_batch_of_one_keeps_its_id(engine: Engine) -> None:
    task_id = put_task(engine)
    assert engine.manager.launch([task_id], [engine.slots(HERE)], as_batch=True) == [task_id]
    response = engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert response.return_mask.sum() == 5 * BLOCK


def test_a_batch_of_gets_and_puts_is_refused(engine: Engine) -> None:
    engine.put(PROMPT, HERE)
    get, _ = engine.manager.get_match(PROMPT)
    put = put_task(engine, tokens_of(BLOCK, 3), [50])
    with pytest.raises(ValueError, match="as_batch"):
        engine.manager.launch([get, put], [engine.slots(THERE), engine.slots([50])], as_batch=True)
    engine.expect(get, KVResponseStatus.UNREADY)
    engine.expect(put, KVResponseStatus.UNREADY)


def test_no_space_is_told(engine: Engine) -> None:
    """Short masks while some slots are left, FAILED when none is; counted either way."""
    metrics = engine.manager._backend.metrics
    before = metrics.no_space_blocks
    big = tokens_of((NUM_SLOTS + 3) * BLOCK, 4)
    first, mask = engine.manager.put_match(big)
    assert mask.sum() == NUM_SLOTS * BLOCK
    assert mask[: NUM_SLOTS * BLOCK].all()
    second, mask = engine.manager.put_match(PROMPT)
    assert not mask.any()
    response = engine.expect(second, KVResponseStatus.FAILED)
    assert "slot" in response.error
    assert metrics.no_space_blocks - before == 3 + 5
    engine.manager.cancel([first])
    assert engine.put(PROMPT, HERE) == 5 * BLOCK


def test_a_timeout_leaves_the_task_alive(engine: Engine) -> None:
    task_id = put_task(engine)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    response = engine.manager.wait([task_id], timeout=0.0)[task_id]
    if response.status is KVResponseStatus.TIMEOUT:
        response = engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert response.status is KVResponseStatus.SUCCESS


def test_one_threads_wait_blocks_no_other(engine: Engine) -> None:
    """A thread waits for a task that nobody has launched into a result yet."""
    task_id = put_task(engine)
    engine.manager.launch([task_id], [engine.slots(HERE)])
    done = threading.Event()

    def wait() -> None:
        engine.manager.wait([task_id])
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for name in range(50):
        engine.manager.get_match(tokens_of(BLOCK, name))
    thread.join(10)
    assert done.is_set()


def test_reset_forgets_and_cancels(engine: Engine) -> None:
    engine.put(PROMPT, HERE)
    get, _ = engine.manager.get_match(PROMPT)
    engine.manager.reset()
    engine.expect(get, KVResponseStatus.CANCELLED)
    assert held(engine) == (0, 0)
    assert not engine.manager.get_match(PROMPT)[1].any()
    assert engine.put(PROMPT, HERE) == 5 * BLOCK
    task_id, mask = engine.manager.get_match(PROMPT)
    assert mask.all()
    engine.manager.cancel(task_id)


def test_namespaces_do_not_see_each_other(engine: Engine) -> None:
    put, _ = engine.manager.put_match(PROMPT, namespace=["tenant", "a"])
    engine.manager.launch([put], [engine.slots(HERE)])
    engine.expect(put, KVResponseStatus.SUCCESS)
    for namespace, hit in ((["tenant", "a"], 5 * BLOCK), (["tenant", "b"], 0), (None, 0), (["tenanta"], 0)):
        task_id, mask = engine.manager.get_match(PROMPT, namespace=namespace)
        assert mask.sum() == hit, namespace
        engine.manager.cancel([task_id])


def test_prefetch_on_one_node_says_what_is_here(engine: Engine) -> None:
    engine.put(PROMPT, HERE)
    task_id = engine.manager.prefetch_async(np.concatenate([PROMPT, tokens_of(BLOCK, 9)]))
    assert engine.expect(task_id, KVResponseStatus.SUCCESS).return_mask.sum() == 5 * BLOCK
    assert held(engine) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (([[1, 2], [3, 4]],), ValueError, "token_ids"),
        (([0.5, 1.5],), TypeError, "token_ids"),
        ((PROMPT, np.ones(3, dtype=bool)), ValueError, "token_mask"),
        ((PROMPT, np.ones(len(PROMPT))), TypeError, "token_mask"),
    ],
)
def test_wrong_arguments_are_named(engine: Engine, arguments, error, name: str) -> None:
    for match in (engine.manager.get_match, engine.manager.put_match):
        with pytest.raises(error, match=name):
            match(*arguments)


def test_tasks_that_nobody_asks_for_are_forgotten(node: Node, tmp_path: Path) -> None:
    """Misses are never collected by some engines; unlaunched matches would pin for ever."""
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ={"FLEXKV_TASK_TTL_S": "0.5"}).wait_ready() as engine:
        for index in range(100):
            engine.manager.get_match(tokens_of(BLOCK, index))
        put = put_task(engine)
        assert held(engine) == (0, 5)
        table = engine.manager._backend._table
        eventually(lambda: len(table) == 0, "an empty table")
        assert held(engine) == (0, 0)
        engine.expect(put, KVResponseStatus.NOT_FOUND)


def test_shutdown_gives_everything_back_and_may_be_repeated(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.put(PROMPT[: 2 * BLOCK], HERE[:2])
        running = put_task(engine)
        engine.manager.get_match(PROMPT)
        engine.manager.launch([running], [engine.slots(HERE[2:])])
        engine.manager.shutdown()
        engine.manager.shutdown()
        assert engine.manager.wait([running])[running].status in (
            KVResponseStatus.FAILED,
            KVResponseStatus.SUCCESS,
        )
        assert not engine.manager.get_match(PROMPT)[1].any()
    with node.join(name) as client:
        full = client.stats()["pool"]["full"]
        assert (full["num_pins"], full["num_staged"]) == (0, 0)
