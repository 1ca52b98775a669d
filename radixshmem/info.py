"""What a server says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

ServerMode = Literal["waiting", "configuring", "ready", "failed", "closing"]
SERVER_MODES: tuple[ServerMode, ...] = get_args(ServerMode)


@dataclass(frozen=True)
class ServerInfo:
    """A server's answer to Status, Configure and WatchReady.

    ``mode``: ``waiting`` for a client's geometry, ``configuring`` (making or adopting regions),
    ``ready``, ``failed`` (``last_error`` says why; the next Configure may try again), ``closing``.
    ``geometry`` has the shape of ``RadixClient.geometry`` and is None until one was accepted.
    ``progress`` is the fraction of the regions' bytes that is reserved and prefaulted.
    ``epoch``: 32 hex digits that change whenever the regions are made anew; "" without regions.
    """

    name: str
    index_name: str
    data_name: str
    endpoint: str
    mode: ServerMode
    last_error: str = ""
    rank: int = 0
    world_size: int = 1
    data_plane: bool = False
    geometry: dict[str, Any] | None = None
    hugepage_path: str = ""
    pid: int = 0
    epoch: str = ""
    version: str = ""
    progress: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.mode == "ready"
