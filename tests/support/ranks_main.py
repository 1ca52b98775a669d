"""One rank of an engine with 2 pipeline stages of 2 tensor-parallel ranks; prints what the ranks agreed on.

python ranks_main.py RANK RENDEZVOUS_FILE
"""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from flexkv_radix.connectors.sglang.ranks import Ranks


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # by tensor-parallel rank
    tensors = [dist.new_group([0, 1]), dist.new_group([2, 3])]  # by stage
    ranks = Ranks([stages[rank % 2], None, tensors[rank // 2]])
    agreed = {
        "is_leader": ranks.is_leader,
        "value": ranks.agree(rank + 10),
        "values": ranks.agree_all([rank, 7, 8] if rank == 0 else []),
        "all": [ranks.all_did(True), ranks.all_did(rank != 3)],
        "none": ranks.agree_all([] if rank == 0 else [rank]),
    }
    print(json.dumps(agreed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
