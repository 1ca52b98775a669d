"""Sizes that follow from a model's configuration, and settings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from flexkv_radix import CacheConfig, LayerGroupSpec, ModelConfig, RankInfo, SWAPoolConfig, expected_geometry
from flexkv_radix.config import dtype_itemsize, register_endpoint
from flexkv_radix.settings import (
    FlexKVSettings,
    client_id_of,
    load_settings,
    rank_endpoint,
    settings_table,
    warn_once,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("FLEXKV_"):
            monkeypatch.delenv(name)
    warn_once.cache_clear()


def test_fields_may_be_set_one_by_one() -> None:
    model = ModelConfig()
    model.num_layers, model.num_kv_heads, model.head_size = 36, 8, 128
    model.tp_size, model.dtype = 4, "float16"
    assert (model.num_ranks, model.full_slot_bytes(16)) == (4, 2359296)
    model.use_mla = True
    assert (model.kv_dim, model.full_slot_bytes(16)) == (1, 36 * 8 * 128 * 2 * 16)
    model.kv_dim = 2
    assert not model.use_mla


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [
        (ModelConfig(36, 8, 128), 2359296),
        (ModelConfig(36, 8, 128, tp_size=4), 2359296),
        (ModelConfig(36, 8, 128, tp_size=4, pp_size=3), 2359296),
        (ModelConfig(2, 1, 4, dtype="float32", tp_size=2), 2 * (2 * 2 * 16 * 4 * 4)),  # a head for each rank
        (ModelConfig(61, 1, 576, use_mla=True, tp_size=8), 61 * 16 * 576 * 2),
        (ModelConfig(61, 1, 576, kv_dim=1, dtype=torch.uint8), 61 * 16 * 576),
        (ModelConfig(block_bytes=12345), 12345),
        (
            ModelConfig(layer_groups=(LayerGroupSpec(2, 1, 8), LayerGroupSpec(1, 4, 4, itemsize=4))),
            1024 + 2048,
        ),
    ],
)
def test_slot_bytes(model: ModelConfig, num_bytes: int) -> None:
    assert model.full_slot_bytes(16) == num_bytes


def test_expected_geometry() -> None:
    swa = SWAPoolConfig(40, num_layers=3, num_kv_heads=2, head_size=8)
    geometry = expected_geometry(ModelConfig(36, 8, 128), CacheConfig(16, swa=swa))
    assert (geometry.block_size, geometry.full_slot_bytes) == (16, 2359296)
    assert (geometry.swa_slot_bytes, geometry.swa_window_blocks) == (3 * 2 * 16 * 2 * 8 * 2, 3)
    assert geometry.slot_align == 1024
    assert geometry.fingerprint == ""


def test_wrong_values_are_named() -> None:
    for arguments, name in (
        ({"num_layers": 0}, "num_layers"),
        ({"kv_dim": 3}, "kv_dim"),
        ({"tp_size": 0}, "tp_size"),
    ):
        with pytest.raises(ValueError, match=name):
            ModelConfig(**arguments)
    with pytest.raises(ValueError, match="tokens_per_block"):
        CacheConfig(0)
    with pytest.raises(ValueError, match="float7"):
        ModelConfig(dtype="float7").full_slot_bytes(16)
    with pytest.raises(ValueError, match="FLEXKV_SERVER_RECV_PORT"):
        register_endpoint("tcp://127.0.0.1:5", 0)


def test_dtypes() -> None:
    assert [
        dtype_itemsize(d) for d in (torch.bfloat16, "bfloat16", "torch.float32", torch.float8_e4m3fn)
    ] == [2, 2, 4, 1]


def test_rank_info() -> None:
    model = ModelConfig(10, pp_size=4, tp_size=4, dp_size=2, nnodes=2)
    ranks = [RankInfo(model, pp_rank=pp, tp_rank=3, dp_rank=1, instance_id=3) for pp in range(4)]
    assert [rank.num_layers_per_pp_stage for rank in ranks] == [3, 3, 2, 2]
    assert ranks[0].dp_client_id == 7
    assert (ranks[0].tp_rank_per_node, ranks[0].pp_size_per_node, model.num_ranks) == (1, 2, 16)


def test_instances_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data-parallel group of each instance has a number, and an endpoint for its ranks."""
    numbers, endpoints = [], set()
    for instance in range(3):
        monkeypatch.setenv("FLEXKV_INSTANCE_ID", str(instance))
        settings = load_settings()
        for rank in range(2):
            numbers.append(client_id_of(settings, rank, dp_size=2))
            endpoints.add(rank_endpoint(settings, "ipc:///run/x", rank))
            full = RankInfo(ModelConfig(dp_size=2), dp_rank=rank, instance_id=instance).dp_client_id
            assert client_id_of(settings, full, dp_size=2) == full == numbers[-1]
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert len(endpoints) == 6
    assert client_id_of(load_settings(), 7, dp_size=1) == 7  # a number that the caller gave out
    monkeypatch.setenv("FLEXKV_INSTANCE_NUM", "2")
    with pytest.raises(ValueError, match=r"FLEXKV_INSTANCE_ID: 2 .*FLEXKV_INSTANCE_NUM=2"):
        load_settings()


def test_environment_over_yaml_over_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text("radixshmem_server_name: /yaml\nstrict: true\ninstance_num: 3\n")
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(path))
    monkeypatch.setenv("FLEXKV_RADIXSHMEM_SERVER_NAME", "/env")
    settings = load_settings()
    assert (settings.radixshmem_server_name, settings.strict, settings.instance_num) == ("/env", True, 3)
    assert settings.server_recv_port == FlexKVSettings.model_fields["server_recv_port"].default


def test_yaml_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(path))
    for text, said in (
        ("radixshmem_servername: /x", "radixshmem_server_name"),
        ("strict: perhaps", "strict"),
        ("- a list", "key: value"),
        ("a: [", "cannot read"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            load_settings()
    path.write_text("")
    assert load_settings().strict is False


def test_environment_only_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("FLEXKV_RADIXSHMEM_SERVERNAME", "/x")
    monkeypatch.setenv("FLEXKV_CPU_CACHE_GB", "64")
    monkeypatch.setenv("FLEXKV_CPU_LAYOUT", "LAYERFIRST")
    monkeypatch.setenv("FLEXKV_ENABLE_RADIXSHMEM", "1")
    load_settings()
    load_settings()
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3
    assert any("did you mean FLEXKV_RADIXSHMEM_SERVER_NAME" in message for message in messages)
    assert any("--data-bytes" in message for message in messages)
    assert any("BLOCKFIRST" in message for message in messages)


def test_a_wrong_value_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_ATTACH_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match=r"FLEXKV_ATTACH_TIMEOUT_S.*soon"):
        load_settings()


def test_the_page_lists_every_setting() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "flexkv.md"
    assert page.read_text().endswith(settings_table())
