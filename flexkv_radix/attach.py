"""Finding the node's radix-server and agreeing with it on what a slot is."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from flexkv_radix.config import CacheConfig, ModelConfig
from flexkv_radix.fingerprint import geometry_fingerprint
from flexkv_radix.layout import common_slot_align
from radixshmem import Geometry, GeometryMismatch, RadixClient, RadixError, ServerUnavailable

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 600.0
_RETRY_S = 0.5
_REQUEST_S = 3.0  # until a server that does not answer is asked again; a shutdown may wait for it
_READY_S = 1.0  # a client that waits for a server at work looks whether to go on this often
_REMIND_S = 30.0


class AttachCancelled(RadixError):  # noqa: N818 - not a failure: the engine is shutting down
    """The engine shut down while it waited for the radix-server."""


def expected_geometry(model_config: ModelConfig, cache_config: CacheConfig) -> Geometry:
    """The client's side of the geometry that this engine needs; it brings no counts."""
    block = cache_config.tokens_per_block
    full_bytes = model_config.full_slot_bytes(block)
    swa = cache_config.swa
    swa_bytes = swa.slot_bytes(block, model_config) if swa else 0
    return Geometry(
        block_size=block,
        full_slot_bytes=full_bytes,
        swa_slot_bytes=swa_bytes,
        swa_window_blocks=swa.window_blocks(block) if swa else 0,
        slot_align=common_slot_align([full_bytes, swa_bytes]),
        fingerprint=geometry_fingerprint(model_config, cache_config),
    )


def attach_radix_client(
    name: str,
    geometry: Geometry | None,
    timeout_s: float = ATTACH_TIMEOUT_S,
    stop: threading.Event | None = None,
) -> RadixClient:
    """A client of the radix-server called name, ready to serve.

    Waits up to timeout_s for a server that is not there yet or still prepares its memory.  Raises at
    once what waiting cannot cure (GeometryMismatch, ValueError, RadixError with the cause);
    TimeoutError tells what was waited for; AttachCancelled when stop is set.
    """
    deadline_s = time.monotonic() + timeout_s
    stop = stop or threading.Event()
    reminder = _Reminder(name)
    while True:
        try:
            # Each try brings the geometry again: the server may be another one by now.
            return _connect(name, geometry)
        except (ServerUnavailable, TimeoutError) as error:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"radix-server {name} was not ready within {timeout_s:g} s: {error}"
                ) from error
            reminder.tick(error)
            if stop.wait(_RETRY_S):
                raise AttachCancelled("shut down while waiting for the radix-server") from error


def _connect(name: str, geometry: Geometry | None) -> RadixClient:
    client = RadixClient(name, geometry, timeout_s=_REQUEST_S)
    try:
        client.wait_ready(_READY_S)
        if geometry is not None:
            check_geometry(client.geometry, geometry)
    except BaseException:
        client.close()
        raise
    return client


class _Reminder:
    """Says what is waited for: at once, then every half minute."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._next_s = 0.0

    def tick(self, error: Exception) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _REMIND_S
            logger.warning(
                "waiting for radix-server %s (start it with: radix-server --name %s --data-bytes <size>): %s",
                self.name, self.name, error,
            )  # fmt: skip


def check_geometry(published: dict[str, Any] | None, expected: Geometry) -> None:
    """Raise GeometryMismatch, showing both sides, unless the published shapes are the expected ones.

    The server checks the same; this one does not rely on it, because wrong strides corrupt memory.
    """
    if published is None:
        raise GeometryMismatch("the radix-server has published no geometry")
    pools = published["pools"]
    swa = pools.get("swa", {})
    ours = {
        "block_size": expected.block_size,
        "slot_align": expected.slot_align or published["slot_align"],
        "full.slot_bytes": expected.full_slot_bytes,
        "swa.slot_bytes": expected.swa_slot_bytes,
        "swa.window_blocks": expected.swa_window_blocks,
    }
    theirs = {
        "block_size": published["block_size"],
        "slot_align": published["slot_align"],
        "full.slot_bytes": pools["full"]["slot_bytes"],
        "swa.slot_bytes": swa.get("slot_bytes", 0),
        "swa.window_blocks": swa.get("window_blocks", 0),
    }
    if ours != theirs:
        raise GeometryMismatch(
            f"the radix-server's slots do not fit this engine: server {theirs}, engine {ours}"
        )


def adopt_radix_server(client: RadixClient, cache_config: CacheConfig) -> None:
    """Take the server's counts and place in the cluster over into cache_config."""
    published = client.geometry
    if published is None:
        raise RadixError("the radix-server has published no geometry")
    cache_config.num_cpu_blocks = int(published["pools"]["full"]["num_slots"])
    if cache_config.swa is not None:
        cache_config.swa.num_slots = int(published["pools"]["swa"]["num_slots"])
    cache_config.node_rank = client.rank()
    cache_config.num_nodes = client.world_size()
    cache_config.enable_kv_sharing = radix_server_is_distributed(client)


def radix_server_is_distributed(client: RadixClient) -> bool:
    """Whether blocks of other nodes can be pulled: prefetch is worth calling."""
    return client.is_distributed()
