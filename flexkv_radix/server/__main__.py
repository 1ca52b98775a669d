"""python -m flexkv_radix.server --endpoint ipc:///tmp/flexkv_server: serve a node's engines."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from flexkv_radix.metrics import MetricsEndpoint
from flexkv_radix.server.server import KVServer
from flexkv_radix.settings import load_settings
from flexkv_radix.transfer.peers import StrangerError


def main() -> int:
    settings = load_settings()
    parser = argparse.ArgumentParser(prog="flexkv_radix.server", description=__doc__)
    parser.add_argument(
        "--endpoint", default=settings.server_recv_port, help="ipc:///path (default: FLEXKV_SERVER_RECV_PORT)"
    )
    parser.add_argument(
        "--background",
        action="store_true",
        help="leave the caller alone, and stop when the last client has left",
    )
    arguments = parser.parse_args()
    if arguments.background:
        if os.fork():
            os._exit(0)
        os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s KVServer: %(message)s")
    metrics = MetricsEndpoint(settings.metrics_port) if settings.enable_metrics else None
    try:
        server = KVServer(arguments.endpoint, exit_when_idle=arguments.background, metrics=metrics)
    except BlockingIOError:
        if arguments.background:
            return 0  # another engine's was quicker
        parser.error(f"--endpoint: {arguments.endpoint} is served already")
    except StrangerError as error:
        parser.error(f"--endpoint: {error}")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: server.request_stop())
    server.serve()
    if metrics is not None:
        metrics.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
