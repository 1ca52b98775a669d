"""The files in deploy/ fit the server that they deploy."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixshmem.cli.settings import settings_page
from radixshmem.config import SETTINGS, ServerConfig
from radixshmem.server import RadixServer
from radixshmem.server.exits import ExitCode
from radixshmem.server.metrics import RegionCollector
from radixshmem.settings import BOOLEAN

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BY_FLAG = {setting.flag: setting for setting in SETTINGS}


def config_of(args: list[str]) -> ServerConfig:
    """The configuration that ``--flag=value`` arguments make; KeyError for a flag that is none."""
    fields: dict[str, Any] = {}
    for arg in args:
        flag, _, value = arg.partition("=")
        setting = BY_FLAG[flag]
        fields[setting.field] = True if setting.kind is BOOLEAN else setting.parse(value)
    return ServerConfig(**fields)


def exported_metrics() -> dict[str, set[str]]:
    """Sample names and their labels, as a server without regions exports them."""
    collector = RegionCollector(
        dict, lambda: RadixServer(ServerConfig()).info, lambda: {"prefault_seconds": 0, "unfingerprinted": 0}
    )
    return {sample.name: set(sample.labels) for metric in collector.collect() for sample in metric.samples}


# -- Grafana ------------------------------------------------------------------------------------

DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
EXPRESSIONS = [(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p["targets"]]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_dashboard_uses_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    metrics = exported_metrics()
    selectors = re.findall(r"(radix_\w+)\{([^}]*)\}", expression)
    assert selectors, title
    used = set(re.findall(r"radix_\w+", expression))
    assert used == {name for name, _ in selectors}
    for name, selector in selectors:
        assert name in metrics, name
        labels = set(re.findall(r"(\w+)(?:=~|=)", selector)) - {"instance"}
        assert labels <= metrics[name]
    for grouping in re.findall(r"by \(([^)]*)\)", expression):
        for name, _ in selectors:
            assert {label.strip() for label in grouping.split(",")} <= metrics[name]


def test_dashboard_shows_every_metric() -> None:
    shown = {name for _, expression in EXPRESSIONS for name in re.findall(r"radix_\w+", expression)}
    assert exported_metrics().keys() - shown == {"radix_unfingerprinted_configures_total"}


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine
        assert max(x for x, _ in mine) < 24
        cells |= mine


# -- systemd ------------------------------------------------------------------------------------


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "radix-server.service").read_text())
    return parser


def test_unit_starts_a_server_that_keeps_its_regions(unit: configparser.ConfigParser) -> None:
    program, *args = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "radix-server"
    assert config_of(args).keep


def test_unit_agrees_with_what_the_process_does(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 2  # the main thread looks once a second
    assert "HUP" in service["ExecReload"]
    final = {ExitCode.USAGE, ExitCode.NAME_IN_USE, ExitCode.CLUSTER, ExitCode.LEFTOVERS_IN_USE}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == final


def test_unit_names_variables_that_exist() -> None:
    named = set(re.findall(r"RADIX_[A-Z_]+[A-Z]", (DEPLOY / "radix-server.service").read_text()))
    assert named
    assert named <= {setting.env for setting in SETTINGS}


# -- Kubernetes ---------------------------------------------------------------------------------


@pytest.fixture
def container() -> dict[str, Any]:
    manifest = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())
    assert manifest["kind"] == "DaemonSet"
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def test_daemon_set_has_valid_settings(container: dict[str, Any]) -> None:
    config = config_of(container["args"])
    assert config.keep
    assert config.resolved_metrics_address == ("0.0.0.0", container["ports"][0]["containerPort"])
    limit = BY_FLAG["--data-bytes"].parse(container["resources"]["limits"]["memory"])
    assert limit > config.data_bytes


def test_daemon_set_waits_long_enough_for_prefault(container: dict[str, Any]) -> None:
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    paths = {
        container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {"/readyz", "/healthz"}


def test_daemon_set_shares_the_host_memory(container: dict[str, Any]) -> None:
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


# -- settings page ------------------------------------------------------------------------------


def test_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "run: python -m radixshmem.cli.settings > docs/settings.md"
