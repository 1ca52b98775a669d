"""radixctl's answers as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from radixshmem.sizes import format_size

_PIPE_WIDTH = 200  # no label or path is folded, and a grep finds it


def show(*parts: RenderableType) -> None:
    """Print to standard output; without a terminal lines are as long as they have to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(*parts, sep="\n")


def status_view(status: dict[str, Any]) -> Group:
    parts: list[RenderableType] = [_server_line(status)]
    if status["region"]:
        parts += [_region_table(status), _pool_table(status["pools"]), _traffic_table(status)]
    return Group(*parts)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A plain table; numbers to the right.  Without any column names it has no header."""
    out = Table(
        title=title or None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        show_header=any(columns),
    )
    body = [list(row) for row in rows]
    for position, column in enumerate(columns):
        numbers = bool(body) and all(isinstance(row[position], (int, float)) for row in body)
        out.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in body:
        out.add_row(*(Text(_cell(value)) for value in row))
    return out


def clients_view(clients: list[dict[str, Any]]) -> Table:
    columns = ("slot", "label", "pid", "state", "device", "pins", "staged", "queries", "hit", "miss", "age")
    rows = [
        (
            c["slot"],
            c["label"],
            c["pid"],
            _client_state(c),
            "yes" if c["device"] else "",
            c["pins"],
            sum(c["staged"].values()),
            c["queries"],
            c["hit_blocks"],
            c["miss_blocks"],
            f"{c['attached_s']:.0f} s",
        )
        for c in clients
    ]
    return table(columns, rows, f"{len(clients)} clients")


def nodes_view(nodes: Iterable[dict[str, Any]], title: str) -> Table:
    columns = ("slot", "state", "hash", "parent", "children", "pins", "sides")
    rows = [
        (
            n["slot"],
            n["state"],
            n["hash"] or "",
            _parent(n["parent"]),
            n["children"],
            n["pins"],
            _sides(n["sides"]),
        )
        for n in nodes
    ]
    return table(columns, rows, title)


def _server_line(status: dict[str, Any]) -> Text:
    server = status["server"]
    if not server["alive"]:
        return Text(
            f"{status['name']}: server stale (no radix-server runs; the region waits for the next one)"
        )
    mode = server["mode"] or "does not answer"
    error = f": {server['last_error']}" if server["last_error"] else ""
    progress = f" {100 * server['progress']:.0f} %" if mode == "configuring" else ""
    return Text(f"{status['name']}: server pid {server['pid']}, {mode}{progress}{error}")


def _region_table(status: dict[str, Any]) -> Table:
    region = status["region"]
    geometry = region["geometry"]
    data = (
        f"{region['data_bytes']} bytes ({format_size(region['data_bytes'])})"
        if region["data_bytes"]
        else "none"
    )
    rows = [
        ("epoch", f"{region['epoch']} ({region['state']}, generation {region['generation']})"),
        ("index", format_size(region["index_bytes"])),
        ("data budget", data),
        ("block size", f"{geometry['block_size']} tokens"),
        ("fingerprint", geometry["fingerprint"] or "none"),
        ("evict policy", region["evict_policy"]),
        ("clients", f"{status['clients']} of {region['max_clients']}"),
        ("pins", str(status["pins"])),
    ]
    return table(("", ""), rows)


def _pool_table(pools: list[dict[str, Any]]) -> Table:
    columns = ("pool", "total", "free", "staged", "pinned", "evictable", "bytes a slot")
    keys = ("component", "total", "free", "staged", "pinned", "evictable", "stride")
    return table(columns, [[pool[key] for key in keys] for pool in pools])


def _traffic_table(status: dict[str, Any]) -> Table:
    stats = status["stats"]
    rows = [
        (
            name,
            stats["hit_blocks"][name],
            stats["miss_blocks"][name],
            "" if rate is None else f"{100 * rate:.1f} %",
            stats["inserted_blocks"][name],
            sum(stats["evicted_blocks"][name].values()),
        )
        for name, rate in status["hit_rate"].items()
        if any(pool["component"] == name for pool in status["pools"])
    ]
    return table(("pool", "hit blocks", "missed", "hit rate", "inserted", "evicted"), rows)


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _client_state(client: dict[str, Any]) -> str:
    """A dead client's slots wait for whoever of its workers still lives."""
    return "dead, worker lives" if client["state"] == "dead" and client["leased"] else str(client["state"])


def _parent(parent: int | None) -> str:
    if parent is None:
        return ""
    return str(parent) if parent >= 0 else f"root {-1 - parent}"


def _sides(sides: dict[str, dict[str, Any]]) -> str:
    return " ".join(f"{name}:{side['slot']}{'*' if side['is_end'] else ''}" for name, side in sides.items())
