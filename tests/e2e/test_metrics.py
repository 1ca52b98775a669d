"""The HTTP endpoint of a real server."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest
from daemon import Daemon, eventually, free_port, run_server
from paths import path_of
from peer import Peer
from prometheus_client.parser import text_string_to_metric_families
from regions import leftovers

from radixshmem import ComponentType, Geometry, RadixClient
from radixshmem.config import DEFAULT_METRICS_ADDRESS

GEOMETRY = Geometry(block_size=16, full_slot_bytes=32768, swa_slot_bytes=4096, swa_window_blocks=4)
FLAGS = ("--data-bytes", "8M", "--swa-ratio", "0.25")
EXPECTED = {
    "radix_slots": ({"component", "state"}, 9),
    "radix_match_blocks_total": ({"component", "result"}, 6),
    "radix_inserted_blocks_total": (set(), 1),
    "radix_evicted_blocks_total": ({"component", "reason"}, 12),
    "radix_allocate_failures_total": ({"component", "reason"}, 6),
    "radix_clients": (set(), 1),
    "radix_reaped_clients_total": (set(), 1),
    "radix_reaped_pins_total": (set(), 1),
    "radix_reaped_slots_total": (set(), 1),
    "radix_lock_recoveries_total": (set(), 1),
    "radix_stale_handles_total": (set(), 1),
    "radix_events_dropped_total": (set(), 1),
    "radix_lock_timeouts_total": (set(), 1),
    "radix_pull_jobs_total": ({"outcome"}, 6),
    "radix_pull_bytes_total": (set(), 1),
    "radix_prefault_seconds": (set(), 1),
}


class Endpoint:
    """HTTP GET on a server's endpoint."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        """name -> sorted label values -> value."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
        return found


def serve(name: str, port: int, *flags: str) -> Daemon:
    return Daemon(name, *FLAGS, *flags, metrics=f"127.0.0.1:{port}")


def test_first_scrape_has_every_metric_at_zero(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        families = list(text_string_to_metric_families(endpoint.get("/metrics")[1]))
        samples = [sample for family in families for sample in family.samples]
        for name, (labels, num_series) in EXPECTED.items():
            mine = [sample for sample in samples if sample.name == name]
            assert len(mine) == num_series, name
            for sample in mine:
                assert set(sample.labels) == labels, name
                assert sample.value == 0, sample
        [info] = [sample for sample in samples if sample.name == "radix_info"]
        assert info.labels["name"] == shm_name


def test_counters_equal_what_was_done(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(30)
            total = client.mempool_total()
            client.insert(path_of(10), client.allocate_slots(10))
            client.insert(path_of(4), client.allocate_slots(4, component=ComponentType.SWA), component=1)
            for _ in range(3):
                client.query(path_of(10))
            client.query(path_of(12))
            client.query(path_of(5, name=9))
            client.index.evict(ComponentType.FULL, 2, 3)
            held = client.query(path_of(3), lock=True)
            taken = client.allocate_slots(total)
            assert len(taken) == total - 3
            assert held.finalize is not None
            for _ in range(20):
                endpoint.get("/readyz")  # a lookup of its own, which must count nowhere
            samples = endpoint.samples()
            held.finalize()
            held.finalize()

        hits, misses = 3 * 10 + 10 + 3, 2 + 5
        assert samples["radix_match_blocks_total"]["full", "hit"] == hits
        assert samples["radix_match_blocks_total"]["full", "miss"] == misses
        assert samples["radix_inserted_blocks_total"][()] == 10
        assert samples["radix_evicted_blocks_total"]["full", "request"] == 2
        assert samples["radix_evicted_blocks_total"]["full", "capacity"] == 5
        assert samples["radix_allocate_failures_total"]["full", "full"] == 1
        assert samples["radix_slots"]["full", "free"] == 0
        assert samples["radix_slots"]["full", "staged"] == total - 3
        assert samples["radix_slots"]["full", "published"] == 3
        assert samples["radix_clients"][()] == 1
        assert samples["radix_prefault_seconds"][()] > 0
        assert eventually(lambda: endpoint.samples()["radix_clients"][()] == 0)


def test_reaping_is_counted_and_logged(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        peer = Peer(shm_name)
        peer.join(GEOMETRY)
        peer.call("insert", path_of(10), peer.call("allocate_slots", 10))
        peer.call("query", path_of(10), lock=True)
        peer.call("allocate_slots", 7)
        peer.kill()
        daemon.wait_log("reaped 1 dead clients: 1 pins, 7 staged slots")
        samples = endpoint.samples()
        assert samples["radix_reaped_clients_total"][()] == 1
        assert samples["radix_reaped_pins_total"][()] == 1
        assert samples["radix_reaped_slots_total"][()] == 7
        assert samples["radix_clients"][()] == 0


def test_background_eviction_keeps_a_part_free(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port, "--background-evict-ratio", "0.5") as daemon:
        daemon.wait_serving()
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(30)
            total = client.mempool_total()
            client.insert(path_of(total), client.allocate_slots(total))
            eventually(lambda: client.mempool_free() >= total / 2)
            evicted = endpoint.samples()["radix_evicted_blocks_total"]["full", "background"]
            assert evicted == client.mempool_free()
            assert client.query(path_of(total)).common_hit == total - evicted


def test_probes_tell_the_mode(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        assert endpoint.get("/healthz") == (200, "ok\n")
        assert endpoint.get("/readyz") == (200, "waiting for a client's geometry\n")
        with RadixClient(shm_name, GEOMETRY) as client:
            client.wait_ready(30)
        assert endpoint.get("/readyz") == (200, "ready\n")
        assert endpoint.get("/nothing")[0] == 404
        assert endpoint.get("/metrics?name[]=radix_clients")[0] == 200


def test_open_metrics_is_spoken_on_request(shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        request = urllib.request.Request(
            f"http://127.0.0.1:{endpoint.port}/metrics", headers={"Accept": "application/openmetrics-text"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            assert response.headers["Content-Type"].startswith("application/openmetrics-text")
            assert response.read().decode().endswith("# EOF\n")


@pytest.mark.parametrize(
    "request_bytes", [b"\x00\xff" * 100 + b"\r\n\r\n", b"GET " + b"a" * 100_000, b"POST / HTTP/1.1\r\n\r\n"]
)
def test_garbage_leaves_the_endpoint_working(request_bytes: bytes, shm_name: str) -> None:
    endpoint = Endpoint(free_port())
    with serve(shm_name, endpoint.port) as daemon:
        daemon.wait_serving()
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        assert endpoint.get("/healthz")[0] == 200
        assert "Traceback" not in daemon.log


# -- addresses ----------------------------------------------------------------------------------


def test_given_address_that_is_taken_ends_the_start(shm_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_server("--name", shm_name, *FLAGS, "--metrics-address", f"127.0.0.1:{port}")
    assert result.returncode == 1
    assert "--metrics-address" in result.stderr
    assert leftovers(shm_name) == []


def test_default_address_that_is_taken_is_one_warning(shm_name: str) -> None:
    host, _, port = DEFAULT_METRICS_ADDRESS.partition(":")
    try:
        taken = socket.create_server((host, int(port)))
    except OSError:
        taken = None  # another server of this machine has it: as good
    env = {"RADIX_LOG_FORMAT": "json"}
    with Daemon(shm_name, *FLAGS, metrics=None, env=env) as daemon:
        daemon.wait_serving()
        warnings = [line for line in map(json.loads, daemon.log.splitlines()) if line["level"] == "warning"]
        assert len(warnings) == 1
        assert "--metrics-address" in warnings[0]["message"]
    if taken is not None:
        taken.close()
