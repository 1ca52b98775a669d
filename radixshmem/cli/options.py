"""Command line options made from the settings of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rich_click as click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, get_completion_class

from radixshmem.settings import BOOLEAN, OCTAL, Setting

SHELLS = ("bash", "zsh", "fish")  # what click has completion for


class SettingType(click.ParamType):  # type: ignore[type-arg] # generic only since click 8.4
    """Parses and checks the text of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.name = setting.kind.metavar.lower() or "bool"
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        origin = ctx.get_parameter_source(param.name) if ctx and param and param.name else None
        try:
            return self._setting.parse(
                value, self._setting.env if origin is ParameterSource.ENVIRONMENT else ""
            )
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in self._setting.choices if choice.startswith(incomplete)]


def setting_options(settings: list[Setting]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds an option for every setting, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(settings):
            command = _option(setting)(command)
        return command

    return decorate


def option_groups(settings: list[Setting], *, rest: list[str]) -> list[dict[str, Any]]:
    """Groups for ``--help``; ``rest`` are the options that are no settings."""
    groups: dict[str, list[str]] = {}
    for setting in settings:
        groups.setdefault(setting.group, []).append(setting.flag)
    return [{"name": name, "options": flags} for name, flags in groups.items()] + [
        {"name": "Other", "options": rest}
    ]


def completion_script(command: click.Command, program: str, shell: str) -> str:
    """Shell code that completes ``program``'s command line."""
    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"there is no completion for {shell}")
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    return completion(command, {}, program, variable).source()


def shown_default(setting: Setting) -> str:
    """The default as help and settings page show it."""
    if setting.shown_default:
        return setting.shown_default
    if setting.kind is BOOLEAN:
        return "on" if setting.default else "off"
    if setting.kind is OCTAL:
        return f"{setting.default:04o}"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def _option(setting: Setting) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    shared: dict[str, Any] = {
        "default": setting.default,
        "help": setting.help,
        "envvar": setting.env,
        "show_envvar": True,
        "show_default": setting.shown_default or (setting.kind is not BOOLEAN and setting.default != ""),
    }
    if setting.kind is BOOLEAN:
        # What is on by default needs a flag that switches it off, and the other way round.
        off = f"/--no-{setting.flag.removeprefix('--')}" if setting.default else ""
        return click.option(setting.flag + off, setting.field, is_flag=True, **shared)
    metavar = "|".join(setting.choices) or setting.kind.metavar
    return click.option(setting.flag, setting.field, type=SettingType(setting), metavar=metavar, **shared)
