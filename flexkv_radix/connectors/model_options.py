"""What changes KV beside the weights: an engine's options and overrides of the model's configuration.

Digests are equal in every process, on every run and wherever the model lies, if the engine computes equal KV.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

# Where a configuration lay, who read it and how long requests may be (see length_of): not what it is.
_VOLATILE = {
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "auto_map",
    "context_len",
    "max_model_len",
}
_ROPE_BY_LENGTH = {"longrope", "su", "dynamic"}
_TYPES_BY_LENGTH = ("llama4", "grok")  # attention scaled for long contexts only, position tables cut to it


def digest_of(value: Any) -> str:
    """Hex digest of a configuration object, or of anything made of plain values."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def named(holder: Any, *names: str) -> dict[str, Any]:
    """Those options of holder that are set.  One that a version lacks, or that is off, is left out."""
    return {name: value for name in names if (value := getattr(holder, name, None))}


def length_of(hf_config: Any, max_tokens: int | None) -> int | None:
    """The engine's longest request where the model's KV depends on it, None elsewhere.

    Such models choose their rotary embedding or scale their attention by it, for short requests too.
    """
    return max_tokens if any(map(_is_by_length, _dicts_in(_plain(hf_config)))) else None


def _is_by_length(config: dict[str, Any]) -> bool:
    rope = config.get("rope_type", config.get("type"))
    return rope in _ROPE_BY_LENGTH or str(config.get("model_type", "")).startswith(_TYPES_BY_LENGTH)


def _dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """value and all that it holds, as far as they are dictionaries."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts_in(part)


def _plain(value: Any) -> Any:
    """value in JSON's types.  What has no better form is its text, which may be another in each process:
    then engines do not share, which is safe."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items() if key not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(part) for part in value), key=str)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)
