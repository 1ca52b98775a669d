"""Ranks find their own engine and no other, wait for it, and leave it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemon import eventually
from engine import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERFIRST,
    SMALL_SLOT_BYTES,
    Engine,
    RankMemory,
    small_engine,
    small_memory,
    tokens_of,
)
from engine_process import EngineProcess
from kv_server import EXTERNAL, ROOT
from node import Node

from flexkv_radix import CacheConfig, KVCacheLayout, KVTPClient, ModelConfig

PROMPT = tokens_of(5 * BLOCK)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES
MAIN = Path(__file__).resolve().parents[2] / "support" / "ranks_apart_main.py"


class Part:
    """ranks_apart_main.py."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process ended during {command}"
        return line.decode().strip()


@contextmanager
def part_of_an_engine(server_name: str, directory: Path, *port: str) -> Iterator[Part]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(MAIN), server_name, str(directory), *port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{MAIN.parent}"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Part(process)
    finally:
        process.stdin.close()
        assert process.wait(20) in (0, -signal.SIGKILL)
        process.stdout.close()


def endpoint_of(directory: Path) -> str:
    return f"{directory}/flexkv_gpu_register_0"


def listens(directory: Path) -> None:
    eventually(lambda: Path(endpoint_of(directory)).exists(), "the worker listens")


def moves_its_own_bytes(engine: Engine) -> None:
    assert engine.put(PROMPT, HERE) == 5 * BLOCK
    assert engine.get(PROMPT, THERE) == 5 * BLOCK


def worker_of(engine: Engine) -> int:
    return int(engine.manager._backend._driver.worker.pid)


# -- whose rank


def test_ranks_of_an_engine_that_failed_in_the_same_process(node: Node, tmp_path: Path) -> None:
    """Nothing tells them from the other engine's: nobody is taken until the failed one has left."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, register=False) as engine:
        listens(tmp_path)
        with small_engine(name, tmp_path, register=False) as other:
            start_s = time.monotonic()
            with pytest.raises(RuntimeError, match=r"flexkv_gpu_register_0.*FLEXKV_SERVER_RECV_PORT"):
                other.wait_ready()
            assert time.monotonic() - start_s < 8, "a living engine is not waited for"
            other.register(f"ipc://{tmp_path}/flexkv")
            eventually(lambda: "uses this endpoint too" in other.clients[0].error, "the refusal")
            with pytest.raises(RuntimeError, match="uses this endpoint too"):
                other.clients[0].wait_registered(0.0)
            assert not engine.manager.is_ready()
        engine.register(f"ipc://{tmp_path}/flexkv")
        engine.wait_ready()
        moves_its_own_bytes(engine)


def test_ranks_of_an_engine_that_failed_in_another_process(node: Node, tmp_path: Path) -> None:
    """They are nearer to the engine that failed; the other one's are taken although it lives."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, register=False) as engine:
        listens(tmp_path)
        with EngineProcess(name, tmp_path) as other:
            eventually(lambda: "uses this endpoint too" in other.ask("rank_error"), "the refusal")
            assert "flexkv_gpu_register_0" in eventually(lambda: other.ask("disabled"), "the failure")
            assert not engine.manager.is_ready()
            engine.register(f"ipc://{tmp_path}/flexkv")
            engine.wait_ready()
            moves_its_own_bytes(engine)


def test_ranks_of_an_engine_that_waits_for_its_turn(node: Node, tmp_path: Path, server) -> None:
    """The same at a KVServer, where the second engine does not fail."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL, register=False) as engine:
        listens(tmp_path)
        with EngineProcess(name, tmp_path, **EXTERNAL) as other:
            eventually(lambda: "uses this endpoint too" in other.ask("rank_error"), "the refusal")
            assert not engine.manager.is_ready()
            engine.register(f"ipc://{tmp_path}/flexkv")
            moves_its_own_bytes(engine.wait_ready())
            engine.close()
            other.ask("ready")
            assert other.ask("disabled") == ""
            assert other.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_a_rank_that_came_before_its_manager(node: Node, tmp_path: Path) -> None:
    """It was taken for one of the engine that was there; its own engine's coming corrects that."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, register=False) as engine:
        with part_of_an_engine(name, tmp_path) as other:
            other.ask("rank")
            eventually(engine.manager.is_ready, "a process that this one started may be a rank")
            other.ask("manager")
            eventually(lambda: "uses this endpoint too" in other.ask("error"), "the refusal")
            engine.register(f"ipc://{tmp_path}/flexkv")
            assert engine.clients[0].wait_registered(20)
            eventually(lambda: engine.put(PROMPT, HERE) == 5 * BLOCK)
            assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_the_nearer_rank_has_the_place(node: Node, tmp_path: Path) -> None:
    """A child of this process registers first; what is in the engine's own process is surely its."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, register=False) as engine, part_of_an_engine(name, tmp_path) as other:
        other.ask("rank")
        eventually(engine.manager.is_ready, "the child is taken")
        engine.register(f"ipc://{tmp_path}/flexkv")
        assert engine.clients[0].wait_registered(20)
        eventually(lambda: "in this place" in other.ask("error"), "the child's refusal")
        moves_its_own_bytes(engine)


def test_a_rank_that_the_engine_has_not_started(node: Node, tmp_path: Path) -> None:
    """Refused where the endpoint follows from FLEXKV_SERVER_RECV_PORT, taken where it is the engine's own."""
    name = node.serve(data_bytes=DATA_BYTES)
    memory = small_memory()
    with part_of_an_engine(name, tmp_path) as engine:
        engine.ask("manager")
        rank = KVTPClient(f"ipc://{tmp_path}/flexkv_gpu_register", 0, 0)
        rank.register_to_server(memory.tensors, memory.layout)
        eventually(lambda: "gpu_register_port" in rank.error, "the refusal")
        assert engine.ask("ready") == "False"
        rank.close()
    with part_of_an_engine(name, tmp_path, f"ipc://{tmp_path}/own") as engine:
        engine.ask("manager")
        rank = KVTPClient(f"ipc://{tmp_path}/own", 0, 0)
        rank.register_to_server(memory.tensors, memory.layout)
        assert rank.wait_registered(20)
        eventually(lambda: engine.ask("ready") == "True", "readiness")
        rank.close()


@pytest.mark.parametrize("device_id", [0, 1], ids=["a taken place", "one too many"])
def test_a_rank_too_many_harms_nobody(node: Node, tmp_path: Path, device_id: int) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path).wait_ready() as engine:
        worker = worker_of(engine)
        memory = small_memory()
        late = KVTPClient(f"ipc://{tmp_path}/flexkv_gpu_register", 0, device_id)
        late.register_to_server(memory.tensors, memory.layout)
        eventually(lambda: "registered" in late.error, "the refusal")
        moves_its_own_bytes(engine)
        assert (worker_of(engine), engine.manager.disabled) == (worker, "")
        engine.clients[0].close()
        assert late.wait_registered(20), "it goes on trying"
        assert late.error == ""
        late.close()


# -- waiting


def test_a_rank_says_what_it_waits_for_and_goes_on(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_radix.tp_client._SAY_WAITING_S", 0.1)
    memory = small_memory()
    rank = KVTPClient(f"ipc://{tmp_path}/flexkv_gpu_register", 0, 0)
    rank.register_to_server(memory.tensors, memory.layout)
    eventually(lambda: caplog.text.count("no transfer worker listens on") > 2, "what it waits for")
    assert endpoint_of(tmp_path) in caplog.text
    assert not rank.wait_registered(0.0)
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path, register=False) as engine:
        engine.wait_ready()
        assert rank.wait_registered(20)
        rank.close()


def test_a_manager_says_how_many_ranks_it_waits_for(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_radix.transfer.handle._SAY_WAITING_S", 0.1)
    memories = [[RankMemory(KVCacheLayout(LAYERFIRST, 2, 32, BLOCK, HEADS, HEAD_SIZE), 2)] for _ in range(2)]
    model = ModelConfig(2, HEADS * 2, HEAD_SIZE, dtype="int16", tp_size=2)
    name = node.serve(data_bytes=1 << 20)
    with Engine(name, tmp_path, model, CacheConfig(BLOCK), memories[:1]) as engine:
        said = f"1 of 2 ranks registered at {endpoint_of(tmp_path)}"
        eventually(lambda: sum(said in record.getMessage() for record in caplog.records) > 1, said)
        assert {record.levelname for record in caplog.records if said in record.getMessage()} == {"WARNING"}
        assert not engine.manager.is_ready()


# -- leaving


def mapped_tensors(worker: int) -> set[str]:
    ours = Path("/proc/self/maps").read_text().splitlines()
    theirs = Path(f"/proc/{worker}/maps").read_text().splitlines()
    files = [{line.split()[4] for line in lines if "/torch_" in line} for lines in (ours, theirs)]
    return files[0] & files[1]


def test_a_rank_that_has_left_is_mapped_nowhere(node: Node, tmp_path: Path) -> None:
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        worker = worker_of(engine)
        assert mapped_tensors(worker)
        engine.clients[0].close()
        assert not mapped_tensors(worker)


def test_leaving_a_worker_that_is_stopped(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_radix.transfer.registration._CLOSE_TIMEOUT_S", 0.2)
    with small_engine(node.serve(data_bytes=DATA_BYTES), tmp_path).wait_ready() as engine:
        worker = worker_of(engine)
        os.kill(worker, signal.SIGSTOP)
        start_s = time.monotonic()
        engine.clients[0].close()
        assert time.monotonic() - start_s < 5
        os.kill(worker, signal.SIGCONT)
    assert "has not let go of the KV tensors" in caplog.text
