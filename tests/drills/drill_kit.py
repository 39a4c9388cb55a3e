"""What all drills share: random moments, the books of a run, what may not be left behind, and the table.

``DRILL_MOMENTS`` (default 20) is the number of random moments of each fault, ``DRILL_SEED`` (default 0) draws them.
The table is printed at the end and written to ``benchmarks/results/drill.json``, row by row: a drill that was not run
keeps its row.

Left behind means: a process that the drill (or anything below it) started, a port that was listened on and cannot be
bound again, a listening socket or a segment of shared memory of this process, a name in ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from slipstream.ledger import Event, LedgerReader

MOMENTS = int(os.environ.get("DRILL_MOMENTS", "20"))
SEED = int(os.environ.get("DRILL_SEED", "0"))
OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "drill.json"
ASYNC = ["schedule.kind=fully_async", "schedule.max_staleness_steps=2", "inference.pause_mode=keep", "data.eval=[]"]
ENDLESS = ["schedule.steps=100000", "checkpoint.every_steps=5", "checkpoint.keep=1"]
"""Of runs that go on until enough has been injected."""
MARK = "SLIPSTREAM_DRILL"
os.environ[MARK] = str(os.getpid())  # every process below this one carries it, also one that has lost its parent
_SETTLE_SECONDS = 60.0


# ---- what is left


@dataclass(frozen=True)
class Residue:
    """What of the drills is on the machine at an instant."""

    processes: frozenset[tuple[int, str]]
    ports: frozenset[int]
    segments: frozenset[str]

    @classmethod
    def now(cls, known: frozenset[int] = frozenset()) -> Residue:
        """``known`` are process ids that belong to the drill itself."""
        gc.collect()
        ours = [p for p in psutil.process_iter() if p.pid not in known and p.pid != os.getpid() and _is_ours(p)]
        return cls(
            frozenset((p.pid, _name(p)) for p in ours),
            frozenset(port for p in [psutil.Process(), *ours] for port in _listening(p)),
            frozenset([*_memory_files(), *_shared_names()]),
        )

    def without(self, before: Residue) -> Residue:
        """What has come since."""
        return Residue(self.processes - before.processes, self.ports - before.ports, self.segments - before.segments)

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {"processes": len(self.processes), "ports": len(self.ports), "segments": len(self.segments)}


def _is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "gone"


def _listening(process: psutil.Process) -> list[int]:
    try:
        return [c.laddr.port for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def _memory_files() -> list[str]:
    """Anonymous segments that this process holds open or has mapped."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    found += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return [name for name in found if "memfd:" in name]


def _shared_names() -> list[str]:
    """Names in /dev/shm, but for those that processes of others have mapped."""
    names = [str(path) for path in Path("/dev/shm").iterdir()] if Path("/dev/shm").is_dir() else []
    if not names:
        return []
    foreign = set()
    for process in psutil.process_iter():
        if process.pid != os.getpid() and not _is_ours(process):
            with contextlib.suppress(OSError):
                foreign.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return [name for name in names if name not in foreign]


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# ---- a drill


@dataclass
class Drill:
    """One row of the table."""

    name: str
    injected: str
    seed: int
    moments: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: dict[str, Any] = field(default_factory=dict)
    leaks: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    known: set[int] = field(default_factory=set)
    """Processes that are the drill's own tools."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}:{self.name}")

    def happened(self, outcome: str, times: int = 1) -> None:
        """``times`` faults were injected, and this is what came of them."""
        if times:
            self.moments += times
            self.outcomes[outcome] += times

    def spread(self, i: int) -> float:
        """A random share of a lifetime: uniform within the ``i``-th of ``MOMENTS`` equal parts."""
        return (i + self.rng.random()) / MOMENTS

    @contextlib.contextmanager
    def nothing_left(self) -> Iterator[set[int]]:
        """Nothing may be left of what happens in here; add ports that were listened on to the set."""
        before = Residue.now(frozenset(self.known))
        ports: set[int] = set()
        yield ports
        until = time.monotonic() + _SETTLE_SECONDS
        while True:
            left = Residue.now(frozenset(self.known)).without(before)
            stuck = [port for port in ports if not _bindable(port)]
            if not (any(left.counts().values()) or stuck):
                return
            if time.monotonic() > until:
                break
            time.sleep(0.1)
        self.leaks.update(left.counts())
        self.leaks["ports"] += len(stuck)
        raise AssertionError(f"left behind: {left}, ports {stuck}")

    def row(self, seconds: float) -> dict[str, Any]:
        """For the results."""
        leaks = {name: self.leaks[name] for name in ("processes", "ports", "segments")}
        row = {"drill": self.name, "injected": self.injected, "seed": self.seed, "moments": self.moments,
               "outcomes": dict(self.outcomes), "leaks": leaks, "seconds": round(seconds, 1), **self.notes}  # fmt: skip
        return row | ({"failure": self.failure} if self.failure else {})


ROWS: list[dict[str, Any]] = []


@contextlib.contextmanager
def drilling(name: str, injected: str, least: int = MOMENTS) -> Iterator[Drill]:
    """A drill of at least so many moments, and its row in the table, whatever comes of it."""
    drill, began = Drill(name, injected, SEED), time.monotonic()
    try:
        yield drill
    except BaseException as error:
        drill.failure = f"{type(error).__name__}: {str(error)[:500]}"
        raise
    finally:
        ROWS.append(drill.row(time.monotonic() - began))
        print("\n" + show(ROWS[-1:]), flush=True)
        write()
    assert drill.moments >= least, f"{drill.moments} of {least} moments"


def show(rows: list[dict[str, Any]]) -> str:
    """The table as text."""
    lines = []
    for row in rows:
        leaks = ", ".join(f"{n} {kind}" for kind, n in row["leaks"].items() if n) or "nothing left"
        lines.append(f"{row['drill']}  [{row['moments']} moments, seed {row['seed']}, {row['seconds']:.0f} s; {leaks}]")
        lines.append(f"    injected: {row['injected']}")
        lines += [f"    {n:4} x {outcome}" for outcome, n in sorted(row["outcomes"].items(), key=lambda o: -o[1])]
        lines += [f"    FAILED: {row['failure']}"] if "failure" in row else []
    return "\n".join(lines)


def write() -> None:
    """Put the rows of these drills into the results; others stay as they are."""
    old = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    fresh = {row["drill"]: row for row in ROWS}
    names = [row["drill"] for row in old] + [name for name in fresh if name not in {row["drill"] for row in old}]
    rows = [fresh.get(name) or next(row for row in old if row["drill"] == name) for name in names]
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    OUT.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


# ---- a run's books


def conserved(run_dir: Path) -> None:
    """The token account balances at every step that counts."""
    for event in LedgerReader(run_dir).events("step", live_only=True):
        account = event.data["account"]
        assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled"), event.step


def trained_prompts(run_dir: Path) -> Counter[str]:
    """How often the steps of the live lineage selected each prompt (``UID@PASS``)."""
    steps = LedgerReader(run_dir).events("step", live_only=True)
    return Counter(group.partition("~")[0] for event in steps for group in event.data["selected"])


def sound(run_dir: Path) -> None:
    """The books balance, no prompt was trained twice, and what failed has no advantage."""
    conserved(run_dir)
    repeated = [key for key, n in trained_prompts(run_dir).items() if n > 1]
    assert not repeated, f"trained twice: {repeated[:3]}"
    for record in LedgerReader(run_dir).trajectories(phase="train"):
        assert record.disposition == "trained" or record.advantage is None, "what failed is no zero"


def versions_are_known(run_dir: Path) -> None:
    """Every sampled token names a version that was published to, and verified on, some replica."""
    reader = LedgerReader(run_dir)
    published = {e.data["version"] for e in reader.events("publish")}
    for record in reader.trajectories(phase="train"):
        if not record.live:
            continue
        unknown = record.trajectory.versions().keys() - published
        assert not unknown, f"{record.trajectory.trajectory_id}: {unknown}"


def cause(error: BaseException) -> str:
    """The class and the first words of an error, without what differs from one time to the next."""
    return plainly(f"{type(error).__name__}: {error}")


def plainly(text: str) -> str:
    """The same of an error that the ledger holds."""
    kind, _, words = text.splitlines()[0].partition(": ")
    words = re.sub(r"\S*/\S+", "PATH", words)
    return f"{kind}: {re.sub(r'[0-9]+', 'N', words)[:110]}"


@dataclass(frozen=True)
class Kill:
    """Signal 9 to the process that logs as ``name``, at ``time`` (seconds since the epoch)."""

    time: float
    name: str


def fates(kills: Sequence[Kill], events: Sequence[Event]) -> list[tuple[Kill, str]]:
    """What the ledger says came of each kill: what it was told of by, ``stopped (CAUSE)``, or nothing.

    A process is told of between its death and the next one of its name.  Where nobody told of it, that start of the
    run has ended in between: each end excuses one death of each name.
    """
    found = []
    for kill in kills:
        until = min((k.time for k in kills if k.name == kill.name and k.time > kill.time), default=math.inf)
        since = [e for e in events if kill.time <= e.time < until]
        dead = f"{kill.name} ended by signal 9"
        told = any(e.kind == "warning" and " is down" in e.data["message"] and dead in e.data["message"] for e in since)
        ended = next((plainly(e.data["message"]) for e in since if e.kind == "error"), None)
        found.append((kill, "told" if told else f"stopped ({ended})" if ended else ""))
    return found
