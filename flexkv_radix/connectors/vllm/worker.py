"""The workers' side of the vLLM connector: hands the KV tensors over.

Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexkv_radix.connectors.vllm.layout import block_planes
from flexkv_radix.connectors.vllm.plan import EnginePlan
from flexkv_radix.tp_client import KVTPClient


class WorkerSide:
    """One rank of the engine that plan describes."""

    def __init__(self, plan: EnginePlan, *, tp_rank: int, pp_rank: int) -> None:
        self._plan = plan
        self._client = KVTPClient(
            plan.register_port, dp_client_id=plan.dp_client_id, device_id=tp_rank, pp_rank=pp_rank
        )

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Let the transfer worker map this rank's tensors.  ValueError if they cannot be moved by blocks."""
        planes, layout = block_planes(
            kv_caches, self._plan.num_blocks, self._plan.tokens_per_block, replicated=self._plan.is_replicated
        )
        self._client.register_to_server(planes, layout)

    def close(self) -> None:
        """Take the tensors back."""
        self._client.close()
