"""A rank hands its KV tensors to the transfer worker."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from flexkv_radix.transfer.protocol import Register, Registered, RegisterRank
from flexkv_radix.transfer.wire import Channel, connect, send_fds, wait_readable

_CLOSE_TIMEOUT_S = 5.0  # a transfer that runs is waited for


class RankRefused(RuntimeError):  # noqa: N818
    """The worker does not take the rank.  may_pass: another time it may."""

    def __init__(self, text: str, *, may_pass: bool) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class Registration:
    """Keeps a rank registered: the worker drops the rank's memory when this, or the process, ends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def is_alive(self) -> bool:
        """Whether the worker still holds the registration."""
        if not self._channel.is_open:
            return False
        return not wait_readable(self._channel)

    def close(self) -> bool:
        """Withdraw; whether the worker, if it lives, has unmapped the memory (it may take its time)."""
        is_unmapped = True
        if self._channel.is_open:
            with contextlib.suppress(OSError):  # the worker is gone
                self._channel.sock.shutdown(socket.SHUT_WR)
            is_unmapped = wait_readable(self._channel, _CLOSE_TIMEOUT_S)
        self._channel.close()
        return is_unmapped


def register_rank(
    endpoint: str, rank: RegisterRank, fds: Sequence[int], timeout_s: float = 600.0, *, wait: bool = True
) -> Registration:
    """Register rank with the worker that listens, or (unless wait is False) will listen, on endpoint.

    fds: one per CPU storage, in the order of rank.storages; they stay the caller's.  The memory has
    to stay allocated as long as the registration.  Raises TimeoutError when no worker comes up or
    answers, another OSError when it ends meanwhile, RankRefused with its text when it refuses.
    """
    deadline_s = time.monotonic() + timeout_s
    channel = Channel(connect(endpoint, timeout_s if wait else 0.0))
    try:
        channel.sock.settimeout(max(0.1, deadline_s - time.monotonic()))
        channel.send(Register(rank))
        send_fds(channel.sock, fds)
        reply = _receive_reply(channel)
        if reply.error:
            why = f"{endpoint}: the transfer worker refused {rank.place}: {reply.error}"
            raise RankRefused(why, may_pass=reply.may_pass)
        channel.sock.settimeout(None)
    except BaseException:
        channel.close()
        raise
    return Registration(channel)


def _receive_reply(channel: Channel) -> Registered:
    reply = None
    with contextlib.suppress(socket.timeout):
        reply = channel.receive()
    if not isinstance(reply, Registered):
        raise TimeoutError(f"the transfer worker did not answer a registration: {reply}")
    return reply
