"""Names of a server and of the objects that it owns."""

from __future__ import annotations

import re

from radixshmem.arrays import check_text

SHM_DIR = "/dev/shm"  # where glibc's shm_open puts POSIX shared memory on Linux
_NAME = re.compile(r"/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_NAME_CHARS = 80  # behind the slash
_MAX_OBJECT_CHARS = 85  # ... with "_data"
_RESERVED_ENDINGS = ("_data", ".sock", ".lock")
_UNIX_SCHEME = "unix:"
_URI_CHARACTERS = "%?#"
_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its closing zero


def check_name(name: str, flag: str = "name") -> str:
    """Return ``name`` if a server may be called so; ValueError naming ``flag`` otherwise."""
    _check(name, flag, _MAX_NAME_CHARS)
    ending = next((ending for ending in _RESERVED_ENDINGS if name.endswith(ending)), None)
    if ending:
        raise ValueError(
            f"{flag}: {name!r} must not end in {ending!r}, which marks another object of a server"
        )
    return name


def check_object_name(name: str, flag: str) -> str:
    """Return ``name`` if a shared-memory object may be called so; ValueError naming ``flag`` otherwise."""
    return _check(name, flag, _MAX_OBJECT_CHARS)


def _check(name: str, flag: str, max_chars: int) -> str:
    is_text = isinstance(name, str) and len(name) <= 1 + max_chars
    if not is_text or not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{flag}: {name!r} is not a name; write '/' and then 1 to {max_chars} of A-Z a-z 0-9 _ . - "
            "(first a letter, digit or _; no '..'), such as /flexkv"
        )
    return name


def shm_path(name: str) -> str:
    """File of the shared-memory object ``name``."""
    return SHM_DIR + name


def default_data_name(name: str) -> str:
    """The SlotStore's name unless ``--data-name`` gives another."""
    return name + "_data"


def lock_path(name: str) -> str:
    """File whose lock says that a server called ``name`` runs."""
    return shm_path(name) + ".lock"


def default_endpoint(name: str) -> str:
    """Control endpoint of the server ``name`` unless ``--endpoint`` gives another."""
    return f"{_UNIX_SCHEME}//{shm_path(name)}.sock"


def socket_path(endpoint: str, flag: str = "endpoint") -> str:
    """Path of the Unix socket that ``endpoint`` (``unix:///path``) names; ValueError naming ``flag``."""
    check_text(endpoint, flag)
    path = endpoint.removeprefix(_UNIX_SCHEME)
    path = "/" + path.lstrip("/") if path.startswith("/") else path
    if not endpoint.startswith(_UNIX_SCHEME) or not path.startswith("/") or path.endswith("/"):
        raise ValueError(f"{flag}: {endpoint!r} is not a Unix socket; write unix:///path/to/socket")
    if any(character in path for character in _URI_CHARACTERS):
        raise ValueError(
            f"{flag}: the path {path!r} must hold none of {_URI_CHARACTERS}, which gRPC interprets"
        )
    if len(path.encode()) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"{flag}: the path {path!r} is longer than {_MAX_SOCKET_PATH_BYTES} bytes")
    return path
