"""Several engines, each a process, on one radix-server: what they share, and what happens when one dies."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from daemon import Daemon, eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from engine_process import EngineProcess
from node import Node
from stopping import stopped

from flexkv_radix import KVResponseStatus

PROMPT = tokens_of(5 * BLOCK + 3)
HERE, THERE = [3, 9, 4, 30, 11], [20, 1, 2, 29, 0]
NUM_SLOTS = 64


def held(client) -> tuple[int, int]:
    full = client.stats()["pool"]["full"]
    return full["num_pins"], full["num_staged"]


def test_b_gets_what_a_put(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with EngineProcess(name, tmp_path / "a") as a, EngineProcess(name, tmp_path / "b") as b:
        assert a.ask("ready") == b.ask("ready") == NUM_SLOTS
        assert a.ask("put", PROMPT, HERE) == 5 * BLOCK
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK
        longer = np.concatenate([PROMPT[: 5 * BLOCK], tokens_of(2 * BLOCK, 1)])
        assert b.ask("put", longer, [*THERE, 40, 41]) == 2 * BLOCK
        assert a.ask("get", longer, [50, 51, 52, 53, 54, 55, 56]) == 7 * BLOCK


def test_after_a_reset_one_engine_hits_nothing_old_and_the_other_does(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with EngineProcess(name, tmp_path / "a") as a, EngineProcess(name, tmp_path / "b") as b:
        a.ask("ready"), b.ask("ready")
        a.ask("put", PROMPT, HERE)
        a.ask("reset")
        assert a.ask("get", PROMPT, THERE) == 0
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK
        a.ask("put", PROMPT, HERE)
        assert a.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_different_weights_of_equal_size_never_share(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with EngineProcess(name, tmp_path / "a", identity="one model") as a:
        assert a.ask("ready") == NUM_SLOTS
        a.ask("put", PROMPT, HERE)
        with EngineProcess(name, tmp_path / "b", identity="its fine-tune") as b:
            b.ask("ready")
            assert "fingerprint" in b.ask("disabled")
            assert b.ask("get", PROMPT, THERE) == 0
            assert b.ask("put", PROMPT, THERE) == 0
        with EngineProcess(name, tmp_path / "c", identity="one model") as c:
            c.ask("ready")
            assert c.ask("get", PROMPT, THERE) == 5 * BLOCK
        assert a.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_a_killed_engines_pins_and_slots_come_back(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with EngineProcess(name, tmp_path / "a") as a, EngineProcess(name, tmp_path / "b") as b:
        a.ask("ready"), b.ask("ready")
        a.ask("put", PROMPT, HERE)
        with node.join(name) as client:
            assert a.ask("match", PROMPT) == 5 * BLOCK
            assert a.ask("stage", tokens_of(4 * BLOCK, 1)) == 4 * BLOCK
            assert held(client) == (2, 4) or held(client) == (1, 4)  # a zero hit pins nothing
            worker = a.ask("worker_pid")
            a.kill()
            eventually(lambda: held(client) == (0, 0), "what the dead engine held", timeout_s=10)
            eventually(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end", timeout_s=10)
        assert b.ask("get", PROMPT, THERE) == 5 * BLOCK


def test_an_engine_killed_in_mid_store_publishes_no_wrong_byte(node: Node, tmp_path: Path) -> None:
    name = node.serve(data_bytes=NUM_SLOTS * SMALL_SLOT_BYTES)
    with small_engine(name, tmp_path).wait_ready() as watcher:
        client = watcher.manager._backend.tier.client
        for turn in range(3):
            with EngineProcess(name, tmp_path / f"a{turn}") as a:
                a.ask("ready")
                a.send("put_forever", PROMPT, HERE)
                seen = client.stats()["inserted_blocks"]["full"]
                eventually(lambda seen=seen: client.stats()["inserted_blocks"]["full"] > seen + 20, "stores")
                a.kill()
            for namespace in range(100):
                watcher.get(PROMPT, THERE, namespace=[str(namespace)])
            eventually(lambda: held(client) == (0, 0), "what the dead engine held", timeout_s=10)


def test_radix_server_killed_and_restarted_is_not_noticed(shm_name: str, tmp_path: Path) -> None:
    flags = ("--data-bytes", str(NUM_SLOTS * SMALL_SLOT_BYTES))
    with Daemon(shm_name, *flags) as server, EngineProcess(shm_name, tmp_path / "a") as a:
        server.wait_serving()
        a.ask("ready")
        assert a.ask("put", PROMPT, HERE) == 5 * BLOCK
        server.kill()
        assert a.ask("get", PROMPT, THERE) == 5 * BLOCK
        assert a.ask("put", tokens_of(3 * BLOCK, 1), [40, 41, 42]) == 3 * BLOCK
        with Daemon(shm_name, *flags, "--keep") as again:
            again.wait_mode("ready")
            assert a.ask("get", PROMPT, THERE) == 5 * BLOCK
            with EngineProcess(shm_name, tmp_path / "b") as b:
                b.ask("ready")
                assert b.ask("get", tokens_of(3 * BLOCK, 1), [50, 51, 52]) == 3 * BLOCK
            again.signal(signal.SIGKILL)


def test_radix_server_killed_in_mid_transfer_fails_nothing(shm_name: str, tmp_path: Path) -> None:
    """A store and a load are under way when it dies, and end while there is none."""
    flags = ("--data-bytes", str(NUM_SLOTS * SMALL_SLOT_BYTES))
    stored, loaded = tokens_of(5 * BLOCK), tokens_of(5 * BLOCK, 1)
    with Daemon(shm_name, *flags) as server, small_engine(shm_name, tmp_path) as engine:
        server.wait_serving()
        engine.wait_ready().put(loaded, HERE)
        engine.compute(stored, HERE)
        put, get = engine.manager.put_match(stored)[0], engine.manager.get_match(loaded)[0]
        with stopped(engine.manager._backend._driver.worker.pid):
            engine.manager.launch([put, get], [engine.slots(HERE), engine.slots(THERE)])
            server.kill()
            engine.expect(put, KVResponseStatus.TIMEOUT, 0.1)
        engine.expect(put, KVResponseStatus.SUCCESS)
        engine.expect(get, KVResponseStatus.SUCCESS)
        assert engine.wrong_blocks(loaded, THERE) == []
        assert engine.get(stored, THERE) == 5 * BLOCK
        assert held(engine.manager._backend.tier.client) == (0, 0)
        for turn in range(50):
            tokens = tokens_of(5 * BLOCK, turn % 15)
            engine.put(tokens, HERE)
            assert engine.get(tokens, THERE) == 5 * BLOCK
