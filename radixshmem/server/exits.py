"""Exit codes of radix-server, and the errors that lead to them."""

from __future__ import annotations

import errno
import resource
from enum import IntEnum

from radixshmem.errors import NoSpace, RadixError


class ExitCode(IntEnum):
    CLEAN = 0
    RUNTIME = 1
    USAGE = 2
    NAME_IN_USE = 3
    NO_SPACE = 4
    CLUSTER = 5
    LEFTOVERS_IN_USE = 6


class NameInUse(RadixError):  # noqa: N818
    """Another server of this name runs."""


class ClusterUnavailable(RadixError):  # noqa: N818
    """The cluster that the configuration asks for cannot be had."""


class LeftoversInUse(RadixError):  # noqa: N818
    """Clients still use an earlier server's regions, which do not fit this configuration."""


_CODES: list[tuple[type[Exception], ExitCode]] = [
    (NameInUse, ExitCode.NAME_IN_USE),
    (NoSpace, ExitCode.NO_SPACE),
    (ClusterUnavailable, ExitCode.CLUSTER),
    (LeftoversInUse, ExitCode.LEFTOVERS_IN_USE),
    (ValueError, ExitCode.USAGE),
    (TypeError, ExitCode.USAGE),
]


_LIMITS = {
    errno.EMFILE: ("open files (ulimit -n)", resource.RLIMIT_NOFILE),
    errno.EFBIG: ("file size (ulimit -f)", resource.RLIMIT_FSIZE),
    errno.ENOMEM: ("address space (ulimit -v)", resource.RLIMIT_AS),
}


def describe(error: Exception) -> str:
    """The error's text, with the resource limit that it comes from."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None) or 0
    what, limit = _LIMITS.get(number, ("", resource.RLIMIT_CORE))
    if not what or resource.getrlimit(limit)[0] == resource.RLIM_INFINITY:
        return str(error)
    return f"{error}: this process's limit of {what} is {resource.getrlimit(limit)[0]}; raise it"


def exit_code(error: Exception) -> ExitCode:
    """Exit code of a server that could not start because of ``error``."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.RUNTIME)
