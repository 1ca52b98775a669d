"""A worker or a server that is stopped, not dead, holds up nobody, and nobody takes it for gone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from daemon import Daemon, eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, small_engine, tokens_of
from kv_server import EXTERNAL, children_of, is_over
from node import Node
from stopping import stopped

from flexkv_radix import KVResponseStatus

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES
NUM_LOADS = 800  # whose messages are more than a socket holds, and whose pins fewer than a client may have
PROMPTLY_S = 3.0
PIDFD_GETFD = 438  # the system call
T = TypeVar("T")


def promptly(call: Callable[..., T], *args: Any, **options: Any) -> T:
    start_s = time.monotonic()
    result = call(*args, **options)
    assert time.monotonic() - start_s < PROMPTLY_S, call
    return result


def launch_loads(engine: Engine, num_loads: int) -> list[int]:
    tasks = []
    for _ in range(num_loads):
        task_id, mask = promptly(engine.manager.get_match, PROMPT)
        assert mask.all()
        promptly(engine.manager.launch, [task_id], [engine.slots(THERE)])
        tasks.append(task_id)
    return tasks


def statuses(engine: Engine, tasks: list[int], timeout_s: float = 60.0) -> list[KVResponseStatus]:
    return [response.status for response in engine.manager.wait(tasks, timeout_s).values()]


@pytest.mark.parametrize("environ", [{}, EXTERNAL], ids=["in process", "KVServer"])
def test_a_stopped_worker_holds_up_no_call(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes], environ: dict[str, str]
) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path, environ=environ).wait_ready() as engine:
        manager = engine.manager
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid if environ else os.getpid()) - {server.pid}
        with stopped(worker):
            tasks = launch_loads(engine, NUM_LOADS)
            assert promptly(manager.try_wait, tasks) == {}
            assert promptly(manager.wait, tasks[:1], timeout=0.1)[tasks[0]].status is KVResponseStatus.TIMEOUT
            put, _ = promptly(manager.put_match, tokens_of(BLOCK, 1))
            promptly(manager.cancel, [tasks.pop(), put])
            assert promptly(manager.is_ready)
            assert not promptly(lambda: manager.disabled)
        assert set(statuses(engine, tasks)) == {KVResponseStatus.SUCCESS}
        assert engine.wrong_blocks(PROMPT, THERE) == []
        assert engine.put(tokens_of(BLOCK, 2), [40]) == BLOCK


def test_what_waits_for_a_stopped_worker_is_bounded(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_radix.transfer.wire.MAX_BACKLOG_BYTES", 20_000)
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        with stopped(engine.manager._backend._driver.worker.pid):
            tasks = launch_loads(engine, NUM_LOADS)
            refused = promptly(engine.manager.try_wait, tasks)
            assert 0 < len(refused) < len(tasks)
            assert {response.status for response in refused.values()} == {KVResponseStatus.FAILED}
            assert all("does not read" in response.error for response in refused.values())
        left = [task_id for task_id in tasks if task_id not in refused]
        assert set(statuses(engine, left)) == {KVResponseStatus.SUCCESS}
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
        full = node.join(name).stats()["pool"]["full"]
        assert (full["num_pins"], full["num_staged"]) == (0, 0)


@pytest.mark.slow
def test_a_shutdown_ends_a_stopped_worker(node: Node, tmp_path: Path) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        worker = engine.manager._backend._driver.worker.pid
        with stopped(worker):
            tasks = launch_loads(engine, NUM_LOADS)
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 20
            assert is_over(worker)
        assert set(statuses(engine, tasks)) == {KVResponseStatus.FAILED}


# -- a KVServer that dies under a transfer


def lifeline_of(worker: int) -> int:
    """A copy of the descriptor whose end tells that the worker is gone."""
    number = int(Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[-2])
    pidfd = os.pidfd_open(worker)
    libc = ctypes.CDLL(None, use_errno=True)
    copy = int(libc.syscall(PIDFD_GETFD, pidfd, number, 0))
    assert copy >= 0, os.strerror(ctypes.get_errno())
    os.close(pidfd)
    return copy


def load_under_way(engine: Engine) -> int:
    task_id, mask = engine.manager.get_match(PROMPT)
    assert mask.all()
    engine.manager.launch([task_id], [engine.slots(THERE)])
    return task_id


def test_a_load_fails_when_nobody_writes_its_blocks_any_more(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    """A stopped worker, mid-transfer, whose server is killed."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        with stopped(worker):
            task_id = load_under_way(engine)
            server.kill()
            start_s = time.monotonic()
            while not (responses := engine.manager.try_wait([task_id])):
                assert time.monotonic() - start_s < 10
            assert is_over(worker)
        assert responses[task_id].status is KVResponseStatus.FAILED


def test_a_worker_that_outlives_its_server_is_waited_for(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    """It does for as long as the kernel takes to end it; here, until somebody lets go of what it held."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        manager = engine.manager
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        lifeline = lifeline_of(worker)
        with stopped(worker):
            task_id = load_under_way(engine)
            server.kill()
            eventually(lambda: manager.disabled, "the death of the KVServer")
            assert manager.try_wait([task_id]) == {}
            assert manager.wait([task_id], timeout=0.3)[task_id].status is KVResponseStatus.TIMEOUT
            assert not promptly(manager.get_match, PROMPT)[1].any()
            os.close(lifeline)
            assert promptly(manager.wait, [task_id], timeout=20)[task_id].status is KVResponseStatus.FAILED


@pytest.mark.slow
def test_a_worker_that_never_ends_is_not_waited_for_for_ever(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        lifeline = lifeline_of(worker)
        with stopped(worker):
            task_id = load_under_way(engine)
            server.kill()
            start_s = time.monotonic()
            engine.expect(task_id, KVResponseStatus.FAILED)
            assert 4 < time.monotonic() - start_s < 10
        os.close(lifeline)
    assert caplog.text.count("has not ended within 5 s") == 1


# -- the end of an engine


def test_after_a_shutdown_nobody_touches_the_engines_memory(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        engine.manager.shutdown()
        assert is_over(worker)


def test_a_shutdown_while_another_thread_waits(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        with stopped(worker):
            task_id = load_under_way(engine)
            responses: list[Any] = []
            thread = threading.Thread(target=lambda: responses.append(engine.manager.wait([task_id], 60)))
            thread.start()
            engine.manager.wait([task_id], timeout=0.5)
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 10
            thread.join(10)
        assert responses[0][task_id].status is KVResponseStatus.FAILED
        assert not engine.manager.get_match(PROMPT)[1].any()


def test_a_shutdown_while_a_stopped_server_does_not_greet(
    tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    with stopped(server.pid), small_engine("/none", tmp_path, environ=EXTERNAL) as engine:
        assert not engine.manager.get_match(PROMPT)[1].any()
        start_s = time.monotonic()
        engine.manager.shutdown()
        assert time.monotonic() - start_s < 5


def test_a_shutdown_while_a_stopped_radix_server_does_not_answer(shm_name: str, tmp_path: Path) -> None:
    with Daemon(shm_name, "--data-bytes", str(DATA_BYTES)) as daemon:
        daemon.wait_serving()
        with stopped(daemon.process.pid), small_engine(shm_name, tmp_path) as engine:
            assert not engine.manager.get_match(PROMPT)[1].any()
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 8


@pytest.mark.slow
def test_a_shutdown_while_a_server_is_stopped(
    node: Node, tmp_path: Path, server: subprocess.Popen[bytes]
) -> None:
    """With a thread that asks it for events all the time."""
    name = node.serve(data_bytes=DATA_BYTES, kvevent_ring_capacity=1024)
    events: list[Any] = []
    with small_engine(name, tmp_path, environ=EXTERNAL, event_collector=events.extend) as engine:
        engine.wait_ready().put(PROMPT, HERE)
        eventually(lambda: events, "events")
        with stopped(server.pid):
            start_s = time.monotonic()
            engine.manager.shutdown()
            assert time.monotonic() - start_s < 20
