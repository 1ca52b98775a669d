"""The client's end of the control channel."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import grpc

from radixshmem.control import codec
from radixshmem.control import control_pb2 as pb
from radixshmem.control.control_pb2_grpc import ControlStub
from radixshmem.control.status_codes import error_of
from radixshmem.errors import RadixError, ServerUnavailable
from radixshmem.geometry import Geometry
from radixshmem.info import ServerInfo
from radixshmem.names import socket_path
from radixshmem.trust import check_socket_owner

_POLL_S = 0.05  # between two looks at a server that has no thread left to stream to us
_FOREVER_S = 1e6  # gRPC takes a much later deadline for one that has passed
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # a proxy variable must not divert a Unix socket
    ("grpc.use_local_subchannel_pool", 1),  # clients of one process must not share a backing-off connection
]


class ControlClient:
    """Talks to the radix-server at ``endpoint`` (``unix:///path``).  Safe to use from several threads.

    ``timeout_s`` is the deadline of each request.  Every method raises ServerUnavailable when nothing
    answers, TimeoutError when the deadline passes, and RadixError for a server that is closing.
    """

    def __init__(self, endpoint: str, timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._path = socket_path(endpoint)
        self._timeout_s = min(timeout_s, _FOREVER_S)
        self._connect()

    def status(self) -> ServerInfo:
        """What the server is doing now."""
        return self._call("Status", pb.StatusRequest())

    def configure(self, geometry: Geometry | None) -> ServerInfo:
        """Bring ``geometry``, or take the published one; returns once it is accepted, not when ready.

        Raises GeometryMismatch (the text shows both sides), ValueError (the text names the flag or
        field), NoSpace.
        """
        wire = codec.geometry_to_wire(geometry) if geometry else None
        return self._call("Configure", pb.ConfigureRequest(geometry=wire))

    def wait_ready(self, timeout_s: float) -> ServerInfo:
        """Wait until the server serves.

        Raises TimeoutError, whose text tells the server's mode now, and RadixError with the cause
        when configuring failed.
        """
        deadline = time.monotonic() + timeout_s
        info = None
        while info is None or time.monotonic() < deadline:
            for info in self._watch(deadline):
                if info.mode == "ready":
                    return info
                if info.mode == "failed":
                    raise RadixError(
                        f"radix-server {info.name} could not make its regions: {info.last_error}"
                    )
                if info.mode == "closing":
                    raise RadixError(f"radix-server {info.name} is closing")
            time.sleep(max(0.0, min(_POLL_S, deadline - time.monotonic())))
        raise TimeoutError(f"radix-server {info.name} is still {_describe(info)} after {timeout_s:g} s")

    def close(self) -> None:
        """Close the channel; calls under way fail."""
        self._channel.close()

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self.endpoint, options=_CHANNEL_OPTIONS)
        self._stub = ControlStub(self._channel)  # type: ignore[no-untyped-call]

    def _call(self, method: str, request: Any) -> ServerInfo:
        self._check_socket()
        try:
            return codec.info_from_wire(getattr(self._stub, method)(request, timeout=self._timeout_s))
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def _watch(self, deadline: float) -> Iterator[ServerInfo]:
        """States of the server until it stops streaming or the deadline passes; at least one."""
        yield self.status()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        try:
            for message in self._stub.WatchReady(pb.WatchReadyRequest(), timeout=min(left_s, _FOREVER_S)):
                yield codec.info_from_wire(message)
        except grpc.RpcError as error:
            if _code(error) != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._translate(error) from error

    def _check_socket(self) -> None:
        check_socket_owner(self._path)
        if not os.path.exists(self._path):
            raise ServerUnavailable(f"no radix-server at {self.endpoint}")

    def _translate(self, error: grpc.RpcError) -> Exception:
        code, text = _code(error), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            # This channel would repeat its error until a back-off is over, whoever listens by then.
            self._connect()
            text = f"no radix-server answers at {self.endpoint} ({text})"
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            text = f"radix-server at {self.endpoint} did not answer within {self._timeout_s:g} s"
        return error_of(code, text)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()
    return code


def _describe(info: ServerInfo) -> str:
    if info.mode == "waiting":
        return "waiting for a client's geometry"
    return f"{info.mode} ({math.floor(100 * info.progress)} % of its memory is ready)"
