"""Parts of the connectors that need no engine: import names, block layouts, ranks, namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexkv_radix.connectors.namespace import request_namespace
from flexkv_radix.connectors.sglang.ranks import Ranks
from flexkv_radix.connectors.vllm.layout import block_planes

SUPPORT = Path(__file__).parents[2] / "support"

NAMES = """
from flexkv_radix import aliases
assert aliases.install() and aliases.install() and aliases.is_installed()
from flexkv.common.request import KVResponseStatus
from flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from flexkv.common.config import CacheConfig, ModelConfig
from flexkv.integration.config import FlexKVConfig
from flexkv.kvmanager import KVManager
from flexkv.server.client import KVTPClient
from flexkv.transfer.layerwise import build_layerwise_eventfd_socket_path
from flexkv.transfer_manager import TransferManagerOnRemote
import flexkv_radix
assert KVManager is flexkv_radix.KVManager and KVTPClient is flexkv_radix.KVTPClient
assert KVResponseStatus.SUCCESS.value == "success"
"""


def run(code: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "", **environment})


def test_the_import_names_of_flexkv() -> None:
    run(NAMES)


def test_an_installed_flexkv_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "flexkv").mkdir()
    (tmp_path / "flexkv/__init__.py").write_text("REAL = True\n")
    run(
        "from flexkv_radix import aliases; assert not aliases.install(); import flexkv; assert flexkv.REAL",
        PYTHONPATH=str(tmp_path),
    )


@pytest.mark.parametrize(
    ("shape", "order", "num_tensors", "num_bytes", "stride_bytes"),
    [
        ((6, 2, 4, 8), (0, 1, 2, 3), 1, 256, 256),  # [blocks, heads, tokens, 2 * head size]
        ((2, 6, 4, 2, 8), (0, 1, 2, 3, 4), 2, 256, 256),  # K and V apart
        ((6, 2, 4, 8), (0, 2, 1, 3), 1, 256, 256),  # another order inside a block
        ((12, 2, 4, 8), (0, 1, 2, 3), 1, 512, 512),  # the backend cuts a block in two
    ],
)
def test_blocks_of_a_layer(
    shape: tuple[int, ...], order: tuple[int, ...], num_tensors: int, num_bytes: int, stride_bytes: int
) -> None:
    layers = {f"layer {n}": torch.zeros(shape, dtype=torch.float32).permute(order) for n in range(3)}
    planes, layout = block_planes(layers, 6, 4, replicated=False)
    assert len(planes) == layout.num_layer == 3 * num_tensors
    assert (layout.bytes_per_layer, layout.block_stride_bytes) == (num_bytes, stride_bytes)
    assert (layout.num_block, layout.tokens_per_block) == (6, 4)


def test_layers_side_by_side_in_a_block() -> None:
    """[blocks, layers, ...]: a block's stride is larger than what one layer has of it."""
    storage = torch.zeros(6, 3, 2, 4, 8)
    layers = {f"layer {n}": storage[:, n] for n in range(3)}
    _, layout = block_planes(layers, 6, 4, replicated=False)
    assert (layout.bytes_per_layer, layout.block_stride_bytes) == (256, 768)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5, 2, 4, 8), "no dimension"),
        (torch.zeros(6, 2, 4, 16)[..., ::2], "not one run of bytes"),
        (torch.zeros(12, 3, 2, 4)[:, 0], "do not follow each other"),
    ],
)
def test_what_cannot_be_moved_by_blocks(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"layer 0.*{message}"):
        block_planes({"layer 0": tensor}, 6, 4, replicated=False)


def test_layers_of_different_sizes() -> None:
    layers = {"small": torch.zeros(6, 4), "large": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match="small, large"):
        block_planes(layers, 6, 4, replicated=False)


def test_ranks_agree_on_what_the_leader_decided(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, SUPPORT / "ranks_main.py", str(rank), tmp_path / "rendezvous"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    answers = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [answer.pop("is_leader") for answer in answers] == [True, False, False, False]
    assert answers == [{"value": 10, "values": [0, 7, 8], "all": [True, False], "none": []}] * 4


def test_a_single_rank_agrees_with_itself() -> None:
    ranks = Ranks([None, None, None])
    assert ranks.is_leader
    assert ranks.agree(5) == 5
    assert ranks.agree_all([1, 2]) == [1, 2]
    assert [ranks.all_did(True), ranks.all_did(False)] == [True, False]


def test_namespaces() -> None:
    assert request_namespace() is None
    assert request_namespace(salt="", lora="") is None
    assert request_namespace(salt="s", lora="l", extra="e", media=["i@0"]) == [
        "lora=l", "salt=s", "extra=e", "media=i@0",
    ]  # fmt: skip
