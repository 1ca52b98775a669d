"""A client that is about to be stopped or killed: runs calls from stdin, pickled, and answers on stdout.

``python living_main.py <index name>``; see ``living.Living`` for the other side.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from regions import attach

from radixshmem import EventReason, SlotStore
from radixshmem.index import QUERY_LOCK, Index, Match

FULL = 0


class Commands:
    """What the other side may call, by name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._index: Index | None = None
        self._held: list[Match] = []
        self._turns = 0
        self._others: list[subprocess.Popen[bytes]] = []

    @property
    def index(self) -> Index:
        assert self._index is not None
        return self._index

    def attach(self) -> dict[str, int]:
        self._index = attach(self._name, "living")
        return {"slot": self.index.slot, "incarnation": self.index.incarnation, "pid": os.getpid()}

    def publish(self, hashes: np.ndarray) -> list[int]:
        slots = self.index.allocate(FULL, len(hashes))[0]
        assert self.index.insert(FULL, hashes, slots, 0, 0)[1] == len(hashes)
        return [int(slot) for slot in slots]

    def pin(self, hashes: np.ndarray) -> int:
        match = Match()
        self.index.match(hashes, 1, QUERY_LOCK, match)
        self._held.append(match)
        return match.common_hit

    def stage(self, num: int) -> list[int]:
        return [int(slot) for slot in self.index.allocate(FULL, num)[0]]

    def set_device(self) -> None:
        self.index.set_device()

    def close(self) -> None:
        self.index.close()

    # -- work that goes on by itself --------------------------------------------------------------

    def start(self, deed: str) -> None:
        """Do ``deed`` over and over in a thread."""
        threading.Thread(target=self._repeat, args=(getattr(self, f"_{deed}"),), daemon=True).start()

    def turns(self) -> int:
        """How often the deed was done."""
        return self._turns

    def _repeat(self, deed: Any) -> None:
        while True:
            deed()
            self._turns += 1

    def _copy(self) -> None:
        self.index.snapshot()

    def _change(self) -> None:
        hashes = np.arange(1000, 1060, dtype=np.uint64)
        slots = self.index.allocate(FULL, len(hashes))[0]
        self.index.insert(FULL, hashes[: len(slots)], slots, 0, 0)
        self.index.evict(FULL, len(hashes), EventReason.REQUEST)

    def _come_and_go(self) -> None:
        attach(self._name, "guest").close()

    # -- other processes ----------------------------------------------------------------------------

    def start_writer(self, slots: list[int]) -> int:
        """A transfer worker that writes into ``slots`` and holds a dup of this client's lease; its pid."""
        lease = os.dup(self.index.lease_fd())
        arguments = [sys.executable, __file__, "write", f"{self._name}_data", *map(str, slots)]
        writer = subprocess.Popen(arguments, pass_fds=[lease], stdout=subprocess.PIPE)
        os.close(lease)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        self._others.append(writer)
        return writer.pid

    def fork(self) -> tuple[int, list[str]]:
        """(pid of a forked child that lives on, what the verbs of this client say in it)."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, pickle.dumps(self._try_verbs()))
            signal.pause()
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            return pid, pickle.load(answer)

    def fork_bare(self, num: int) -> list[int]:
        """Pids of children that were forked while other threads work, and live on."""
        return [self._fork_bare() for _ in range(num)]

    def _fork_bare(self) -> int:
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        time.sleep(0.001)
        return pid

    def reap_child(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def _try_verbs(self) -> list[str]:
        verbs = {
            "match": lambda: self.index.match(np.arange(1, 4, dtype=np.uint64), 1, 0, Match()),
            "pin": lambda: self.index.match(np.arange(1, 4, dtype=np.uint64), 1, QUERY_LOCK, Match()),
            "allocate": lambda: self.index.allocate(FULL, 1),
            "insert": lambda: self.index.insert(FULL, np.zeros(1, np.uint64), np.zeros(1, np.int32), 0, 0),
            "recycle": lambda: self.index.recycle(FULL, np.zeros(1, np.int32)),
            "evict": lambda: self.index.evict(FULL, 1, EventReason.REQUEST),
            "reset": lambda: self.index.reset(),
            "reap": lambda: self.index.reap(),
            "stats": lambda: self.index.stats(),
            "events": lambda: self.index.events(0, 10),
            "snapshot": lambda: self.index.snapshot(),
            "lease_fd": lambda: self.index.lease_fd(),
        }
        return [f"{name}: {outcome(verb)}" for name, verb in verbs.items()]


def outcome(verb: Any) -> str:
    try:
        verb()
    except Exception as error:  # noqa: BLE001 - the test looks at which
        return type(error).__name__
    return "done"


def write_forever(store_name: str, slots: list[int]) -> None:
    """Count up in the first word of each slot."""
    store = SlotStore.attach(store_name)
    words = [store.slot_view(slot).cast("Q") for slot in slots]
    print("writing", flush=True)
    while True:
        for word in words:
            word[0] += 1


def serve(name: str) -> None:
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    commands = Commands(name)
    while True:
        try:
            method, args = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = getattr(commands, method)(*args)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_forever(sys.argv[2], [int(slot) for slot in sys.argv[3:]])
    serve(sys.argv[1])
