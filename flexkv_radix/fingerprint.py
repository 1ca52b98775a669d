"""What the bytes in a slot mean: equal sizes do not make equal bytes.

    model_identity(dir)    of the weights: configuration and contents of the files, never their path
    geometry_fingerprint   of a slot: that, and how the engine lays its KV out

The same path in two containers may hold two fine-tunes, and one model may lie at two paths.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from flexkv_radix.config import CacheConfig, ModelConfig, SWAPoolConfig, dtype_name

_SLOT_FORMAT = 1  # order of bytes within a slot (layout.py, placement.py)
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_IGNORED_CONFIG = ("_name_or_path", "transformers_version")  # where it lay and who wrote it, not what it is


def geometry_fingerprint(model_config: ModelConfig, cache_config: CacheConfig) -> str:
    """Hex digest of everything that decides a slot's bytes; "" where the model's identity is unknown."""
    if not cache_config.model_identity:
        return ""
    model, swa = model_config, cache_config.swa
    parts = {
        "model": cache_config.model_identity,
        "slot_format": _SLOT_FORMAT,
        "tokens_per_block": cache_config.tokens_per_block,
        "shape": _shape(model),
        "groups": [repr(group) for group in model.layer_groups],
        "block_bytes": model.block_bytes,
        "split": [model.pp_size, model.num_head_ranks, model.attn_cp_size],
        "swa": swa and [swa.sliding_window, swa.block_bytes, *_shape(swa)],
    }
    return _digest(parts)


def _shape(kv: ModelConfig | SWAPoolConfig) -> list[int | str]:
    return [kv.num_layers, kv.num_kv_heads, kv.head_size, kv.kv_dim, dtype_name(kv.dtype)]


def model_identity(
    model_dir: str | Path,
    *,
    full: bool = False,
    revision: str = "",
    quantization: str = "",
    dtype: Any = "",
    engine: str = "",
    attention_backend: str = "",
    **extra: str,
) -> str:
    """Hex digest that names a model's weights and how an engine computes KV from them.

    engine: name and version, for opaque blocks whose order of bytes is the engine's own.  full: hash
    every byte of the weights instead of samples of each tensor.  extra: more that decides the bytes.
    Raises FileNotFoundError if model_dir holds no weights, ValueError for a damaged file.
    """
    directory = Path(model_dir)
    files = sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)})
    if not files:
        raise FileNotFoundError(f"{directory}: no weights ({', '.join(_WEIGHTS)})")
    parts = {
        "config": _config_of(directory / "config.json"),
        "weights": [[path.name, _file_digest(path, full)] for path in files],
        "revision": revision,
        "quantization": quantization,
        "dtype": dtype_name(dtype),
        "engine": engine,
        "attention_backend": attention_backend,
        "extra": extra,
    }
    return _digest(parts)


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _config_of(path: Path) -> Any:
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _IGNORED_CONFIG}


def _file_digest(path: Path, full: bool) -> str:
    """Digest of a weights file: its SHA-256 if the name of the blob behind a link tells, else by contents."""
    if not full and path.is_symlink() and _SHA256.fullmatch(path.resolve().name):
        return path.resolve().name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if full:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        else:
            _add_samples(digest, file, path)
    return ("full:" if full else "sampled:") + digest.hexdigest()


def _add_samples(digest: Any, file: BinaryIO, path: Path) -> None:
    num_bytes = path.stat().st_size
    digest.update(struct.pack("<Q", num_bytes))
    for start, end in _tensor_ranges(digest, file, path, num_bytes):
        for offset in _sample_offsets(start, end):
            file.seek(offset)
            digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))


def _sample_offsets(start: int, end: int) -> Iterator[int]:
    """Offsets of samples spread evenly from the first to the last byte of start..end."""
    span = end - start - _SAMPLE_BYTES
    if span <= _SAMPLE_BYTES * (_NUM_SAMPLES - 1):
        yield from range(start, end, _SAMPLE_BYTES)
    else:
        yield from (start + span * i // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES))


def _tensor_ranges(digest: Any, file: BinaryIO, path: Path, num_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges of the file's tensors; a safetensors header is added to digest.  Others are one range."""
    if path.suffix != ".safetensors":
        return [(0, num_bytes)]
    prefix = file.read(8)
    header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else num_bytes
    if 8 + header_bytes > num_bytes or header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"{path}: not a safetensors file (header of {header_bytes} bytes in {num_bytes})")
    raw = file.read(header_bytes)
    digest.update(raw)
    begin = 8 + header_bytes
    tensors = [value["data_offsets"] for name, value in json.loads(raw).items() if name != "__metadata__"]
    return sorted((begin + int(start), begin + int(end)) for start, end in tensors)
