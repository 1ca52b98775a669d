"""Record locks of open files: the kernel drops them with the file's last use, however its holder ends."""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid
_WRITE_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lock_file(fd: int) -> None:
    """Lock the file open as ``fd``, until it is closed.  OSError (EAGAIN) if another has it locked."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WRITE_WHOLE_FILE)


def is_locked(fd: int) -> bool:
    """Whether anybody else holds a record lock on any byte of the file open as ``fd``."""
    probe = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WRITE_WHOLE_FILE)
    return bool(_FLOCK.unpack(probe)[0] != fcntl.F_UNLCK)
