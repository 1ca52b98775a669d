"""A client in a process of its own: runs the calls that come in on stdin, pickled, and answers on stdout.

Results that hold a pin stay alive under the number of their call, as an engine would keep them.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from radixshmem import ComponentType, Geometry, QueryResult, RadixClient


class Peer:
    """What the other side may call, by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.client: RadixClient | None = None
        self.held: dict[int, QueryResult] = {}

    def join(self, geometry: Geometry | None) -> Any:
        self.client = RadixClient(self.name, geometry, label="peer")
        self.client.wait_ready(30)
        return self.client.geometry

    def query(self, number: int, hashes: Any, **options: Any) -> dict[str, Any]:
        assert self.client is not None
        result = self.client.query(hashes, **options)
        if options.get("lock"):
            self.held[number] = result
        return {
            "number": number,
            "status": result.status,
            "full_hit": result.full_hit,
            "common_hit": result.common_hit,
            "slots": [int(slot) for _, _, slots in result.full_fragments for slot in slots],
            "swa_start": result.swa_start,
            "swa_slots": result.swa_slots.tolist(),
        }

    def finalize(self, number: int) -> None:
        finalize = self.held.pop(number).finalize
        assert finalize is not None
        finalize()

    def fill(self, slot: int, value: int, component: ComponentType = ComponentType.FULL) -> None:
        assert self.client is not None
        view = self.client.slot_view(slot, component)
        view[:] = bytes([value]) * len(view)

    def read(self, slot: int, component: ComponentType = ComponentType.FULL) -> bytes:
        assert self.client is not None
        return bytes(self.client.slot_view(slot, component))

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def serve(name: str) -> None:
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    peer = Peer(name)
    for number in range(sys.maxsize):
        try:
            method, args, options = pickle.load(calls)
        except EOFError:
            return
        try:
            if method == "query":
                answer = peer.query(number, *args, **options)
            elif hasattr(peer, method):
                answer = getattr(peer, method)(*args, **options)
            else:
                answer = getattr(peer.client, method)(*args, **options)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
