"""Plans against plain sets of block numbers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv_radix.planner import NO_SLOTS, Blocks, Transfer, bind, merge, plan_get, plan_put
from flexkv_radix.transfer.protocol import OpKind
from radixshmem import ComponentType

FULL, SWA = ComponentType.FULL, ComponentType.SWA
block_sets = st.sets(st.integers(0, 30), max_size=20)


def blocks_of(ids: set[int]) -> Blocks:
    return Blocks.of(np.array(sorted(ids), dtype=np.int64))


def listed(blocks: Blocks) -> list[int]:
    return list(range(blocks.start, blocks.end)) if blocks.ids is None else blocks.ids.tolist()


@given(block_sets, st.integers(0, 31))
def test_blocks_are_a_sorted_set(ids: set[int], end: int) -> None:
    blocks = blocks_of(ids)
    assert listed(blocks) == sorted(ids)
    assert len(blocks) == len(ids)
    assert listed(blocks.below(end)) == sorted(i for i in ids if i < end)
    run, block = [], end
    while block in ids:
        run.append(block)
        block += 1
    assert listed(blocks.run_from(end)) == run
    slots = np.arange(31, dtype=np.int32) * 7
    assert blocks.pick(slots).tolist() == [7 * i for i in sorted(ids)]


@given(block_sets, st.integers(0, 31), st.integers(0, 8))
def test_get_moves_the_wanted_blocks_below_the_hit(ids: set[int], hit: int, window: int) -> None:
    full = np.arange(hit, dtype=np.int32) + 1000
    swa_start = hit - min(window, hit)
    swa = np.arange(swa_start, hit, dtype=np.int32) + 2000
    plan = plan_get(blocks_of(ids), hit, full, swa_start, swa)
    moved = sorted(i for i in ids if i < hit)
    assert listed(plan.blocks) == moved
    first = moved[0] if moved else hit
    expected = {
        FULL: [i + 1000 for i in moved],
        SWA: [i + 2000 for i in range(max(first, swa_start), hit)],
    }
    assert {t.component: t.slots.tolist() for t in plan.transfers} == {k: v for k, v in expected.items() if v}


@given(block_sets, st.integers(0, 31), st.integers(0, 31), st.integers(0, 31))
def test_put_stores_a_gapless_run_behind_the_hit(ids: set[int], num_blocks: int, hit: int, got: int) -> None:
    hit = min(hit, num_blocks)
    ids = {i for i in ids if i < num_blocks}
    plan = plan_put(blocks_of(ids), num_blocks, hit)
    run = []
    while hit + len(run) in ids:
        run.append(hit + len(run))
    assert listed(plan.blocks) == run
    assert listed(plan.with_slots(got).blocks) == run[:got]


def test_bind_refuses_other_lengths_and_drops_what_is_empty() -> None:
    three = np.arange(3, dtype=np.int32)
    gpu = np.arange(3, dtype=np.int64)
    full, swa = Transfer(OpKind.D2H, FULL, three), Transfer(OpKind.D2H, SWA, NO_SLOTS)
    assert bind([full, swa], [gpu, gpu[:0]]) == [(full, gpu)]
    with pytest.raises(ValueError, match=r"^slot_mapping: 2"):
        bind([full], [gpu[:2]])
    with pytest.raises(ValueError, match=r"^swa_slot_mapping: 2"):
        bind([Transfer(OpKind.D2H, SWA, three)], [gpu[:2]])


def test_merge_keeps_pairs_together() -> None:
    def pair(component: ComponentType, first: int) -> tuple[Transfer, np.ndarray]:
        slots = np.arange(first, first + 2, dtype=np.int32)
        return Transfer(OpKind.H2D, component, slots), slots.astype(np.int64) * 10

    merged = merge([pair(FULL, 0), pair(SWA, 100), pair(FULL, 50)])
    assert [(t.component, t.slots.tolist(), blocks.tolist()) for t, blocks in merged] == [
        (FULL, [0, 1, 50, 51], [0, 10, 500, 510]),
        (SWA, [100, 101], [1000, 1010]),
    ]


@pytest.mark.parametrize("module", ["planner", "layout", "lifecycle", "placement", "config"])
def test_pure_modules_import_no_torch(module: str) -> None:
    code = f"import flexkv_radix.{module}, sys; sys.exit('torch' in sys.modules or 'zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
