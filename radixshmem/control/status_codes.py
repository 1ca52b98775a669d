"""Which gRPC status stands for which error.  The one table for both ends."""

from __future__ import annotations

import grpc

from radixshmem.errors import GeometryMismatch, NoSpace, RadixError, ServerUnavailable

# First match wins: subclasses before their bases.
_CODES: list[tuple[type[Exception], grpc.StatusCode]] = [
    (GeometryMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (TypeError, grpc.StatusCode.INVALID_ARGUMENT),
    (NoSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RadixError, grpc.StatusCode.ABORTED),
]
_ERRORS: dict[grpc.StatusCode, type[Exception]] = {
    grpc.StatusCode.FAILED_PRECONDITION: GeometryMismatch,
    grpc.StatusCode.INVALID_ARGUMENT: ValueError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoSpace,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimeoutError,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """Status that carries ``error``; INTERNAL for one that no caller expects."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def error_of(code: grpc.StatusCode, text: str) -> Exception:
    """The error that a caller gets for a status; RadixError for one without its own."""
    kind = _ERRORS.get(code)
    return kind(text) if kind else RadixError(f"{code.name}: {text}" if code.name != "ABORTED" else text)
