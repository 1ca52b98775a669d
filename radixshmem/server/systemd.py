"""systemd's notification protocol.  Without ``NOTIFY_SOCKET`` everything here does nothing."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(**fields: str | int) -> bool:
    """Tell the service manager, e.g. ``notify(READY=1, STATUS="...")``; returns whether it was told."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    address = "\0" + path[1:] if path[0] == "@" else path
    text = "\n".join(f"{key}={value}" for key, value in fields.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.sendto(text.encode(), address)
    except OSError as error:
        log.warning("the service manager at %s could not be told: %s", path, error)
        return False
    return True


def watchdog_interval_s() -> float | None:
    """Seconds within which the service manager wants a sign of life; None if it wants none."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or int(microseconds) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(microseconds) / 1e6
