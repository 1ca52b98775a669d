"""Would a server of this size start here?  And what would slow it down?"""

from __future__ import annotations

import os
from dataclasses import dataclass

from radixshmem.config import ServerConfig
from radixshmem.errors import NoSpace
from radixshmem.names import SHM_DIR
from radixshmem.server.machine import Machine
from radixshmem.server.preflight import Need, check_machine, check_space, memlock_note
from radixshmem.sizes import format_size

_MIN_OPEN_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """``level``: ok, note (works, but), or problem (a server would not start)."""

    what: str
    level: str
    detail: str


def examine(config: ServerConfig, machine: Machine | None = None) -> list[Finding]:
    """Findings about this machine for a server with ``config``."""
    machine = machine or Machine()
    findings = [_shm(machine), _memory(machine), _cgroup(machine), _huge_pages(config, machine)]
    findings += [_memlock(config, machine), _open_files(), _numa(machine)]
    try:
        check_machine(config, machine)
        huge = config.data_bytes if config.hugepage_path else 0
        check_space(Need(config.data_bytes - huge, huge), config, machine)
    except (NoSpace, ValueError) as error:
        return [*findings, Finding("start", "problem", str(error))]
    budget = format_size(config.data_bytes) if config.data_bytes else "an index-only server"
    return [*findings, Finding("start", "ok", f"there is room for {budget}")]


def _shm(machine: Machine) -> Finding:
    free, total = machine.free_bytes_of(SHM_DIR)
    return Finding(SHM_DIR, "ok", f"{format_size(free)} free of {format_size(total)}")


def _memory(machine: Machine) -> Finding:
    return Finding("memory", "ok", f"{format_size(machine.memory_available_bytes())} available")


def _cgroup(machine: Machine) -> Finding:
    cgroup = machine.cgroup_memory()
    if cgroup is None:
        return Finding("cgroup", "ok", "no memory limit")
    text = f"{format_size(cgroup.free_bytes)} free of {format_size(cgroup.limit_bytes)} ({cgroup.path})"
    return Finding("cgroup", "ok", text)


def _huge_pages(config: ServerConfig, machine: Machine) -> Finding:
    size = format_size(machine.default_huge_page_bytes())
    if not config.hugepage_path:
        return Finding("huge pages", "ok", f"not asked for (default size {size})")
    pages = machine.huge_pages(config.hugepage_path)
    if pages is None:
        return Finding("huge pages", "problem", f"{config.hugepage_path} is not a hugetlbfs")
    return Finding(
        "huge pages", "ok", f"{format_size(pages.free_bytes)} free, of {format_size(pages.page_bytes)} each"
    )


def _memlock(config: ServerConfig, machine: Machine) -> Finding:
    note, limit = memlock_note(config, machine), machine.memlock_limit_bytes()
    if note:
        return Finding("memlock", "note", note)
    return Finding("memlock", "ok", "unlimited" if limit is None else format_size(limit))


def _open_files() -> Finding:
    limit = os.sysconf("SC_OPEN_MAX")
    if limit < _MIN_OPEN_FILES:
        return Finding("open files", "note", f"{limit}: raise it to {_MIN_OPEN_FILES} (ulimit -n)")
    return Finding("open files", "ok", str(limit))


def _numa(machine: Machine) -> Finding:
    nodes = machine.numa_nodes()
    if len(nodes) == 1:
        return Finding("NUMA", "ok", "one node")
    return Finding("NUMA", "ok", f"nodes {', '.join(map(str, nodes))}; consider --numa interleave")
