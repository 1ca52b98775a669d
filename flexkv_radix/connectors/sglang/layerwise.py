"""Loads that the forward of a batch waits for layer by layer.

SGLang's KV pool calls wait_until(layer) before it reads that layer's KV.  A batch may hold several loads,
each with a counter of its own; a layer is ready when it is in all of them.  Imports nothing of SGLang.
"""

from __future__ import annotations

from flexkv_radix.layerwise import NUM_COUNTERS, LayerEvents


class LayerwiseLoads:
    """Counters of the loads whose layers are still to be waited for."""

    def __init__(self, num_layers: int, socket_path: str, *, rank: int, num_ranks: int) -> None:
        self._num_layers = num_layers
        self._events = LayerEvents(num_layers)
        self._events.connect(socket_path, rank, num_ranks)
        self._active: dict[int, int] = {}  # counter -> next layer to wait for

    @property
    def consumer_index(self) -> int:
        """SGLang's way to ask whether a load runs: -1 if none does."""
        return next(iter(self._active), -1)

    def free_counter(self) -> int:
        """A counter for the next load, -1 if all are in use."""
        return next((n for n in range(NUM_COUNTERS) if n not in self._active), -1)

    def take_counter(self, counter_id: int) -> bool:
        """Expect the next load to signal counter_id.  To be called before any rank's share of it starts."""
        if counter_id < 0 or counter_id in self._active:
            return False
        self._events.reset(counter_id)
        self._active[counter_id] = 0
        return True

    def drop_counter(self, counter_id: int) -> None:
        """The load was not started."""
        del self._active[counter_id]

    def wait_until(self, layer: int) -> None:
        """Return when the layer (of this stage, from 0) is in place for every load of the batch.

        LayerLoadFailed or TransferDied: it never will be.
        """
        for counter_id, next_layer in list(self._active.items()):
            if layer < next_layer:
                continue
            self._events.wait(counter_id, layer)
            if layer + 1 == self._num_layers:
                del self._active[counter_id]
            else:
                self._active[counter_id] = layer + 1

    def close(self) -> None:
        self._active.clear()
        self._events.close()
