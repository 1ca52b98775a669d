"""The engine's side of the transfer worker."""

from __future__ import annotations

from collections.abc import Callable

from flexkv_radix.transfer.protocol import OpResult, TransferConfig, TransferOp


class TransferHandle:
    """Spawns the transfer worker of one engine and talks to it.

    lease_fd is dup'ed into the worker, so that the client's staged slots stay its own until the
    worker is gone.  mark_device is called (on a thread of the handle) before the worker registers
    slots with a device: pass RadixClient.set_device.
    """

    def __init__(
        self, config: TransferConfig, *, lease_fd: int, mark_device: Callable[[], None] | None = None
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Spawn the worker and return at once."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """True once every rank has registered.  RuntimeError with the worker's text if start-up failed."""
        raise NotImplementedError

    def submit(self, ops: list[TransferOp]) -> None:
        """Queue ops.  TransferDied when the worker is gone; RuntimeError before is_ready()."""
        raise NotImplementedError

    def poll(self, timeout_s: float = 0.0) -> list[OpResult]:
        """Results that arrived since the last call; waits up to timeout_s for the first one.

        TransferDied once the worker is gone and every result it sent was returned.
        """
        raise NotImplementedError

    def shutdown(self) -> None:
        """Stop the worker and wait for it; idempotent."""
        raise NotImplementedError
