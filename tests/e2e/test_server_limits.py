"""Limits and borders: small /dev/shm, other users, terminals, a stop in the middle of making regions."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from daemon import DEADLINE_S, Daemon, environment, eventually
from regions import leftovers

from radixshmem import Geometry, RadixClient, RadixError, RadixServer, ServerConfig

GEOMETRY = Geometry(block_size=16, full_slot_bytes=65536)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount or to become another user")


def run_python(code: str, *wrapper: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, inside ``wrapper``."""
    return subprocess.run(
        [*wrapper, sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(),
        check=False,
    )


def in_small_shm(code: str, size: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where /dev/shm is a file system of ``size``, as in a container."""
    script = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return run_python(code, "unshare", "--mount", "sh", "-c", script, "sh")


@needs_root
def test_budget_beyond_a_containers_shm_is_refused_before_anything_is_made() -> None:
    result = in_small_shm(
        """
        import os, sys
        from radixshmem.cli.radix_server import radix_server
        try:
            radix_server(["--name", "/small", "--data-bytes", "64M", "--metrics-address", ""])
        except SystemExit as end:
            assert os.listdir("/dev/shm") == [], os.listdir("/dev/shm")
            sys.exit(end.code)
        """,
        "24m",
    )
    assert result.returncode == 4, result.stderr
    assert "25165824 bytes (24 MiB)" in result.stderr
    assert "67108864 bytes (64 MiB)" in result.stderr
    assert "--shm-size" in result.stderr


@needs_root
def test_index_that_no_longer_fits_fails_configure_and_leaves_nothing() -> None:
    result = in_small_shm(
        """
        import os
        from radixshmem import Geometry, NoSpace, RadixClient, RadixServer, ServerConfig
        with RadixServer(ServerConfig(name="/small", data_bytes=20 << 20, metrics_address="")) as server:
            try:
                RadixClient("/small", Geometry(16, 65536))
            except NoSpace as error:
                assert "/dev/shm has" in str(error) and "--shm-size" in str(error), error
            else:
                raise AssertionError("it fits")
            assert server.info.mode == "failed"
            assert sorted(os.listdir("/dev/shm")) == ["small.lock", "small.sock"]
        assert os.listdir("/dev/shm") == []
        """,
        "24m",
    )
    assert result.returncode == 0, result.stderr


@needs_root
def test_file_system_that_fills_up_while_regions_are_made_is_an_error_not_a_crash() -> None:
    result = in_small_shm(
        """
        import os
        from radixshmem import Geometry, RadixClient, RadixError, RadixServer, ServerConfig
        from radixshmem.server import builder
        config = ServerConfig(name="/small", data_bytes=20 << 20, metrics_address="")
        with RadixServer(config) as server:
            # Somebody else takes the space between the check and the making.
            check = builder.check_space
            def check_and_lose(*args):
                check(*args)
                with open("/dev/shm/hog", "wb") as hog:
                    hog.write(bytes(12 << 20))
            builder.check_space = check_and_lose
            client = RadixClient("/small", Geometry(16, 65536))
            try:
                client.wait_ready(20)
            except RadixError as error:
                assert "full" in str(error) and "--shm-size" in str(error), error
            else:
                raise AssertionError("it fits")
            client.close()
            assert sorted(os.listdir("/dev/shm")) == ["hog", "small.lock", "small.sock"]
            builder.check_space = check
            os.unlink("/dev/shm/hog")
            with RadixClient("/small", Geometry(16, 65536)) as client:
                assert client.wait_ready(20).mode == "ready"
        """,
        "40m",
    )
    assert result.returncode == 0, result.stderr


# -- other users --------------------------------------------------------------------------------


def as_nobody(code: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        f"""
        import os
        from radixshmem import *
        from radixshmem.control import ControlClient
        os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
        """
        + textwrap.indent(textwrap.dedent(code), " " * 8)
    )


@needs_root
def test_server_adopts_and_discards_only_what_is_its_own(shm_name: str) -> None:
    with Daemon(shm_name, "--data-bytes", "8M", "--mode", "0666") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(DEADLINE_S)
            epoch = client.info.epoch
        daemon.kill()
    Path(f"/dev/shm{shm_name}.lock").unlink()  # its owner's; otherwise it is what stops the other user
    for fresh in (False, True):
        result = as_nobody(
            f"""
            config = ServerConfig("{shm_name}", data_bytes=8 << 20, fresh={fresh}, metrics_address="")
            RadixServer(config).start()
            """
        )
        assert result.returncode == 1
        assert "belongs to user id 0" in result.stderr
    with Daemon(shm_name, "--data-bytes", "8M") as daemon:
        assert daemon.wait_mode("ready").epoch == epoch


@needs_root
def test_other_users_get_in_only_by_mode(shm_name: str) -> None:
    join = f"""
        client = RadixClient("{shm_name}", Geometry(16, 65536))
        client.wait_ready(20)
        assert len(client.allocate_slots(3)) == 3
        client.close()
        """
    for mode, code in (("0600", 1), ("0666", 0)):
        with Daemon(shm_name, "--data-bytes", "8M", "--mode", mode) as daemon:
            daemon.wait_serving()
            assert as_nobody(join).returncode == code
            with RadixClient(shm_name, Geometry(16, 65536)) as client:
                client.wait_ready(DEADLINE_S)
            opened = as_nobody(
                f"""
                from radixshmem.region import open_index
                os.close(open_index("{shm_name}"))
                """
            )
            assert opened.returncode == code, opened.stderr
            assert ("start its radix-server with --group and --mode 0660" in opened.stderr) == bool(code)
            assert daemon.stop() == 0


@needs_root
def test_adopted_regions_get_the_mode_of_the_new_server(shm_name: str) -> None:
    for mode in ("0600", "0660"):
        with Daemon(shm_name, "--data-bytes", "8M", "--keep", "--mode", mode) as daemon:
            daemon.wait_serving()
            with RadixClient(shm_name, GEOMETRY) as client:
                client.wait_ready(DEADLINE_S)
            for suffix in ("", "_data", ".sock"):
                assert os.stat(f"/dev/shm{shm_name}{suffix}").st_mode & 0o777 == int(mode, 8)
            assert daemon.stop() == 0


@needs_root
def test_client_of_another_user_trusts_the_owner_it_was_told(shm_name: str) -> None:
    with Daemon(shm_name, "--data-bytes", "8M", "--mode", "0666") as daemon:
        daemon.wait_serving()
        os.chown(f"/dev/shm{shm_name}.sock", NOBODY, NOBODY)
        with pytest.raises(RadixError, match=f"RADIX_SERVER_UID={NOBODY}"):
            RadixClient(shm_name, GEOMETRY)


# -- terminals ----------------------------------------------------------------------------------


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(shm_name: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "radixshmem.cli", "--name", shm_name, "--metrics-address", ""]
    shown = bytearray()

    def has(text: bytes) -> bool:
        shown.extend(os.read(ours, 4096))
        return text in shown

    env = environment({"TERM": "xterm", "COLUMNS": "120"})
    with subprocess.Popen([*command, "--data-bytes", "64M"], stdin=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        eventually(lambda: has(b"Waiting for a client's geometry"))
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(DEADLINE_S)
        eventually(lambda: has(b"ready: FULL 1024 x 65536 bytes"))
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    os.close(ours)
    assert "━".encode() in shown
    assert b"MiB" in shown

    with Daemon(shm_name, "--data-bytes", "64M") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(DEADLINE_S)
        daemon.wait_log("100 %")
        assert "━" not in daemon.log


def test_the_limit_that_stops_the_build_is_named(shm_name: str) -> None:
    """RLIMIT_FSIZE holds for shared memory, too."""
    with Daemon(shm_name, "--data-bytes", "8M") as daemon:
        daemon.wait_serving()
        limits = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        client = RadixClient(shm_name, GEOMETRY)
        with pytest.raises(RadixError, match=r"ulimit -f.* is 1048576"):
            client.wait_ready(DEADLINE_S)
        client.close()
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, limits)
        assert daemon.stop() == 0


# -- no descriptor left -------------------------------------------------------------------------


def test_server_without_a_free_descriptor_keeps_its_regions(shm_name: str) -> None:
    """It cannot look for dead clients then, which is no reason to give the cache up."""
    with Daemon(shm_name, "--data-bytes", "8M") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            epoch = client.wait_ready(DEADLINE_S).epoch
            client.allocate_slots(1)
            limits = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            daemon.wait_log("put off")
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, limits)
            client.allocate_slots(1)
        assert daemon.wait_mode("ready").epoch == epoch
        assert daemon.stop() == 0


# -- stopping in the middle ---------------------------------------------------------------------


def test_stop_while_regions_are_made_leaves_nothing(shm_name: str) -> None:
    for _ in range(5):
        server = RadixServer(ServerConfig(shm_name, data_bytes=64 << 20, metrics_address="")).start()
        client = RadixClient(shm_name, GEOMETRY)
        server.close()
        client.close()
        assert server.info.mode == "closing"
        assert leftovers(shm_name) == []
        server.close()
        assert server.wait(0)
