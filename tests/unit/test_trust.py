from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixshmem import RadixError
from radixshmem.trust import check_region_owner, check_socket_owner, trusted_uids

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
STRANGER = 54321


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "region", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


def test_own_and_roots_files_are_trusted(fd: int) -> None:
    check_region_owner(fd, "it")
    check_region_owner(fd, "it", own=True)
    assert trusted_uids() == {0, os.geteuid()}


@needs_root
def test_a_strangers_file_needs_the_variable(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.fchown(fd, STRANGER, -1)
    with pytest.raises(RadixError, match=f"RADIX_SERVER_UID={STRANGER}"):
        check_region_owner(fd, "it")
    monkeypatch.setenv("RADIX_SERVER_UID", str(STRANGER))
    check_region_owner(fd, "it")
    with pytest.raises(RadixError, match="belongs to"):
        check_region_owner(fd, "it", own=True)


def test_a_variable_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIX_SERVER_UID", "radix")
    with pytest.raises(ValueError, match="RADIX_SERVER_UID"):
        trusted_uids()


def test_what_is_no_regular_file_is_refused() -> None:
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(RadixError, match="regular file"):
            check_region_owner(fd, "it")
    finally:
        os.close(fd)


def test_socket(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    check_socket_owner(str(path))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        check_socket_owner(str(path))
        link = tmp_path / "link"
        link.symlink_to(path)
        with pytest.raises(RadixError, match="not a socket"):
            check_socket_owner(str(link))
    (tmp_path / "file").touch()
    with pytest.raises(RadixError, match="not a socket"):
        check_socket_owner(str(tmp_path / "file"))


@needs_root
def test_a_strangers_socket(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.chown(path, STRANGER, -1)
        with pytest.raises(RadixError, match=f"user id {STRANGER}"):
            check_socket_owner(str(path))
