"""The small parts of the server: state, lock, logs, service manager, exit codes."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixshmem import NoSpace, RadixError, ServerConfig, ServerInfo
from radixshmem.file_lock import is_locked
from radixshmem.names import lock_path
from radixshmem.server import ClusterUnavailable, ExitCode, LeftoversInUse, NameInUse, exit_code
from radixshmem.server.lock import NameLock, lock_holder
from radixshmem.server.logs import Logs
from radixshmem.server.state import ServerState
from radixshmem.server.systemd import notify, watchdog_interval_s

log = logging.getLogger("radixshmem.test")


# -- state --------------------------------------------------------------------------------------


@pytest.fixture
def state() -> ServerState:
    return ServerState(ServerInfo("/x", "/x", "", "unix:///x", "waiting"))


def test_changes_wake_who_waits(state: ServerState) -> None:
    seen: list[ServerInfo] = []
    before = state.info
    waiter = threading.Thread(target=lambda: seen.append(state.wait_change(before, 30)))
    waiter.start()
    state.update(mode="configuring", progress=0.5)
    waiter.join()
    assert (seen[0].mode, seen[0].progress) == ("configuring", 0.5)
    assert state.wait_change(state.info, 0) is state.info


def test_only_drawn_transitions_are_made(state: ServerState) -> None:
    with pytest.raises(AssertionError, match="waiting to ready"):
        state.update(mode="ready")
    for mode in (
        "configuring",
        "failed",
        "configuring",
        "ready",
        "failed",
        "configuring",
        "ready",
        "closing",
    ):
        assert state.update(mode=mode).mode == mode


def test_closing_is_final(state: ServerState) -> None:
    state.update(mode="closing")
    assert state.update(mode="ready", epoch="e").mode == "closing"
    assert state.info.epoch == "e"


# -- name lock ----------------------------------------------------------------------------------


def test_lock_is_exclusive_also_within_a_process(shm_name: str) -> None:
    lock = NameLock(shm_name)
    assert lock_holder(shm_name) == os.getpid()
    with pytest.raises(NameInUse, match=str(os.getpid())):
        NameLock(shm_name)
    lock.release()
    assert lock_holder(shm_name) is None
    NameLock(shm_name).remove()
    assert not Path(lock_path(shm_name)).exists()


def test_lock_file_that_somebody_else_removed_is_left_to_them(shm_name: str) -> None:
    first = NameLock(shm_name)
    os.unlink(lock_path(shm_name))
    second = NameLock(shm_name)
    first.remove()
    assert lock_holder(shm_name) == os.getpid()
    second.remove()
    assert not Path(lock_path(shm_name)).exists()


def test_lock_of_a_killed_process_is_free(shm_name: str) -> None:
    code = f"from radixshmem.server.lock import NameLock; NameLock({shm_name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert lock_holder(shm_name) == process.pid
        with pytest.raises(NameInUse):
            NameLock(shm_name)
        process.kill()
        process.wait()
    NameLock(shm_name).remove()


def test_lock_on_an_unlinked_file_is_not_taken_for_the_lock(shm_name: str) -> None:
    """Of many that lock and unlink at once, never two hold the name."""
    holders, most, turns = 0, 0, 0
    guard = threading.Lock()

    def contend() -> None:
        nonlocal holders, most, turns
        for _ in range(200):
            try:
                lock = NameLock(shm_name)
            except NameInUse:
                continue
            with guard:
                holders += 1
                most, turns = max(most, holders), turns + 1
            with guard:
                holders -= 1
            lock.remove()

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert turns > 4


def test_any_record_lock_of_a_file_is_seen(tmp_path: Path) -> None:
    import fcntl
    import struct

    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with path.open("r+b") as mine, path.open("rb") as probe:
        assert not is_locked(probe.fileno())
        byte = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1 << 40, 1, 0)
        fcntl.fcntl(mine.fileno(), fcntl.F_OFD_SETLK, byte)
        assert is_locked(probe.fileno())
    with path.open("rb") as probe:
        assert not is_locked(probe.fileno())


def test_lock_file_that_is_not_a_file_is_refused(shm_name: str, tmp_path: Path) -> None:
    path = Path(lock_path(shm_name))
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RadixError, match="lock file"):
        NameLock(shm_name)
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RadixError, match="not a file of user id"):
        NameLock(shm_name)
    assert lock_holder(shm_name) is None  # and does not wait for somebody to write into the pipe


# -- logs ---------------------------------------------------------------------------------------


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, put back as it was."""
    logger = logging.getLogger("radixshmem")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_json_lines(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    Logs(ServerConfig(log_format="json", log_file=str(path)))
    log.info("with %s", "words", extra={"bytes": 7})
    log.debug("not shown")
    try:
        raise ValueError("inside")
    except ValueError:
        log.exception("went wrong")
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["level"], first["message"], first["bytes"]) == ("info", "with words", 7)
    assert first["time"].endswith("+00:00")
    assert "ValueError: inside" in second["exception"]


def test_text_lines_and_level_switch(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(ServerConfig(log_level="warning"))
    log.info("hidden")
    log.warning("shown", extra={"slot": 3})
    assert "DEBUG now" in logs.renew()
    log.debug("shown too")
    assert "WARNING now" in logs.renew()
    log.debug("hidden")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == ["WARNING shown slot=3", "DEBUG shown too"]


def test_log_file_is_opened_anew(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs = Logs(ServerConfig(log_file=str(path)))
    log.info("one")
    path.rename(tmp_path / "log.1")
    assert "anew" in logs.renew()
    log.info("two")
    assert "two" in path.read_text()


# -- service manager ----------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_reaches_the_manager(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"radix-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address if abstract else address)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + address if abstract else address)
        assert notify(READY=1, STATUS="all well")
        assert manager.recv(100) == b"READY=1\nSTATUS=all well"


def test_notify_without_a_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify(READY=1)
    monkeypatch.setenv("NOTIFY_SOCKET", "/nobody/listens")
    assert not notify(READY=1)


@pytest.mark.parametrize(
    ("microseconds", "pid", "interval_s"),
    [("", "", None), ("0", "", None), ("x", "", None), ("2500000", "", 2.5), ("2500000", "1", None)],
)
def test_watchdog_interval(
    microseconds: str, pid: str, interval_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_interval_s() == interval_s


# -- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NameInUse(""), 3),
        (NoSpace(""), 4),
        (ClusterUnavailable(""), 5),
        (LeftoversInUse(""), 6),
        (ValueError(""), 2),
        (RadixError(""), 1),
        (OSError(""), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == ExitCode(code) == code
