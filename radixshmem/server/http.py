"""HTTP endpoint: /metrics, /healthz, /readyz."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

log = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0  # a scraper that stops sending must not keep a thread
_TEXT = "text/plain; charset=utf-8"

Probe = Callable[[], tuple[bool, str]]
"""Returns whether all is well, and a line that says how."""


class MetricsServer:
    """Serves until ``close``.  Raises OSError when ``host:port`` cannot be bound."""

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, health: Probe, ready: Probe
    ) -> None:
        routes = {"/metrics": _metrics(registry), "/healthz": _probe(health), "/readyz": _probe(ready)}

        class Handler(_Handler):
            answers = routes

        server_type = _Server6 if ":" in host else _Server
        self._server = server_type((host, port), Handler)
        self.address = "{}:{}".format(*self._server.server_address[:2])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Answer = Callable[[str], tuple[HTTPStatus, str, bytes]]  # (Accept header) -> status, content type, body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Two servers must not share a port; a port in TIME_WAIT may be taken over.
    allow_reuse_port = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request of %s failed", client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    answers: dict[str, Answer]
    timeout = _REQUEST_TIMEOUT_S
    server_version, sys_version = "radix-server", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        answer = self.answers.get(self.path.partition("?")[0], _not_found)
        status, content_type, body = answer(self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)


def _metrics(registry: CollectorRegistry) -> Answer:
    def answer(accept: str) -> tuple[HTTPStatus, str, bytes]:
        encode, content_type = choose_encoder(accept)
        return HTTPStatus.OK, content_type, encode(registry)

    return answer


def _probe(probe: Probe) -> Answer:
    def answer(accept: str) -> tuple[HTTPStatus, str, bytes]:
        is_well, text = probe()
        return HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{text}\n".encode()

    return answer


def _not_found(accept: str) -> tuple[HTTPStatus, str, bytes]:
    return HTTPStatus.NOT_FOUND, _TEXT, b"try /metrics, /healthz or /readyz\n"
