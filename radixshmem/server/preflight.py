"""Refuse, before anything is allocated, what cannot be had: with the numbers and the fix."""

from __future__ import annotations

import os
from dataclasses import dataclass

from radixshmem.config import ServerConfig
from radixshmem.errors import NoSpace
from radixshmem.names import SHM_DIR
from radixshmem.server.machine import Machine
from radixshmem.sizes import format_size


@dataclass(frozen=True)
class Need:
    """Bytes that regions will take.  ``reusable_bytes``: what discarding leftovers gives back first."""

    shm_bytes: int
    huge_bytes: int = 0
    reusable_bytes: int = 0

    @property
    def new_bytes(self) -> int:
        """Normal memory that has to be free now."""
        return max(0, self.shm_bytes - self.reusable_bytes)


def check_machine(config: ServerConfig, machine: Machine) -> None:
    """ValueError naming the flag for a huge page mount or NUMA node that is not there."""
    numa_nodes(config, machine)
    if config.hugepage_path and machine.huge_pages(config.hugepage_path) is None:
        raise ValueError(
            f"--hugepage-path: {config.hugepage_path} is not a mounted hugetlbfs; "
            f"mount one: mount -t hugetlbfs none {config.hugepage_path}"
        )
    if config.hugepage_path and not os.access(config.hugepage_path, os.W_OK):
        raise ValueError(
            f"--hugepage-path: {config.hugepage_path} is not writable for user id {os.geteuid()}"
        )


def check_space(need: Need, config: ServerConfig, machine: Machine) -> None:
    """NoSpace unless /dev/shm, the host, the cgroup and the huge page pool can give ``need``."""
    for problem in (_shm_problem, _memory_problem, _cgroup_problem, _huge_problem):
        text = problem(need, config, machine)
        if text:
            raise NoSpace(text)


def memlock_note(config: ServerConfig, machine: Machine) -> str:
    """What RLIMIT_MEMLOCK may stop, which is not this server; "" when it is high enough."""
    limit = machine.memlock_limit_bytes()
    if limit is None or limit >= config.data_bytes:
        return ""
    return (
        f"memlock is limited to {_both(limit)}: registering the SlotStore with an RDMA device takes "
        f"{_both(config.data_bytes)} (ulimit -l unlimited; systemd LimitMEMLOCK=infinity; "
        "docker --ulimit memlock=-1)"
    )


def numa_nodes(config: ServerConfig, machine: Machine) -> tuple[int, ...]:
    """The nodes that ``--numa`` means; empty for the kernel's default placement."""
    if not config.numa:
        return ()
    present = machine.numa_nodes()
    if config.numa == "interleave":
        return present
    wanted = tuple(dict.fromkeys(int(part) for part in config.numa.split(",")))
    missing = [node for node in wanted if node not in present]
    if missing:
        raise ValueError(
            f"--numa: this machine has no node {missing[0]}, only {', '.join(map(str, present))}"
        )
    return wanted


def _shm_problem(need: Need, config: ServerConfig, machine: Machine) -> str:
    free, total = machine.free_bytes_of(SHM_DIR)
    if need.new_bytes <= free:
        return ""
    return (
        f"{SHM_DIR} has {_both(free)} free of {_both(total)}, but the regions need {_both(need.new_bytes)}: "
        f"enlarge it (docker run --shm-size={_round_gib(need.shm_bytes)}g; Kubernetes: an emptyDir with "
        f"medium: Memory and a larger sizeLimit at {SHM_DIR}; a host: mount -o remount,size=... {SHM_DIR}), "
        "or lower --data-bytes"
    )


def _memory_problem(need: Need, config: ServerConfig, machine: Machine) -> str:
    available = machine.memory_available_bytes()
    if need.new_bytes <= available:
        return ""
    return (
        f"the machine has {_both(available)} of memory available, but the regions need "
        f"{_both(need.new_bytes)}: stop what uses it, or lower --data-bytes"
    )


def _cgroup_problem(need: Need, config: ServerConfig, machine: Machine) -> str:
    cgroup = machine.cgroup_memory()
    if cgroup is None or need.new_bytes <= cgroup.free_bytes:
        return ""
    return (
        f"the memory limit of this container ({cgroup.path}: {_both(cgroup.limit_bytes)}, in use "
        f"{_both(cgroup.used_bytes)}) leaves {_both(cgroup.free_bytes)}, but the regions need "
        f"{_both(need.new_bytes)}: raise it (docker run --memory, Kubernetes resources.limits.memory), "
        "or lower --data-bytes"
    )


def _huge_problem(need: Need, config: ServerConfig, machine: Machine) -> str:
    pages = machine.huge_pages(config.hugepage_path) if need.huge_bytes else None
    if pages is None or need.huge_bytes <= pages.free_bytes:
        return ""
    count = -(-need.huge_bytes // pages.page_bytes)
    return (
        f"--hugepage-path {config.hugepage_path} has {_both(pages.free_bytes)} in free huge pages of "
        f"{format_size(pages.page_bytes)}, but the SlotStore needs {_both(need.huge_bytes)}: reserve {count} "
        f"pages (/sys/kernel/mm/hugepages/hugepages-{pages.page_bytes // 1024}kB/nr_hugepages), "
        "lower --data-bytes, or allow normal pages with --hugepage-fallback"
    )


def _both(num_bytes: int) -> str:
    """``68719476736 bytes (64 GiB)``."""
    return f"{num_bytes} bytes ({format_size(num_bytes)})"


def _round_gib(num_bytes: int) -> int:
    return -(-num_bytes // 2**30) + 1
