"""Give a new file all its memory up front: place, allocate, touch.

Order matters: the NUMA policy must stand before fallocate, which places the pages; fallocate comes
before any touch, so that a full file system is an error here and never a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from radixshmem.errors import NoSpace, RadixError
from radixshmem.sizes import format_size

ALLOCATE_CHUNK_BYTES = 2**30  # one fallocate call: long enough to be cheap, short enough for progress
TOUCH_SLICE_BYTES = 2**26  # unit of work of a thread: about 10 ms
MAX_TOUCH_THREADS = 16  # page clearing saturates memory well before this many
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}

Progress = Callable[[int, int], None]
"""Called with (bytes ready, bytes in all) in the thread that allocates; may raise to give up."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Prefault:
    """How a file's pages are made.  ``num_threads`` 0: one a usable core, at most 16.

    ``numa_nodes``: none leaves placement to the kernel, one binds to it, several interleave.
    """

    touch: bool = True
    num_threads: int = 0
    numa_nodes: tuple[int, ...] = ()


def allocate_pages(
    fd: int, num_bytes: int, what: str, how: Prefault = Prefault(), progress: Progress | None = None
) -> None:
    """Size the new, empty file ``fd`` to ``num_bytes`` and allocate (and touch) all of it.

    Raises NoSpace when the file system is full, naming ``what``, and RadixError when the NUMA nodes
    are refused.
    """
    os.ftruncate(fd, num_bytes)
    with mmap.mmap(fd, num_bytes) as mapping:
        address = _address_of(mapping)
        if how.numa_nodes:
            _bind_numa(address, num_bytes, how.numa_nodes)
        _allocate_and_touch(fd, address, num_bytes, what, how, progress)


def touch_threads(how: Prefault) -> int:
    """Threads that touching will use."""
    return how.num_threads or min(len(os.sched_getaffinity(0)), MAX_TOUCH_THREADS)


def _allocate_and_touch(
    fd: int, address: int, num_bytes: int, what: str, how: Prefault, progress: Progress | None
) -> None:
    """Allocate chunk after chunk in this thread while a pool touches what is allocated already."""
    report = progress or (lambda done, total: None)
    touched = 0
    report(0, num_bytes)
    with ThreadPoolExecutor(touch_threads(how), thread_name_prefix="prefault") as pool:
        pending: list[Future[int]] = []
        try:
            for start in range(0, num_bytes, ALLOCATE_CHUNK_BYTES):
                end = min(start + ALLOCATE_CHUNK_BYTES, num_bytes)
                _fallocate(fd, start, end - start, num_bytes, what)
                if how.touch:
                    pending += [pool.submit(_touch, address + a, n) for a, n in _slices(start, end)]
                    report(sum(job.result() for job in pending if job.done()), num_bytes)
                else:
                    report(end, num_bytes)
            for job in as_completed(pending):
                touched += job.result()
                report(touched, num_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _slices(start: int, end: int) -> list[tuple[int, int]]:
    return [(a, min(TOUCH_SLICE_BYTES, end - a)) for a in range(start, end, TOUCH_SLICE_BYTES)]


def _fallocate(fd: int, start: int, length: int, num_bytes: int, what: str) -> None:
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        free = os.statvfs(f"/proc/self/fd/{fd}")
        raise NoSpace(
            f"{what} needs {num_bytes} bytes ({format_size(num_bytes)}), but its file system was full after "
            f"{start} (size {format_size(free.f_blocks * free.f_frsize)}): enlarge it (docker --shm-size, "
            "Kubernetes emptyDir sizeLimit, mount -o remount,size=..., more huge pages) or lower --data-bytes"
        ) from error


def _touch(address: int, length: int) -> int:
    """Map every page of a fresh range writable; returns ``length``.  Runs without the GIL."""
    if _libc.madvise(address, length, MADV_POPULATE_WRITE) != 0:
        if ctypes.get_errno() == errno.EFAULT:  # the pages exist but cannot be had: a poisoned page
            raise RadixError("touching the region failed: bad memory")
        ctypes.memset(address, 0, length)  # a kernel before 5.14
    return length


def _address_of(mapping: mmap.mmap) -> int:
    # The ctypes object must be gone before the mapping closes, hence the function.
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _bind_numa(address: int, length: int, nodes: Sequence[int]) -> None:
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        raise RadixError(f"--numa is not supported on {platform.machine()}")
    words = [0] * (max(nodes) // 64 + 1)
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    mask = (ctypes.c_uint64 * len(words))(*words)
    mode = _MPOL_BIND if len(nodes) == 1 else _MPOL_INTERLEAVE
    # The kernel reads maxnode - 1 bits.
    if _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(mode),
        mask,
        ctypes.c_ulong(len(words) * 64 + 1),
        ctypes.c_uint(0),
    ):
        code = ctypes.get_errno()
        raise RadixError(f"--numa {','.join(map(str, nodes))}: mbind failed: {os.strerror(code)}")
