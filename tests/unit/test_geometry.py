from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radixshmem import ComponentType, Geometry, GeometryMismatch
from radixshmem.geometry import PublishedGeometry, check_same_geometry, count_by_ratio, plan_geometry

FULL, SWA, MAMBA = ComponentType
PLAIN = Geometry(block_size=16, full_slot_bytes=5000)
HYBRID = Geometry(16, 5000, swa_slot_bytes=3000, swa_window_blocks=8)


def counts(plan: PublishedGeometry) -> dict[str, int]:
    return {pool.component.name: pool.num_slots for pool in plan.pools}


# -- Geometry ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"full_slot_bytes": 0}, "full_slot_bytes"),
        ({"full_slot_bytes": -1}, "full_slot_bytes"),
        ({"swa_slot_bytes": 10}, "swa_window_blocks"),
        ({"swa_window_blocks": 10}, "swa_slot_bytes"),
        ({"swa_slot_bytes": 10, "swa_window_blocks": 1025}, "swa_window_blocks"),
        ({"slot_align": 48}, "slot_align"),
        ({"fingerprint": "x" * 128}, "fingerprint"),
        ({"fingerprint": "a\0b"}, "fingerprint"),
        ({"block_size": 2**32}, "block_size"),
    ],
)
def test_impossible_geometry_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry(**{"block_size": 16, "full_slot_bytes": 4096, **fields})


@pytest.mark.parametrize("fields", [{"block_size": 16.0}, {"full_slots": True}, {"fingerprint": b"x"}])
def test_wrong_type_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(fields))):
        Geometry(**{"block_size": 16, "full_slot_bytes": 4096, **fields})


# -- counts --------------------------------------------------------------------------------------


def test_budget_goes_to_full_slots_of_one_stride() -> None:
    plan = plan_geometry(PLAIN, data_bytes=10 * 8192 + 8191)
    assert counts(plan) == {"FULL": 10}
    assert plan.pools[0].stride == 8192
    assert plan.pools[0].slot_bytes == 5000


def test_side_slots_come_off_the_budget_first() -> None:
    plan = plan_geometry(HYBRID, data_bytes=1_000_000, swa_ratio=0.5)
    assert counts(plan) == {"SWA": 500_000 // 4096, "FULL": (1_000_000 - 122 * 4096) // 8192}
    assert plan.pools[0].component == FULL


def test_mamba_takes_its_part_too() -> None:
    geometry = replace(HYBRID, mamba_slot_bytes=100)
    plan = plan_geometry(geometry, data_bytes=1_000_000, swa_ratio=0.25, mamba_ratio=0.1, slot_align=64)
    swa, mamba = 250_000 // 3008, 100_000 // 128
    assert counts(plan) == {
        "FULL": (1_000_000 - swa * 3008 - mamba * 128) // 5056,
        "SWA": swa,
        "MAMBA": mamba,
    }
    assert plan.pools[2].window_blocks == 1


def test_geometry_without_swa_leaves_the_budget_to_full() -> None:
    assert counts(plan_geometry(PLAIN, data_bytes=100 * 8192, swa_ratio=0.5)) == {"FULL": 100}


def test_counts_are_decimal() -> None:
    # In binary floating point 0.29 * 100 is 28.999999999999996.
    assert count_by_ratio(0.29, 100, 1) == 29
    assert count_by_ratio(0.1, 3 * 4096 * 10, 4096) == 3


@pytest.mark.parametrize("count", [1, 7, 333, 12_345, 9_999_999])
def test_ratio_made_from_a_count_gives_it_back(count: int) -> None:
    data_bytes, stride = 64 * 2**30, 4096
    ratio = count * stride / data_bytes
    assert count_by_ratio(float(str(ratio)), data_bytes, stride) == count


def test_rounding_is_to_six_places_and_no_further() -> None:
    assert count_by_ratio(0.9999994, 10, 10) == 0
    assert count_by_ratio(0.9999996, 10, 10) == 1


def test_slot_align_of_the_client_wins() -> None:
    plan = plan_geometry(replace(PLAIN, slot_align=1), data_bytes=50_000, slot_align=4096)
    assert (plan.slot_align, plan.pools[0].stride, counts(plan)) == (1, 5000, {"FULL": 10})
    assert plan_geometry(PLAIN, data_bytes=81920, slot_align=512).pools[0].stride == 5120


@pytest.mark.parametrize(
    ("geometry", "options", "message"),
    [
        (PLAIN, {"data_bytes": 8191}, "--data-bytes"),
        (HYBRID, {"data_bytes": 1 << 20}, "--swa-ratio"),
        (HYBRID, {"data_bytes": 1 << 20, "swa_ratio": 0.001}, "--swa-ratio"),
        (HYBRID, {"data_bytes": 10_000, "swa_ratio": 0.9}, "--data-bytes"),
        (replace(PLAIN, mamba_slot_bytes=8), {"data_bytes": 1 << 20}, "--mamba-ratio"),
        (replace(PLAIN, full_slots=5), {"data_bytes": 1 << 20}, "full_slots"),
        (PLAIN, {}, "full_slots"),
        (replace(HYBRID, full_slots=5), {}, "swa_slots"),
        (replace(PLAIN, full_slots=5, swa_slots=5), {}, "swa_slots"),
        (replace(PLAIN, full_slots=2**31), {}, "--data-bytes"),
    ],
)
def test_unplannable_names_flag_or_field(geometry: Geometry, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_geometry(geometry, **options)


def test_index_only_takes_the_counts_given() -> None:
    plan = plan_geometry(replace(HYBRID, full_slots=100, swa_slots=20))
    assert counts(plan) == {"FULL": 100, "SWA": 20}
    assert [pool.stride for pool in plan.pools] == [0, 0]


# -- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slot_align", "align"), [(1, 64), (64, 64), (4096, 4096), (1 << 16, 1 << 16)])
def test_pools_follow_the_header_page_aligned(slot_align: int, align: int) -> None:
    geometry = replace(HYBRID, mamba_slot_bytes=100, slot_align=slot_align)
    plan, total = plan_geometry(geometry, data_bytes=10**7, swa_ratio=0.2, mamba_ratio=0.1).lay_out(4096)
    end = 4096
    for pool in plan.pools:
        assert pool.offset % align == 0
        assert end <= pool.offset < end + align
        end = pool.offset + pool.num_bytes
    assert total % 4096 == 0
    assert end <= total < end + 4096


# -- the same geometry again ---------------------------------------------------------------------


@pytest.fixture
def published() -> PublishedGeometry:
    return plan_geometry(HYBRID, data_bytes=1 << 20, swa_ratio=0.5)


def test_same_geometry_passes(published: PublishedGeometry) -> None:
    check_same_geometry(published, HYBRID)
    check_same_geometry(published, replace(HYBRID, slot_align=4096, register_chunk_tokens=4096))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"full_slot_bytes": 5001},
        {"swa_slot_bytes": 0, "swa_window_blocks": 0},
        {"swa_window_blocks": 9},
        {"mamba_slot_bytes": 1},
        {"slot_align": 1},
        {"register_chunk_tokens": 1},
        {"full_slots": 1},
    ],
)
def test_other_geometry_is_refused_showing_both(published: PublishedGeometry, change: dict[str, Any]) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        check_same_geometry(published, replace(HYBRID, **change))
    text = str(caught.value)
    field, value = next(iter(change.items()))
    assert field in text
    assert "server (" in text
    assert "client (" in text
    assert not value or f"{field}={value}" in text.split("client (")[1]


def test_fingerprints_differ_only_when_both_are_there(published: PublishedGeometry) -> None:
    check_same_geometry(published, replace(HYBRID, fingerprint="a"))
    marked = replace(published, fingerprint="a")
    check_same_geometry(marked, HYBRID)
    with pytest.raises(GeometryMismatch, match="fingerprint"):
        check_same_geometry(marked, replace(HYBRID, fingerprint="b"))


def test_a_client_takes_whatever_was_published_for_its_zeroes() -> None:
    geometry = replace(HYBRID, slot_align=512)
    published = plan_geometry(geometry, data_bytes=1 << 20, swa_ratio=0.5, register_chunk_tokens=77)
    published.check_shapes(HYBRID)
    with pytest.raises(GeometryMismatch, match="slot_align"):
        published.check_shapes(replace(HYBRID, slot_align=1024))


def test_published_geometry_goes_back_to_the_clients_side() -> None:
    geometry = replace(HYBRID, mamba_slot_bytes=9, slot_align=8, register_chunk_tokens=3, fingerprint="f")
    with_data = plan_geometry(geometry, data_bytes=1 << 20, swa_ratio=0.2, mamba_ratio=0.2)
    assert with_data.as_geometry() == geometry
    counted = replace(geometry, full_slots=10, swa_slots=5, mamba_slots=2)
    assert plan_geometry(counted).as_geometry() == counted


def test_as_dict_has_only_pools_that_exist(published: PublishedGeometry) -> None:
    assert published.as_dict() == {
        "block_size": 16,
        "slot_align": 4096,
        "register_chunk_tokens": 4096,
        "fingerprint": "",
        "pools": {
            "full": {"num_slots": published.pools[0].num_slots, "slot_bytes": 5000},
            "swa": {"num_slots": published.pools[1].num_slots, "slot_bytes": 3000, "window_blocks": 8},
        },
    }
