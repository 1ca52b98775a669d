"""The server's end of the control channel."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol

import grpc

from radixshmem.control import codec
from radixshmem.control import control_pb2 as pb
from radixshmem.control.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from radixshmem.control.status_codes import code_of
from radixshmem.geometry import Geometry
from radixshmem.info import ServerInfo

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024  # a geometry has some hundred; what is longer is not one
_LOOK_S = 0.5  # how soon a stream notices that its client has gone
_END_MODES = ("ready", "failed", "closing")


class Backend(Protocol):
    """What the service needs of a server.  All of it is called from several threads at once."""

    @property
    def info(self) -> ServerInfo: ...

    def configure(self, geometry: Geometry | None) -> ServerInfo: ...

    def wait_change(self, seen: ServerInfo, timeout_s: float) -> ServerInfo:
        """The state once it differs from ``seen``, or after ``timeout_s``."""
        ...


class ControlService(ControlServicer):
    """Answers requests from ``backend``.

    Streams hold a thread each, so at most ``max_streams`` of them wait; a further one gets the state
    once and its client asks again.
    """

    def __init__(self, backend: Backend, max_streams: int) -> None:
        self._backend = backend
        self._streams = threading.BoundedSemaphore(max_streams)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.ServerInfo:  # noqa: N802
        return codec.info_to_wire(self._backend.info)

    def Configure(self, request: pb.ConfigureRequest, context: grpc.ServicerContext) -> pb.ServerInfo:  # noqa: N802
        try:
            geometry = codec.geometry_from_wire(request.geometry) if request.HasField("geometry") else None
            return codec.info_to_wire(self._backend.configure(geometry))
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets it and the server lives on
            _abort(context, error)

    def WatchReady(  # noqa: N802
        self, request: pb.WatchReadyRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ServerInfo]:
        info = self._backend.info
        yield codec.info_to_wire(info)
        if not self._streams.acquire(blocking=False):
            return
        try:
            while info.mode not in _END_MODES and context.is_active():
                seen, info = info, self._backend.wait_change(info, _LOOK_S)
                if info != seen:
                    yield codec.info_to_wire(info)
        finally:
            self._streams.release()


def build_server(backend: Backend, num_workers: int) -> grpc.Server:
    """A gRPC server for ``backend`` that is not bound to an address yet."""
    server = grpc.server(
        ThreadPoolExecutor(num_workers, thread_name_prefix="control"),
        options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES), ("grpc.so_reuseport", 0)],
    )
    add_ControlServicer_to_server(ControlService(backend, max(1, num_workers // 2)), server)  # type: ignore[no-untyped-call]
    return server


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    code = code_of(error)
    if code == grpc.StatusCode.INTERNAL:
        log.error("a control request failed unexpectedly", exc_info=error)
        context.abort(code, f"{type(error).__name__}: {error}")
    context.abort(code, str(error))
