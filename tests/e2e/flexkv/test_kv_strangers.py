"""Another user of the machine at our paths: nothing of ours is handed over, and nobody waits in vain."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, small_engine, tokens_of
from kv_server import EMBEDDED, EXTERNAL, ROOT
from node import Node
from stranger import UID, stranger

from flexkv_radix.layerwise import LayerEvents
from flexkv_radix.transfer.peers import StrangerError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be two users")
PROMPT = tokens_of(5 * BLOCK)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Where every user may create files, as in /tmp."""
    with tempfile.TemporaryDirectory(prefix="t_strangers_") as directory:
        os.chmod(directory, 0o1777)
        yield Path(directory)


def test_a_rank_hands_no_memory_to_a_stranger(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "flexkv_gpu_register_0"
    with stranger("listen", path) as other, small_engine("/none", tmp_path, register=False) as engine:
        engine.register(f"ipc://{tmp_path}/flexkv")
        with pytest.raises(RuntimeError, match=rf"{path}.*user id {UID}.*user id {os.geteuid()}"):
            engine.clients[0].wait_registered(30)
        assert other.stdout.readline() == "0 0\n"


def test_a_rank_hands_no_eventfds_to_a_stranger(tmp_path: Path) -> None:
    events = LayerEvents(2)
    with stranger("listen", tmp_path / "layers") as other:
        with pytest.raises(StrangerError, match=f"user id {UID}"):
            events.connect(str(tmp_path / "layers"), 0, 1)
        assert other.stdout.readline() == "0 0\n"
    events.close()


@pytest.mark.parametrize("mode", [EXTERNAL, EMBEDDED], ids=["external", "embedded"])
def test_a_client_says_nothing_to_a_stranger(mode: dict[str, str], tmp_path: Path) -> None:
    with stranger("listen", tmp_path / "flexkv.alive") as other, stranger("lock", tmp_path / "flexkv.lock"):
        with small_engine("/none", tmp_path, environ=mode) as engine:
            eventually(lambda: engine.manager.disabled, "the end of the cache", timeout_s=10)
            assert f"user id {UID}" in engine.manager.disabled
            assert not engine.manager.get_match(PROMPT)[1].any()
        if mode is EXTERNAL:
            assert other.stdout.readline() == "0 0\n"


def test_no_token_goes_to_a_stranger(node: Node, tmp_path: Path, server) -> None:
    """Who listens at the endpoint of a server that lives is seen before the first request."""
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    (tmp_path / "flexkv").unlink()
    with stranger("listen", tmp_path / "flexkv") as other:
        with small_engine(name, tmp_path, environ=EXTERNAL) as engine:
            eventually(lambda: f"user id {UID}" in engine.manager.disabled, "the end of the cache")
            assert not engine.manager.get_match(PROMPT)[1].any()
        num_bytes, num_fds = map(int, other.stdout.readline().split())
        assert num_bytes <= 64, "more than ZeroMQ's own greeting"
        assert num_fds == 0


def test_a_strangers_lock_is_named(tmp_path: Path) -> None:
    with stranger("lock", tmp_path / "flexkv.lock"):
        result = subprocess.run(
            [sys.executable, "-m", "flexkv_radix.server", "--endpoint", f"ipc://{tmp_path}/flexkv"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert result.returncode == 2
    assert f"{tmp_path}/flexkv.lock belongs to user id {UID}" in result.stderr
    assert "FLEXKV_SERVER_RECV_PORT" in result.stderr


def test_strangers_are_turned_away(node: Node, tmp_path: Path, server) -> None:
    """Also where the sockets' modes would let them in."""
    name = node.serve(data_bytes=64 * SMALL_SLOT_BYTES)
    layers = str(tmp_path / "layers")
    layerwise = {"FLEXKV_ENABLE_LAYERWISE_TRANSFER": "1", "FLEXKV_LAYERWISE_EVENTFD_SOCKET": layers}
    with small_engine(name, tmp_path, environ={**EXTERNAL, **layerwise}).wait_ready() as engine:
        files = sorted(tmp_path.iterdir())
        assert len(files) == 6
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        for file in files:
            if file.is_socket() and file.name != "flexkv":  # ZeroMQ's: there the token counts
                os.chmod(file, 0o666)
                with stranger("connect", file) as other:
                    assert other.stdout.readline() == "0 0\n"
        assert engine.put(PROMPT, range(5)) == 5 * BLOCK
