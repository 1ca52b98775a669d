from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixshmem.prefault as prefault
from radixshmem import NoSpace, RadixError
from radixshmem.prefault import Prefault, allocate_pages

MIB = 1 << 20


@pytest.fixture
def fd(shm_name: str) -> Iterator[int]:
    fd = os.open(f"/dev/shm{shm_name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("how", [Prefault(), Prefault(num_threads=3), Prefault(touch=False)])
def test_every_page_is_allocated_and_zero(fd: int, how: Prefault) -> None:
    seen: list[tuple[int, int]] = []
    allocate_pages(fd, 3 * MIB + 4096, "it", how, lambda done, total: seen.append((done, total)))
    status = os.fstat(fd)
    assert status.st_size == 3 * MIB + 4096
    assert status.st_blocks * 512 >= status.st_size
    with mmap.mmap(fd, 0) as mapping:
        assert not any(mapping[:])
    assert seen[0] == (0, status.st_size)
    assert seen[-1] == (status.st_size, status.st_size)
    assert seen == sorted(seen)


def test_work_is_cut_into_chunks_and_slices(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "ALLOCATE_CHUNK_BYTES", MIB)
    monkeypatch.setattr(prefault, "TOUCH_SLICE_BYTES", MIB // 4)
    seen: list[int] = []
    allocate_pages(fd, 5 * MIB // 2, "it", Prefault(num_threads=2), lambda done, _: seen.append(done))
    assert seen[-1] == 5 * MIB // 2
    assert len(set(seen)) >= 10
    assert os.fstat(fd).st_blocks * 512 >= 5 * MIB // 2


def test_a_kernel_without_populate_is_served_too(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "MADV_POPULATE_WRITE", 9999)  # EINVAL, as an old kernel says
    allocate_pages(fd, MIB, "it", Prefault())
    with mmap.mmap(fd, 0) as mapping:
        assert not any(mapping[:])


def test_progress_can_give_up(fd: int) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        allocate_pages(fd, MIB, "it", Prefault(), stop)


def test_a_full_file_system_is_an_error_with_numbers_and_fix(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if os.system(f"mount -t tmpfs -o size=2m none {tmp_path}") != 0:
        pytest.skip("this container may not mount")
    try:
        fd = os.open(tmp_path / "region", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with pytest.raises(
                NoSpace, match=r"the store needs 4194304 bytes \(4 MiB\).*size 2 MiB.*--shm-size"
            ):
                allocate_pages(fd, 4 * MIB, "the store")
        finally:
            os.close(fd)
    finally:
        os.system(f"umount {tmp_path}")


def test_a_node_that_does_not_exist_is_refused(fd: int) -> None:
    with pytest.raises(RadixError, match=r"--numa 63.*mbind"):
        allocate_pages(fd, MIB, "it", Prefault(numa_nodes=(63,)))


def test_node_zero_is_there_wherever_numa_is(fd: int) -> None:
    if not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    try:
        allocate_pages(fd, MIB, "it", Prefault(numa_nodes=(0,)))
    except RadixError as error:
        if os.strerror(errno.ENOSYS) in str(error) or os.strerror(errno.EPERM) in str(error):
            pytest.skip("mbind is not allowed here")
        raise
    assert os.fstat(fd).st_blocks * 512 >= MIB
