"""ServerConfig and the settings that it is made of."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from radixshmem import ServerConfig
from radixshmem.config import SETTINGS, split_address
from radixshmem.settings import parse_environment

BY_FIELD = {setting.field: setting for setting in SETTINGS}
EXPECTED_FLAGS = re.findall(
    r"--[a-z-]+",
    """
    --name --data-bytes --swa-ratio --mamba-ratio --data-name --endpoint --hugepage-path --prefault
    --prefault-threads --numa --slot-align --evict-policy --background-evict-ratio --kvevent-ring-capacity
    --max-clients --register-chunk-tokens --rpc-workers --mode --group --metrics-address --fresh --keep
    --require-fingerprint --reap-quarantine-s --log-format --log-level --expected-min-nodes --registry
    --cluster-id --node-name --rpc-address --rpc-interface --rpc-port --bootstrap-timeout --settle-ms
    --num-rht-shards --transfer-protocol --transfer-dev --transfer-ip --transfer-port --max-inflight
    --max-pending-jobs --job-ttl --tls-cert --tls-key --tls-ca
    """,
)


def test_every_field_is_one_flag_and_one_variable() -> None:
    assert [setting.field for setting in SETTINGS] == [
        field.name for field in dataclasses.fields(ServerConfig)
    ]
    flags = [setting.flag for setting in SETTINGS]
    variables = [setting.env for setting in SETTINGS]
    assert len(set(flags)) == len(set(variables)) == len(SETTINGS)
    assert set(EXPECTED_FLAGS) <= set(flags)
    assert all(variable.startswith("RADIX_") for variable in variables)
    assert all(setting.help.endswith(".") and setting.group for setting in SETTINGS)


def test_defaults_are_a_valid_configuration() -> None:
    config = ServerConfig()
    assert config.name == "/flexkv"
    assert config.resolved_data_name == ""
    assert config.resolved_endpoint == "unix:///dev/shm/flexkv.sock"
    assert config.resolved_metrics_address == ("127.0.0.1", 9464)
    assert not config.is_cluster


def test_names_are_resolved_from_the_server_name() -> None:
    assert ServerConfig(name="/x", data_bytes=1).resolved_data_name == "/x_data"
    assert ServerConfig(data_bytes=1, data_name="/y").resolved_data_name == "/y"
    assert ServerConfig(endpoint="unix:///tmp/s").resolved_endpoint == "unix:///tmp/s"


@pytest.mark.parametrize("address", ["", "off"])
def test_metrics_can_be_switched_off(address: str) -> None:
    assert ServerConfig(metrics_address=address).resolved_metrics_address is None


@pytest.mark.parametrize("fields", [{"registry": "etcd://a:1"}, {"expected_min_nodes": 2}])
def test_what_makes_a_cluster(fields: dict[str, Any]) -> None:
    assert ServerConfig(**fields).is_cluster


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"name": "x"}, "--name"),
        ({"data_bytes": -1}, "--data-bytes"),
        ({"swa_ratio": 1.5, "data_bytes": 1}, "--swa-ratio"),
        ({"swa_ratio": float("nan"), "data_bytes": 1}, "--swa-ratio"),
        ({"swa_ratio": 0.5, "mamba_ratio": 0.5, "data_bytes": 1}, "--mamba-ratio"),
        ({"swa_ratio": 0.5}, "--data-bytes"),
        ({"slot_align": 48}, "--slot-align"),
        ({"slot_align": 0}, "--slot-align"),
        ({"evict_policy": "random"}, "--evict-policy"),
        ({"background_evict_ratio": 1.0}, "--background-evict-ratio"),
        ({"max_clients": 1}, "--max-clients"),
        ({"max_clients": 1025}, "--max-clients"),
        ({"mode": 0o755}, "--mode"),
        ({"mode": 0o060}, "--mode"),
        ({"mode": 0o1600}, "--mode"),
        ({"numa": "0-3"}, "--numa"),
        ({"numa": "1,"}, "--numa"),
        ({"data_name": "noslash"}, "--data-name"),
        ({"data_name": "/flexkv"}, "--data-name"),
        ({"data_name": "/flexkv.sock"}, "--data-name"),
        ({"data_name": "/other.lock"}, "--data-name"),
        ({"endpoint": "localhost:1"}, "--endpoint"),
        ({"hugepage_path": "huge"}, "--hugepage-path"),
        ({"log_file": "log"}, "--log-file"),
        ({"metrics_address": "9464"}, "--metrics-address"),
        ({"metrics_address": "h:65536"}, "--metrics-address"),
        ({"registry": "a:1"}, "--registry"),
        ({"registry": "etcd://a"}, "--registry"),
        ({"registry": "etcd://a:1,"}, "--registry"),
        ({"tls_cert": "c"}, "--tls-cert"),
        ({"transfer_protocol": "smoke"}, "--transfer-protocol"),
        ({"rpc_port": 70000}, "--rpc-port"),
    ],
)
def test_what_cannot_be_is_refused_by_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"data_bytes": "64G"},
        {"data_bytes": True},
        {"prefault": 1},
        {"name": b"/x"},
        {"settle_ms": 1.5},
        {"data_bytes": np.zeros(2, np.int64)},
    ],
)
def test_wrong_types_are_refused_by_flag(fields: dict[str, Any]) -> None:
    [field] = fields
    with pytest.raises(TypeError, match=BY_FIELD[field].flag):
        ServerConfig(**fields)


def test_whole_numbers_are_good_ratios() -> None:
    assert ServerConfig(reap_quarantine_s=3, background_evict_ratio=0).reap_quarantine_s == 3


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("data_bytes", "64GB", 64 * 10**9),
        ("data_bytes", "1.5T", 3 * 2**39),
        ("mode", "0660", 0o660),
        ("mode", "660", 0o660),
        ("prefault", "no", False),
        ("keep", "TRUE", True),
        ("swa_ratio", " 0.25 ", 0.25),
        ("max_clients", "12", 12),
        ("metrics_address", "[::1]:80", "[::1]:80"),
    ],
)
def test_text_is_parsed(field: str, text: str, value: object) -> None:
    assert BY_FIELD[field].parse(text) == value


@pytest.mark.parametrize(
    ("field", "text"),
    [("data_bytes", "50%"), ("mode", "8"), ("keep", "maybe"), ("max_clients", "1.5"), ("swa_ratio", "half")],
)
def test_text_that_means_nothing_is_refused_by_flag(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=BY_FIELD[field].flag):
        BY_FIELD[field].parse(text)


def test_environment_gives_fields_and_arguments_win() -> None:
    environ = {
        "RADIX_NAME": "/e",
        "RADIX_DATA_BYTES": "1K",
        "RADIX_JOB_TTL": "5",
        "RADIX_GROUP": "",
        "HOME": "/",
    }
    config = ServerConfig.from_env(environ, name="/given")
    assert (config.name, config.data_bytes, config.job_ttl_s, config.group) == ("/given", 1024, 5.0, "")


def test_bad_variable_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValueError, match=r"^RADIX_DATA_BYTES: "):
        parse_environment(SETTINGS, {"RADIX_DATA_BYTES": "64X"})


@pytest.mark.parametrize(
    ("address", "parts"), [("h:1", ("h", 1)), ("[::1]:65535", ("::1", 65535)), ("0.0.0.0:0", ("0.0.0.0", 0))]
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address, "--x") == parts
