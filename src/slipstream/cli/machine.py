"""What this machine can do for a run, in plain verdicts.

Owns: the checks and their wording.  Refuses: changing anything; benchmarks (numbers are read, not measured, but for
one small matrix product that shows whether bfloat16 is native or emulated).

>>> [verdict.level for verdict in check_machine() if verdict.what == "python"]
['ok']
"""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from slipstream.errors import SlipstreamError

Level = Literal["ok", "note", "missing"]
GB = 1e9
NEEDED_MEMORY, NEEDED_DISK = 6 * GB, 3 * GB
"""What the quickstart may take (peak memory), and its model, database and checkpoints on disk."""


@dataclass(frozen=True)
class Verdict:
    """One finding.  ``missing`` means that a run cannot work; ``note`` that something is slower or left out."""

    level: Level
    what: str
    text: str
    mend: str = ""

    def __str__(self) -> str:
        mend = f"; {self.mend}" if self.mend else ""
        return f"{self.level:<8}{self.what:<10}{self.text}{mend}"


_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


def check_machine(folder: Path = Path()) -> list[Verdict]:
    """All verdicts; ``folder`` is where runs would be written."""
    checks: tuple[Callable[[], Iterator[Verdict]], ...] = (
        _python,
        _cores,
        _memory,
        _torch,
        lambda: _disk(folder),
        _sandbox,
        _chromium,
    )
    return [verdict for check in checks for verdict in check()]


def _python() -> Iterator[Verdict]:
    yield Verdict("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def cgroup_limit(name: str, root: Path = Path("/sys/fs/cgroup")) -> str | None:
    """A cgroup v2 limit of this process's container, or None when there is none to read."""
    try:
        text = (root / name).read_text().strip()
    except OSError:
        return None
    return None if text.startswith("max") else text


def usable_cores() -> float:
    """Cores that this process may use: affinity, cut by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = cgroup_limit("cpu.max")
    if quota is not None:
        used, period = quota.split()
        cores = min(cores, float(used) / float(period))
    return cores


def usable_memory() -> int:
    """Bytes of memory of the machine or of its container, whichever is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = cgroup_limit("memory.max")
    return total if limit is None else min(total, int(limit))


def _cores() -> Iterator[Verdict]:
    cores = usable_cores()
    text = f"{cores:g} usable, load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else f"{cores:g} usable"
    if cores < 2:
        yield Verdict("note", "cores", text, "the quickstart's times are for 2; expect about double")
    else:
        yield Verdict("ok", "cores", text)


def _memory() -> Iterator[Verdict]:
    import psutil

    total, free = usable_memory(), int(psutil.virtual_memory().available)
    text = f"{total / GB:.1f} GB, {min(free, total) / GB:.1f} GB available"
    if total < NEEDED_MEMORY:
        mend = "lower inference.kv_cache_tokens and training.max_tokens_per_microbatch ('slipstream plan' adds up)"
        yield Verdict("note", "memory", text, mend)
    else:
        yield Verdict("ok", "memory", text)


def _torch() -> Iterator[Verdict]:
    missing = [name for name in ("torch", "transformers", "safetensors", "peft") if util.find_spec(name) is None]
    if missing:
        yield Verdict("missing", "torch", f"not installed: {', '.join(missing)}", "pip install 'slipstream[torch]'")
        return
    import torch

    cuda = torch.cuda.is_available()
    device = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} device(s)" if cuda else "CPU"
    versions = f"torch {torch.__version__}, transformers {metadata.version('transformers')}"
    yield Verdict("ok", "torch", f"{versions}, {device}, {torch.get_num_threads()} threads")
    ratio = _bf16_speed()
    flags = ", ".join(_bf16_flags()) or "no bf16 instructions"
    if ratio < 1:
        mend = "model.dtype=float32 is faster on this machine; bfloat16 still halves memory"
        yield Verdict("note", "bfloat16", f"{ratio:.1f}x the speed of float32 ({flags})", mend)
    else:
        yield Verdict("ok", "bfloat16", f"{ratio:.1f}x the speed of float32 ({flags})")


def _bf16_flags(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    try:
        words = set(path.read_text().split())
    except OSError:
        return []
    return sorted(words & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"})


def _bf16_speed(size: int = 512, repeats: int = 5) -> float:
    """How many times faster a bfloat16 matrix product is than a float32 one (best of a few)."""
    import torch

    def best(dtype: torch.dtype) -> float:
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        a @ b  # the first call chooses kernels
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - started)
        return min(times)

    with torch.inference_mode():
        return best(torch.float32) / best(torch.bfloat16)


def _disk(folder: Path) -> Iterator[Verdict]:
    from slipstream.paths import cache_dir

    for what, wanted in (("runs", folder), ("cache", cache_dir())):
        place = next(p for p in (wanted.resolve(), *wanted.resolve().parents) if p.exists())
        free = shutil.disk_usage(place).free
        text = f"{free / GB:.1f} GB free for the {what} in {place}"
        if not os.access(place, os.W_OK):
            mend = "make it writable" if what == "runs" else "make it writable, or set SLIPSTREAM_CACHE"
            yield Verdict("missing", "disk", f"{place} cannot be written", mend)
        elif free < NEEDED_DISK:
            yield Verdict("note", "disk", text, f"the quickstart wants {NEEDED_DISK / GB:.0f} GB")
        else:
            yield Verdict("ok", "disk", text)


def _sandbox() -> Iterator[Verdict]:
    """Run the SQL sandbox itself: a good query must pass, and a write and an endless query must be stopped."""
    from slipstream.envs.sqldb import SqlSandbox

    what = "sandbox"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "probe.sqlite"
        connection = sqlite3.connect(path)
        connection.executescript("CREATE TABLE t(x); INSERT INTO t VALUES (7);")
        connection.close()
        try:
            with SqlSandbox(path) as db:
                reads = db.execute("SELECT x FROM t").rows == ((7,),)
                attach = db.execute(f"ATTACH '{Path(scratch) / 'made'}' AS other")
                endless = db.execute(
                    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT max(i) FROM n"
                )
        except (SlipstreamError, OSError) as error:
            yield Verdict("missing", what, f"the SQL sandbox does not start ({error})", "text2sql cannot run here")
            return
        made = (Path(scratch) / "made").exists()
    failed = [
        name
        for name, holds in (
            ("reading", reads),
            ("refusing ATTACH", not attach.ok and not made),
            ("stopping an endless query", not endless.ok),
        )
        if not holds
    ]
    if failed:
        yield Verdict("missing", what, f"SQLite {sqlite3.sqlite_version}: fails at {', '.join(failed)}", "do not train")
    else:
        text = f"SQLite {sqlite3.sqlite_version} in a child process: reads, cannot write, endless queries are stopped"
        yield Verdict("ok", what, text)


def _chromium() -> Iterator[Verdict]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found:
        yield Verdict("ok", "browser", f"{found} (the tests open the report in it)")
    else:
        yield Verdict("note", "browser", "no Chromium: the report's browser tests are skipped", "apt install chromium")
