"""What makes two models' bytes the same, and what does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexkv_radix import CacheConfig, LayerGroupSpec, ModelConfig, SWAPoolConfig, model_identity
from flexkv_radix.fingerprint import geometry_fingerprint


def write_model(directory: Path, seed: int = 0, **config: object) -> Path:
    directory.mkdir()
    tensors = np.random.default_rng(seed).integers(0, 256, 400_000, dtype=np.uint8)
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "big": {"dtype": "U8", "shape": [390_000], "data_offsets": [0, 390_000]},
            "small": {"dtype": "U8", "shape": [10_000], "data_offsets": [390_000, 400_000]},
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + tensors.tobytes()
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
    return directory


def change_byte(path: Path, offset_from_end: int) -> None:
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 1
    path.write_bytes(data)


def test_the_path_does_not_matter(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", _name_or_path="/here")
    second = write_model(tmp_path / "b", _name_or_path="/there")
    assert model_identity(first) == model_identity(second)


def test_the_same_path_with_other_weights_is_another_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    before = model_identity(path)
    shutil.rmtree(path)
    assert model_identity(write_model(path, seed=1)) != before


def test_small_tensors_are_read_whole_and_big_ones_sampled(tmp_path: Path) -> None:
    path = write_model(tmp_path / "a")
    sampled, full = model_identity(path), model_identity(path, full=True)
    assert sampled != full
    change_byte(path / "model.safetensors", 10_000 + 390_000 - 4096 - 10)  # between two samples of `big`
    assert model_identity(path) == sampled
    assert model_identity(path, full=True) != full
    change_byte(path / "model.safetensors", 5_000)  # in `small`
    assert model_identity(path) != sampled


@pytest.mark.parametrize(
    "change",
    [{"revision": "x"}, {"quantization": "fp8"}, {"dtype": "float16"}, {"engine": "vllm 1"},
     {"attention_backend": "flash"}, {"adapter": "y"}],
)  # fmt: skip
def test_everything_named_counts(tmp_path: Path, change: dict[str, str]) -> None:
    path = write_model(tmp_path / "a")
    assert model_identity(path, **change) != model_identity(path)


def test_config_counts(tmp_path: Path) -> None:
    assert model_identity(write_model(tmp_path / "a", rope=1)) != model_identity(
        write_model(tmp_path / "b", rope=2)
    )


def test_a_hub_caches_link_names_the_contents(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    identities = []
    for index, name in enumerate(("a" * 64, "b" * 64)):
        snapshot = write_model(tmp_path / f"snapshot{index}")
        weights = snapshot / "model.safetensors"
        shutil.move(weights, blobs / name)
        weights.symlink_to(blobs / name)
        identities.append(model_identity(snapshot))
    assert identities[0] != identities[1]  # equal bytes, but the links say otherwise: not a byte was read


def test_missing_and_damaged_weights_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no weights"):
        model_identity(tmp_path / "empty")
    path = write_model(tmp_path / "a")
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="safetensors"):
        model_identity(path)


def test_other_formats_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.mkdir()
    (path / "model.gguf").write_bytes(bytes(100))
    before = model_identity(path)
    change_byte(path / "model.gguf", 1)
    assert model_identity(path) != before


CACHE = CacheConfig(16, model_identity="m")


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        (ModelConfig(4, 4, 8, tp_size=2), CACHE),
        (ModelConfig(4, 4, 8, pp_size=2), CACHE),
        (ModelConfig(2, 8, 8), CACHE),
        (ModelConfig(4, 4, 8, dtype="float16"), CACHE),
        (ModelConfig(4, 4, 8, block_bytes=8192), CACHE),
        (ModelConfig(4, 4, 8, layer_groups=(LayerGroupSpec(4, 4, 8),)), CACHE),
        (ModelConfig(4, 4, 8), replace(CACHE, model_identity="n")),
        (ModelConfig(4, 4, 8), replace(CACHE, tokens_per_block=32)),
        (ModelConfig(4, 4, 8), replace(CACHE, swa=SWAPoolConfig(32))),
    ],
)
def test_equal_sizes_do_not_make_equal_bytes(model: ModelConfig, cache: CacheConfig) -> None:
    assert geometry_fingerprint(model, cache) != geometry_fingerprint(ModelConfig(4, 4, 8), CACHE)
    assert geometry_fingerprint(model, cache) == geometry_fingerprint(model, cache)


def test_without_an_identity_nothing_is_claimed() -> None:
    assert geometry_fingerprint(ModelConfig(4, 4, 8), CacheConfig(16)) == ""
