"""Regions with damaged bytes, each met by a process of its own that does all it can with them.

``python -m tests.fuzz.mutants --number N --seed S [--first I]`` prints a JSON report.  A victim may
find the region corrupt, busy, retired or usable; it must not die of a signal, hang, or raise
anything that the API does not promise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixshmem import ComponentType, EventReason, Geometry, RadixError, ServerConfig, SlotStore
from radixshmem.attachment import Attachment
from radixshmem.geometry import plan_geometry
from radixshmem.index import INSERT_KEEP_UNUSED, QUERY_LOCK, Index, Match
from radixshmem.names import shm_path
from radixshmem.records import RegionConfig
from radixshmem.region import create_regions, retire_regions
from radixshmem.server.leftovers import Adopt, inspect_leftovers

GEOMETRY = Geometry(16, 64, 64, 4, 64, slot_align=64)
DATA_BYTES, SWA_RATIO, MAMBA_RATIO = 96 * 64, 0.2, 0.1
IDENTITY_BYTES, HEADER_BYTES = 256, 4096
INTERESTING = [
    0,
    1,
    2,
    3,
    15,
    63,
    64,
    127,
    128,
    255,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFF00,
    0xFFFFFFFF,
    (1 << 64) - 1,
]
VICTIM_LIMIT_S = 60.0
# What a verb may say of a damaged region.
PROMISED = (RadixError, ValueError, OSError, MemoryError, TimeoutError)
FULL = ComponentType.FULL


@dataclass
class Template:
    """The bytes of a healthy pair of regions."""

    index: bytes
    store: bytes


def region_config(name: str) -> RegionConfig:
    plan = plan_geometry(GEOMETRY, data_bytes=DATA_BYTES, swa_ratio=SWA_RATIO, mamba_ratio=MAMBA_RATIO)
    return RegionConfig(
        plan,
        data_bytes=DATA_BYTES,
        swa_ratio=SWA_RATIO,
        mamba_ratio=MAMBA_RATIO,
        data_name=f"{name}_data",
        event_capacity=64,
        max_clients=4,
        pins_per_client=8,
    )


def make_template(name: str) -> Template:
    """Two paths with windows, an old tree under a pin, staged slots, and a client that died with them."""
    create_regions(name, region_config(name))
    pid = os.fork()
    if pid == 0:
        index = Attachment(name, "dead", 0).index
        populate(index, 1)
        pin(index, 1)
        index.reset()
        populate(index, 100)
        populate(index, 200)
        pin(index, 100)
        index.allocate(FULL, 5)
        index.allocate(ComponentType.SWA, 2)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with open(shm_path(name), "rb") as index_file, open(shm_path(f"{name}_data"), "rb") as store_file:
        return Template(index_file.read(), store_file.read())


def path(first: int) -> np.ndarray:
    return np.arange(first, first + 12, dtype=np.uint64)


def populate(index: Index, first: int) -> None:
    index.insert(FULL, path(first), index.allocate(FULL, 12)[0], 0, 0)
    for component, num in ((ComponentType.SWA, 4), (ComponentType.MAMBA, 1)):
        slots = index.allocate(component, num)[0]
        index.insert(component, path(first), slots, 0, 0) if len(slots) else None


def pin(index: Index, first: int) -> Match:
    match = Match()
    index.match(path(first), 7, QUERY_LOCK, match)
    return match


# -- damage ---------------------------------------------------------------------------------------


def damage(rng: random.Random, data: bytes) -> tuple[bytes, list[str]]:
    """A copy with one to eight words changed, and what was changed."""
    out, changes = bytearray(data), []
    for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
        width = rng.choice([1, 2, 4, 4, 4, 8])
        limit = min(rng.choice([IDENTITY_BYTES, HEADER_BYTES, len(out), len(out)]), len(out))
        at = rng.randrange(limit // width) * width
        old = int.from_bytes(out[at : at + width], "little")
        new = new_value(rng, old) % (1 << 8 * width)
        out[at : at + width] = new.to_bytes(width, "little")
        changes.append(f"{at}+{width}: {old:#x} -> {new:#x}")
    return bytes(out), changes


def new_value(rng: random.Random, old: int) -> int:
    how = rng.randrange(4)
    if how == 0:
        return old ^ (1 << rng.randrange(64))
    if how == 1:
        return old + rng.choice([-2, -1, 1, 2])
    return rng.choice(INTERESTING) if how == 2 else rng.randrange(100)


# -- victims --------------------------------------------------------------------------------------


def use(name: str, meddle: Callable[[], None] | None = None) -> None:
    """Every verb there is; ``meddle`` runs once the client is attached."""
    attached = Attachment(name, "victim", 0)
    index = attached.index
    if meddle is not None:
        meddle()
    held = Match()
    deeds: list[Callable[[], object]] = [
        lambda: [pin_into(index, first, held) for first in (1, 100, 200)],
        lambda: look(index, 200),
        lambda: populate(index, 300),
        lambda: index.allocate(FULL, 70),
        lambda: [index.allocate(component, 3) for component in ComponentType],
        lambda: keep_unused(index),
        lambda: index.evict(FULL, 10, EventReason.REQUEST),
        lambda: index.evict(ComponentType.SWA, 10, EventReason.REQUEST),
        lambda: index.reap(),
        lambda: index.stats(),
        lambda: index.events(0, 100),
        lambda: index.removed_hashes(1 << 40, 100),
        lambda: look_inside(index),
        lambda: index.reset(),
        lambda: populate(index, 400),
        lambda: attached.store().array(FULL).sum(),
        lambda: index.read_info(),
        lambda: index.set_fingerprint("fuzz"),
        lambda: index.set_device(),
        lambda: attached.close(),
    ]
    for deed in deeds:
        with contextlib.suppress(*PROMISED):
            deed()


def pin_into(index: Index, first: int, match: Match) -> None:
    index.match(path(first), 7, QUERY_LOCK, match)
    if match._pin is not None and match.holds_pin():
        index.release(match._pin)


def look(index: Index, first: int) -> None:
    match = Match()
    for mask in (1, 3, 5, 7):
        index.match(path(first), mask, 0, match)
        list(match.common_slots()), list(match.swa_slots), list(match.mamba_slots)


def keep_unused(index: Index) -> None:
    slots = index.allocate(FULL, 12)[0]
    hashes = path(200)[: len(slots)]
    index.insert(FULL, hashes, slots, 0, INSERT_KEEP_UNUSED)
    index.recycle(FULL, slots)


def look_inside(index: Index) -> None:
    snapshot = index.snapshot()
    snapshot.check()
    snapshot.summarize()
    list(snapshot.nodes())


def adopt(name: str) -> str:
    """What a server does with leftovers: what it adopts is sound, and stays so."""
    config = ServerConfig(name=name, data_bytes=DATA_BYTES, swa_ratio=SWA_RATIO, mamba_ratio=MAMBA_RATIO)
    decision = inspect_leftovers(config)
    if not isinstance(decision, Adopt):
        return "discarded"
    populate(decision.index, 300)
    decision.index.evict(FULL, 20, EventReason.REQUEST)
    decision.index.reap()
    num_violations, report = decision.index.snapshot().check()
    assert num_violations == 0, report
    return "adopted"


def attach_store(name: str) -> None:
    store = SlotStore.attach(f"{name}_data", timeout_ms=0)
    for component in ComponentType:
        if store.has_pool(component):
            store.array(component)[-1, -1] = 1
            bytes(store.slot_view(store.pool(component).num_slots - 1, component))


# -- the report -----------------------------------------------------------------------------------


class Fuzzer:
    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.template = make_template(name)
        self.ends: Counter[str] = Counter()
        self.failures: list[dict[str, object]] = []

    def run_one(self, number: int) -> None:
        rng = random.Random(self.seed * 1_000_003 + number)
        kind = rng.choice(["use", "use", "meddle", "adopt", "store"])
        healthy = self.template.store if kind == "store" else self.template.index
        damaged, changes = damage(rng, healthy)
        self.write("", self.template.index if kind in ("store", "meddle") else damaged)
        self.write("_data", damaged if kind == "store" else self.template.store)
        victim = {
            "use": lambda: use(self.name),
            "meddle": lambda: use(self.name, lambda: self.overwrite(damaged)),
            "adopt": lambda: adopt(self.name),
            "store": lambda: attach_store(self.name),
        }[kind]
        end = run_victim(victim)
        self.ends[f"{kind}: {end.splitlines()[0]}"] += 1
        if not end.startswith("fine"):
            self.failures.append({"number": number, "kind": kind, "changes": changes, "end": end})

    def write(self, suffix: str, data: bytes) -> None:
        """A new file under the old name: nobody else maps it."""
        file_path = shm_path(self.name + suffix)
        os.unlink(file_path)
        with open(os.open(file_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)

    def overwrite(self, data: bytes) -> None:
        """Change, word by word, what differs in the file that is mapped."""
        with open(shm_path(self.name), "r+b", buffering=0) as file:
            for at in range(0, len(data), 8):
                if data[at : at + 8] != self.template.index[at : at + 8]:
                    os.pwrite(file.fileno(), data[at : at + 8], at)


def run_victim(victim: Callable[[], str | None]) -> str:
    """How a child that calls ``victim`` ended: "fine: ..." or what is wrong."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(VICTIM_LIMIT_S))
        os.write(writer, outcome(victim).encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"killed by {name}" if name != "SIGALRM" else f"hung for {VICTIM_LIMIT_S:.0f} s"
    return text


def outcome(victim: Callable[[], str | None]) -> str:
    try:
        return f"fine: {victim() or 'used'}"
    except PROMISED as error:
        return f"fine: {type(error).__name__}"
    except BaseException:  # noqa: BLE001 - the report shows it
        return "raised\n" + traceback.format_exc()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    name, start = f"/t-fuzz-{os.getpid()}", time.monotonic()
    fuzzer = Fuzzer(name, args.seed)
    try:
        for number in range(args.first, args.first + args.number):
            fuzzer.run_one(number)
    finally:
        retire_regions(name)
        for suffix in ("", "_data"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shm_path(name + suffix))
    report = {
        "seconds": round(time.monotonic() - start, 1),
        "ends": dict(fuzzer.ends),
        "failures": fuzzer.failures,
    }
    print(json.dumps(report, indent=1))
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
