"""The radix-server: owns the regions, answers the handshake, reaps, evicts, reports."""

from radixshmem.server.exits import (
    ClusterUnavailable,
    ExitCode,
    LeftoversInUse,
    NameInUse,
    exit_code,
)
from radixshmem.server.server import RadixServer

__all__ = ["ClusterUnavailable", "ExitCode", "LeftoversInUse", "NameInUse", "RadixServer", "exit_code"]
