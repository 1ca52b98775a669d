"""What an earlier server of the same name left, and what becomes of it.

Assumes: the name lock is held, so whatever is there has no living server.

Guarantees: regions are adopted only when header, SlotStore and a copy of the whole index are proved
valid and fit the configuration.  Regions that a client may still use, but that do not fit, are left
alone, and so is the SlotStore of any other server, alive or dead.  Everything else is retired first, so
that whoever comes late learns it, and then unlinked.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from radixshmem import _native
from radixshmem.config import ServerConfig
from radixshmem.errors import (
    CorruptRegion,
    IndexBusy,
    LayoutMismatch,
    RadixError,
    RegionRetired,
    ServerNotReady,
)
from radixshmem.file_lock import is_locked
from radixshmem.index import Index
from radixshmem.names import default_data_name
from radixshmem.records import RegionInfo, RegionState
from radixshmem.region import (
    destroy_store,
    object_path,
    open_index,
    open_object,
    refuse_store,
    retire_regions,
    store_refusal,
)
from radixshmem.server.exits import LeftoversInUse
from radixshmem.sizes import format_size
from radixshmem.store_header import read_pools

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

SERVER_LABEL = "radix-server"
_BUSY_DEADLINE_S = 5.0  # a client that holds the index lock for longer is stopped, not slow


@dataclass(frozen=True)
class Nothing:
    """No earlier server left anything."""


@dataclass(frozen=True)
class Adopt:
    """Valid regions that fit, joined as a client."""

    index: Index
    info: RegionInfo


@dataclass(frozen=True)
class Discard:
    """Regions of no further use, and why.  ``num_bytes``: memory that discarding gives back."""

    reason: str
    num_bytes: int


Leftovers = Nothing | Adopt | Discard


class _UnusableError(Exception):
    """Why regions cannot be adopted."""


def inspect_leftovers(config: ServerConfig) -> Leftovers:
    """Decide, changing nothing but joining an index that is adopted.

    Raises LeftoversInUse when living clients use regions that do not fit, and RadixError when objects
    of these names belong to somebody else.
    """
    leftovers = _inspect(config)
    if not isinstance(leftovers, Adopt):
        _refuse_others_store(config)
    return leftovers


def _inspect(config: ServerConfig) -> Leftovers:
    try:
        fd = open_index(config.name, own=True)
    except FileNotFoundError:
        return _inspect_stray_store(config)
    with os.fdopen(fd, "rb+", buffering=0):
        refuse_store(fd, config.name)
        try:
            if config.fresh:
                raise _UnusableError("--fresh was given")
            return _inspect_index(fd, config)
        except _UnusableError as reason:
            return Discard(str(reason), _allocated_bytes(fd, config))


def discard_leftovers(config: ServerConfig, decision: Discard) -> None:
    """Retire and unlink what ``decision`` is about."""
    log.warning("discarding what an earlier server %s left: %s", config.name, decision.reason)
    # A SlotStore that no readable index names is found by its name.
    for data_name in {default_data_name(config.name), config.resolved_data_name} - {""}:
        drop_regions(config.name, data_name, config.hugepage_path)


def drop_regions(name: str, data_name: str, hugepage_path: str) -> None:
    """Retire and unlink the index ``name`` and the SlotStore ``data_name``, on either kind of pages.

    ``data_name`` "": there is no SlotStore but the one that the index names, if it does.  What may not be
    removed for the server ``name`` stays.
    """
    retire_regions(name)
    for path in {"", hugepage_path} if data_name else ():
        if not store_refusal(name, data_name, path):
            destroy_store(data_name, path)


def _inspect_stray_store(config: ServerConfig) -> Leftovers:
    """A SlotStore without its index: a crash between two unlinks, if it is not another server's."""
    if not config.data_bytes:
        return Nothing()
    try:
        fd = open_object(config.resolved_data_name, config.hugepage_path, own=True)
    except FileNotFoundError:
        return Nothing()
    with os.fdopen(fd, "rb", buffering=0):
        return Discard("a SlotStore without an index", os.fstat(fd).st_blocks * 512)


def _refuse_others_store(config: ServerConfig) -> None:
    """RadixError if the SlotStore's name is taken by what is not this server's to remove."""
    if not config.data_bytes:
        return
    for path in {config.hugepage_path, "" if config.hugepage_fallback else config.hugepage_path}:
        refusal = store_refusal(config.name, config.resolved_data_name, path)
        if refusal:
            raise RadixError(f"--data-name: {refusal}: choose another name, or remove it if nobody needs it")


def _inspect_index(fd: int, config: ServerConfig) -> Adopt:
    try:
        info = _native.region_peek(fd)
    except LayoutMismatch as error:
        _refuse_if_used(fd, config, str(error))  # locks can be tested whatever the layout
        raise _UnusableError(str(error)) from error
    except CorruptRegion as error:
        raise _UnusableError(str(error)) from error
    if info.state != RegionState.READY:
        raise _UnusableError(f"the index is {info.state.name}, not READY")
    different = differences(config, info)
    if different:
        _refuse_if_used(fd, config, different)
        raise _UnusableError(different)
    _check_store(info)
    return Adopt(_join(fd, config), info)


def differences(config: ServerConfig, info: RegionInfo) -> str:
    """How the regions' size and shape differ from what ``config`` asks for; "" when they fit."""
    have = info.config
    sides: list[tuple[str, object, object]] = [
        ("--data-bytes", have.data_bytes, config.data_bytes),
        ("--swa-ratio", have.swa_ratio, config.swa_ratio),
        ("--mamba-ratio", have.mamba_ratio, config.mamba_ratio),
        ("--data-name", have.data_name, config.resolved_data_name),
    ]
    # A server that fell back to normal pages left no huge page path; it fits if falling back still may be.
    if not (config.hugepage_fallback and not have.hugepage_path):
        sides.append(("--hugepage-path", have.hugepage_path, config.hugepage_path if have.data_bytes else ""))
    return "; ".join(
        f"{flag} was {_show(flag, theirs)} and is {_show(flag, ours)} now"
        for flag, theirs, ours in sides
        if theirs != ours
    )


def kept_settings(config: ServerConfig, info: RegionInfo) -> list[str]:
    """Settings that adopted regions keep from their making although ``config`` has others."""
    have = info.config
    pairs = [
        ("--evict-policy", have.evict_policy, config.evict_policy),
        ("--max-clients", have.max_clients, config.max_clients),
        ("--pins-per-client", have.pins_per_client, config.pins_per_client),
        ("--reap-quarantine-s", have.reap_quarantine_s, config.reap_quarantine_s),
    ]
    return [f"{flag} {theirs} (not {ours})" for flag, theirs, ours in pairs if theirs != ours]


def _check_store(info: RegionInfo) -> None:
    """The SlotStore must be the one that the index was made with, whole."""
    config = info.config
    if not config.data_bytes:
        return
    try:
        fd = open_object(config.data_name, config.hugepage_path, own=True)
    except FileNotFoundError:
        raise _UnusableError(f"its SlotStore {config.data_name} is gone") from None
    with os.fdopen(fd, "rb", buffering=0):
        try:
            store = _native.store_peek(fd)
            pools = read_pools(fd, store.total_bytes)
        except CorruptRegion as error:
            raise _UnusableError(f"its SlotStore {config.data_name}: {error}") from error
        if store.epoch != config.epoch or store.state != RegionState.READY:
            raise _UnusableError(f"its SlotStore {config.data_name} belongs to other regions")
        if os.fstat(fd).st_size != store.total_bytes or pools != config.geometry.pools:
            raise _UnusableError(f"its SlotStore {config.data_name} has another size or other pools")


def _join(fd: int, config: ServerConfig) -> Index:
    """Attach like any client and prove the invariants on a copy."""
    try:
        index = _until_free(lambda: Index(fd, SERVER_LABEL), config)
        num_violations, report = _until_free(index.snapshot, config).check()
    except (CorruptRegion, RegionRetired, ServerNotReady) as error:
        raise _UnusableError(str(error)) from error
    except LeftoversInUse:
        raise
    except RadixError as error:  # the client table is full: everybody in it lives
        raise LeftoversInUse(f"the regions that an earlier server {config.name} left: {error}") from error
    if num_violations:
        index.close()
        raise _UnusableError(f"its index violates {num_violations} invariants: {report.splitlines()[0]}")
    return index


def _until_free(attempt: Callable[[], _Result], config: ServerConfig) -> _Result:
    deadline = time.monotonic() + _BUSY_DEADLINE_S
    while True:
        try:
            return attempt()
        except IndexBusy as error:
            if time.monotonic() > deadline:
                raise LeftoversInUse(
                    f"a client of the regions that an earlier server {config.name} left holds the index lock "
                    f"and is stopped: continue or end it ({error})"
                ) from error


def _refuse_if_used(fd: int, config: ServerConfig, different: str) -> None:
    if is_locked(fd):
        raise LeftoversInUse(
            f"clients still use the regions that an earlier server {config.name} left, and these do not "
            f"fit: {different}. Stop the clients, start with the earlier settings, or discard the regions "
            "with --fresh"
        )


def _allocated_bytes(index_fd: int, config: ServerConfig) -> int:
    num_bytes = os.fstat(index_fd).st_blocks * 512
    if config.data_bytes and not config.hugepage_path:
        with suppress(FileNotFoundError):
            num_bytes += os.stat(object_path(config.resolved_data_name)).st_blocks * 512
    return num_bytes


def _show(flag: str, value: object) -> str:
    if flag == "--data-bytes" and isinstance(value, int):
        return f"{value} bytes ({format_size(value)})"
    return repr(value) if isinstance(value, str) else str(value)
