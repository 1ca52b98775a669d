"""The ranks of an engine, and what is made of them once all are there.

    incomplete --last rank added--> equipping --mover made--> equipped
        ^                               |                         |
        +------- a rank left (the mover is closed first) ---------+

Making a mover pins the SlotStore, which may take minutes: it goes on beside the worker's loop.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from flexkv_radix.transfer.lane import Equipment
from flexkv_radix.transfer.mapping import MappedStore
from flexkv_radix.transfer.mover import Mover, Placement, RankMemory, place
from flexkv_radix.transfer.protocol import RankPlace
from flexkv_radix.transfer.signals import LayerSignals
from flexkv_radix.transfer.wire import Channel


@dataclass(frozen=True)
class _Leaver:
    memory: RankMemory
    on_unmapped: Callable[[], None]


class Roster:
    """Owned by the worker's loop, which calls take_mover() when `wake_fd` is readable.

    make_mover is called on a thread of its own.  drain returns when no op is under way.
    """

    def __init__(
        self,
        store: MappedStore,
        num_ranks: int,
        signals: LayerSignals,
        make_mover: Callable[[Placement], Mover],
        drain: Callable[[], None],
    ) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._signals = signals
        self._make_mover = make_mover
        self._drain = drain
        self._ranks: dict[Channel, RankMemory] = {}
        self._left: list[_Leaver] = []  # to unmap when nothing uses them any more
        self._mover: Mover | None = None
        self._made: queue.SimpleQueue[tuple[Placement, Mover] | Exception] = queue.SimpleQueue()
        self._is_making = False
        self.equipment: Equipment | str = "no rank has registered its KV tensors"  # or why there is none
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._ranks)

    def holder(self, place: RankPlace) -> Channel | None:
        """Whose place it is."""
        return next((channel for channel, memory in self._ranks.items() if memory.rank.place == place), None)

    def refusal(self, place: RankPlace) -> str:
        """Why one more rank, at place, is not taken; "" if it is."""
        if self.holder(place) is not None:
            return "another rank has registered in this place"
        if len(self._ranks) == self._num_ranks:
            return f"all ranks of the engine have registered ({self._num_ranks})"
        return ""

    def add(self, channel: Channel, memory: RankMemory) -> None:
        """ValueError if it was the last rank and the ranks do not fit together."""
        self._ranks[channel] = memory
        if len(self._ranks) < self._num_ranks:
            self.equipment = f"{len(self._ranks)} of {self._num_ranks} ranks have registered"
        elif not self._is_making:
            self._equip()

    def remove(self, channel: Channel, on_unmapped: Callable[[], None]) -> None:
        """on_unmapped is called once nothing of the rank's memory is mapped any more."""
        memory = self._ranks.pop(channel)
        self._left.append(_Leaver(memory, on_unmapped))
        self.equipment = f"{memory.rank.place} is gone"
        if not self._is_making:
            self._unequip()

    def take_mover(self) -> bool:
        """Whether all ranks can be served from now on.  Raises what making the mover raised."""
        os.eventfd_read(self.wake_fd)
        self._is_making = False
        made = self._made.get()
        if isinstance(made, Exception):
            raise made
        placement, self._mover = made
        if self._left:  # while the mover was made
            self._unequip()
            if len(self._ranks) == self._num_ranks:
                self._equip()
            return False
        self._signals.bind(_num_layers(placement))
        self.equipment = Equipment(placement, self._mover)
        return True

    def _equip(self) -> None:
        placement = place(self._store, list(self._ranks.values()))
        self.equipment = "the KV tensors are being prepared"
        self._is_making = True
        threading.Thread(target=self._make, args=(placement,), name="equip", daemon=True).start()

    def _make(self, placement: Placement) -> None:
        try:
            self._made.put((placement, self._make_mover(placement)))
        except Exception as error:  # noqa: BLE001 - raised again where the worker's loop takes it
            self._made.put(error)
        os.eventfd_write(self.wake_fd, 1)

    def _unequip(self) -> None:
        self._drain()
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        while self._left:
            leaver = self._left.pop()
            leaver.memory.close()
            leaver.on_unmapped()


def _num_layers(placement: Placement) -> dict[RankPlace, int]:
    num_layers: dict[RankPlace, int] = {}
    for parts in placement.parts.values():
        for placed in parts:
            last = max(segment.layer for segment in placed.part.segments)
            num_layers[placed.place] = max(num_layers.get(placed.place, 0), last + 1)
    return num_layers
