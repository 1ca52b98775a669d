"""One tensor-parallel rank: gpu_rank_main.py <endpoint> <tp rank> <seed> <device>.

Fills its KV from the seed, registers, then answers lines of stdin with the name of a saved array:
"blocks": what its device holds; "clear": the same, after zeroing everything.
"""

import json
import sys
import tempfile

import numpy as np
from gpu_engine import GpuPart, registration
from shared_engine import kv_part, scramble

from flexkv_radix.layout import KVCacheLayoutType
from flexkv_radix.transfer.protocol import RankPlace
from flexkv_radix.transfer.registration import register_rank


def main() -> None:
    endpoint, tp_rank, seed, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    part = GpuPart(kv_part(KVCacheLayoutType.LAYERFIRST), device)
    scramble(np.random.default_rng(seed), *part.model.tensors)
    part.push()
    held = register_rank(endpoint, registration([part], RankPlace(tp_rank=tp_rank)), (), 60.0)
    with tempfile.TemporaryDirectory() as directory:
        for number, line in enumerate(sys.stdin):
            if line.strip() == "clear":
                for tensor in part.tensors:
                    tensor.zero_()
            np.save(f"{directory}/{number}.npy", part.pull())
            print(json.dumps(f"{directory}/{number}.npy"), flush=True)
    held.close()


if __name__ == "__main__":
    main()
