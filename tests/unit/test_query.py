from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
from frozen import frozen_index
from node import Node
from paths import path_of

from radixshmem import IndexBusy, InsertError, QueryResult, QueryStatus, RadixClient


@pytest.fixture
def client(node: Node) -> RadixClient:
    """A client that has published one path of 50 blocks."""
    client = node.client(pins_per_client=4)
    client.insert(path_of(50), client.allocate_slots(50))
    return client


def num_pins(client: RadixClient) -> int:
    return int(client.stats()["pool"]["full"]["num_pins"])


def finalize(result: QueryResult) -> None:
    assert result.finalize is not None
    result.finalize()


# -- pins ----------------------------------------------------------------------------------------


def test_finalize_drops_the_pin_once(client: RadixClient) -> None:
    result = client.query(path_of(50), lock=True)
    other = client.query(path_of(50), lock=True)
    assert num_pins(client) == 2
    for _ in range(3):
        finalize(result)
        assert num_pins(client) == 1
    finalize(other)
    assert num_pins(client) == 0
    assert client.stats()["stale_releases"] == 0


def test_with_releases_at_exit(client: RadixClient) -> None:
    with client.query(path_of(50), lock=True) as result:
        assert num_pins(client) == 1
        finalize(result)
    with pytest.raises(KeyError), client.query(path_of(50), lock=True):
        raise KeyError
    assert num_pins(client) == 0


def test_without_lock_there_is_nothing_to_finalize(client: RadixClient) -> None:
    with client.query(path_of(50)) as result:
        assert result.finalize is None
        assert num_pins(client) == 0


def test_a_zero_hit_pins_nothing(client: RadixClient) -> None:
    result = client.query(path_of(5, name=1), lock=True)
    assert (result.status, result.common_hit, result.full_fragments) == (QueryStatus.OK, 0, [])
    assert num_pins(client) == 0
    finalize(result)
    assert client.query(np.empty(0, np.uint64), lock=True).common_hit == 0
    del result
    gc.collect()


def test_pin_limit_is_a_zero_hit(client: RadixClient) -> None:
    held = [client.query(path_of(50), lock=True) for _ in range(4)]
    refused = client.query(path_of(50), lock=True)
    assert (refused.status, refused.full_hit, refused.common_hit) == (QueryStatus.PIN_LIMIT, 0, 0)
    finalize(refused)
    finalize(held.pop())
    with client.query(path_of(50), lock=True) as result:
        assert result.status == QueryStatus.OK
    for result in held:
        finalize(result)


def test_results_outlive_their_release(client: RadixClient) -> None:
    with client.query(path_of(50), lock=True) as result:
        slots = result.full_fragments[0][2].tolist()
    client.query(path_of(20))
    assert result.full_fragments[0][2].tolist() == slots
    assert (result.full_hit, result.common_hit, result.swa_start) == (50, 50, 50)
    assert "common_hit=50" in repr(result)
    assert "pinned=False" in repr(result)


# -- results that nobody finalized ------------------------------------------------------------------


def test_a_collected_result_warns_and_is_released_by_the_next_verb(client: RadixClient) -> None:
    result = client.query(path_of(50), lock=True)
    with pytest.warns(ResourceWarning, match=r"QueryResult\(status=0, full_hit=50.*not finalized"):
        del result
    assert client.index.stats()["pool"][0]["num_pins"] == 1
    client.query(path_of(1))
    assert client.index.stats()["pool"][0]["num_pins"] == 0


def test_a_result_that_was_never_made_is_collected_in_silence() -> None:
    QueryResult.__new__(QueryResult)  # what an interrupt at the start of __init__ leaves
    gc.collect()


def test_a_result_collected_in_a_cycle(client: RadixClient) -> None:
    class Request:
        pass

    request = Request()
    request.myself, request.result = request, client.query(path_of(50), lock=True)  # type: ignore[attr-defined]
    del request
    with pytest.warns(ResourceWarning):
        gc.collect()
    assert num_pins(client) == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_collecting_in_the_middle_of_anything_is_safe(client: RadixClient) -> None:
    """The collector runs at its lowest threshold while verbs run and results in cycles pile up."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            result = client.query(path_of(50), lock=True)
            assert result.status in (QueryStatus.OK, QueryStatus.PIN_LIMIT)
            cycle: list[object] = [result]
            cycle.append(cycle)
            del cycle, result
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert num_pins(client) == 0


def test_closing_the_client_releases_without_a_word(node: Node) -> None:
    client = node.client()
    client.insert(path_of(10), client.allocate_slots(10))
    other = node.join(client.name)
    result = client.query(path_of(10), lock=True)
    assert num_pins(other) == 1
    client.close()
    assert num_pins(other) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finalize(result)
        del result


# -- a busy index ------------------------------------------------------------------------------------


def test_busy_query_is_a_zero_hit(client: RadixClient) -> None:
    with frozen_index(client.name):
        result = client.query(path_of(50), lock=True)
        assert (result.status, result.full_hit, result.common_hit) == (QueryStatus.BUSY, 0, 0)
        finalize(result)
        assert client.query(path_of(50)).full_hit == 50, "without a pin no lock is needed"
    assert client.stats()["lock_timeouts"] >= 1


def test_busy_release_is_done_by_the_next_verb(client: RadixClient) -> None:
    result = client.query(path_of(50), lock=True)
    with frozen_index(client.name):
        finalize(result)
        finalize(result)
    assert client.index.stats()["pool"][0]["num_pins"] == 1
    assert num_pins(client) == 0


def test_busy_recycle_stays_staged_until_the_next_verb(client: RadixClient) -> None:
    slots = client.allocate_slots(100)
    with frozen_index(client.name):
        client.recycle_slots(slots)
        slots[:] = -1  # the queue must have its own copy
    assert client.index.num_free(0) == 1850
    assert client.mempool_free() == 1950


def test_busy_allocate_is_empty_and_keeps_nothing(client: RadixClient) -> None:
    with frozen_index(client.name):
        assert len(client.allocate_slots(10)) == 0
    assert client.mempool_free() == 1950


def test_busy_insert_can_be_resumed(client: RadixClient) -> None:
    hashes = path_of(70)
    slots = client.allocate_slots(20)
    with frozen_index(client.name):
        result = client.insert(hashes, slots, start=50)
    assert result.error == InsertError.BUSY
    done = result.num_inserted + len(result.unused_slots)
    assert done == 0
    assert client.insert(hashes, slots[done:], start=50 + done).num_inserted == 20
    assert client.query(hashes).full_hit == 70


def test_busy_reset_says_so(client: RadixClient) -> None:
    with frozen_index(client.name), pytest.raises(IndexBusy, match="BUSY"):
        client.reset()
    assert client.query(path_of(50)).full_hit == 50
    client.reset()
    assert client.query(path_of(50)).full_hit == 0
