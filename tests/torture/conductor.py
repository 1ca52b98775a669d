"""Runs workers and a server, kills and stops them at random, and watches what becomes of the region."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field

from radixshmem.config import EVICT_POLICIES
from tests.torture import worker
from tests.torture.audit import QUARANTINE_S, AuditError, Auditor
from tests.torture.lock_word import LockWord
from tests.torture.orphans import die_with_parent
from tests.torture.seats import NOBODY, Seat, make_seats
from tests.torture.tape import LostEventsError

DATA_BYTES = "1M"  # 3000 slots of 256 bytes: every prompt evicts others
SERVER_FLAGS = (
    "--swa-ratio",
    "0.2",
    "--mamba-ratio",
    "0.06",
    "--kvevent-ring-capacity",
    "262144",
    "--max-clients",
    "64",
)
BLOCKED_LIMIT_S = 1.0
MAX_STOP_S = 0.4
MIN_ATTACHED = 2  # somebody has to find out what the dead left
SERVER_START_S = 120.0
TICK_S = 0.004
STALL_S = 0.25  # between two ticks: this machine is busy elsewhere
LOCK_LOOKS = 20_000  # tries to find a worker while it holds the lock


@dataclass(frozen=True)
class Plan:
    """How much of what; ``*_every_s`` are means of random intervals.

    It goes on for ``seconds``, and then until enough was killed, but for no more than ``max_seconds``.
    Without ``min_restarts`` the server is killed all along, else just so often: workers need it to attach.
    """

    name: str
    seconds: float
    seed: int
    min_kills: int = 0
    min_restarts: int = 0
    max_seconds: float = 0.0
    num_workers: int = 6
    kill_every_s: float = 0.12
    stop_every_s: float = 1.2
    restart_every_s: float = 2.0


@dataclass
class Report:
    seed: int
    policy: str
    seconds: float = 0.0
    kills: int = 0
    kills_holding_lock: int = 0
    kills_while_stopped: int = 0
    stops: int = 0
    stops_holding_lock: int = 0
    server_kills: int = 0
    lock_recoveries: int = 0
    operations: int = 0
    verified_bytes: int = 0
    final_blocks: int = 0
    final_bytes: int = 0
    hit_blocks: int = 0
    busy: int = 0
    pin_limits: int = 0
    short_allocations: int = 0
    stale_inserts: int = 0
    lost_prefixes: int = 0
    resets: int = 0
    status_calls: int = 0
    invariant_checks: int = 0
    stored_events: int = 0
    removed_events: int = 0
    reaped_clients: int = 0
    reaped_pins: int = 0
    reaped_slots: int = 0
    lock_timeouts: int = 0
    walk_retries: int = 0
    worst_verb_ms: float = 0.0
    worst_verb_wall_ms: float = 0.0  # with time in which it could run but got no CPU
    worst_reap_ms: float = 0.0
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Server:
    """A radix-server process that is killed and started again."""

    def __init__(self, name: str, policy: str) -> None:
        self._command = [sys.executable, "-m", "radixshmem.cli", "--name", name, "--data-bytes", DATA_BYTES]
        self._command += ["--evict-policy", policy, "--reap-quarantine-s", str(QUARANTINE_S)]
        self._command += [*SERVER_FLAGS, "--metrics-address", "", "--log-level", "warning"]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, preexec_fn=die_with_parent)

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


class Conductor:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.report = Report(plan.seed, EVICT_POLICIES[(plan.seed - 1) % len(EVICT_POLICIES)])
        self.seats = make_seats(plan.num_workers)
        self.pids: dict[int, Seat] = {}
        self.stopped: dict[int, float] = {}  # pid -> when to go on
        self.num_started = 0
        self.killed_server = 0

    def run(self) -> Report:
        start = time.monotonic()
        self.server = Server(self.plan.name, self.report.policy)
        try:
            for seat in self.seats:
                self.start_worker(seat)
            self.wait_ready()
            self.auditor = Auditor(self.plan.name)
            self.lock_word = LockWord(self.plan.name)
            self.torture(time.monotonic())
            self.conclude()
        except (AuditError, LostEventsError) as error:
            self.report.failures.append(str(error))
        finally:
            self.kill_all()
            self.finish_server()
        self.report.seconds = round(time.monotonic() - start, 1)
        return self.report

    # -- processes ------------------------------------------------------------------------------------

    def start_worker(self, seat: Seat) -> None:
        self.num_started += 1
        seed = self.plan.seed * 1_000_003 + self.num_started
        seat["SLOT"] = seat["INCARNATION"] = NOBODY
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os._exit(worker.run(self.plan.name, seat, seed))
        self.pids[pid] = seat

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SERVER_START_S
        while any(seat["SLOT"] == NOBODY for seat in self.seats):
            self.check_workers()
            if self.server.process.poll() is not None:
                raise AuditError("the server did not start")
            if time.monotonic() > deadline:
                raise AuditError("the workers did not all attach in time")
            time.sleep(0.01)

    def check_workers(self) -> None:
        """A worker ends only by our hand, or because it found something wrong."""
        for seat in self.seats:
            if seat.failure:
                raise AuditError(seat.failure)
        for pid in list(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                seat = self.pids.pop(pid)
                raise AuditError(seat.failure or f"worker {seat.index} died by itself")

    def bury(self, pid: int) -> None:
        os.waitpid(pid, 0)
        seat = self.pids.pop(pid)
        self.stopped.pop(pid, None)
        if seat["INCARNATION"] != NOBODY:
            self.auditor.note_death(seat["INCARNATION"])

    # -- what is done to them -------------------------------------------------------------------------

    def torture(self, start: float) -> None:
        plan = self.plan
        deeds = {
            self.kill: plan.kill_every_s,
            self.stop: plan.stop_every_s,
            self.restart_server: plan.restart_every_s,
        }
        due = {deed: time.monotonic() + self.rng.expovariate(1 / mean) for deed, mean in deeds.items()}
        last = time.monotonic()
        while self.goes_on((now := time.monotonic()) - start):
            self.auditor.stalled_s += max(0.0, now - last - STALL_S)
            last = now
            for deed, mean in deeds.items():
                if now >= due[deed]:
                    deed()
                    due[deed] = now + self.rng.expovariate(1 / mean)
            self.wake(now)
            self.look()
            time.sleep(TICK_S)

    def goes_on(self, seconds: float) -> bool:
        enough = (
            self.report.kills >= self.plan.min_kills and self.report.server_kills >= self.plan.min_restarts
        )
        return seconds < self.plan.seconds or (not enough and seconds < self.plan.max_seconds)

    def look(self) -> None:
        self.check_workers()
        self.auditor.index.check_alive()
        self.auditor.tape.follow()
        self.auditor.check_dead_are_reaped()
        worst = max(self.seats, key=lambda seat: seat["WORST_NS"])
        if worst["WORST_NS"] > BLOCKED_LIMIT_S * 1e9:
            raise AuditError(f"worker {worst.index} was blocked for {worst['WORST_NS'] / 1e6:.0f} ms")

    def attached(self) -> list[int]:
        return [pid for pid, seat in self.pids.items() if seat["SLOT"] != NOBODY]

    def pick(self) -> int | None:
        """A worker, now and then one that still attaches; None when few others would go on."""
        attached = self.attached()
        if len(attached) <= MIN_ATTACHED:
            return None
        return self.rng.choice(list(self.pids) if self.rng.random() < 0.1 else attached)

    def catch_holding_lock(self, pid: int) -> bool:
        """Wait until the worker holds the index lock, for a while."""
        slot = self.pids[pid]["SLOT"]
        return any(self.lock_word.owner() == slot for _ in range(LOCK_LOOKS))

    def kill(self) -> None:
        """A worker anywhere, or while it holds the lock, or while it is stopped."""
        pid = self.pick()
        if pid is None:
            return
        seat, was_stopped = self.pids[pid], pid in self.stopped
        if not was_stopped and self.rng.random() < 0.5:
            self.catch_holding_lock(pid)
        os.kill(pid, signal.SIGKILL)
        slot = seat["SLOT"]
        self.bury(pid)
        self.report.kills += 1
        self.report.kills_while_stopped += was_stopped
        self.report.kills_holding_lock += self.lock_word.owner() == slot
        self.start_worker(seat)

    def stop(self) -> None:
        pid = self.pick()
        if pid is None or len(self.stopped) > 1 or pid in self.stopped:
            return
        seat = self.pids[pid]
        if self.rng.random() < 0.7:
            self.catch_holding_lock(pid)
        seat["STOPS"] += 1
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        self.report.stops += 1
        self.report.stops_holding_lock += self.lock_word.owner() == seat["SLOT"]
        self.stopped[pid] = time.monotonic() + self.rng.uniform(0.02, MAX_STOP_S)

    def wake(self, now: float) -> None:
        for pid, when in list(self.stopped.items()):
            if now >= when:
                del self.stopped[pid]
                self.pids[pid]["STOPS"] += 1
                os.kill(pid, signal.SIGCONT)

    def restart_server(self) -> None:
        """Once the last one has adopted the regions, and while more restarts are wanted."""
        newest, wanted = self.newest_server(), self.plan.min_restarts
        if newest != self.killed_server and (not wanted or self.report.server_kills < wanted):
            self.server.kill_and_restart()
            self.killed_server = newest
            self.report.server_kills += 1

    def newest_server(self) -> int:
        """Incarnation of the last server that joined the regions."""
        return max((c.incarnation for c in self.auditor.clients() if c.label == "radix-server"), default=0)

    def await_server(self) -> None:
        deadline = time.monotonic() + SERVER_START_S
        while self.newest_server() in (0, self.killed_server):
            if self.server.process.poll() is not None or time.monotonic() > deadline:
                raise AuditError("the last server did not adopt the regions")
            time.sleep(0.01)

    # -- the end --------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        for pid in list(self.pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self.pids[pid]

    def conclude(self) -> None:
        self.await_server()
        for pid in list(self.pids):
            os.kill(pid, signal.SIGKILL)
            self.bury(pid)
            self.report.kills += 1
        report, auditor = self.report, self.auditor
        auditor.wait_all_returned()
        report.final_blocks = auditor.check_region()
        report.final_bytes = auditor.check_bytes()
        self.count()

    def count(self) -> None:
        report, auditor = self.report, self.auditor
        total = {
            f: sum(seat[f] for seat in self.seats) for f in ("OPS", "VERIFIED_BYTES", "HIT_BLOCKS", "BUSY")
        }
        report.operations, report.verified_bytes = total["OPS"], total["VERIFIED_BYTES"]
        report.hit_blocks, report.busy = total["HIT_BLOCKS"], total["BUSY"]
        report.worst_verb_ms = round(max(seat["WORST_NS"] for seat in self.seats) / 1e6, 1)
        report.worst_verb_wall_ms = round(max(seat["WORST_WALL_NS"] for seat in self.seats) / 1e6, 1)
        report.worst_reap_ms = round(auditor.worst_reap_s * 1e3, 1)
        report.stored_events, report.removed_events = auditor.tape.num_stored, auditor.tape.num_removed
        for field_name, seat_field in (
            ("pin_limits", "PIN_LIMITS"),
            ("short_allocations", "SHORT"),
            ("stale_inserts", "STALE"),
            ("lost_prefixes", "LOST_PREFIX"),
            ("resets", "RESETS"),
            ("status_calls", "STATUS_CALLS"),
            ("invariant_checks", "CHECKS"),
        ):
            setattr(report, field_name, sum(seat[seat_field] for seat in self.seats))
        stats = auditor.index.stats()
        for name in (
            "lock_recoveries",
            "reaped_clients",
            "reaped_pins",
            "reaped_slots",
            "lock_timeouts",
            "walk_retries",
        ):
            setattr(report, name, stats[name])

    def finish_server(self) -> None:
        if hasattr(self, "auditor"):
            self.auditor.close()
        code = self.server.stop()
        if code:
            self.report.failures.append(f"the server ended with exit code {code}")
        left = [entry for entry in os.listdir("/dev/shm") if entry.startswith(self.plan.name[1:])]
        if left:
            self.report.failures.append(f"the server left {left} in /dev/shm")
