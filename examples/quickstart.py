"""The whole life of a cached prompt, in one process: python examples/quickstart.py"""

import os

import numpy as np

from radixshmem import Geometry, RadixClient, RadixServer, ServerConfig, hash_blocks

GEOMETRY = Geometry(block_size=16, full_slot_bytes=32 << 10, fingerprint="16 tokens of a pattern")
# Usually an operator runs this part: radix-server --name /flexkv --data-bytes 64M
config = ServerConfig(name=f"/quickstart-{os.getpid()}", data_bytes=64 << 20, metrics_address="")

# Every engine of the node attaches by name and says what a slot is.
with RadixServer(config), RadixClient(config.name, GEOMETRY) as client:
    client.wait_ready()
    prompt = np.arange(100)  # token ids
    hashes = hash_blocks(prompt, 16)  # six whole blocks; each hash covers its whole prefix

    # A miss: take slots, fill them, and only then publish them.
    slots = client.allocate_slots(len(hashes))
    for block, slot in enumerate(slots):
        client.slot_view(slot)[:] = bytes([block]) * (32 << 10)
    client.insert(hashes, slots)

    # A hit, from any process: the pin keeps the blocks in place while their bytes are read.
    longer = np.concatenate([prompt[:64], [7] * 64])  # the same first four blocks
    with client.query(hash_blocks(longer, 16), lock=True) as match:
        [(rank, first_block, hit_slots)] = match.full_fragments
        first_bytes = [client.slot_view(slot)[0] for slot in hit_slots]
    print(f"{match.common_hit} of {len(longer) // 16} blocks hit, their first bytes are {first_bytes}")
