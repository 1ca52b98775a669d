"""The radix-server process: start, configure, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from daemon import Daemon, eventually, run_server
from regions import leftovers

import radixshmem
from radixshmem import Geometry, GeometryMismatch, NoSpace, RadixClient, RadixError, ServerUnavailable
from radixshmem.config import SETTINGS
from radixshmem.control import ControlClient
from radixshmem.names import default_endpoint

GEOMETRY = Geometry(block_size=16, full_slot_bytes=65536)
BUDGET = ("--data-bytes", "16M")


def configure(name: str, geometry: Geometry = GEOMETRY) -> RadixClient:
    """A client of a server that is ready."""
    client = RadixClient(name, geometry)
    client.wait_ready(30)
    return client


# -- the command line ---------------------------------------------------------------------------


def test_version_names_the_package_version() -> None:
    result = run_server("--version")
    assert result.returncode == 0
    assert radixshmem.__version__ in result.stdout


def test_help_groups_every_flag_and_shows_defaults() -> None:
    result = run_server("--help")
    assert result.returncode == 0
    for setting in SETTINGS:
        assert re.search(rf"{setting.flag}\b", result.stdout), setting.flag
        assert setting.env in result.stdout
    for group in {setting.group for setting in SETTINGS}:
        assert f"─ {group} ─" in result.stdout
    assert "127.0.0.1:9464" in result.stdout
    assert "[default: /flexkv]" in result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_for_the_shell(shell: str) -> None:
    result = run_server("--completion", shell)
    assert result.returncode == 0
    assert "_RADIX_SERVER_COMPLETE" in result.stdout


@pytest.mark.parametrize("size", ["-5", "64X", ""])
def test_bad_size_is_a_usage_error_that_names_the_flag(size: str) -> None:
    result = run_server("--data-bytes", size)
    assert result.returncode == 2
    assert "--data-bytes" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--name", "flexkv"), "--name"),
        (("--swa-ratio", "0.5"), "--data-bytes"),
        (("--mode", "9"), "--mode"),
        (("--evict-policy", "random"), "--evict-policy"),
        (("--numa", "4095"), "--numa"),
        (("--hugepage-path", "/tmp"), "--hugepage-path"),
        (("--group", "no_such_group_here"), "--group"),
        (("--group", str(2**32 - 1)), "--group"),
        (("--endpoint", "unix:///tmp/a%20b.sock"), "--endpoint"),
        (("--log-file", "/no/such/directory/log"), "--log-file"),
    ],
)
def test_bad_flag_is_a_usage_error_that_names_it(flags: tuple[str, ...], named: str, shm_name: str) -> None:
    name = () if "--name" in flags else ("--name", shm_name)
    result = run_server(*name, *flags)
    assert result.returncode == 2, result.stderr
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    assert leftovers(shm_name) == []


def test_environment_sets_what_flags_do_not(shm_name: str) -> None:
    env = {"RADIX_DATA_BYTES": "32M", "RADIX_SWA_RATIO": "7"}
    result = run_server("--name", shm_name, env=env)
    assert (result.returncode, "RADIX_SWA_RATIO" in result.stderr) == (2, True)
    with Daemon(shm_name, "--swa-ratio", "0.5", env=env) as daemon:
        daemon.wait_log("33554432 bytes (32 MiB)")


@pytest.mark.parametrize(
    "flags", [("--expected-min-nodes", "2"), ("--registry", "etcd://127.0.0.1:2379,127.0.0.2:2379")]
)
def test_cluster_is_refused_with_its_own_code(flags: tuple[str, ...], shm_name: str) -> None:
    result = run_server("--name", shm_name, *BUDGET, *flags)
    assert result.returncode == 5
    assert flags[0] in result.stderr
    assert leftovers(shm_name) == []


# -- life ---------------------------------------------------------------------------------------


def test_life_from_start_to_clean_stop(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        assert "16777216 bytes (16 MiB)" in daemon.log
        daemon.wait_log("Waiting for a client's geometry")
        with configure(shm_name) as client:
            assert client.info.mode == "ready"
            assert client.info.pid == daemon.process.pid
            assert client.geometry is not None
            assert client.geometry["pools"] == {"full": {"num_slots": 256, "slot_bytes": 65536}}
        assert daemon.stop() == 0
    assert leftovers(shm_name) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_while_waiting(number: signal.Signals, shm_name: str) -> None:
    with Daemon(shm_name) as daemon:
        daemon.wait_log("Waiting")
        daemon.signal(number)
        assert daemon.wait_exit() == 0
    assert leftovers(shm_name) == []


def test_clients_learn_that_the_server_stopped_for_good(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        with configure(shm_name) as client:
            assert len(client.allocate_slots(1)) == 1
            assert daemon.stop() == 0
            with pytest.raises(radixshmem.RegionRetired):
                client.allocate_slots(1)
            with pytest.raises(ServerUnavailable):
                client.status()


def test_second_stop_signal_ends_at_once(shm_name: str, tmp_path: Path) -> None:
    """Also while the stop waits: here for a log that nobody reads."""
    log_file = tmp_path / "log"
    os.mkfifo(log_file)
    reader = os.open(log_file, os.O_RDWR | os.O_NONBLOCK)
    with Daemon(shm_name, *BUDGET, "--log-file", str(log_file)) as daemon:
        daemon.wait_serving()
        with configure(shm_name), suppress(BlockingIOError):
            while True:
                os.write(reader, b"\n")

        def has_ended() -> bool:
            daemon.signal(signal.SIGTERM)
            return daemon.process.poll() is not None

        eventually(has_ended, "the server ends")
        assert daemon.process.returncode == 1
    os.close(reader)


def test_usr1_dumps_status_and_hup_switches_the_level(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET, "--log-format", "json") as daemon:
        daemon.wait_serving()
        daemon.signal(signal.SIGUSR1)
        daemon.wait_log("SIGUSR1")
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("log level is DEBUG now")
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("log level is INFO now")
        lines = [json.loads(line) for line in daemon.log.splitlines()]
    assert {"time", "level", "message"} <= lines[0].keys()
    dump = next(line["message"] for line in lines if "SIGUSR1" in line["message"])
    assert json.loads(dump.removeprefix("SIGUSR1: "))["info"]["mode"] == "waiting"


def test_hup_opens_the_log_file_anew(shm_name: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Daemon(shm_name, "--log-file", str(log)) as daemon:
        daemon.wait_serving()
        log.rename(tmp_path / "server.log.1")
        daemon.signal(signal.SIGHUP)
        eventually(lambda: log.exists() and "opened anew" in log.read_text())


# -- who may run --------------------------------------------------------------------------------


def test_second_server_of_a_name_exits_and_touches_nothing(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as first:
        first.wait_serving()
        with configure(shm_name) as client:
            before = {name: os.stat(f"/dev/shm/{name}").st_ino for name in leftovers(shm_name)}
            for flags in ((), ("--fresh",), ("--data-bytes", "32M")):
                result = run_server("--name", shm_name, *flags)
                assert result.returncode == 3
                assert str(first.process.pid) in result.stderr
            assert {name: os.stat(f"/dev/shm/{name}").st_ino for name in leftovers(shm_name)} == before
            assert client.status().mode == "ready"
            assert len(client.allocate_slots(3)) == 3


def test_two_servers_side_by_side(shm_name: str) -> None:
    other = shm_name + "b"
    with Daemon(shm_name, *BUDGET) as first, Daemon(other, "--data-bytes", "8M") as second:
        first.wait_serving()
        second.wait_serving()
        with configure(shm_name) as one, configure(other) as two:
            assert (one.mempool_total(), two.mempool_total()) == (256, 128)
            assert one.info.epoch != two.info.epoch
        assert (first.stop(), second.stop()) == (0, 0)
    assert leftovers(shm_name) == []


def test_stale_socket_is_replaced(shm_name: str) -> None:
    path = f"/dev/shm{shm_name}.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        assert daemon.stop() == 0


def test_socket_path_taken_by_another_kind_of_file(shm_name: str) -> None:
    Path(f"/dev/shm{shm_name}.sock").write_text("mine")
    result = run_server("--name", shm_name)
    assert result.returncode == 1
    assert "--endpoint" in result.stderr
    assert leftovers(shm_name) == [f"{shm_name[1:]}.sock"]


def test_lock_file_that_is_a_link_is_refused(shm_name: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep")
    Path(f"/dev/shm{shm_name}.lock").symlink_to(target)
    result = run_server("--name", shm_name)
    assert result.returncode == 1
    assert target.read_text() == "keep"


def test_modes_of_regions_and_socket(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET, "--mode", "0660", "--group", str(os.getgid())) as daemon:
        daemon.wait_serving()
        with configure(shm_name):
            for name in ("", "_data", ".sock"):
                status = os.stat(f"/dev/shm{shm_name}{name}")
                assert stat.S_IMODE(status.st_mode) == 0o660, name
                assert status.st_gid == os.getgid()
    with Daemon(shm_name + "b", *BUDGET) as daemon:
        daemon.wait_serving()
        with configure(daemon.name):
            for name in ("", "_data", ".sock", ".lock"):
                assert stat.S_IMODE(os.stat(f"/dev/shm{daemon.name}{name}").st_mode) == 0o600, name


# -- memory -------------------------------------------------------------------------------------


def test_budget_beyond_shared_memory_is_refused_with_numbers_and_fix(shm_name: str) -> None:
    result = run_server("--name", shm_name, "--data-bytes", "900T")
    assert result.returncode == 4
    assert "--shm-size" in result.stderr
    assert "sizeLimit" in result.stderr
    assert str(900 * 2**40) in result.stderr
    assert leftovers(shm_name) == []


def test_index_beyond_memory_fails_configure_and_the_next_one_works(shm_name: str) -> None:
    too_many = Geometry(16, 4096, full_slots=0x7FFFFF00)
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        with pytest.raises(NoSpace, match="bytes"):
            RadixClient(shm_name, too_many)
        info = daemon.wait_mode("failed")
        assert "bytes" in info.last_error
        with configure(shm_name, Geometry(16, 4096, full_slots=100)) as client:
            assert client.mempool_total() == 100
            assert client.info.last_error == ""


# -- configure ----------------------------------------------------------------------------------


def test_client_before_its_server(shm_name: str) -> None:
    with pytest.raises(ServerUnavailable, match="UNAVAILABLE"):
        RadixClient(shm_name, GEOMETRY)


def test_other_geometry_is_refused_with_both_shown(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        with configure(shm_name):
            with pytest.raises(GeometryMismatch, match=r"block_size=16.*block_size=32"):
                RadixClient(shm_name, Geometry(32, 65536))
            with RadixClient(shm_name) as guest:
                assert guest.block_size() == 16


@pytest.mark.parametrize(
    ("flags", "geometry", "named"),
    [
        (("--data-bytes", "64K"), Geometry(16, 2**20), "--data-bytes"),
        (BUDGET, Geometry(16, 65536, swa_slot_bytes=4096, swa_window_blocks=4), "--swa-ratio"),
        (BUDGET, Geometry(16, 65536, mamba_slot_bytes=4096), "--mamba-ratio"),
        ((), Geometry(16, 65536), "--data-bytes"),
        ((*BUDGET, "--require-fingerprint"), GEOMETRY, "--require-fingerprint"),
    ],
)
def test_geometry_that_the_flags_do_not_allow(
    flags: tuple[str, ...], geometry: Geometry, named: str, shm_name: str
) -> None:
    with Daemon(shm_name, *flags) as daemon:
        daemon.wait_serving()
        with pytest.raises(ValueError, match=named):
            RadixClient(shm_name, geometry)
        info = daemon.status()
        assert info is not None
        assert info.mode == "waiting"


def test_ten_clients_configure_at_once(shm_name: str) -> None:
    ready: list[RadixClient] = []
    errors: list[BaseException] = []
    gate = threading.Barrier(10)

    def join() -> None:
        try:
            gate.wait()
            ready.append(configure(shm_name))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    with Daemon(shm_name, *BUDGET, "--rpc-workers", "2") as daemon:
        daemon.wait_serving()
        threads = [threading.Thread(target=join) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len({client.info.epoch for client in ready}) == 1
        assert daemon.log.count("made the regions") == 1
        for client in ready:
            client.close()


def test_failed_build_is_told_and_may_be_tried_again(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        obstacle = Path(f"/dev/shm{shm_name}_data")
        obstacle.write_text("")
        with RadixClient(shm_name, GEOMETRY) as client:
            with pytest.raises(RadixError, match="_data"):
                client.wait_ready(30)
        info = daemon.status()
        assert info is not None
        assert (info.mode, info.geometry) == ("failed", None)
        assert not Path(f"/dev/shm{shm_name}").exists()
        obstacle.unlink()
        with configure(shm_name, Geometry(32, 65536)) as client:
            assert client.block_size() == 32


def test_first_fingerprint_is_kept_and_another_refused(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        with configure(shm_name):
            daemon.wait_log("without a fingerprint")
            with configure(shm_name, Geometry(16, 65536, fingerprint="model-a")) as named:
                assert named.geometry is not None
                assert named.geometry["fingerprint"] == "model-a"
            with pytest.raises(GeometryMismatch, match=r"model-a.*model-b"):
                RadixClient(shm_name, Geometry(16, 65536, fingerprint="model-b"))
            RadixClient(shm_name, GEOMETRY).close()


def test_index_only_server_counts_from_the_geometry(shm_name: str) -> None:
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        with configure(shm_name, Geometry(16, 4096, full_slots=77)) as client:
            assert client.mempool_total() == 77
            assert not client.info.data_plane
            assert client.info.data_name == ""
        assert not Path(f"/dev/shm{shm_name}_data").exists()


def test_index_only_server_leaves_a_file_that_it_did_not_make(shm_name: str) -> None:
    theirs = Path(f"/dev/shm{shm_name}_data")
    theirs.write_bytes(b"somebody's")
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        with configure(shm_name, Geometry(16, 4096, full_slots=77)):
            pass
        assert daemon.stop() == 0
    assert theirs.read_bytes() == b"somebody's"
    assert not Path(f"/dev/shm{shm_name}").exists()


def test_wait_ready_timeout_tells_the_mode(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        client = ControlClient(default_endpoint(shm_name))
        with pytest.raises(TimeoutError, match="waiting for a client's geometry"):
            client.wait_ready(0.3)
        client.close()


def test_stopped_server_is_a_timeout_not_a_hang(shm_name: str) -> None:
    with Daemon(shm_name, *BUDGET) as daemon:
        daemon.wait_serving()
        client = ControlClient(default_endpoint(shm_name), timeout_s=0.5)
        client.status()
        daemon.signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            client.status()
        daemon.signal(signal.SIGCONT)
        eventually(lambda: daemon.status())
        client.close()


# -- the service manager ------------------------------------------------------------------------


def test_service_manager_is_told(shm_name: str, tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(30)
        env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "200000"}
        with Daemon(shm_name, *BUDGET, env=env) as daemon:
            assert "READY=1" in manager.recv(4096).decode()
            with configure(shm_name):
                seen = ""
                while "STATUS=ready" not in seen or "WATCHDOG=1" not in seen:
                    seen += manager.recv(4096).decode() + "\n"
            daemon.signal(signal.SIGTERM)
            while "STOPPING=1" not in seen:
                seen += manager.recv(4096).decode() + "\n"
            assert daemon.wait_exit() == 0
