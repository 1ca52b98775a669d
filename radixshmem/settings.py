"""Configuration as data: one dataclass field is one flag, one environment variable, one docs row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixshmem.sizes import parse_size

ENV_PREFIX = "RADIX_"
_METADATA_KEY = "setting"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Kind:
    """How a value is written, and what it is afterwards."""

    metavar: str
    types: tuple[type, ...]
    parse: Callable[[str, str], Any]  # (text, flag) -> value; ValueError naming the flag


@dataclass(frozen=True)
class Setting:
    """One field of a configuration with everything that flag, environment and docs need."""

    field: str
    flag: str
    env: str
    kind: Kind
    default: Any
    group: str
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    shown_default: str

    def parse(self, text: str, source: str = "") -> Any:
        """Value of ``text``, checked; ValueError names ``source``, by default the flag."""
        value = self.kind.parse(text.strip(), source or self.flag)
        self.check(value, source)
        return value

    def check(self, value: Any, source: str = "") -> None:
        """ValueError or TypeError naming ``source``, by default the flag, unless ``value`` is allowed."""
        name = source or self.flag
        if type(value) is type(self.default) and value == self.default:
            return
        if not isinstance(value, self.kind.types) or (type(value) is bool and bool not in self.kind.types):
            wanted = " or ".join(t.__name__ for t in self.kind.types)
            raise TypeError(f"{name}: {value!r} is of type {type(value).__name__}, not {wanted}")
        if self.choices and value not in self.choices:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(self.choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: {value} is not a finite number")
        self._check_range(value, name)

    def _check_range(self, value: Any, name: str) -> None:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{name}: {value} is below {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{name}: {value} is above {self.maximum:g}")


def setting(
    default: Any,
    kind: Kind,
    help: str,  # noqa: A002
    *,
    group: str,
    flag: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    shown_default: str = "",
) -> Any:
    """A dataclass field that ``settings_of`` turns into a Setting.  ``flag``: where the name differs."""
    metadata = {
        "flag": flag,
        "group": group,
        "kind": kind,
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "shown_default": shown_default,
    }
    return dataclasses.field(default=default, metadata={_METADATA_KEY: metadata})


def settings_of(config_type: type) -> list[Setting]:
    """The settings of a configuration dataclass, in the order of its fields."""
    return [_describe(field) for field in dataclasses.fields(config_type)]


def parse_environment(settings: list[Setting], environ: Mapping[str, str]) -> dict[str, Any]:
    """Field values that ``environ`` gives; an empty variable counts as unset.  ValueError names it."""
    return {s.field: s.parse(environ[s.env], s.env) for s in settings if environ.get(s.env)}


def _describe(field: dataclasses.Field[Any]) -> Setting:
    metadata = dict(field.metadata[_METADATA_KEY])
    flag = metadata.pop("flag") or "--" + field.name.replace("_", "-")
    env = ENV_PREFIX + flag.removeprefix("--").upper().replace("-", "_")
    return Setting(field=field.name, flag=flag, env=env, default=field.default, **metadata)


def _parse_int(text: str, flag: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not an integer") from None


def _parse_float(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not a number") from None


def _parse_octal(text: str, flag: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not an octal number such as 0600") from None


def _parse_bool(text: str, flag: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(f"{flag}: {text!r} is neither of {', '.join(_TRUE)} nor of {', '.join(_FALSE)}")
    return text.lower() in _TRUE


TEXT = Kind("TEXT", (str,), lambda text, _flag: text)
SIZE = Kind("SIZE", (int,), parse_size)
INTEGER = Kind("N", (int,), _parse_int)
NUMBER = Kind("NUMBER", (int, float), _parse_float)
OCTAL = Kind("OCTAL", (int,), _parse_octal)
BOOLEAN = Kind("", (bool,), _parse_bool)
