"""What a server says about itself, and who waits for it to change.

    waiting ----- Configure, adoption -----> configuring -----> ready
       |                                        |   ^             |
       | no space                         error |   | Configure   | corrupt, retired
       |                                        v   |             |
       +------------------------------------->  failed  <---------+

Every mode may go to closing, which is the last one.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from radixshmem.info import ServerInfo

_NEXT = {
    "waiting": ("configuring", "failed", "closing"),
    "configuring": ("ready", "failed", "closing"),
    "ready": ("failed", "closing"),
    "failed": ("configuring", "closing"),
    "closing": (),
}


class ServerState:
    """The current ServerInfo.  Readers get it whole; changes wake who waits."""

    def __init__(self, info: ServerInfo) -> None:
        self._info = info
        self._changed = threading.Condition()

    @property
    def info(self) -> ServerInfo:
        return self._info

    def update(self, **changes: Any) -> ServerInfo:
        """Replace fields.  A closing server stays closing, whatever its threads still report."""
        with self._changed:
            mode = changes.get("mode", self._info.mode)
            if self._info.mode == "closing" and mode != "closing":
                changes.pop("mode")
            elif mode != self._info.mode and mode not in _NEXT[self._info.mode]:
                raise AssertionError(f"a server does not go from {self._info.mode} to {mode}")
            self._info = dataclasses.replace(self._info, **changes)
            self._changed.notify_all()
            return self._info

    def wait_change(self, seen: ServerInfo, timeout_s: float) -> ServerInfo:
        """The state once it differs from ``seen``, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._info != seen, timeout_s)
            return self._info
