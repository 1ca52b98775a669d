"""One suite for every connector: what engines rely on, whatever their interface.

Each connector is driven as its engine does, on a real KVManager with CPU tensors and a real server.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from daemon import eventually
from engine import BLOCK, SMALL_SLOT_BYTES, Engine, Tokens, small_engine, tokens_of
from node import Node
from regions import unique_name

from flexkv_radix import CacheConfig
from flexkv_radix.connectors.base import SharedCache
from flexkv_radix.connectors.namespace import request_namespace
from flexkv_radix.connectors.readiness import await_ready
from flexkv_radix.connectors.vllm.scheduler import SchedulerSide, namespace_of
from flexkv_radix.settings import FlexKVSettings
from radixshmem import RadixClient


class Driver:
    """A connector, called as its engine would."""

    def __init__(self, cache: SharedCache, engine: Engine) -> None:
        self.cache, self.engine = cache, engine

    def lookup(self, name: str, tokens: Tokens, num_computed: int = 0, **tenant: Any) -> int:
        """Tokens that can be loaded for the request called name."""
        return self.cache.lookup(name, tokens[:-1], num_computed, request_namespace(**tenant))

    def load(self, name: str, blocks: list[int]) -> bool:
        """Load what was found to blocks; whether that went well."""
        if not self.cache.start_load(name, self.engine.slots(blocks)):
            return False
        return self.cache.finish_load(name)

    def start_load(self, name: str, blocks: list[int]) -> None:
        assert self.cache.start_load(name, self.engine.slots(blocks))

    def is_loaded(self, name: str) -> bool | None:
        """None while it runs."""
        ok = self.cache.poll().loads.get(name)
        assert ok is None or isinstance(ok, bool)
        return ok

    def abandon(self, name: str) -> None:
        """The request ends without having been scheduled."""
        self.cache.release(name)

    def store(self, name: str, tokens: Tokens, blocks: list[int], **tenant: Any) -> bool:
        """The request ends, its tokens' KV in blocks; whether something is being stored."""
        return self.cache.start_store(name, tokens, self.engine.slots(blocks), request_namespace(**tenant))

    def is_stored(self, name: str) -> bool:
        return name in self.cache.poll().stores


@dataclass
class VllmRequest:
    """A vLLM request as its scheduler sees it."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Lora:
    lora_name: str
    lora_path: str = "/nowhere"
    lora_int_id: int = 1


class VllmDriver(Driver):
    """The scheduler's half of the vLLM connector, with loads between steps."""

    load_async = True

    def __init__(self, cache: SharedCache, engine: Engine) -> None:
        super().__init__(cache, engine)
        self.side = SchedulerSide(cache, load_async=self.load_async)
        self.requests: dict[str, VllmRequest] = {}
        self.found: dict[str, tuple[int, int]] = {}
        self.failed_blocks: set[int] = set()
        self.finished_loads: set[str] = set()
        self.finished_stores: set[str] = set()

    def request(
        self, name: str, tokens: Tokens, salt: str | None = None, lora: str | None = None
    ) -> VllmRequest:
        return self.requests.setdefault(
            name,
            VllmRequest(name, tokens.tolist(), cache_salt=salt, lora_request=Lora(lora) if lora else None),
        )

    def lookup(self, name: str, tokens: Tokens, num_computed: int = 0, **tenant: Any) -> int:
        request = self.request(name, tokens, **tenant)
        num_tokens, is_async = self.side.get_num_new_matched_tokens(request, num_computed)
        assert is_async == (num_tokens > 0 and self.load_async)
        self.found[name] = num_computed, num_tokens
        return num_tokens

    def start_load(self, name: str, blocks: list[int]) -> None:
        num_computed, num_tokens = self.found[name]
        table = [0] * (num_computed // BLOCK) + blocks
        self.side.update_state_after_alloc(self.requests[name], table, num_tokens)
        self.step()

    def load(self, name: str, blocks: list[int]) -> bool:
        self.start_load(name, blocks)
        eventually(lambda: self.is_loaded(name) is not None)
        return not self.failed_blocks & set(blocks)

    def is_loaded(self, name: str) -> bool | None:
        self.step()
        if name not in self.finished_loads and self.load_async:
            return None
        return not self.failed_blocks

    def abandon(self, name: str) -> None:
        assert not self.side.request_finished(self.requests[name], [])

    def store(self, name: str, tokens: Tokens, blocks: list[int], **tenant: Any) -> bool:
        request = self.request(name, tokens, **tenant)
        request.num_computed_tokens = len(tokens)
        return self.side.request_finished(request, blocks)

    def is_stored(self, name: str) -> bool:
        self.step()
        return name in self.finished_stores

    def step(self) -> None:
        report = self.side.take_report()
        assert self.load_async or not report.finished_loads
        self.failed_blocks |= report.failed_blocks
        self.finished_loads |= report.finished_loads
        self.finished_stores |= report.finished_stores


class SynchronousVllmDriver(VllmDriver):
    """The same with loads that the step waits for."""

    load_async = False


MakeConnector = Callable[..., Driver]


@pytest.fixture
def server(node: Node) -> str:
    return node.serve(data_bytes=64 * SMALL_SLOT_BYTES)


@pytest.fixture(params=[Driver, VllmDriver, SynchronousVllmDriver])
def make(request: pytest.FixtureRequest, server: str, tmp_path: Path) -> Iterator[MakeConnector]:
    """Connectors of engines of one server."""
    made: list[Driver] = []

    def make_connector(**options: Any) -> Driver:
        directory = tmp_path / str(len(made))
        directory.mkdir()
        engine = small_engine(server, directory, **options).wait_ready()
        made.append(request.param(SharedCache(engine.manager, BLOCK), engine))
        return made[-1]

    yield make_connector
    for driver in made:
        driver.cache.close()
        driver.engine.close()


@pytest.fixture
def client(node: Node, server: str) -> Callable[[], RadixClient]:
    return lambda: node.join(server)


def stored(driver: Driver, name: str, tokens: Tokens, blocks: list[int], **tenant: Any) -> None:
    """Compute, store, wait."""
    driver.engine.compute(tokens, blocks)
    assert driver.store(name, tokens, blocks, **tenant)
    eventually(lambda: driver.is_stored(name))


def test_what_one_engine_stores_another_loads_to_the_byte(make: MakeConnector) -> None:
    first, second = make(), make()
    tokens = tokens_of(5 * BLOCK + 3)
    stored(first, "a", tokens, [1, 2, 3, 4, 5, 6])
    assert second.lookup("b", tokens) == 5 * BLOCK
    assert second.load("b", [11, 12, 13, 14, 15])
    assert second.engine.wrong_blocks(tokens, [11, 12, 13, 14, 15]) == []
    assert second.cache.counters.loaded_tokens == first.cache.counters.stored_tokens == 5 * BLOCK


def test_the_last_token_is_left_to_compute(make: MakeConnector) -> None:
    driver = make()
    tokens = tokens_of(3 * BLOCK)
    stored(driver, "a", tokens, [1, 2, 3])
    assert driver.lookup("b", tokens) == 2 * BLOCK
    driver.abandon("b")


def test_what_the_engine_has_is_not_loaded(make: MakeConnector) -> None:
    driver = make()
    tokens = tokens_of(4 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3, 4, 5])
    assert driver.lookup("b", tokens, 3 * BLOCK) == BLOCK
    assert driver.load("b", [9])
    assert driver.engine.wrong_blocks(tokens, [9], first=3) == []


def test_storing_again_moves_nothing(make: MakeConnector) -> None:
    driver = make()
    tokens = tokens_of(2 * BLOCK)
    stored(driver, "a", tokens, [1, 2])
    assert not driver.store("b", tokens, [1, 2])
    assert driver.cache.counters.errors == 0


def test_tenants_share_with_themselves_alone(make: MakeConnector) -> None:
    """Also where a salt looks like an adapter's name, or like several parts."""
    driver = make()
    tokens = tokens_of(2 * BLOCK + 1)
    tenants: list[dict[str, str]] = [
        {},
        {"salt": "x"},
        {"lora": "x"},
        {"salt": "lora=x"},
        {"lora": "a", "salt": "b"},
        {"lora": "a\0salt=b"},
        {"lora": "a\\0salt=b"},
    ]
    for number, tenant in enumerate(tenants):
        assert driver.lookup(f"before {number}", tokens, **tenant) == 0, tenant
        stored(driver, f"store {number}", tokens, [1, 2, 3], **tenant)
        assert driver.lookup(f"after {number}", tokens, **tenant) == 2 * BLOCK, tenant
        driver.abandon(f"after {number}")


def test_adapters_of_one_name_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    namespaces = []
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "adapter_model.bin").write_bytes(bytes([min(number, 1)]) * 100)
        request = VllmRequest("r", [1], lora_request=Lora("support", str(directory), number))
        namespaces.append(namespace_of(request))
    assert namespaces[0] != namespaces[1] == namespaces[2]


def test_asking_again_pins_once_and_abandoning_drops_the_pin(
    make: MakeConnector, client: Callable[[], RadixClient]
) -> None:
    driver = make()
    tokens = tokens_of(2 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3])
    pins = client()
    for _ in range(3):
        assert driver.lookup("b", tokens) == 2 * BLOCK
        assert pins.stats()["pool"]["full"]["num_pins"] == 1
    driver.abandon("b")
    eventually(lambda: pins.stats()["pool"]["full"]["num_pins"] == 0)


def test_a_request_that_grew_is_looked_up_anew(
    make: MakeConnector, client: Callable[[], RadixClient]
) -> None:
    driver = make()
    tokens = tokens_of(4 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3, 4, 5])
    assert driver.lookup("b", tokens, 0) == 4 * BLOCK
    assert driver.lookup("b", tokens, 2 * BLOCK) == 2 * BLOCK
    assert client().stats()["pool"]["full"]["num_pins"] == 1
    driver.abandon("b")


def test_a_dead_worker_fails_the_load_and_then_nothing_is_found(make: MakeConnector, server: str) -> None:
    driver = make()
    tokens = tokens_of(4 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3, 4, 5])
    assert driver.lookup("b", tokens) == 4 * BLOCK
    os.kill(worker_of(os.getpid()), signal.SIGKILL)
    assert not driver.load("b", [6, 7, 8, 9])
    assert driver.cache.counters.failed_loads == 1
    names = (f"again {number}" for number in count())

    def found() -> int:
        name = next(names)
        num_tokens = driver.lookup(name, tokens)
        driver.abandon(name)
        return num_tokens

    # A launch may learn of the death a moment before the cache is off.
    eventually(lambda: found() == 0, "a request whose load failed would fail for ever")


def test_new_weights_hide_what_was_stored(make: MakeConnector) -> None:
    driver, other = make(), make()
    tokens = tokens_of(2 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3])
    driver.cache.reset()
    assert driver.lookup("b", tokens) == 0
    assert other.lookup("b", tokens) == 2 * BLOCK
    other.abandon("b")
    driver.cache.reset("version 2")
    other.cache.reset("version 2")
    stored(driver, "c", tokens, [1, 2, 3])
    assert other.lookup("d", tokens) == 2 * BLOCK
    other.abandon("d")


def test_more_than_the_pool_holds(make: MakeConnector) -> None:
    """Everything stored is the pool's size at most; older blocks make room."""
    driver = make()
    for name in range(12):
        stored(driver, f"s{name}", tokens_of(10 * BLOCK, name), list(range(1, 11)))
    assert driver.lookup("new", tokens_of(10 * BLOCK, 11)) == 9 * BLOCK
    assert driver.lookup("old", tokens_of(10 * BLOCK, 0)) == 0
    driver.abandon("new")


def test_a_refused_engine_serves_without(make: MakeConnector) -> None:
    make()
    refused = make(cache=CacheConfig(2 * BLOCK))
    tokens = tokens_of(4 * BLOCK)
    assert not await_ready(refused.cache, 30, FlexKVSettings())
    assert refused.cache.manager.disabled
    assert refused.lookup("a", tokens) == 0
    assert not refused.store("a", tokens, [1, 2])


def test_an_engines_start_waits_for_the_cache_but_not_for_ever(node: Node, tmp_path: Path) -> None:
    name = unique_name()
    engine = small_engine(name, tmp_path)
    cache = SharedCache(engine.manager, BLOCK)
    try:
        assert not await_ready(cache, 0.2, FlexKVSettings())
        node.serve(name=name, data_bytes=64 * SMALL_SLOT_BYTES)
        assert await_ready(cache, 30, FlexKVSettings())
        assert cache.is_ready()
    finally:
        cache.close()
        engine.close()


STRICT = {"FLEXKV_STRICT": "1", "FLEXKV_ATTACH_TIMEOUT_S": "1"}


@pytest.mark.parametrize("is_there", [True, False], ids=["refused", "absent"])
def test_a_strict_engine_does_not_start_without_the_cache(
    make: MakeConnector, server: str, tmp_path: Path, is_there: bool
) -> None:
    """And is told why.  Also when the cache would not be waited for otherwise."""
    make()
    name, named = (server, "block_size=32") if is_there else (unique_name(), "radix-server")
    (tmp_path / "strict").mkdir()
    engine = small_engine(name, tmp_path / "strict", cache=CacheConfig(2 * BLOCK), environ=STRICT)
    try:
        with pytest.raises(RuntimeError, match=f"FLEXKV_STRICT=1: .*{named}"):
            await_ready(SharedCache(engine.manager, 2 * BLOCK), 0, FlexKVSettings(strict=True))
    finally:
        engine.close()


def test_a_strict_engine_waits_for_the_cache(node: Node, tmp_path: Path) -> None:
    """As long as FLEXKV_ATTACH_TIMEOUT_S says, whatever the connector's own time."""
    name = unique_name()
    engine = small_engine(name, tmp_path, environ={"FLEXKV_STRICT": "1"})
    cache = SharedCache(engine.manager, BLOCK)
    server = Timer(0.5, node.serve, kwargs={"name": name, "data_bytes": 64 * SMALL_SLOT_BYTES})
    server.start()
    try:
        assert await_ready(cache, 0, FlexKVSettings(strict=True))
    finally:
        server.join()
        engine.close()


def test_closing_with_a_load_under_way(make: MakeConnector) -> None:
    driver = make()
    tokens = tokens_of(4 * BLOCK + 1)
    stored(driver, "a", tokens, [1, 2, 3, 4, 5])
    assert driver.lookup("b", tokens) == 4 * BLOCK
    driver.start_load("b", [6, 7, 8, 9])
    driver.cache.close()


def worker_of(parent: int) -> int:
    """Process id of the one transfer worker of this process."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"flexkv_radix.transfer.worker" in path.read_bytes()
        and f"PPid:\t{parent}\n" in (path.parent / "status").read_text()
    ]
    assert len(found) == 1, found
    return found[0]
