from __future__ import annotations

import gc
import threading

import pytest
from node import INDEX_ONLY, Node
from paths import path_of

from radixshmem import PullJob, RadixClient


@pytest.fixture
def client(node: Node) -> RadixClient:
    """A client that has published 10 blocks and may have 2 pull jobs outstanding."""
    name = node.serve()
    client = node.join(name, INDEX_ONLY, max_outstanding=2)
    client.insert(path_of(10), client.allocate_slots(10))
    return client


def test_on_one_node_a_job_is_done_with_the_local_hit(client: RadixClient) -> None:
    job = client.pull_async(path_of(15))
    assert (job.local_hit, job.planned_hit, job.done()) == (10, 10, True)
    result = job.wait(1.0)
    assert (result.common_hit, result.remote_blocks, result.remote_bytes) == (10, 0, 0)
    assert result.source_rank == -1
    assert result.finalize is None
    assert job.wait() == result


def test_a_locked_job_hands_its_pin_over(client: RadixClient) -> None:
    result = client.pull_async(path_of(10), lock=True).wait()
    assert client.stats()["pool"]["full"]["num_pins"] == 1
    assert result.finalize is not None
    result.finalize()
    result.finalize()
    assert client.stats()["pool"]["full"]["num_pins"] == 0


def test_cancel_drops_the_pin(client: RadixClient) -> None:
    job = client.pull_async(path_of(10), lock=True)
    job.cancel()
    job.cancel()
    assert client.stats()["pool"]["full"]["num_pins"] == 0


def test_ids_are_unique(client: RadixClient) -> None:
    ids = []
    for _ in range(5):
        job = client.pull_async(path_of(10))
        ids.append(job.job_id)
        job.wait()
    assert len(set(ids)) == 5


def test_only_so_many_may_be_outstanding(client: RadixClient) -> None:
    jobs: list[PullJob] = [client.pull_async(path_of(10)) for _ in range(2)]
    with pytest.raises(TimeoutError, match="max_outstanding"):
        client.pull_async(path_of(10), block=False)
    with pytest.raises(TimeoutError, match="max_outstanding"):
        client.pull_async(path_of(10), timeout_ms=20)
    jobs[0].wait()
    client.pull_async(path_of(10), block=False).cancel()
    client.pull_async(path_of(10), block=False).wait()
    jobs.clear()
    gc.collect()
    kept = [client.pull_async(path_of(10), block=False) for _ in range(2)]
    assert len(kept) == 2


def test_a_blocked_pull_goes_on_when_another_thread_collects(client: RadixClient) -> None:
    jobs = [client.pull_async(path_of(10)) for _ in range(2)]
    collector = threading.Timer(0.05, jobs[0].wait)
    collector.start()
    assert client.pull_async(path_of(10), timeout_ms=30_000).local_hit == 10
    collector.join()


def test_bad_arguments_hold_no_place(client: RadixClient) -> None:
    for _ in range(3):
        with pytest.raises(TypeError, match="hashes"):
            client.pull_async([1, 2, 3])  # type: ignore[arg-type]
    assert client.pull_async(path_of(10), block=False).done()
