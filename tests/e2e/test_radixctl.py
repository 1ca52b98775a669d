"""radixctl on living and dead servers."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon, ctl, ctl_json, environment, eventually
from living import Living
from paths import path_of
from peer import Peer
from regions import attach, leftovers

import radixshmem
from radixshmem import Geometry, RadixClient, RegionRetired

GEOMETRY = Geometry(block_size=16, full_slot_bytes=32768, swa_slot_bytes=4096, swa_window_blocks=4)
FLAGS = ("--data-bytes", "8M", "--swa-ratio", "0.25")
COMMANDS = ("status", "clients", "pins", "check", "dump", "events", "doctor")


@pytest.fixture
def daemon(shm_name: str) -> Iterator[Daemon]:
    """A server with ten published blocks, of which three are pinned, and two staged slots."""
    with Daemon(shm_name, *FLAGS) as daemon:
        daemon.wait_serving()
        with Peer(shm_name) as peer:
            peer.join(GEOMETRY)
            peer.call("insert", path_of(10), peer.call("allocate_slots", 10))
            peer.call("query", path_of(3), lock=True)
            peer.call("allocate_slots", 2)
            yield daemon


def test_help_and_version() -> None:
    assert radixshmem.__version__ in ctl("--version").stdout
    text = ctl("--help").stdout
    for command in (*COMMANDS, "top", "evict", "reset", "rm", "completion"):
        assert re.search(rf"\b{command}\b", text), command


def test_completion_script() -> None:
    assert "_RADIXCTL_COMPLETE" in ctl("completion", "bash").stdout


def test_looking_inside_a_living_server(daemon: Daemon) -> None:
    name = daemon.name
    status = ctl_json("--name", name, "status")
    assert status["server"] | {"version": None} == {
        "alive": True,
        "pid": daemon.process.pid,
        "mode": "ready",
        "last_error": "",
        "progress": 1.0,
        "version": None,
    }
    full, swa = status["pools"]
    total = full["total"]
    assert (full["staged"], full["pinned"], full["evictable"]) == (2, 3, 7)
    assert full["free"] == total - 12
    assert (swa["component"], swa["free"]) == ("swa", swa["total"])
    assert status["region"]["geometry"]["pools"]["swa"]["window_blocks"] == 4
    assert status["hit_rate"]["full"] == 1.0
    assert status["pins"] == 1

    by_label = {client["label"]: client for client in ctl_json("--name", name, "clients")}
    assert set(by_label) == {"radix-server", "peer"}
    assert (by_label["peer"]["pins"], by_label["peer"]["staged"]["full"]) == (1, 2)

    [pinned] = ctl_json("--name", name, "pins")
    assert (pinned["hash"], pinned["pins"]) == (f"{path_of(3)[-1]:016x}", 1)

    nodes = ctl_json("--name", name, "dump")
    assert {node["hash"] for node in nodes if node["hash"]} == {f"{h:016x}" for h in path_of(10)}
    assert sum(node["state"] == "staged" for node in nodes) == 2
    assert len(ctl_json("--name", name, "dump", "--limit", "4")) == 4

    assert ctl_json("--name", name, "check")["violations"] == 0
    assert ctl("--name", name, "check").returncode == 0


def test_clients_shows_who_died_before_anybody_reaped_it(daemon: Daemon) -> None:
    name, server = daemon.name, daemon.process.pid

    def states() -> dict[int, tuple[str, bool]]:
        clients = ctl_json("--name", name, "clients")
        return {c["pid"]: (c["state"], c["leased"]) for c in clients if c["label"] != "peer"}

    with Living(name) as alone, Living(name) as outlived:
        writer = outlived.call("start_writer", outlived.call("stage", 2))
        assert states() == dict.fromkeys((server, alone.pid, outlived.pid), ("active", True))
        for process in (daemon, alone, outlived):
            process.kill()
        dead = dict.fromkeys((server, alone.pid, outlived.pid), ("dead", False))
        assert states() == dead | {outlived.pid: ("dead", True)}
        assert "dead, worker lives" in ctl("--name", name, "clients").stdout
        os.kill(writer, signal.SIGKILL)
        eventually(lambda: states() == dead, "the worker's lease is gone")


def test_every_looking_command_has_a_table(daemon: Daemon) -> None:
    for command in COMMANDS:
        result = ctl("--name", daemon.name, command)
        assert result.returncode == 0, (command, result.stderr)
        assert result.stdout.strip(), command
    assert f"server pid {daemon.process.pid}, ready" in ctl("--name", daemon.name, "status").stdout


def test_name_and_json_are_taken_behind_the_command_too(daemon: Daemon) -> None:
    before = ctl("--name", daemon.name, "--json", "clients")
    behind = ctl("clients", "--name", daemon.name, "--json")
    assert [c["label"] for c in json.loads(before.stdout)] == [c["label"] for c in json.loads(behind.stdout)]


def test_evict_reset_and_their_events(daemon: Daemon) -> None:
    name = daemon.name
    assert ctl_json("--name", name, "evict", "4") == {"component": "full", "evicted": 4}
    assert ctl_json("--name", name, "evict", "--all") == {"component": "full", "evicted": 3}
    assert ctl_json("--name", name, "evict", "--all", "--component", "swa")["evicted"] == 0
    events = ctl_json("--name", name, "events")["events"]
    assert [event["kind"] for event in events] == ["stored"] * 10 + ["removed"] * 7
    assert {event["reason"] for event in events[10:]} == {"request"}
    assert {event["hash"] for event in events[10:]} == {f"{h:016x}" for h in path_of(10)[3:]}
    assert len(ctl_json("--name", name, "events", "--limit", "2")["events"]) == 2

    assert ctl_json("--name", name, "reset") == {"generation": 1}
    assert ctl_json("--name", name, "check")["violations"] == 0
    with RadixClient(name) as client:
        assert client.query(path_of(3)).common_hit == 0


def test_evict_wants_a_count_or_all(daemon: Daemon) -> None:
    assert ctl("--name", daemon.name, "evict").returncode == 2
    assert ctl("--name", daemon.name, "evict", "3", "--all").returncode == 2


def test_evict_names_the_component_that_is_not_there(daemon: Daemon) -> None:
    refused = ctl("--name", daemon.name, "evict", "3", "--component", "mamba")
    assert (refused.returncode, "--component" in refused.stderr) == (2, True)


@pytest.mark.parametrize("interval", ["0", "inf", "nan", "1e300"])
def test_an_impossible_interval_is_a_usage_error(interval: str, daemon: Daemon) -> None:
    refused = ctl("--name", daemon.name, "top", "--count", "1", "--interval", interval)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_top_shows_rates(daemon: Daemon) -> None:
    result = ctl("--name", daemon.name, "top", "--json", "--interval", "0.1", "--count", "2")
    samples = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(samples) == 2
    assert [pool["component"] for pool in samples[0]["pools"]] == ["full", "swa"]
    text = ctl("--name", daemon.name, "top", "--interval", "0.1", "--count", "2").stdout
    assert len(re.findall(r"^full .* 0\.0$", text, re.MULTILINE)) == 2, "a log gets every look"


def test_a_reader_that_goes_away_is_no_error(daemon: Daemon) -> None:
    command = [sys.executable, "-W", "error", "-m", "radixshmem.cli.ctl", "--name", daemon.name]
    command += ["top", "--json", "--interval", "0.05"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_followed_events_come_as_they_happen(daemon: Daemon) -> None:
    command = [
        sys.executable,
        "-m",
        "radixshmem.cli.ctl",
        "--name",
        daemon.name,
        "--json",
        "events",
        "--follow",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as follower:
        assert follower.stdout is not None
        first = [json.loads(follower.stdout.readline()) for _ in range(10)]
        assert {event["kind"] for event in first} == {"stored"}
        assert ctl_json("--name", daemon.name, "evict", "1")["evicted"] == 1
        assert json.loads(follower.stdout.readline())["kind"] == "removed"
        follower.terminate()


def test_rm_refuses_while_the_server_lives(daemon: Daemon) -> None:
    result = ctl("--name", daemon.name, "rm")
    assert result.returncode == 3
    assert str(daemon.process.pid) in result.stderr
    assert daemon.wait_mode("ready")


def test_dead_server(shm_name: str) -> None:
    with Daemon(shm_name, *FLAGS) as daemon:
        daemon.wait_serving()
        with Peer(shm_name) as peer:
            peer.join(GEOMETRY)
            peer.call("insert", path_of(10), peer.call("allocate_slots", 10))
            daemon.kill()
    status = ctl_json("--name", shm_name, "status")
    assert (status["server"]["alive"], status["server"]["pid"]) == (False, None)
    assert status["pools"][0]["evictable"] == 10
    assert "stale" in ctl("--name", shm_name, "status").stdout
    assert len(ctl_json("--name", shm_name, "dump")) == 10
    assert ctl_json("--name", shm_name, "check")["violations"] == 0
    assert ctl_json("--name", shm_name, "evict", "2")["evicted"] == 2

    index = attach(shm_name)
    assert ctl("--name", shm_name, "rm").returncode == 0
    with pytest.raises(RegionRetired):
        index.check_alive()
    index.close()
    assert leftovers(shm_name) == []


def test_check_reports_violations_with_exit_code_1(shm_name: str) -> None:
    with Daemon(shm_name, *FLAGS) as daemon:
        daemon.wait_serving()
        with Peer(shm_name) as peer:
            peer.join(GEOMETRY)
            peer.call("insert", path_of(10), peer.call("allocate_slots", 10))
        hash_of_first = int(path_of(10)[0]).to_bytes(8, "little")
        with open(f"/dev/shm{shm_name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as region:
            offset = region.find(hash_of_first)
            assert offset >= 0
            while offset >= 0:  # the tree's and the event ring's
                region[offset : offset + 8] = bytes(8)
                offset = region.find(hash_of_first)
        result = ctl("--name", shm_name, "check")
        assert result.returncode == 1, result.stdout
        assert re.search(r"\bI\d+\b", result.stdout)
        data = json.loads(ctl("--name", shm_name, "check", "--json").stdout)
        assert data["violations"] > 0
        assert data["report"]


@pytest.mark.parametrize("command", ["status", "clients", "pins", "dump", "check", "events", "reset", "top"])
def test_nothing_there_is_one_line_and_exit_code_1(command: str, shm_name: str) -> None:
    result = ctl("--name", shm_name, command)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert shm_name in result.stderr


def test_waiting_server_has_a_status_without_region(shm_name: str) -> None:
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        status = ctl_json("--name", shm_name, "status")
        assert (status["server"]["mode"], status["region"]) == ("waiting", None)
        assert "waiting" in ctl("--name", shm_name, "status").stdout
        assert "waits for" in ctl("--name", shm_name, "clients").stderr


def test_rm_of_nothing_and_of_a_stale_socket(shm_name: str) -> None:
    assert ctl_json("--name", shm_name, "rm") == {"removed": []}
    with Daemon(shm_name) as daemon:
        daemon.wait_serving()
        daemon.kill()
    assert ctl_json("--name", shm_name, "rm")["removed"] == [f"/dev/shm{shm_name}.sock"]
    assert leftovers(shm_name) == []


def test_rm_finds_a_store_of_another_name_and_nobody_elses(shm_name: str) -> None:
    data_name = f"{shm_name}_bytes"
    not_ours = Path(f"/dev/shm{shm_name}_data")
    not_ours.write_bytes(b"somebody's")
    with Daemon(shm_name, *FLAGS, "--data-name", data_name) as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(30)
        daemon.kill()
    removed = ctl_json("--name", shm_name, "rm")["removed"]
    assert removed == [f"/dev/shm{path}" for path in (shm_name, data_name, f"{shm_name}.sock")]
    assert leftovers(shm_name) == [not_ours.name]


def test_bad_name_is_a_usage_error() -> None:
    result = ctl("--name", "flexkv", "status")
    assert result.returncode == 2
    assert "--name" in result.stderr


def test_doctor_foresees_a_start_that_would_fail() -> None:
    result = ctl("doctor", "--data-bytes", "900T")
    assert result.returncode == 1
    assert "--shm-size" in result.stdout
    findings = json.loads(ctl("--json", "doctor").stdout)
    assert {"/dev/shm", "memory", "cgroup", "memlock", "huge pages", "start"} <= {f["what"] for f in findings}
    assert ctl("doctor", "--data-bytes", "1M").returncode == 0


def test_status_of_a_garbage_region_is_an_error_not_a_crash(shm_name: str) -> None:
    Path(f"/dev/shm{shm_name}").write_bytes(b"\xff" * 65536)
    for command in ("status", "check", "dump", "clients"):
        result = ctl("--name", shm_name, command)
        assert result.returncode == 1, command
        assert "corrupt" in result.stderr
        assert "Traceback" not in result.stderr
    assert eventually(lambda: ctl("--name", shm_name, "rm").returncode == 0)
