"""The life of tasks: pins, staged slots, cancel, batches, timeouts, reset, namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from frozen import frozen_index
from kv_server import EXTERNAL
from node import Node
from stopping import stopped

from flexkv_radix import KVResponseStatus, hash_tokens
from flexkv_radix.planner import Blocks

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


def worker_pid(engine: Engine) -> int:
    return engine.manager._backend._driver.worker.pid


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
    engine.put(tokens_of(2 * BLOCK, 1), [40, 41])
    get, put = engine.manager.get_match(tokens_of(2 * BLOCK, 1))[0], put_task(engine)
    with stopped(worker_pid(engine)):
        engine.manager.launch([get, put], [engine.slots([50, 51]), engine.slots(HERE)])
        engine.manager.cancel([get, put])
        engine.expect(put, KVResponseStatus.TIMEOUT, 0.1)
        assert held(engine) == (1, 5)  # the blocks may still be written
    engine.expect(get, KVResponseStatus.CANCELLED)
    engine.expect(put, KVResponseStatus.CANCELLED)
    assert held(engine) == (0, 0)
    assert not engine.manager.get_match(PROMPT)[1].any()


def test_reset_while_a_store_runs_publishes_nothing(engine: Engine) -> None:
    put = put_task(engine)
    with stopped(worker_pid(engine)):
        engine.manager.launch([put], [engine.slots(HERE)])
        engine.manager.reset("as before")
    engine.expect(put, KVResponseStatus.CANCELLED)
    assert held(engine) == (0, 0)
    engine.manager.reset("as before")
    assert not engine.manager.get_match(PROMPT)[1].any()


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
    with stopped(worker_pid(engine)):
        engine.manager.launch([task_id], [engine.slots(HERE)])
        for timeout in (0.0, 0.1, np.float32(0.1), -1):
            engine.expect(task_id, KVResponseStatus.TIMEOUT, timeout)
    engine.expect(task_id, KVResponseStatus.SUCCESS)


@pytest.mark.parametrize("timeout", [float("inf"), 1e12])
def test_a_wait_for_ever(engine: Engine, timeout: float) -> None:
    task_id = put_task(engine)
    with ThreadPoolExecutor() as pool, stopped(worker_pid(engine)) as go_on:
        engine.manager.launch([task_id], [engine.slots(HERE)])
        answer = pool.submit(engine.expect, task_id, KVResponseStatus.SUCCESS, timeout)
        assert not wait([answer], 0.2).done
        go_on()
        answer.result(20)


def test_one_threads_wait_blocks_no_other(engine: Engine) -> None:
    """A thread waits for a task that cannot end yet; meanwhile all other calls are answered."""
    task_id = put_task(engine)
    with ThreadPoolExecutor() as pool, stopped(worker_pid(engine)) as go_on:
        engine.manager.launch([task_id], [engine.slots(HERE)])
        answer = pool.submit(engine.expect, task_id, KVResponseStatus.SUCCESS)
        for name in range(50):
            miss, _ = engine.manager.get_match(tokens_of(BLOCK, name))
            engine.expect(miss, KVResponseStatus.SUCCESS)
        staged, _ = engine.manager.put_match(tokens_of(BLOCK, 1))
        engine.manager.cancel([staged])
        engine.expect(staged, KVResponseStatus.CANCELLED)
        assert not answer.done()
        go_on()
        answer.result(20)


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


def test_a_string_is_no_namespace(engine: Engine) -> None:
    for match in (engine.manager.get_match, engine.manager.put_match, engine.manager.prefetch_async):
        with pytest.raises(TypeError, match=r"namespace: .*\['ab'\]"):
            match(PROMPT, namespace="ab")


def test_no_namespace_is_that_of_a_version_of_the_weights(engine: Engine, tmp_path: Path) -> None:
    engine.manager.reset("v1")
    engine.put(PROMPT, HERE)
    with pytest.raises(ValueError, match="weights"):
        engine.manager.reset("v1\0x")
    assert engine.get(PROMPT, THERE) == 5 * BLOCK
    with small_engine(engine.server_name, tmp_path).wait_ready() as fresh:
        for namespace in (["weights=v1"], ["weights=", "weights=v1"], ["", "weights=v1"]):
            assert fresh.get(PROMPT, THERE, namespace=namespace) == 0, namespace
        put, _ = fresh.manager.put_match(tokens_of(BLOCK, 1), namespace=["weights=v2"])
        fresh.manager.launch([put], [fresh.slots([40])])
        fresh.expect(put, KVResponseStatus.SUCCESS)
    engine.manager.reset("v2")
    assert engine.get(tokens_of(BLOCK, 1), [41]) == 0
    engine.manager.reset("v1")
    assert engine.get(PROMPT, THERE) == 5 * BLOCK


@pytest.mark.parametrize("given", ["array", "list", "listed array", "listed list"])
def test_a_single_id_comes_with_its_slots(engine: Engine, given: str) -> None:
    task_id = put_task(engine, tokens_of(BLOCK, 1), [40])
    slots = {"array": engine.slots([40]), "list": engine.slots([40]).tolist()}[given.split()[-1]]
    mappings = [slots] if given.startswith("listed") else slots
    assert engine.manager.launch(task_id, mappings) == [task_id]
    engine.expect(task_id, KVResponseStatus.SUCCESS)
    assert engine.get(tokens_of(BLOCK, 1), [41]) == BLOCK


@pytest.mark.parametrize("empty", [[], np.array([], dtype=np.int64), np.array([])], ids=repr)
def test_no_tokens_are_a_miss(engine: Engine, empty) -> None:
    for match in (engine.manager.get_match, engine.manager.put_match):
        task_id, mask = match(empty, empty)
        assert mask.shape == (0,)
        assert mask.dtype == np.bool_
        engine.expect(task_id, KVResponseStatus.SUCCESS)


def test_a_locked_index_is_told(engine: Engine) -> None:
    """Whoever holds the lock makes no progress: nothing can be pinned or staged."""
    engine.put(PROMPT, HERE)
    longer = np.concatenate([PROMPT, tokens_of(BLOCK, 1)])
    metrics = engine.manager._backend.metrics
    errors, no_space = metrics.match_errors, metrics.no_space_blocks
    with frozen_index(engine.server_name):
        get, get_mask = engine.manager.get_match(PROMPT)
        puts = [engine.manager.put_match(tokens) for tokens in (longer, tokens_of(BLOCK, 2))]
    assert not get_mask.any()
    engine.expect(get, KVResponseStatus.SUCCESS)
    for put, put_mask in puts:
        assert not put_mask.any()
        assert "locked" in engine.expect(put, KVResponseStatus.FAILED).error
    assert metrics.match_errors - errors == 2  # to see that a block is missing takes no lock
    assert metrics.no_space_blocks - no_space == 1
    assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_a_match_whose_planning_fails_holds_nothing(engine: Engine) -> None:
    """Numbers of blocks that no sequence has, as only a bug could bring them this far."""
    engine.manager.reset("these")
    engine.put(PROMPT[: 2 * BLOCK], HERE[:2])
    backend, hashes = engine.manager._backend, hash_tokens(PROMPT, BLOCK, ["weights=these"])
    with pytest.raises(IndexError):
        backend.get_match(hashes, len(PROMPT), Blocks(0, 2, np.array([0, 99])))
    assert held(engine) == (0, 0)
    with pytest.raises(ValueError):  # noqa: PT011 - NumPy's own
        backend.put_match(hashes, len(PROMPT), Blocks(0, 5, np.zeros((1, 5), dtype=np.int64)))
    assert held(engine) == (0, 0)
    assert engine.put(PROMPT, HERE) == 3 * BLOCK


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


@pytest.mark.parametrize("environ", [{}, EXTERNAL], ids=["in process", "KVServer"])
def test_flags_and_numbers_of_any_type(node: Node, tmp_path: Path, server, environ: dict[str, str]) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, environ=environ).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        for flag in (0, 1, np.bool_(True)):
            get, mask = engine.manager.get_match(PROMPT, swa_aware=flag)
            put, _ = engine.manager.put_match(PROMPT, swa_aware=flag)
            prefetch = engine.manager.prefetch_async(PROMPT, swa_aware=flag)
            assert mask.all()
            engine.manager.launch(
                np.array([get]), [engine.slots(THERE)], None, flag, np.bool_(False), np.int64(0)
            )
            for task_id in (get, put, prefetch):
                engine.expect(task_id, KVResponseStatus.SUCCESS, np.float32(20))
        with pytest.raises(TypeError):
            engine.manager.launch([get], [engine.slots(THERE)], counter_id=0.5)
        assert not engine.manager.disabled


def test_a_second_start_does_nothing(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path, event_collector=lambda events: None) as engine:
        engine.manager.start()
        engine.wait_ready()
        engine.manager.start()
        assert engine.put(PROMPT, HERE) == 5 * BLOCK


def test_shutdown_gives_everything_back_and_may_be_repeated(node: Node, tmp_path: Path) -> None:
    """A transfer that is under way ends well or FAILED, and its blocks are there or not; what was only
    matched is FAILED.
    """
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine, ThreadPoolExecutor() as pool:
        engine.put(PROMPT[: 2 * BLOCK], HERE[:2])
        running = put_task(engine)
        matched, _ = engine.manager.get_match(PROMPT)
        worker = worker_pid(engine)
        with stopped(worker):
            engine.manager.launch([running], [engine.slots(HERE[2:])])
            end = pool.submit(engine.manager.shutdown)
            eventually(lambda: engine.manager._backend._driver._stop.is_set(), "the shutdown's begin")
        end.result(20)
        engine.manager.shutdown()
        engine.expect(matched, KVResponseStatus.FAILED)
        status = engine.manager.wait([running])[running].status
        assert status in (KVResponseStatus.FAILED, KVResponseStatus.SUCCESS)
        assert not engine.manager.get_match(PROMPT)[1].any()
    with node.join(name) as client:
        hit = client.query(engine.hashes(PROMPT)).full_hit
        assert hit == (5 if status is KVResponseStatus.SUCCESS else 2)
        full = client.stats()["pool"]["full"]
        assert (full["num_pins"], full["num_staged"]) == (0, 0)
