from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from node import INDEX_ONLY, Node
from paths import path_of

from radixshmem import (
    COMPONENT_MASK_SWA,
    ClientClosed,
    ComponentType,
    Geometry,
    RadixClient,
    RadixError,
    ServerUnavailable,
)

HYBRID = Geometry(16, 4096, 1024, 4, full_slots=100, swa_slots=16)
SWA, MAMBA = ComponentType.SWA, ComponentType.MAMBA


@pytest.fixture
def client(node: Node) -> RadixClient:
    return node.client(HYBRID)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "flexkv", "/", "/a b", "/a..b", "/x_data", "/x.sock", "/x.lock", "/a/b", "/" + "x" * 81]
)
def test_impossible_names(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        RadixClient(name)


def test_bad_constructor_arguments(shm_name: str) -> None:
    with pytest.raises(TypeError, match="geometry"):
        RadixClient(shm_name, {"block_size": 16})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_outstanding"):
        RadixClient(shm_name, max_outstanding=0)
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            RadixClient(shm_name, timeout_s=timeout_s)
    for field in ("endpoint", "max_outstanding", "timeout_s", "label"):
        for value in ([1], np.array([1, 2]), b"x"):
            with pytest.raises(TypeError, match=field):
                RadixClient(shm_name, **{field: value})
    with pytest.raises(ServerUnavailable, match="UNAVAILABLE"):
        RadixClient(shm_name)


BAD_CALLS: list[tuple[type[Exception], str, Callable[[RadixClient], Any]]] = [
    (TypeError, "hashes", lambda c: c.query([1, 2])),
    (TypeError, "hashes", lambda c: c.query(np.arange(3.0))),
    (ValueError, "hashes", lambda c: c.query(np.zeros((2, 2), np.uint64))),
    (ValueError, "hashes", lambda c: c.query(np.zeros(8, np.uint64)[::2])),
    (ValueError, "hashes", lambda c: c.query(np.zeros(8, np.int64)[::2])),
    (ValueError, "max_hashes", lambda c: c.kvevent_drain(-1)),
    (ValueError, "cursor", lambda c: c.events(-1)),
    (ValueError, "mask", lambda c: c.query(path_of(2), mask=0)),
    (ValueError, "mask", lambda c: c.query(path_of(2), mask=8)),
    (ValueError, "mask", lambda c: c.query(path_of(2), mask=5)),
    (ValueError, "mask", lambda c: c.query(path_of(2), mask=-1)),
    (ValueError, "n:", lambda c: c.allocate_slots(-1)),
    (TypeError, "n must", lambda c: c.allocate_slots(1.0)),
    (TypeError, "n must", lambda c: c.allocate_slots("1")),
    (TypeError, "start", lambda c: c.insert(path_of(2), np.zeros(1, np.int32), start=1.0)),
    (TypeError, "start", lambda c: c.insert(path_of(2), np.zeros(2, np.int32), start=None)),
    (TypeError, "max_hashes", lambda c: c.kvevent_drain(1.0)),
    (TypeError, "cursor", lambda c: c.events("0")),
    (ValueError, "cursor", lambda c: c.events(1 << 64)),
    (TypeError, "mask", lambda c: c.query(path_of(2), mask=[1])),
    (TypeError, "mask", lambda c: c.query(path_of(2), mask=1.0)),
    (TypeError, "component", lambda c: c.allocate_slots(1, component=None)),
    (TypeError, "component", lambda c: c.recycle_slots(np.zeros(1, np.int32), component=[0])),
    (TypeError, "timeout_ms", lambda c: c.pull_async(path_of(2), timeout_ms=None)),
    (TypeError, "timeout_s", lambda c: c.wait_ready(None)),
    (ValueError, "timeout_s", lambda c: c.wait_ready(float("nan"))),
    (ValueError, "n:", lambda c: c.allocate_slots(101)),
    (ValueError, "n:", lambda c: c.allocate_slots(17, component=SWA)),
    (ValueError, "component", lambda c: c.allocate_slots(1, component=MAMBA)),
    (ValueError, "component", lambda c: c.allocate_slots(1, component=9)),
    (ValueError, "component", lambda c: c.recycle_slots(np.zeros(1, np.int32), component=MAMBA)),
    (TypeError, "slots", lambda c: c.recycle_slots([1])),
    (ValueError, "slots", lambda c: c.recycle_slots(np.array([2**40]))),
    (TypeError, "slots", lambda c: c.insert(path_of(2), [1, 2])),
    (ValueError, "start", lambda c: c.insert(path_of(2), np.zeros(2, np.int32), start=-1)),
    (ValueError, "start", lambda c: c.insert(path_of(2), np.zeros(0, np.int32), start=3)),
    (ValueError, "slots", lambda c: c.insert(path_of(2), np.zeros(1, np.int32))),
    (ValueError, "slots", lambda c: c.insert(path_of(2), np.zeros(2, np.int32), start=1)),
    (ValueError, "start", lambda c: c.insert(path_of(9), np.zeros(1, np.int32), start=8, component=SWA)),
    (ValueError, "slots", lambda c: c.insert(path_of(1), np.zeros(2, np.int32), component=SWA)),
    (ValueError, "component", lambda c: c.insert(path_of(1), np.zeros(1, np.int32), component=MAMBA)),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_arguments_are_named_and_change_nothing(client: RadixClient, number: int) -> None:
    error, message, call = BAD_CALLS[number]
    before = client.stats()
    with pytest.raises(error, match=message):
        call(client)
    assert client.stats() == before


def test_slots_that_are_not_the_callers(client: RadixClient, node: Node) -> None:
    other = node.join(client.name)
    mine, theirs = client.allocate_slots(4), other.allocate_slots(4)
    hashes = path_of(4)
    wrong = [theirs, np.append(mine[:3], theirs[0]), np.append(mine[:3], mine[0]), np.append(mine[:3], [99])]
    wrong += [np.append(mine[:3], [-1]), np.append(mine[:3], [100])]
    for slots in wrong:
        slots = slots.astype(np.int32)
        with pytest.raises(ValueError, match="slots: "):
            client.insert(hashes, slots)
        with pytest.raises(ValueError, match="slots: "):
            client.recycle_slots(slots)
        assert client.query(hashes).full_hit == 0
        assert client.mempool_free() == 92
    client.insert(hashes, mine)
    with pytest.raises(ValueError, match="slots: "):
        client.recycle_slots(mine)
    other.recycle_slots(theirs)
    with pytest.raises(ValueError, match="slots: "):
        other.recycle_slots(theirs)


def test_integer_dtypes_are_converted(client: RadixClient) -> None:
    slots = client.allocate_slots(3)
    assert slots.dtype == np.int32
    client.insert(path_of(3).view(np.int64), slots.astype(np.int64))
    assert client.query(path_of(3)).full_hit == 3
    assert client.query(path_of(3).view(np.int64)).full_hit == 3


def test_arguments_are_not_changed(client: RadixClient) -> None:
    hashes, slots = path_of(3), client.allocate_slots(3)
    hashes_before, slots_before = hashes.copy(), slots.copy()
    hashes.setflags(write=False)
    slots.setflags(write=False)
    client.insert(hashes, slots)
    client.query(hashes)
    assert hashes.tolist() == hashes_before.tolist()
    assert slots.tolist() == slots_before.tolist()


def test_nothing_at_all(client: RadixClient) -> None:
    none = np.empty(0, np.int32)
    assert len(client.allocate_slots(0)) == 0
    client.recycle_slots(none)
    assert client.insert(np.empty(0, np.uint64), none).num_inserted == 0
    assert client.query(np.empty(0, np.uint64)).full_hit == 0
    client.flush()


def test_mask_of_a_side_component_implies_full(client: RadixClient) -> None:
    client.insert(path_of(6), client.allocate_slots(6))
    client.insert(path_of(6), client.allocate_slots(4, component=SWA), component=SWA)
    hit = client.query(path_of(6), mask=COMPONENT_MASK_SWA)
    assert (hit.full_hit, hit.common_hit, len(hit.full_fragments[0][2])) == (6, 6, 6)


# -- what it tells -------------------------------------------------------------------------------


def test_geometry_and_place_in_the_cluster(client: RadixClient) -> None:
    assert client.geometry == {
        "block_size": 16,
        "slot_align": 4096,
        "register_chunk_tokens": 4096,
        "fingerprint": "",
        "pools": {
            "full": {"num_slots": 100, "slot_bytes": 4096},
            "swa": {"num_slots": 16, "slot_bytes": 1024, "window_blocks": 4},
        },
    }
    assert client.info.geometry == client.geometry
    assert client.status().geometry == client.geometry
    assert (client.rank(), client.world_size(), client.is_distributed()) == (0, 1, False)
    assert client.block_size() == 16
    assert (client.info.mode, client.info.data_plane) == ("ready", False)


def test_pool_counts(client: RadixClient) -> None:
    client.allocate_slots(10)
    client.allocate_slots(3, component=SWA)
    assert (client.mempool_total(), client.mempool_free()) == (100, 90)
    assert (client.swa_mempool_total(), client.swa_mempool_free()) == (16, 13)
    assert (client.mamba_mempool_total(), client.mamba_mempool_free()) == (0, 0)


def test_stats_are_named(client: RadixClient) -> None:
    client.insert(path_of(100), client.allocate_slots(100))
    client.query(path_of(70))
    client.query(path_of(5, name=3))
    client.allocate_slots(30)
    stats = client.stats()
    assert stats["pool"]["full"]["num_published"] == 70
    assert stats["pool"]["full"]["num_staged"] == 30
    assert stats["evicted_blocks"]["full"]["capacity"] == 30
    assert stats["inserted_blocks"] == {"full": 100, "swa": 0, "mamba": 0}
    assert (stats["hit_blocks"]["full"], stats["miss_blocks"]["full"]) == (70, 5)
    assert stats["queries"] == 2


def test_the_client_shows_under_its_label(node: Node) -> None:
    from radixshmem import _native
    from radixshmem.region import open_index

    name = node.serve()
    node.join(name, INDEX_ONLY, label="engine 7").allocate_slots(5)
    fd = open_index(name)
    records = {record.label: record for record in _native.peek_clients(fd)}
    assert records["engine 7"].num_staged == (5, 0, 0)


def test_an_index_only_server_has_no_store(client: RadixClient) -> None:
    with pytest.raises(RadixError, match="--data-bytes"):
        _ = client.store
    with pytest.raises(RadixError, match="--data-bytes"):
        client.slot_view(0)


# -- the end -------------------------------------------------------------------------------------


def test_after_close_every_verb_says_so(node: Node) -> None:
    client = node.client()
    client.index.check_alive()
    index = client.index
    client.close()
    client.close()
    none = np.empty(0, np.int32)
    calls: list[Callable[[], Any]] = [
        lambda: client.query(path_of(1)),
        lambda: client.allocate_slots(1),
        lambda: client.insert(np.empty(0, np.uint64), none),
        lambda: client.recycle_slots(none),
        lambda: client.pull_async(path_of(1)),
        lambda: client.kvevent_drain(1),
        lambda: client.events(0),
        lambda: client.slot_view(0),
        lambda: index.check_alive(),
        client.reset,
        client.flush,
        client.stats,
        client.status,
        client.wait_ready,
        client.reattach,
        client.mempool_free,
        client.block_size,
    ]
    for call in calls:
        with pytest.raises(ClientClosed):
            call()
    for attribute in ("index", "store", "kvevent_enabled"):
        with pytest.raises(ClientClosed):
            getattr(client, attribute)


def test_close_gives_everything_back(node: Node) -> None:
    client = node.client()
    watcher = node.join(client.name)
    client.insert(path_of(10), client.allocate_slots(10))
    held = client.query(path_of(10), lock=True)
    client.allocate_slots(20)
    with pytest.warns(ResourceWarning):
        client.query(path_of(10), lock=True)
    assert watcher.stats()["pool"]["full"]["num_pins"] == 2
    client.close()
    assert held.common_hit == 10
    assert watcher.mempool_free() == 1990
    assert watcher.stats()["pool"]["full"]["num_pins"] == 0


def test_closing_while_other_threads_are_in_verbs(node: Node) -> None:
    client = node.client()
    client.insert(path_of(500), client.allocate_slots(500))
    started = threading.Barrier(5)

    def work() -> None:
        started.wait()
        while True:
            try:
                with client.query(path_of(500), lock=True) as result:
                    assert result.status == 0
                client.recycle_slots(client.allocate_slots(20))
            except ClientClosed:
                return

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work) for _ in range(4)]
        started.wait()
        for _ in range(200):
            client.query(path_of(500))
        client.close()
        for job in jobs:
            job.result(30)


def test_threads_share_a_client(node: Node) -> None:
    """Staged, pinned and free counts come out exactly after many threads did everything at once."""
    client = node.client()

    def work(name: int) -> None:
        for round_ in range(30):
            hashes = path_of(40, 100 * name + round_)
            slots = client.allocate_slots(40)
            client.insert(hashes[: len(slots)], slots)
            with client.query(hashes, lock=True) as result:
                assert result.status == 0
            client.recycle_slots(client.allocate_slots(5))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    counts = client.stats()["pool"]["full"]
    assert (counts["num_pins"], counts["num_staged"]) == (0, 0)
    assert counts["num_free"] + counts["num_published"] == 2000


FORK = """
import os, sys
import numpy as np
from radixshmem import RadixClient, RadixError
name = sys.argv[1]
client = RadixClient(name)
client.wait_ready(30)
hashes = np.arange(1, 9, dtype=np.uint64)
client.insert(hashes, client.allocate_slots(8))
result = client.query(hashes, lock=True)
child = os.fork()
if child == 0:
    calls = [lambda: client.query(hashes), lambda: client.allocate_slots(1), client.status, client.stats,
             client.reset, lambda: client.slot_view(0), lambda: client.pull_async(hashes)]
    for number, call in enumerate(calls):
        try:
            call()
        except RadixError as error:
            if "fork" not in str(error):
                os._exit(50 + number)
        else:
            os._exit(100 + number)
    result.finalize()
    client.close()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert client.query(hashes).full_hit == 8
assert client.stats()["pool"]["full"]["num_pins"] == 1, "the child must not drop its parent's pin"
result.finalize()
assert client.stats()["pool"]["full"]["num_pins"] == 0
client.close()
"""


def test_a_forked_child_is_told_to_make_its_own(client: RadixClient) -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORK, client.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
