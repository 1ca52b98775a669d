"""Errors of the package.  A miss, a full pool or a busy index is a result, not an error."""

from __future__ import annotations

from enum import IntEnum


class RadixError(RuntimeError):
    """Base of the errors that say something about the server, the region or the client."""


class ServerUnavailable(RadixError):  # noqa: N818 - a condition that callers retry on
    """Nothing answers at the server's socket.  The text starts with ``UNAVAILABLE:``."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail if detail.startswith("UNAVAILABLE") else f"UNAVAILABLE: {detail}")


class ServerNotReady(RadixError):  # noqa: N818
    """The server answers but has no region to serve from yet."""


class GeometryMismatch(ValueError):  # noqa: N818
    """The client's geometry is not the published one; the text shows both."""


class CorruptRegion(RadixError):  # noqa: N818
    """The region is damaged, or not of this version (LayoutMismatch)."""


class LayoutMismatch(CorruptRegion):
    """The region was built with another layout version or ABI; its bytes mean nothing here."""


class RegionRetired(RadixError):  # noqa: N818
    """The server stopped for good or made its regions anew; ``RadixClient.reattach`` follows it."""


class ClientClosed(RadixError):  # noqa: N818
    """The client was closed."""


class IndexBusy(RadixError):  # noqa: N818
    """Not now; nearly always because the index lock was not free within its deadline.

    The text starts with ``BUSY:``.
    """

    def __init__(self, detail: str) -> None:
        super().__init__(f"BUSY: {detail}")


class NoSpace(RadixError):  # noqa: N818
    """Shared memory, huge pages or RAM do not suffice; the text has the numbers and the fix."""


class InsertError(IntEnum):
    """How an insert ended.  Returned, never raised."""

    OK = 0
    FULL_PATH_MISSING = 1
    PREFIX_MISSING = 2
    STALE_GENERATION = 3
    BUSY = 4
