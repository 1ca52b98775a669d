"""Limits of machines, read from their files, and the refusals that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixshmem import NoSpace, ServerConfig
from radixshmem.cli.doctor import examine
from radixshmem.server.machine import Machine
from radixshmem.server.preflight import Need, check_machine, check_space, numa_nodes

GIB = 2**30


class FakeRoot:
    """A directory tree with the /proc and /sys files of another machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", "MemTotal: 1048576000 kB\nMemAvailable: 1048576000 kB\nHugepagesize: 2048 kB\n"
        )
        self.write("proc/self/cgroup", "0::/\n")
        self.write("sys/devices/system/node/has_memory", "0\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cgroup(self, directory: str, limit: str, used: int, idle: int = 0) -> None:
        """A cgroup of the unified hierarchy."""
        self.write(f"sys/fs/cgroup/{directory}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{directory}/memory.current", f"{used}\n")
        self.write(f"sys/fs/cgroup/{directory}/memory.stat", f"anon 1\ninactive_file {idle}\n")

    @property
    def machine(self) -> Machine:
        return Machine(str(self.root))


@pytest.fixture
def other(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def test_this_machine_has_memory() -> None:
    machine = Machine()
    assert machine.memory_available_bytes() > 0
    free, total = machine.free_bytes_of("/dev/shm")
    assert 0 < free <= total
    assert machine.numa_nodes()


def test_no_limit_is_no_cgroup(other: FakeRoot) -> None:
    assert other.machine.cgroup_memory() is None
    other.cgroup("", "max", 5)
    assert other.machine.cgroup_memory() is None


def test_tightest_cgroup_of_the_path_counts(other: FakeRoot) -> None:
    other.write("proc/self/cgroup", "0::/pod/box\n")
    other.cgroup("", str(100 * GIB), 0)
    other.cgroup("pod", str(10 * GIB), 9 * GIB, idle=2 * GIB)
    other.cgroup("pod/box", str(50 * GIB), 1 * GIB)
    memory = other.machine.cgroup_memory()
    assert memory is not None
    assert (memory.limit_bytes, memory.used_bytes, memory.free_bytes) == (10 * GIB, 7 * GIB, 3 * GIB)
    assert memory.path == "/sys/fs/cgroup/pod/memory.max"


def test_cgroup_v1(other: FakeRoot) -> None:
    other.write("proc/self/cgroup", "4:memory,hugetlb:/box\n1:cpu:/\n")
    base = "sys/fs/cgroup/memory"
    other.write(f"{base}/memory.limit_in_bytes", str(2**63 - 4096))
    other.write(f"{base}/memory.usage_in_bytes", "5")
    assert other.machine.cgroup_memory() is None
    other.write(f"{base}/box/memory.limit_in_bytes", str(4 * GIB))
    other.write(f"{base}/box/memory.usage_in_bytes", str(3 * GIB))
    other.write(f"{base}/box/memory.stat", f"total_inactive_file {GIB}\n")
    memory = other.machine.cgroup_memory()
    assert memory is not None
    assert memory.free_bytes == 2 * GIB


def test_cgroup_limit_refuses_with_numbers_and_fix(other: FakeRoot) -> None:
    other.cgroup("", str(2 * GIB), GIB)
    with pytest.raises(NoSpace, match=rf"{GIB} bytes.*resources.limits.memory") as refused:
        check_space(Need(GIB + 1), ServerConfig(), other.machine)
    assert str(GIB + 1) in str(refused.value)
    check_space(Need(GIB), ServerConfig(), other.machine)


def test_what_leftovers_give_back_counts(other: FakeRoot) -> None:
    other.cgroup("", str(2 * GIB), GIB)
    check_space(Need(GIB + 5, reusable_bytes=5), ServerConfig(), other.machine)


def test_memory_refuses_with_numbers_and_fix(other: FakeRoot) -> None:
    other.write("proc/meminfo", "MemAvailable: 1024 kB\n")
    with pytest.raises(NoSpace, match=r"1048576 bytes.*--data-bytes"):
        check_space(Need(2**20 + 1), ServerConfig(), other.machine)


def test_shared_memory_refuses_with_numbers_and_fix(other: FakeRoot) -> None:
    _, total = Machine().free_bytes_of("/dev/shm")
    with pytest.raises(NoSpace, match=r"--shm-size.*sizeLimit"):
        check_space(Need(total + 1), ServerConfig(), other.machine)


def test_numa_nodes(other: FakeRoot) -> None:
    other.write("sys/devices/system/node/has_memory", "0-2,4\n")
    assert other.machine.numa_nodes() == (0, 1, 2, 4)
    assert numa_nodes(ServerConfig(), other.machine) == ()
    assert numa_nodes(ServerConfig(numa="interleave"), other.machine) == (0, 1, 2, 4)
    assert numa_nodes(ServerConfig(numa="4,1,4"), other.machine) == (4, 1)
    with pytest.raises(ValueError, match=r"--numa.*no node 3"):
        numa_nodes(ServerConfig(numa="3"), other.machine)


def test_huge_pages_want_a_hugetlbfs(other: FakeRoot, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--hugepage-path.*mount -t hugetlbfs"):
        check_machine(ServerConfig(hugepage_path=str(tmp_path)), Machine())
    other.write("proc/self/mounts", f"none / ext4 rw 0 0\nnone {tmp_path} hugetlbfs rw 0 0\n")
    page = other.machine.huge_pages(str(tmp_path))
    assert page is not None
    kilobytes = page.page_bytes // 1024
    other.write(f"sys/kernel/mm/hugepages/hugepages-{kilobytes}kB/free_hugepages", "3\n")
    config = ServerConfig(hugepage_path=str(tmp_path))
    check_machine(config, other.machine)
    check_space(Need(0, huge_bytes=3 * page.page_bytes), config, other.machine)
    with pytest.raises(NoSpace, match=r"reserve 4 pages.*--hugepage-fallback"):
        check_space(Need(0, huge_bytes=3 * page.page_bytes + 1), config, other.machine)


def test_doctor_names_what_would_stop_a_start(other: FakeRoot) -> None:
    other.cgroup("", str(2 * GIB), GIB)
    findings = {finding.what: finding for finding in examine(ServerConfig(data_bytes=GIB + 1), other.machine)}
    assert findings["start"].level == "problem"
    assert "1 GiB free of 2 GiB" in findings["cgroup"].detail
    assert all(f.level == "ok" for f in examine(ServerConfig(data_bytes=4096), other.machine))
