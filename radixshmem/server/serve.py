"""Run a RadixServer as a process of its own: signals, service manager, exit code."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType

from radixshmem.config import ServerConfig
from radixshmem.errors import RadixError
from radixshmem.info import ServerInfo
from radixshmem.server.exits import ExitCode, describe, exit_code
from radixshmem.server.logs import Logs
from radixshmem.server.server import RadixServer
from radixshmem.server.systemd import notify, watchdog_interval_s

log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_S = 1.0  # how soon the service manager sees progress


def serve(config: ServerConfig) -> ExitCode:
    """Run a server until a signal stops it; returns the exit code.  Call it in the main thread."""
    try:
        logs = Logs(config)
    except OSError as error:
        raise ValueError(f"--log-file: {config.log_file} cannot be opened: {error.strerror}") from error
    signals = _Signals()
    try:
        with RadixServer(config, show_progress=True) as server:
            notify(READY=1, STATUS=_status_line(server.info))
            _run(server, logs, signals)
            notify(STOPPING=1)
    except (RadixError, ValueError, TypeError, OSError, MemoryError) as error:
        log.error("%s", describe(error))
        log.debug("where it came from", exc_info=error)
        return exit_code(error)
    except Exception:
        log.exception("this should not have happened")
        return ExitCode.RUNTIME
    return ExitCode.CLEAN


class _Signals:
    """Turns signals into a queue that the main thread reads.

    The second stop signal ends the process at once, whatever the main thread waits for.
    """

    def __init__(self) -> None:
        self.queue: SimpleQueue[int] = SimpleQueue()  # put() may be called from a signal handler
        self._is_stopping = False
        for number in (*_STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in _STOP_SIGNALS:
            if self._is_stopping:
                os._exit(ExitCode.RUNTIME)
            self._is_stopping = True
        self.queue.put(number)


def _run(server: RadixServer, logs: Logs, signals: _Signals) -> None:
    """Until a stop signal: answer the other signals and keep the service manager informed."""
    watchdog_s = watchdog_interval_s()
    look_s = min(_LOOK_S, watchdog_s / 2) if watchdog_s else _LOOK_S
    actions: dict[int, Callable[[], None]] = {
        signal.SIGHUP: lambda: log.info("SIGHUP: %s", logs.renew()),
        signal.SIGUSR1: lambda: log.info("SIGUSR1: %s", _dump(server)),
    }
    shown = ""
    while True:
        try:
            number = signals.queue.get(timeout=look_s)
        except Empty:
            number = 0
        if number in _STOP_SIGNALS:
            log.info("%s: stopping", signal.Signals(number).name)
            return
        if number:
            actions[number]()
        line = _status_line(server.info)
        if line != shown:
            notify(STATUS=line)
            shown = line
        if watchdog_s and _is_working(server):
            notify(WATCHDOG=1)


def _is_working(server: RadixServer) -> bool:
    """Once ready only a real lookup counts; before, that the upkeep thread comes round."""
    if server.info.mode == "ready":
        return server.probe_ready()[0]
    return server.probe_health()[0]


def _status_line(info: ServerInfo) -> str:
    if info.mode == "waiting":
        return "waiting for a client's geometry"
    if info.mode == "configuring":
        return f"making the regions: {100 * info.progress:.0f} %"
    return f"{info.mode}: {info.last_error}" if info.last_error else info.mode


def _dump(server: RadixServer) -> str:
    """Everything the server knows, on one line."""
    return json.dumps({"info": dataclasses.asdict(server.info), "stats": server.stats()}, default=str)
