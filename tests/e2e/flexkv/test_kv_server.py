"""One KVServer for several engine instances: independent of each other, and of who started it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from engine_process import EngineProcess
from kv_server import EMBEDDED, EXTERNAL, ROOT, children_of, start_server
from node import Node

from flexkv_radix import KVResponseStatus
from flexkv_radix.server import liveness
from flexkv_radix.server import messages as m
from flexkv_radix.server.spawn import is_served

PROMPT = tokens_of(5 * BLOCK + 3)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
DATA_BYTES = 64 * SMALL_SLOT_BYTES


def held(client) -> tuple[int, int]:
    full = client.stats()["pool"]["full"]
    return full["num_pins"], full["num_staged"]


def shared_tensors(rank_pid: int, worker_pid: int) -> set[str]:
    """Files of shared tensors that both processes have mapped."""

    def files(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/torch_" in line}

    return files(rank_pid) & files(worker_pid)


def test_round_trip_and_counts(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        assert engine.cache.num_cpu_blocks == 64
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
        assert engine.put(PROMPT, HERE) == 0
        mask = (PROMPT >= 0) & (PROMPT[BLOCK] != PROMPT)  # gaps travel too
        assert engine.get(PROMPT, THERE, token_mask=mask) == 4 * BLOCK
        prefetch = engine.manager.prefetch_async(PROMPT)
        assert engine.expect(prefetch, KVResponseStatus.SUCCESS).return_mask.sum() == 5 * BLOCK


def test_batch_ids_are_as_in_process(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        prompts = [tokens_of(2 * BLOCK, index) for index in range(2)]
        places = [[10, 11], [20, 21]]
        tasks = []
        for tokens, at in zip(prompts, places, strict=True):
            engine.compute(tokens, at)
            tasks.append(engine.manager.put_match(tokens)[0])
        [batch] = engine.manager.launch(tasks, [engine.slots(at) for at in places], as_batch=True)
        assert batch not in tasks
        assert [mask.sum() for mask in engine.expect(batch, KVResponseStatus.SUCCESS).return_mask] == [32, 32]
        engine.expect(tasks[0], KVResponseStatus.NOT_FOUND)
        single = engine.manager.get_match(prompts[0])[0]
        assert engine.manager.launch([single], [engine.slots([40, 41])], as_batch=True) == [single]
        engine.expect(single, KVResponseStatus.SUCCESS)


def test_errors_come_back_and_nobody_is_harmed(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        with pytest.raises(ValueError, match="task_ids"):
            engine.manager.launch([12345], [engine.slots([1])])
        engine.compute(PROMPT, HERE)
        task_id, _ = engine.manager.put_match(PROMPT)
        with pytest.raises(ValueError, match="slot_mapping"):
            engine.manager.launch([task_id], [engine.slots([1])])
        engine.manager.launch([task_id], [engine.slots([1, 2, 3, 4, 99])])
        assert "99" in engine.expect(task_id, KVResponseStatus.FAILED).error
        assert engine.put(PROMPT, HERE) == 5 * BLOCK


def test_garbage_does_not_stop_the_server(node: Node, tmp_path: Path, server) -> None:
    import zmq

    name = node.serve(data_bytes=DATA_BYTES)
    endpoint = f"ipc://{tmp_path}/flexkv"
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as noisy:
        silent.connect(liveness.liveness_path(endpoint))
        noisy.connect(liveness.liveness_path(endpoint))
        noisy.sendall(b"\xff" * 64)
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            for parts in ([b"x"], [b"1", b"\xc1garbage"], [b"1", b""], [b"1", b"2", b"3", b"4"]):
                dealer.send_multipart(parts)
            dealer.send(m.encode(m.Request(b"a guessed token", 7, m.Poll([1]))))
            assert dealer.poll(5000)
            reply = m.decode_reply(dealer.recv())
            assert reply.call == 7
            assert "does not know" in reply.outcome.error
        with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
            assert engine.put(PROMPT, HERE) == 5 * BLOCK
    assert server.poll() is None


def test_one_wait_blocks_neither_client_nor_server(node: Node, tmp_path: Path, server) -> None:
    """A wait for a task that hangs (its worker is stopped), while others go on."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        [worker] = children_of(server.pid)
        with EngineProcess(name, tmp_path, 1, **EXTERNAL) as other:
            other.ask("ready")
            engine.compute(PROMPT, HERE)
            task_id, _ = engine.manager.put_match(PROMPT)
            os.kill(worker, signal.SIGSTOP)
            try:
                engine.manager.launch([task_id], [engine.slots(HERE)])
                waited: list[object] = []
                thread = threading.Thread(
                    target=lambda: waited.append(engine.manager.wait([task_id], timeout=60))
                )
                thread.start()
                for turn in range(20):
                    assert not engine.manager.get_match(tokens_of(BLOCK, turn))[1].any()
                assert engine.manager.wait([task_id], timeout=0.1)[task_id].status is KVResponseStatus.TIMEOUT
                assert other.ask("put", tokens_of(2 * BLOCK, 7), [1, 2], timeout_s=20) == 2 * BLOCK
                assert not waited
            finally:
                os.kill(worker, signal.SIGCONT)
            thread.join(20)
            assert waited[0][task_id].status is KVResponseStatus.SUCCESS


def test_a_dead_clients_things_come_back(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with EngineProcess(name, tmp_path, 0, **EXTERNAL) as a, EngineProcess(name, tmp_path, 1, **EXTERNAL) as b:
        a.ask("ready"), b.ask("ready")
        a.ask("put", PROMPT, HERE)
        workers = children_of(server.pid)
        assert len(workers) == 2
        [mapped] = [pid for pid in workers if shared_tensors(a.pid, pid)]
        client = node.join(name)
        assert a.ask("match", PROMPT) == 5 * BLOCK
        assert a.ask("stage", tokens_of(4 * BLOCK, 1)) == 4 * BLOCK
        assert held(client)[1] == 4
        a.kill()
        eventually(
            lambda: held(client) == (0, 0) and not Path(f"/proc/{mapped}/maps").exists(),
            "the dead client's pins, slots and mappings",
            timeout_s=2,
        )
        assert children_of(server.pid) == workers - {mapped}
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK
    with EngineProcess(name, tmp_path, 0, **EXTERNAL) as again:
        again.ask("ready")
        assert again.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_a_shutdown_leaves_the_server_and_the_others_alone(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with EngineProcess(name, tmp_path, 1, **EXTERNAL) as other:
        other.ask("ready")
        with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
            engine.put(PROMPT, HERE)
        assert other.ask("get", PROMPT, THERE) == 5 * BLOCK
        assert server.poll() is None


def test_the_servers_death_is_an_error_within_seconds(
    node: Node, tmp_path: Path, server, caplog: pytest.LogCaptureFixture
) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        [worker] = children_of(server.pid)
        engine.compute(tokens_of(2 * BLOCK, 1), [1, 2])
        put, _ = engine.manager.put_match(tokens_of(2 * BLOCK, 1))
        unlaunched, _ = engine.manager.get_match(PROMPT)
        os.kill(worker, signal.SIGSTOP)
        engine.manager.launch([put], [engine.slots([1, 2])])
        threading.Timer(0.2, server.kill).start()
        start_s = time.monotonic()
        response = engine.manager.wait([put], timeout=60)[put]
        assert time.monotonic() - start_s < 5
        assert response.status is KVResponseStatus.FAILED
        assert "KVServer" in response.error
        os.kill(worker, signal.SIGCONT)
        engine.expect(unlaunched, KVResponseStatus.FAILED)
        task_id, mask = engine.manager.get_match(PROMPT)
        assert not mask.any()
        assert engine.expect(task_id, KVResponseStatus.SUCCESS).return_mask.shape == PROMPT.shape
        misses = [engine.manager.get_match(tokens_of(n * BLOCK, n))[0] for n in (1, 3)]
        [batch] = engine.manager.launch(misses, [engine.slots([]), engine.slots([])], as_batch=True)
        masks = engine.expect(batch, KVResponseStatus.SUCCESS).return_mask
        assert [(len(mask), mask.any()) for mask in masks] == [(BLOCK, False), (3 * BLOCK, False)]
        assert engine.manager.is_ready()
        assert caplog.text.count("without the KV cache") == 1
        client = node.join(name)
        eventually(lambda: held(client) == (0, 0), "what the dead server held", timeout_s=10)
        again = start_server(tmp_path)
        eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)
        assert caplog.text.count("the KV cache is back") == 1
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
        assert engine.put(tokens_of(2 * BLOCK, 1), [1, 2]) == 2 * BLOCK
        # Numbers begin anew at a new server, and yet a task of the old one is not taken for one of its.
        unlaunched_again, _ = engine.manager.get_match(PROMPT)
        assert unlaunched_again not in (put, unlaunched)
        slots = [engine.slots(THERE), engine.slots([40, 41, 42, 43, 44])]
        assert engine.manager.launch([unlaunched, unlaunched_again], slots) == [unlaunched, unlaunched_again]
        engine.expect(unlaunched, KVResponseStatus.FAILED)
        engine.expect(unlaunched_again, KVResponseStatus.SUCCESS)
    again.terminate()
    assert again.wait(20) == 0


def test_a_batch_with_a_miss_fails_with_the_server(node: Node, tmp_path: Path) -> None:
    """The miss alone would be a success; the load in the same batch was not done."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL) as engine:
        miss, _ = engine.manager.get_match(PROMPT)
        server = start_server(tmp_path)
        engine.wait_ready().put(PROMPT, HERE)
        get, _ = engine.manager.get_match(PROMPT)
        server.kill()
        server.wait()
        slots = [engine.slots([]), engine.slots(THERE)]
        [batch] = engine.manager.launch([miss, get], slots, as_batch=True)
        assert "KVServer" in engine.expect(batch, KVResponseStatus.FAILED).error


def test_a_stranger_at_the_endpoint_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who answers what is no greeting is no server; the engine serves on."""
    monkeypatch.setattr("flexkv_radix.server.connection._CONNECT_TIMEOUT_S", 0.0)
    stop = threading.Event()

    def answer(listener: socket.socket) -> None:
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError), listener.accept()[0] as sock:
                sock.sendall(b"\x03\0\0\0abc")
                sock.recv(1 << 16)
            stop.wait(0.01)

    with liveness.listen(f"ipc://{tmp_path}/flexkv") as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with small_engine("/none", tmp_path, environ=EXTERNAL) as engine:
            engine.wait_ready()
            assert "no greeting" in engine.manager.disabled
            assert not engine.manager.get_match(PROMPT)[1].any()
        stop.set()
        thread.join()
    assert caplog.text.count("without the KV cache") == 1


def test_a_client_with_many_open_files(node: Node, tmp_path: Path, server, many_files) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        assert not engine.manager.disabled
        assert engine.put(PROMPT, HERE) == 5 * BLOCK
        assert engine.get(PROMPT, THERE) == 5 * BLOCK


def test_an_embedded_server_that_died_is_started_again(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with (
        small_engine(name, tmp_path, environ=EMBEDDED).wait_ready() as engine,
        EngineProcess(name, tmp_path, 1, **EMBEDDED) as other,
    ):
        other.ask("ready")
        for turn in range(2):
            assert engine.put(tokens_of(5 * BLOCK, turn), HERE) == 5 * BLOCK
            os.kill(server_of(tmp_path), signal.SIGKILL)
            eventually(lambda: engine.manager.disabled, "the server's death")
            eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)
            eventually(lambda: other.ask("disabled") == "", "the other engine's cache")
            assert engine.get(tokens_of(5 * BLOCK, turn), THERE) == 5 * BLOCK
            assert other.ask("get", tokens_of(5 * BLOCK, turn), THERE) == 5 * BLOCK


def test_a_killed_worker_of_the_server(node: Node, tmp_path: Path, server) -> None:
    """One client's worker; the other client is not concerned."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        [worker] = children_of(server.pid)
        engine.put(PROMPT, HERE)
        with EngineProcess(name, tmp_path, 1, **EXTERNAL) as other:
            other.ask("ready")
            os.kill(worker, signal.SIGSTOP)
            get, _ = engine.manager.get_match(PROMPT)
            engine.manager.launch([get], [engine.slots(THERE)])
            os.kill(worker, signal.SIGKILL)
            start_s = time.monotonic()
            assert "worker" in engine.expect(get, KVResponseStatus.FAILED).error
            assert time.monotonic() - start_s < 5
            assert other.ask("get", PROMPT, THERE) == 5 * BLOCK
            eventually(lambda: not engine.manager.disabled, lambda: engine.manager.disabled)
            assert engine.get(PROMPT, THERE) == 5 * BLOCK
            assert other.ask("disabled") == ""


def server_of(directory: Path) -> int:
    """Process id of the KVServer that serves engines in directory: who holds the endpoint's lock."""
    inode = (directory / "flexkv.lock").stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return next(int(lock[4]) for lock in locks if lock[5].endswith(f":{inode}"))


def test_an_id_in_use_waits_for_its_turn(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as first:
        with small_engine(name, tmp_path, environ=EXTERNAL, register=False) as second:
            first.put(PROMPT, HERE)
            assert not second.manager.is_ready()
            first.close()
            second.register(f"ipc://{tmp_path}/flexkv")
            second.wait_ready()
            assert not second.manager.disabled
            assert second.get(PROMPT, THERE) == 5 * BLOCK


def test_a_refusal_reaches_the_client(node: Node, tmp_path: Path, server) -> None:
    name = node.serve(data_bytes=SMALL_SLOT_BYTES - 1)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        assert "--data-bytes" in engine.manager.disabled
        assert not engine.manager.get_match(PROMPT)[1].any()


def test_the_embedded_server_serves_all_and_outlives_its_starter(node: Node, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/flexkv"
    name = node.serve(data_bytes=DATA_BYTES)
    with EngineProcess(name, tmp_path, 0, **EMBEDDED) as a, EngineProcess(name, tmp_path, 1, **EMBEDDED) as b:
        a.ask("ready"), b.ask("ready")
        assert a.ask("put", PROMPT, HERE) == 5 * BLOCK
        a.kill()
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK
        assert is_served(endpoint)
    eventually(lambda: not is_served(endpoint), "the idle server's end", timeout_s=60)
    assert [path.name for path in tmp_path.glob("flexkv*")] == ["flexkv.lock"]


def test_a_second_server_is_refused(tmp_path: Path, server) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flexkv_radix.server", "--endpoint", f"ipc://{tmp_path}/flexkv"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "served already" in result.stderr


def test_an_endpoint_that_is_no_unix_socket_is_refused(node: Node, tmp_path: Path) -> None:
    from engine import environment, small_model

    from flexkv_radix import CacheConfig, KVManager

    with environment("/none", "tcp://127.0.0.1:5555", EXTERNAL), pytest.raises(ValueError, match="ipc://"):
        KVManager(small_model(), CacheConfig(BLOCK))


def test_requests_of_a_stranger_are_refused(node: Node, tmp_path: Path, server) -> None:
    """A token is not guessed."""
    name = node.serve(data_bytes=DATA_BYTES)
    with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as engine:
        engine.put(PROMPT, HERE)
        backend = engine.manager._backend
        server = backend._connection.server
        token, server.token = server.token, b"wrong"
        with pytest.raises(Exception, match="does not know"):
            backend._call(server, m.Poll([1]), m.Answers)
        server.token = token
        assert engine.get(PROMPT, THERE) == 5 * BLOCK
