"""``radixctl``: look into, check and repair a server's region, whether the server lives or not."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import rich_click as click
from rich.console import Console
from rich.live import Live

import radixshmem
from radixshmem.cli import tables
from radixshmem.cli.doctor import examine
from radixshmem.cli.options import SHELLS, SettingType, completion_script
from radixshmem.cli.region_view import joined, read_clients, read_nodes, read_pins, read_status
from radixshmem.cli.top import view, watch
from radixshmem.config import SETTINGS, ServerConfig
from radixshmem.errors import RadixError
from radixshmem.geometry import POOL_NAMES, ComponentType
from radixshmem.index import Index
from radixshmem.names import check_name
from radixshmem.records import Event, EventReason
from radixshmem.server.exits import ExitCode, NameInUse

PROGRAM = "radixctl"
EVENTS_PER_READ = 4096
FOLLOW_S = 0.2
_COMPONENTS = list(POOL_NAMES.values())
_SETTING = {setting.field: setting for setting in SETTINGS}


@dataclass
class Target:
    """What the options before the command say; the same options behind it win."""

    name: str = ServerConfig.name
    as_json: bool = False


def _name_option(**more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = "Name of the server."
    return click.option("--name", type=SettingType(_SETTING["name"]), metavar="TEXT", help=text, **more)


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")(command)


def _target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Accept --name and --json behind the command too; errors become one line and an exit code."""

    @_name_option()
    @_json_option
    @click.pass_obj
    @functools.wraps(command)
    def run(target: Target, /, *args: Any, name: str | None, as_json: bool, **kwargs: Any) -> None:
        target = Target(name or target.name, as_json or target.as_json)
        try:
            check_name(target.name, "--name")
            command(target, *args, **kwargs)
        except NameInUse as error:
            _fail(str(error), ExitCode.NAME_IN_USE)
        except BrokenPipeError:
            raise  # the reader has seen enough: click ends without a word
        except (RadixError, OSError) as error:
            _fail(str(error), ExitCode.RUNTIME)
        except ValueError as error:
            raise click.UsageError(str(error)) from None

    return run


def _fail(text: str, code: ExitCode) -> None:
    click.echo(f"{PROGRAM}: {text}", err=True)
    sys.exit(code)


def _answer(target: Target, data: Any, view_of: Callable[[], Any], indent: int | None = 2) -> None:
    if target.as_json:
        click.echo(json.dumps(data, indent=indent))
    else:
        tables.show(view_of())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@_name_option(envvar="RADIX_NAME", default=ServerConfig.name, show_default=True, show_envvar=True)
@_json_option
@click.version_option(radixshmem.__version__, prog_name=PROGRAM)
@click.pass_context
def radixctl(ctx: click.Context, name: str, as_json: bool) -> None:
    """Look into, check and repair the region of a radix-server, whether the server lives or not.

    Exit codes: 0 done, 1 failed or violations found, 2 usage, 3 refused because the server lives,
    130 and 143 interrupted (SIGINT, SIGTERM).
    """
    ctx.obj = Target(name, as_json)


@radixctl.command()
@_target_options
def status(target: Target) -> None:
    """Server, pools, hit rate, clients and epoch."""
    data = read_status(target.name)
    _answer(target, data, lambda: tables.status_view(data))


@radixctl.command()
@_target_options
def clients(target: Target) -> None:
    """Who is attached, with pins, staged slots and queries."""
    data = read_clients(target.name)
    _answer(target, data, lambda: tables.clients_view(data))


@radixctl.command()
@_target_options
def pins(target: Target) -> None:
    """Blocks that pins sit on."""
    data = read_pins(target.name)
    _answer(target, data, lambda: tables.nodes_view(data, f"{len(data)} pinned blocks"))


@radixctl.command()
@click.option(
    "--interval", type=click.FloatRange(0.05, 86400), default=1.0, show_default=True, help="Seconds a look."
)
@click.option("--count", type=click.IntRange(1), help="Looks before it ends; without it, until interrupted.")
@_target_options
def top(target: Target, interval: float, count: int | None) -> None:
    """Live rates; with --json one object a line."""
    samples = itertools.islice(watch(target.name, interval), count)
    console = Console()
    if target.as_json or not console.is_terminal:
        for sample in samples:
            _answer(target, sample, functools.partial(view, target.name, sample), indent=None)
        return
    with Live(console=console, auto_refresh=False) as live:
        for sample in samples:
            live.update(view(target.name, sample), refresh=True)


@radixctl.command()
@_target_options
def check(target: Target) -> None:
    """Prove the invariants on a copy of the index; exit code 1 when one is violated."""
    with joined(target.name) as index:
        num_violations, report = index.snapshot().check()
    data = {"violations": num_violations, "report": report.splitlines()}
    text = report if num_violations else f"{target.name}: all invariants hold"
    _answer(target, data, lambda: text)
    if num_violations:
        sys.exit(ExitCode.RUNTIME)


@radixctl.command()
@click.option("--limit", type=click.IntRange(1), help="Nodes at most.")
@_target_options
def dump(target: Target, limit: int | None) -> None:
    """Published and staged blocks."""
    data = list(itertools.islice(read_nodes(target.name), limit))
    _answer(target, data, lambda: tables.nodes_view(data, f"{len(data)} nodes"))


@radixctl.command()
@click.argument("count", type=click.IntRange(1), required=False)
@click.option("--all", "everything", is_flag=True, help="All that is not pinned.")
@click.option("--component", type=click.Choice(_COMPONENTS), default="full", show_default=True)
@_target_options
def evict(target: Target, count: int | None, everything: bool, component: str) -> None:
    """Evict COUNT blocks (side pools: slots), least useful first."""
    if (count is None) != everything:
        raise click.UsageError("give COUNT or --all")
    with joined(target.name) as index:
        if index.info.config.geometry.pool(ComponentType(_COMPONENTS.index(component))) is None:
            raise ValueError(f"--component: {target.name} has no pool for {component}")
        num_evicted = _evict(index, _COMPONENTS.index(component), count)
    data = {"component": component, "evicted": num_evicted}
    _answer(target, data, lambda: f"evicted {num_evicted} {component}")


@radixctl.command()
@_target_options
def reset(target: Target) -> None:
    """Forget everything published; pinned and staged slots live on until released."""
    with joined(target.name) as index:
        index.reset()
        generation = index.read_info().generation
    _answer(target, {"generation": generation}, lambda: f"{target.name}: reset; generation {generation}")


@radixctl.command()
@click.option("--follow", is_flag=True, help="Go on with what comes, one object a line with --json.")
@click.option("--limit", type=click.IntRange(1), help="The newest N only.")
@_target_options
def events(target: Target, follow: bool, limit: int | None) -> None:
    """Stored and removed blocks that the event ring still has."""
    with joined(target.name) as index:
        cursor = max(0, index.event_head() - limit) if limit else 0
        cursor, found, lost = _read_events(index, cursor)
        data = {"events": found, "lost_older": lost, "cursor": cursor}
        if not follow:
            _answer(target, data, lambda: _events_table(found))
            return
        while True:
            for event in found:
                click.echo(json.dumps(event) if target.as_json else _event_line(event))
            time.sleep(FOLLOW_S)
            cursor, found, lost = _read_events(index, cursor)
            if lost:
                click.echo(f"{PROGRAM}: some events were overwritten before they were read", err=True)


@radixctl.command()
@click.option("--data-bytes", type=SettingType(_SETTING["data_bytes"]), default=0, metavar="SIZE",
              help="Would a server with this budget start?")  # fmt: skip
@click.option("--hugepage-path", default="", metavar="DIR", help="... with its SlotStore in this hugetlbfs?")
@_target_options
def doctor(target: Target, data_bytes: int, hugepage_path: str) -> None:
    """What this machine has for a server, before a start fails on it.

    /dev/shm, memory, the cgroup's limit, huge pages, memlock, open files, NUMA nodes; exit code 1 when a
    server would not start.
    """
    config = ServerConfig(name=target.name, data_bytes=data_bytes, hugepage_path=hugepage_path)
    findings = examine(config)
    rows = [(finding.what, finding.level, finding.detail) for finding in findings]
    _answer(target, [asdict(f) for f in findings], lambda: tables.table(("what", "", "detail"), rows))
    if any(finding.level == "problem" for finding in findings):
        sys.exit(ExitCode.RUNTIME)


@radixctl.command()
@_target_options
def rm(target: Target) -> None:
    """Remove what a dead server left; refused (exit code 3) while it lives."""
    from radixshmem.server.remove import remove_leftovers

    removed = remove_leftovers(target.name)
    text = f"removed {', '.join(removed)}" if removed else f"nothing of {target.name} was there"
    _answer(target, {"removed": removed}, lambda: text)


@radixctl.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print shell code that completes radixctl's command line."""
    click.echo(completion_script(radixctl, PROGRAM, shell))


def _evict(index: Index, component: int, count: int | None) -> int:
    """Evict ``count`` blocks, or all that can be, in steps."""
    done = 0
    while count is None or done < count:
        step = EVENTS_PER_READ if count is None else min(EVENTS_PER_READ, count - done)
        num = index.evict(component, step, EventReason.REQUEST)
        if not num:
            break
        done += num
    return done


def _read_events(index: Index, cursor: int) -> tuple[int, list[dict[str, Any]], bool]:
    """Everything from ``cursor`` to the head."""
    found: list[dict[str, Any]] = []
    lost = False
    while True:
        cursor, batch, overflow = index.events(cursor, EVENTS_PER_READ)
        found += map(_event_dict, batch)
        lost |= overflow
        if len(batch) < EVENTS_PER_READ:
            return cursor, found, lost


def _event_dict(event: Event) -> dict[str, Any]:
    return {
        "number": event.number,
        "kind": event.kind.name.lower(),
        "reason": event.reason.name.lower(),
        "component": POOL_NAMES[event.component],
        "hash": f"{event.hash:016x}",
        "parent_hash": None if event.parent_hash is None else f"{event.parent_hash:016x}",
        "client": event.client,
    }


def _event_line(event: dict[str, Any]) -> str:
    return "{number} {kind} {component} {hash} {reason}".format(**event)


def _events_table(found: list[dict[str, Any]]) -> Any:
    columns = ("number", "kind", "component", "hash", "parent_hash", "reason", "client")
    rows = [["" if event[column] is None else event[column] for column in columns] for event in found]
    return tables.table(columns, rows, f"{len(found)} events")
