"""Writes the settings page: ``python -m radixshmem.cli.settings > docs/settings.md``."""

from __future__ import annotations

import sys

from radixshmem.cli.options import shown_default
from radixshmem.config import SETTINGS
from radixshmem.settings import BOOLEAN, Setting

_HEAD = """# Settings of radix-server

Every setting is a flag, an environment variable and a field of `radixshmem.ServerConfig`. A flag wins over
the variable; an empty variable counts as unset. `python -m radixshmem.cli.settings` generates this page.

Sizes: `64G`, `64g`, `64Gi` and `64GiB` are 64·2^30 bytes, `64GB` is 64·10^9, `1.5T` is fine, and a plain
integer is bytes.
"""


def settings_page() -> str:
    """The page as Markdown."""
    groups: dict[str, list[Setting]] = {}
    for setting in SETTINGS:
        groups.setdefault(setting.group, []).append(setting)
    return _HEAD + "".join(_section(name, settings) for name, settings in groups.items())


def _section(name: str, settings: list[Setting]) -> str:
    head = f"\n## {name}\n\n| flag | variable | field | default | meaning |\n|---|---|---|---|---|\n"
    return head + "".join(_row(setting) for setting in settings)


def _row(setting: Setting) -> str:
    flag = setting.flag
    if setting.kind is BOOLEAN:
        flag = f"--no-{flag.removeprefix('--')}" if setting.default else flag
    values = "\\|".join(setting.choices) or setting.kind.metavar
    cells = (f"`{flag}{' ' + values if values else ''}`", f"`{setting.env}`", f"`{setting.field}`")
    return f"| {' | '.join(cells)} | {_escape(shown_default(setting))} | {_escape(setting.help)} |\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


if __name__ == "__main__":
    sys.stdout.write(settings_page())
