"""What the machine, and the container around this process, can give.

Every figure is read afresh.  ``root`` stands before /proc and /sys, so that other machines' files
can be read too.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_V1_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True)
class CgroupMemory:
    """The tightest memory limit over this process, in bytes.  ``used`` leaves out idle page cache."""

    limit_bytes: int
    used_bytes: int
    path: str

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class HugePages:
    """Huge pages that a hugetlbfs mount can give."""

    page_bytes: int
    free_bytes: int


class Machine:
    """Reads limits of this machine."""

    def __init__(self, root: str = "/") -> None:
        self._root = Path(root)

    def free_bytes_of(self, directory: str) -> tuple[int, int]:
        """(free, total) bytes of the file system that ``directory`` is on."""
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def memory_available_bytes(self) -> int:
        """What may be allocated without swapping; 0 if the kernel does not say."""
        return self._meminfo().get("MemAvailable", 0)

    def default_huge_page_bytes(self) -> int:
        return self._meminfo().get("Hugepagesize", 0)

    def cgroup_memory(self) -> CgroupMemory | None:
        """The limit that leaves the least, of this process's cgroup and those above it; None without one."""
        found = [memory for memory in (*self._cgroups_v2(), *self._cgroups_v1()) if memory]
        return min(found, key=lambda memory: memory.free_bytes, default=None)

    def memlock_limit_bytes(self) -> int | None:
        """RLIMIT_MEMLOCK of this process; None if it has none."""
        soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def huge_pages(self, directory: str) -> HugePages | None:
        """What the hugetlbfs mounted at ``directory`` has; None if it is another file system.

        A mount without a size of its own reports no blocks; then the kernel's pool is what counts.
        """
        if self._file_system_of(directory) != "hugetlbfs":
            return None
        status = os.statvfs(directory)
        page = status.f_bsize
        pool = self._read_int(f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/free_hugepages") or 0
        free = min(pool, status.f_bavail) if status.f_blocks else pool
        return HugePages(page, free * page)

    def numa_nodes(self) -> tuple[int, ...]:
        """Numbers of the NUMA nodes that have memory."""
        text = self._read("sys/devices/system/node/has_memory") or self._read(
            "sys/devices/system/node/online"
        )
        return tuple(_parse_ranges(text or "0"))

    def _file_system_of(self, directory: str) -> str:
        """Type of the file system whose mount point is the longest prefix of ``directory``."""
        best, kind = "", ""
        for line in (self._read("proc/self/mounts") or "").splitlines():
            _device, mount, fs_type = line.split()[:3]
            if len(mount) >= len(best) and Path(os.path.realpath(directory)).is_relative_to(mount):
                best, kind = mount, fs_type
        return kind

    def _meminfo(self) -> dict[str, int]:
        lines = (line.split() for line in (self._read("proc/meminfo") or "").splitlines())
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}

    def _cgroup_path(self, controller: str) -> str | None:
        """This process's path in the hierarchy of ``controller``; "" names the unified one."""
        for line in (self._read("proc/self/cgroup") or "").splitlines():
            _number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
        return None

    def _cgroups_v2(self) -> list[CgroupMemory | None]:
        return [
            self._cgroup(directory, "memory.max", "memory.current", "inactive_file")
            for directory in self._directories("sys/fs/cgroup", self._cgroup_path(""))
        ]

    def _cgroups_v1(self) -> list[CgroupMemory | None]:
        return [
            self._cgroup(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for directory in self._directories("sys/fs/cgroup/memory", self._cgroup_path("memory"))
        ]

    def _directories(self, mount: str, path: str | None) -> list[str]:
        """The cgroup's directory and those above it.  A container may see its own as the mount's root."""
        if path is None:
            return []
        parts = Path(path.lstrip("/")).parts
        return [os.path.join(mount, *parts[:depth]) for depth in range(len(parts), -1, -1)]

    def _cgroup(self, directory: str, limit: str, used: str, idle: str) -> CgroupMemory | None:
        limit_bytes, used_bytes = (
            self._read_int(f"{directory}/{limit}"),
            self._read_int(f"{directory}/{used}"),
        )
        if limit_bytes is None or used_bytes is None or limit_bytes >= _UNLIMITED_V1_BYTES:
            return None
        stat = (line.split() for line in (self._read(f"{directory}/memory.stat") or "").splitlines())
        cache = next((int(words[1]) for words in stat if words[0] == idle), 0)
        return CgroupMemory(limit_bytes, max(0, used_bytes - cache), f"/{directory}/{limit}")

    def _read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text()
        except OSError:
            return None

    def _read_int(self, path: str) -> int | None:
        text = (self._read(path) or "").strip()
        return int(text) if text.isdigit() else None


def _parse_ranges(text: str) -> list[int]:
    """``0-2,4`` -> [0, 1, 2, 4]."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
