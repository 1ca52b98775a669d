"""The control channel between clients and a radix-server: gRPC on a Unix socket."""

from radixshmem.control.client import ControlClient

__all__ = ["ControlClient"]
