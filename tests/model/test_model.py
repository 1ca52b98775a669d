"""The index against the reference model, verb by verb, for the policies whose order is told exactly.

Long runs: ``RADIX_MODEL_OPERATIONS=160000 RADIX_MODEL_SEED=2``; ``RADIX_MODEL_SHRINK=1`` shrinks a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from radixshmem import Geometry, RadixServer, ServerConfig
from tests.model.machine import IndexMachine, Setup

SEED = int(os.environ.get("RADIX_MODEL_SEED", "1"))
OPERATIONS = int(os.environ.get("RADIX_MODEL_OPERATIONS", "6000"))
STEPS = 50
PHASES = (Phase.generate, *([Phase.shrink] if "RADIX_MODEL_SHRINK" in os.environ else []))
PINS_PER_CLIENT = 6

SMALL = Geometry(16, 64, 64, 3, 64, full_slots=40, swa_slots=13, mamba_slots=5, fingerprint="model")
# Paths of several batches, windows that are longer than most paths.
LARGE = Geometry(16, 64, 64, 8, 64, full_slots=300, swa_slots=40, mamba_slots=12, fingerprint="model")


@pytest.fixture(params=[("small", "lru"), ("large", "lru"), ("small", "fifo")], ids="-".join)
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    size, policy = request.param
    geometry, max_run = {"small": (SMALL, 5), "large": (LARGE, 70)}[size]
    config = ServerConfig(
        name=f"/t-model-{os.getpid()}-{size}-{policy}",
        metrics_address="",
        evict_policy=policy,
        pins_per_client=PINS_PER_CLIENT,
        max_clients=8,
        kvevent_ring_capacity=1 << 14,
    )
    with RadixServer(config):
        yield Setup(config.name, geometry, PINS_PER_CLIENT, max_run, policy == "lru")


@pytest.mark.timeout(0)
def test_index_equals_model(setup: Setup) -> None:
    """A third of the operations for each setup."""

    def machine() -> IndexMachine:
        return IndexMachine(setup)

    how = settings(
        max_examples=max(1, OPERATIONS // 3 // STEPS),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(SEED)(machine), settings=how)
    print(f"seed {SEED}: {dict(setup.ops)}")
    assert setup.ops["rules"] >= OPERATIONS // 3 // 4, "Hypothesis stopped early"
    assert {
        "insert OK",
        "insert PREFIX_MISSING",
        "insert FULL_PATH_MISSING",
        "insert STALE_GENERATION",
    } <= set(setup.ops)
