"""Entry points by which the engines find this package, in every process they start."""

from __future__ import annotations

from flexkv_radix import aliases


def register_vllm() -> None:
    """`vllm.general_plugins`: RadixShmemConnector by name, and FlexKV's import names."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    aliases.install()
    name = "RadixShmemConnector"
    if name not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice is an error, asking is not offered
        KVConnectorFactory.register_connector(name, "flexkv_radix.connectors.vllm", name)


def register_sglang() -> None:
    """`sglang.srt.plugins`: `--radix-cache-backend radixshmem`, and FlexKV's import names."""
    from flexkv_radix.connectors.sglang.backend import register

    aliases.install()
    register()
