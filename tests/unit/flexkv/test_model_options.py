"""Identities of one set of weights under engines' options: equal where the KV is equal, and only there."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexkv_radix.config import RankInfo
from flexkv_radix.connectors.model_options import digest_of, length_of
from flexkv_radix.connectors.sglang.flexkv_config import FlexKVConfig
from flexkv_radix.connectors.vllm.plan import identity_of

LONGROPE = {"rope_parameters": {"rope_type": "longrope"}}


class HfConfig:
    """A model's configuration, as engines hold it once it is read and overridden."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.fields = {"_name_or_path": str(path), "rope_theta": 10000.0, "sliding_window": 4096, **fields}

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def weights(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"rope_theta": 10000.0}')
    (directory / "model.bin").write_bytes(bytes(100))
    return directory


def vllm_identity(
    path: Path,
    hf: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    load_format: str = "auto",
    **model: Any,
) -> str:
    options = {"max_model_len": 2048, "disable_sliding_window": False, "multimodal_config": None, **model}
    held = {"model": str(path), "revision": None, "quantization": None, "dtype": torch.bfloat16}
    return identity_of(
        SimpleNamespace(
            model_config=SimpleNamespace(**held, hf_config=HfConfig(path, **hf or {}), **options),
            load_config=SimpleNamespace(load_format=load_format, download_dir=None),
            cache_config=SimpleNamespace(**{"cache_dtype": "auto", "sliding_window": None, **(cache or {})}),
            attention_config=SimpleNamespace(backend=None),
        ),
        "0.32.0",
    )


def sglang_identity(path: Path, hf: dict[str, Any] | None = None, **options: Any) -> str:
    return sglang_plan(path, hf, **options)[0].cache_config.model_identity


def sglang_plan(
    path: Path, hf: dict[str, Any] | None = None, context_len: int = 1024, tp_rank: int = 0, **args: Any
) -> tuple[FlexKVConfig, RankInfo]:
    config = FlexKVConfig.from_env()
    hf_config = HfConfig(path, context_len=context_len, **hf or {})
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "get_total_num_kv_heads": lambda: 2}
    model = SimpleNamespace(
        model_path=str(path), revision=None, quantization=None, dtype=torch.bfloat16, attention_arch=None,
        hf_config=hf_config, context_len=context_len, **sizes,
    )  # fmt: skip
    given = {
        "tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "node_rank": 0, "kv_cache_dtype": "auto",
        "json_model_override_args": "{}", "load_format": "auto", "quantization_param_path": None, **args,
    }  # fmt: skip
    rank = config.post_init_from_sglang_config(
        sglang_config=model, server_args=SimpleNamespace(**given), page_size=16, tp_rank=tp_rank
    )
    return config, rank


@pytest.mark.parametrize(
    "options",
    [
        {"hf": {"rope_theta": 1e6}},
        {"hf": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        {"hf": {"text_config": {"rope_theta": 1e6}}},
        {"hf": {"sliding_window": None}},
        {"disable_sliding_window": True},
        {"hf": LONGROPE},
        {"hf": LONGROPE, "max_model_len": 8192},
        {"quantization_config": {"linear": "fp8"}},
        {"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
        {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_what_changes_the_kv_of_a_vllm(tmp_path: Path, options: dict[str, Any]) -> None:
    path = weights(tmp_path)
    others = {vllm_identity(path), vllm_identity(path, hf=LONGROPE, max_model_len=4096)}
    assert "" not in others
    assert vllm_identity(path, **options) not in others
    assert vllm_identity(path, **options) == vllm_identity(weights(tmp_path / "copy"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"hf": {"rope_theta": 1e6}},
        {"json_model_override_args": '{"rope_theta": 1e6}'},
        {"hf": LONGROPE},
        {"hf": LONGROPE, "context_len": 8192},
        {"load_format": "dummy"},
        {"torchao_config": "int8wo"},
    ],
    ids=str,
)
def test_what_changes_the_kv_of_an_sglang(tmp_path: Path, options: dict[str, Any]) -> None:
    path = weights(tmp_path)
    others = {sglang_identity(path), sglang_identity(path, hf=LONGROPE, context_len=4096)}
    assert "" not in others
    assert sglang_identity(path, **options) not in others
    assert sglang_identity(path, **options) == sglang_identity(weights(tmp_path / "copy"), **options)


def test_scales_of_the_kv_count_by_their_contents(tmp_path: Path) -> None:
    path, scales = weights(tmp_path), [tmp_path / f"{number}.json" for number in range(3)]
    for number, file in enumerate(scales):
        file.write_text(json.dumps({"scale": min(number, 1)}))
    first, second, third = (sglang_identity(path, quantization_param_path=str(file)) for file in scales)
    assert sglang_identity(path) != first != second == third


def test_what_does_not_change_the_kv(tmp_path: Path) -> None:
    path = weights(tmp_path)
    assert vllm_identity(path) == vllm_identity(path, max_model_len=4096, served_model_name="another")
    assert vllm_identity(path) == vllm_identity(path, hf={"transformers_version": "5.0", "max_model_len": 9})
    assert sglang_identity(path) == sglang_identity(path, context_len=512)


def test_groups_of_dp_attention_are_clients_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_INSTANCE_ID", "3")
    split = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    ranks = [sglang_plan(weights(tmp_path), tp_rank=tp_rank, **split)[1] for tp_rank in range(4)]
    assert [rank.dp_client_id for rank in ranks] == [6, 6, 7, 7]
    assert [rank.attn_tp_rank for rank in ranks] == [0, 1, 0, 1]


def test_digests_are_the_same_in_every_process() -> None:
    code = """
import torch
from flexkv_radix.connectors.model_options import digest_of
print(digest_of({"b": {"x", "yy", "zzz"}, "a": (1, 2.5, None), 3: torch.bfloat16}))
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            env={"PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in range(3)
    }  # fmt: skip
    assert len(answers) == 1


def test_digests_of_values_that_json_lacks() -> None:
    kinds = Enum("kinds", ["one", "two"])
    values: list[Any] = [
        {"a": 1},
        {"a": 2},
        {"a": {1}},
        {"a": {2}},
        kinds.one,
        kinds.two,
        torch.float16,
        [],
        {},
    ]
    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})


def test_the_length_of_requests_counts_where_the_kv_depends_on_it() -> None:
    assert length_of({"rope_theta": 1e4}, 2048) is None
    assert length_of({"rope_scaling": {"type": "dynamic"}}, 2048) == 2048
    assert length_of({"text_config": {"model_type": "llama4_text"}}, 2048) == 2048
    assert length_of({"layers": [{"rope_type": "longrope"}]}, 2048) == 2048
