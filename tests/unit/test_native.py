from __future__ import annotations

import errno
from dataclasses import replace

import pytest

import radixshmem
from radixshmem import Geometry, _native
from radixshmem._build import CSRC, read_interface, sources
from radixshmem._native import lib, raise_for
from radixshmem.geometry import plan_geometry
from radixshmem.records import RegionConfig
from radixshmem.stats import name_stats


@pytest.mark.parametrize(
    ("name", "exception"),
    [
        ("RS_EINVAL", ValueError),
        ("RS_EBUSY", radixshmem.IndexBusy),
        ("RS_ENOMEM", MemoryError),
        ("RS_ESYS", OSError),
        ("RS_ECORRUPT", radixshmem.CorruptRegion),
        ("RS_ENOTREADY", radixshmem.ServerNotReady),
        ("RS_ERETIRED", radixshmem.RegionRetired),
        ("RS_ECLIENTS", radixshmem.RadixError),
        ("RS_ENOTOWNER", ValueError),
        ("RS_EDUPLICATE", ValueError),
        ("RS_ERANGE", ValueError),
        ("RS_EFORKED", radixshmem.RadixError),
        ("RS_ENOCOMPONENT", ValueError),
    ],
)
def test_each_code_has_its_exception(name: str, exception: type[Exception]) -> None:
    with pytest.raises(exception, match="the step"):
        raise_for(getattr(lib, name), "the step")


def test_no_code_is_forgotten() -> None:
    header = (CSRC / "radixshm.h").read_text()
    codes = [name for name in dir(lib) if name.startswith("RS_E") and not name.startswith("RS_EVENT")]
    assert len(codes) == header.count("    X(RS_E")
    for name in codes:
        with pytest.raises(Exception, match=r"the step: \w+"):
            raise_for(getattr(lib, name), "the step")


def test_a_version_of_its_own_is_corrupt_for_callers() -> None:
    with pytest.raises(radixshmem.CorruptRegion, match="layout version"):
        raise_for(lib.RS_EVERSION, "index")


def test_a_system_error_keeps_its_number() -> None:
    with pytest.raises(OSError, match="index") as caught:
        _native.region_format(
            -1, RegionConfig(plan_geometry(Geometry(16, 64, full_slots=4)), epoch=b"e" * 16)
        )
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize(
    "change",
    [{"max_clients": 0}, {"max_clients": 5000}, {"pins_per_client": 0}],
)
def test_an_impossible_config_is_refused(change: dict[str, int]) -> None:
    config = RegionConfig(plan_geometry(Geometry(16, 64, full_slots=4)))
    assert _native.region_bytes(config) > 0
    with pytest.raises(ValueError, match="index plan"):
        _native.region_bytes(replace(config, **change))  # type: ignore[arg-type]


def test_interface_ends_where_the_header_says() -> None:
    interface = read_interface((CSRC / "radixshm.h").read_text())
    assert "rs_match(" in interface
    assert "#include" not in interface
    assert "RS_EBUSY = -2" in interface


def test_the_copy_extension_is_not_part_of_the_core() -> None:
    assert "csrc/copy.c" not in sources()
    assert "csrc/tree.c" in sources()


def test_names_of_statistics() -> None:
    raw = {
        "pool": [{"capacity": 1}, {"capacity": 2}, {"capacity": 3}],
        "evicted_blocks": [[0, 1, 2, 3, 4]] * 3,
        "queries": 7,
    }
    assert name_stats(raw) == {
        "pool": {"full": {"capacity": 1}, "swa": {"capacity": 2}, "mamba": {"capacity": 3}},
        "evicted_blocks": {
            name: {"none": 0, "capacity": 1, "background": 2, "request": 3, "reset": 4}
            for name in ("full", "swa", "mamba")
        },
        "queries": 7,
    }
