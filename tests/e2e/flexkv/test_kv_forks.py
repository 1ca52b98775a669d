"""An engine that has forked: its child has a copy of every socket, and is not the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from engine_process import EngineProcess
from kv_server import EXTERNAL
from node import Node

PROMPT = tokens_of(5 * BLOCK)
BLOCKS = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("end", "by_hand"),
    [("killed", False), ("killed", True), ("shut down", False)],  # shut down, True: nobody could tell
)
def test_an_engine_is_gone_though_its_child_lives(
    end: str, by_hand: bool, node: Node, tmp_path: Path, server
) -> None:
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    with EngineProcess(name, tmp_path, **EXTERNAL) as engine:
        engine.ask("ready")
        engine.ask("put", PROMPT, BLOCKS)
        assert engine.ask("match", PROMPT) == 5 * BLOCK
        assert engine.ask("stage", tokens_of(4 * BLOCK, 1)) == 4 * BLOCK
        client = node.join(name)
        assert client.stats()["pool"]["full"]["num_staged"] == 4
        child = engine.ask("fork", by_hand)
        try:
            if end == "killed":
                engine.kill()
            else:
                engine.ask("shutdown")
            eventually(
                lambda: client.stats()["pool"]["full"]["num_staged"] == 0, "the staged slots", timeout_s=2
            )
            with small_engine(name, tmp_path, environ=EXTERNAL).wait_ready() as again:
                assert again.get(PROMPT, BLOCKS) == 5 * BLOCK
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
