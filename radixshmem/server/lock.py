"""The lock on a server's name.

Guarantees: at most one process holds it, whatever files earlier servers left behind; it is released
by the kernel when its holder dies, in whatever way.  Existence of the file means nothing.

The file may be unlinked and made anew between our open and our lock.  Then we hold a lock on a file
that nobody else will ever open; so after locking, the path must still lead to the locked inode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from radixshmem import names
from radixshmem.errors import RadixError
from radixshmem.file_lock import is_locked, lock_file
from radixshmem.server.exits import NameInUse

_PID_BYTES = 32


class NameLock:
    """The held lock on ``name``; ``release`` or ``remove`` ends it."""

    def __init__(self, name: str) -> None:
        """Take the lock.  Raises NameInUse, and RadixError when the lock file is not ours to use."""
        self.path = names.lock_path(name)
        self._fd = _lock_file(name, self.path)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)  # for people and radixctl only

    def release(self) -> None:
        """Let go and leave the file: the regions are kept for the next server."""
        os.close(self._fd)

    def remove(self) -> None:
        """Unlink the file while it is still locked, unless somebody else did, then let go."""
        if _leads_to(self.path, self._fd):
            os.unlink(self.path)
        os.close(self._fd)


def lock_holder(name: str) -> int | None:
    """Pid, as it saw itself, of the server that runs as ``name``; 0 if unknown; None if none runs.

    Nobody holds what is no regular file: NameLock refuses it.  Raises PermissionError when the lock file
    belongs to another user.
    """
    path = names.lock_path(name)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        # Not blocking: a pipe may have come meanwhile.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not is_locked(fd):
            return None
        text = os.pread(fd, _PID_BYTES, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(fd)


def _lock_file(name: str, path: str) -> int:
    """An fd of the file at ``path`` that holds the lock."""
    while True:
        fd = _open(path)
        try:
            lock_file(fd)
            if _leads_to(path, fd):
                return fd
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = lock_holder(name)
            raise NameInUse(
                f"a radix-server called {name} runs already{f' as process {holder}' if holder else ''}: "
                "stop it, or choose another --name"
            ) from None
        os.close(fd)


def _open(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        raise RadixError(f"{path} belongs to another user: choose another --name, or remove it") from error
    except OSError as error:
        raise RadixError(f"{path} cannot be opened as a lock file: {error.strerror}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise RadixError(
            f"{path} is not a file of user id {os.geteuid()}: choose another --name, or remove it"
        )
    return fd


def _leads_to(path: str, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    return False
