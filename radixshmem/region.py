"""Make, open, retire and remove a server's pair of shared-memory files.

The index ``<name>`` is POSIX shared memory; the SlotStore ``<name>_data`` is too, or a file on
hugetlbfs.  Both are new inodes, sized and allocated before anybody can use them; the SlotStore
turns READY first, the index last, so that whoever sees a READY index finds all of it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import posix_ipc

from radixshmem import _native
from radixshmem.errors import CorruptRegion, LayoutMismatch, NoSpace, RadixError
from radixshmem.file_lock import is_locked, lock_file
from radixshmem.names import shm_path
from radixshmem.prefault import Prefault, Progress, allocate_pages
from radixshmem.records import RegionConfig, RegionState
from radixshmem.store_header import read_owner, write_owner, write_pools
from radixshmem.trust import check_region_owner

SMALL_PAGE_BYTES = 4096
_NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # a link, a directory, a socket


@dataclass(frozen=True)
class Access:
    """Who may open the files: permission bits, and a group id when the group is not the process's."""

    mode: int = 0o600
    gid: int | None = None


def page_bytes(hugepage_path: str = "") -> int:
    """Page size of the SlotStore's file system."""
    return os.statvfs(hugepage_path).f_frsize if hugepage_path else SMALL_PAGE_BYTES


def plan_files(config: RegionConfig) -> tuple[RegionConfig, int, int]:
    """(config with the pools' offsets filled in, bytes of the index file, bytes of the SlotStore file).

    The SlotStore's bytes are 0 for an index-only config (``data_bytes`` 0).
    """
    store_bytes = 0
    if config.data_bytes:
        geometry, store_bytes = config.geometry.lay_out(page_bytes(config.hugepage_path))
        config = replace(config, geometry=geometry)
    return config, _native.region_bytes(config), store_bytes


def create_regions(
    name: str,
    config: RegionConfig,
    access: Access = Access(),
    how: Prefault = Prefault(),
    progress: Progress | None = None,
) -> RegionConfig:
    """Make both files of the server ``name`` and publish them; returns the config with epoch and offsets.

    ``config.data_name`` names the SlotStore (unused when ``data_bytes`` is 0).  ``progress`` is called
    with (bytes ready, bytes of both files).  On any failure, also one that ``progress`` raises, nothing
    is left behind.  Raises FileExistsError when an object of that name is there, NoSpace, ValueError.
    """
    config, index_bytes, store_bytes = plan_files(replace(config, epoch=secrets.token_bytes(16)))
    report = progress or (lambda done, total: None)
    total = index_bytes + store_bytes
    with _new_file(name, "", access) as index_fd:
        allocate_pages(index_fd, index_bytes, f"the index {name}", how, lambda done, _: report(done, total))
        _native.region_format(index_fd, config)
        if store_bytes:
            with _new_file(config.data_name, config.hugepage_path, access) as store_fd:
                lock_file(store_fd)  # until it says whose it is (see store_refusal)
                allocate_pages(
                    store_fd,
                    store_bytes,
                    f"the SlotStore {config.data_name}",
                    how,
                    lambda done, _: report(index_bytes + done, total),
                )
                _format_store(store_fd, name, config, store_bytes)
                _native.region_set_state(index_fd, RegionState.READY)
        else:
            _native.region_set_state(index_fd, RegionState.READY)
    return config


def open_index(name: str, *, own: bool = False) -> int:
    """Open the index ``name`` (read and write, close-on-exec) and check its owner; returns the fd.

    ``own`` demands this process's effective user.  Raises FileNotFoundError, PermissionError, RadixError.
    """
    return open_object(name, own=own)


def open_object(name: str, hugepage_path: str = "", *, own: bool = False) -> int:
    """Open one of a server's files, never through a link, and check its owner; returns the fd."""
    path = object_path(name, hugepage_path)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError as error:
        raise PermissionError(_describe_refusal(path)) from error
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise RadixError(f"{path} is not a regular file: remove it, or choose another name") from error
        raise
    try:
        check_region_owner(fd, path, own=own)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _describe_refusal(path: str) -> str:
    status = os.stat(path, follow_symlinks=False)
    return (
        f"{path} may not be opened by user id {os.geteuid()}: it is user id {status.st_uid}'s, group id "
        f"{status.st_gid}'s, mode {stat.S_IMODE(status.st_mode):04o}; run as that user, or start its "
        "radix-server with --group and --mode 0660"
    )


def object_path(name: str, hugepage_path: str = "") -> str:
    """Path of the object ``name``."""
    return hugepage_path.rstrip("/") + name if hugepage_path else shm_path(name)


def retire_regions(name: str) -> None:
    """Mark the regions of ``name`` RETIRED, so that whoever is attached learns it, and unlink them.

    Only files of this process's effective user are touched, and a SlotStore of another server is not.
    Files that are gone, or are no regions, are no error: the latter are unlinked all the same.  Raises
    RadixError, and changes nothing, if ``name`` is the SlotStore of another server.
    """
    store = recorded_store(name)
    has_store = bool(store and store[0] and not store_refusal(name, *store))
    with suppress(FileNotFoundError), _opened(name, "") as index_fd:
        refuse_store(index_fd, name)
        _set_state(_native.region_set_state, index_fd)
    unlink_object(name)
    if store and has_store:
        destroy_store(*store)


def refuse_store(index_fd: int, name: str) -> None:
    """Raise RadixError if what is open as the index ``name`` is the SlotStore of another server."""
    owner = read_owner(index_fd)
    if owner:
        raise RadixError(
            f"--name: {shm_path(name)} is the SlotStore of radix-server {owner}, which has it as its "
            "--data-name: choose another --name"
        )


def store_refusal(name: str, data_name: str, hugepage_path: str = "") -> str:
    """Why the SlotStore may not be removed for the server ``name``; "" if it may be, or is not there.

    A SlotStore says whose it is.  One that was not finished does not: it is the server's whose index
    names it, unless somebody is still making it.
    """
    with suppress(FileNotFoundError), _opened(data_name, hugepage_path) as fd:
        path, owner = object_path(data_name, hugepage_path), read_owner(fd)
        if owner:
            return "" if owner == name else f"{path} is the SlotStore of radix-server {owner}"
        if is_locked(fd):
            return f"{path} is being made by another server"
        if recorded_store(name) != (data_name, hugepage_path) or not _may_be_made_with(fd, name):
            return f"{path} is not known to be of radix-server {name}"
    return ""


def _may_be_made_with(store_fd: int, name: str) -> bool:
    """Whether a SlotStore without an owner has the epoch of the index ``name``, or none yet."""
    with suppress(FileNotFoundError), _opened(name, "") as index_fd, suppress(CorruptRegion, LayoutMismatch):
        epoch = _native.region_peek(index_fd).config.epoch
        try:
            return _native.store_peek(store_fd).epoch == epoch
        except CorruptRegion:
            return True
    return False


def recorded_store(name: str) -> tuple[str, str] | None:
    """(name, huge page path) of the SlotStore that the index ``name`` was made with; the name is "" if there
    is none.  None without an index, and with one that cannot be read.
    """
    with suppress(FileNotFoundError), _opened(name, "") as index_fd, suppress(CorruptRegion, LayoutMismatch):
        config = _native.region_peek(index_fd).config
        return config.data_name, config.hugepage_path
    return None


def destroy_store(name: str, hugepage_path: str = "") -> None:
    """Mark the SlotStore ``name`` RETIRED and unlink it; nothing there is no error."""
    with suppress(FileNotFoundError), _opened(name, hugepage_path) as fd:
        _set_state(_native.store_set_state, fd)
    unlink_object(name, hugepage_path)


def unlink_object(name: str, hugepage_path: str = "") -> None:
    """Remove the name of an object; nothing there is no error."""
    with suppress(FileNotFoundError, posix_ipc.ExistentialError):
        if hugepage_path:
            os.unlink(object_path(name, hugepage_path))
        else:
            posix_ipc.unlink_shared_memory(name)


@contextmanager
def _opened(name: str, hugepage_path: str) -> Iterator[int]:
    fd = open_object(name, hugepage_path, own=True)
    try:
        yield fd
    finally:
        os.close(fd)


def _set_state(setter: Callable[[int, RegionState], None], fd: int) -> None:
    with suppress(RadixError, OSError):  # not a region, or one too short to map: nobody can serve from it
        setter(fd, RegionState.RETIRED)


@contextmanager
def _new_file(name: str, hugepage_path: str, access: Access) -> Iterator[int]:
    """A new file under its final name, readable as ``access`` says; unlinked if the body fails."""
    fd = _create(name, hugepage_path)
    try:
        if access.gid is not None:
            os.fchown(fd, -1, access.gid)
        os.fchmod(fd, access.mode)
        yield fd
    except BaseException:
        unlink_object(name, hugepage_path)
        raise
    finally:
        os.close(fd)


def _create(name: str, hugepage_path: str) -> int:
    if hugepage_path:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(object_path(name, hugepage_path), flags, 0o600)
    try:
        return int(posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd)
    except posix_ipc.ExistentialError:
        raise FileExistsError(f"{object_path(name)} exists") from None
    except posix_ipc.PermissionsError:
        raise PermissionError(f"{object_path(name)} may not be made by user id {os.geteuid()}") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(
                f"{object_path(name)} cannot be made: its file system has no inode left (df -i); remove "
                "files there, or mount it with a larger nr_inodes"
            ) from error
        raise


def _format_store(fd: int, name: str, config: RegionConfig, store_bytes: int) -> None:
    first = page_bytes(config.hugepage_path)
    _native.store_format(fd, store_bytes, first, config.epoch)
    write_owner(fd, first, name)
    write_pools(fd, first, config.geometry.pools)
    _native.store_set_state(fd, RegionState.READY)
