"""Synchronous against asynchronous training on two cores: steps per hour, the bound, and what is learnt.

    python benchmarks/async_vs_sync.py                      # five seeds (make bench-async), about 25 minutes
    python benchmarks/async_vs_sync.py --seeds 1 --steps 6  # does it run?

The work is that of ``train()``: embedded engine, turn loop, update, verified publish, ledger.  A random model of some
million parameters answers in one turn and earns the share of its characters that come before 'a'.  The environment is
a judge that takes its time: each sample waits for a log-normal time that stands in its data row, drawn from the seed,
so that both arms wait the same times for the same prompts.  Held-out prompts wait for nothing.  How long the judge
takes is scaled to the machine as it is when a seed begins: so that a synchronous step, of which a first short run
without waits says how long it computes, is idle for about ``IDLE_SHARE``.  A machine that is faster or slower by the
time leaves another share; outside ``IDLE_RANGE`` the waits are scaled by what was seen and the synchronous run is made
again, before the asynchronous one is begun.

Each seed has its own model and data and, after that first run, three more, each in a process of its own:

=========  ==============  ==============================  =========
run        schedule        threads                         waits
=========  ==============  ==============================  =========
``sync``   ``sync``        two for each phase in turn      yes
``async``  ``fully_async`` one for the engine, one for     yes
                           the trainer, at the same time
``alone``  ``sync``        one for each phase in turn      no
=========  ==============  ==============================  =========

**Rate.**  Seconds per step between the end of step ``FILL`` and the end of step ``steps - DRAIN``, in both arms alike:
what fills the pipeline is not steady, nor is its end, where nothing is sampled any more.  ``whole_run_speedup`` has
all steps in it.

**Bound.**  With one core each, a step of the asynchronous run cannot take less than the largest of

* ``generation``: seconds in which the engine works for one step's samples, alone on one core (means of ``alone``);
* ``training``: update and publish of one step, alone on one core; a step ends when its publish is verified;
* ``waiting``: a group holds one of ``B (S + 1)`` places while its slowest sample waits and while it is trained on, so
  by Little's law a step takes at least ``(wait + training) / (S + 1)``.  ``wait`` is the mean over the groups of
  the ``async`` run itself, as its ledger has it.

All over the steps that the rate is taken over.

``bound`` is the synchronous seconds per step over that, ``fraction_of_bound`` the speed-up over ``bound``.  ``alone``
shares caches, memory and clock with nobody, decodes full batches and has no straggler: the bound is out of reach on
purpose.

**Idle.**  ``sync_idle_share``: part of a synchronous step in which neither engine nor trainer had anything to do.

**Reward.**  Mean over fresh samples (temperature 1) of held-out prompts after the last step.  ``not_inferior`` says
that the lower end of the 95 % t-interval of (async - sync), paired by seed, lies above -0.03.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from machine import machine

from slipstream.config import load_settings
from slipstream.envs import BaseTextEnv, deregister, register
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.ledger import LedgerReader
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.run import train

RESULTS = Path(__file__).parent / "results" / "async.json"
ENV = "slow_judge"
PROMPTS, SAMPLES, STALENESS = 8, 8, 2
TOKENS, BATCH = 32, 32
STEPS, PROBE_STEPS = 30, 8
FILL = DRAIN = STALENESS + 1
IDLE_SHARE, IDLE_RANGE, TRIES = 0.35, (0.31, 0.39), 3
WAIT_SIGMA, WAIT_MOST = 0.9, 20.0
"""The judge's seconds: spread of their logarithm, and where the tail is cut, in medians."""
HELD_OUT, EVAL_SAMPLES = 16, 16
MARGIN = 0.03
DEADLINE = 3600.0
MODEL: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.06,
}
BASE = (
    "model.dtype=float32",
    "inference.dtype=float32",
    "algorithm.preset=cispo",  # under a lag of two, ppo_clip takes most gradients away and needs three times the steps
    "training.optimizer.lr=2e-4",
    # Every step has the same work, also when all that is to be learnt is learnt: groups whose samples earn the same are
    # trained on, and samples that are equal are not computed once for all.
    "algorithm.drop_zero_variance=false",
    "training.share_prompts=false",
    "training.optimizer.weight_decay=0",
    f"rollout.samples_per_prompt={SAMPLES}",
    f"rollout.sampling.max_tokens_per_turn={TOKENS}",
    "rollout.max_prompt_tokens=64",
    "rollout.max_total_tokens=160",
    "rollout.env_workers=512",  # a wait is no work
    "rollout.concurrency=512",
    f"inference.max_batch_size={BATCH}",
    f"schedule.prompts_per_step={PROMPTS}",
    f"env.id={ENV}",
    f"eval.samples_per_prompt={EVAL_SAMPLES}",
    "eval.sampling.temperature=1.0",
    "checkpoint.every_steps=0",
    "logging.report=false",
    "logging.sinks=[jsonl]",
)
ARMS: Mapping[str, Sequence[str]] = {
    "sync": ("schedule.kind=sync", "inference.threads=2", "training.threads=2"),
    "async": (
        "schedule.kind=fully_async",
        f"schedule.max_staleness_steps={STALENESS}",
        "inference.pause_mode=keep",
        "inference.threads=1",
        "training.threads=1",
        "eval.before=false",
    ),
    "alone": (
        "schedule.kind=sync",
        "inference.threads=1",
        "training.threads=1",
        "eval.before=false",
        "eval.after=false",
    ),
}
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}


class SlowJudge(BaseTextEnv):
    """One turn; earns the share of characters before 'a', after the time that its row says for this sample."""

    _asked: ClassVar[Counter[int]] = Counter()
    _lock: ClassVar[Any] = threading.Lock()

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        row = (extras or {})["row"]
        waits = (extras or {})["waits"]
        with self._lock:
            self._seconds = float(waits[self._asked[row] % len(waits)])
            self._asked[row] += 1

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        time.sleep(self._seconds)
        reward = sum(c < "a" for c in action) / max(len(action), 1)
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


def draw(shape: tuple[int, ...], *key: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Waits with a median of 1."""
    return np.minimum(np.random.default_rng(key).lognormal(0.0, WAIT_SIGMA, shape), WAIT_MOST)


def rows(first: int, count: int, seed: int, median: float) -> list[dict[str, Any]]:
    """Data rows, each with the waits of its samples in seconds."""
    seconds = (median * draw((count, SAMPLES), seed, first)).round(4)
    return [
        {"uid": f"q{i}", "prompt": f"question {i}", "row": i, "waits": line.tolist()}
        for i, line in enumerate(seconds, first)
    ]


def median_wait(busy: float) -> float:
    """The median that leaves a synchronous step idle for ``IDLE_SHARE``, when it computes for ``busy`` seconds.

    Such a step waits for the slowest of the samples that were decoded last; the others waited meanwhile.
    """
    slowest = draw((4000, min(PROMPTS * SAMPLES, BATCH)), 0).max(axis=1).mean()
    return float(busy * IDLE_SHARE / (1 - IDLE_SHARE) / slowest)


def scale_of_waits(share: float) -> float:
    """What to multiply waits by that left a step idle for ``share``, so that they leave it idle for ``IDLE_SHARE``."""
    return (IDLE_SHARE / (1 - IDLE_SHARE)) / (share / (1 - share))


# -- one run, in a process of its own ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One run: per step its end (seconds since the first began) and its parts in seconds, and what it learnt."""

    ends: list[float]
    update: list[float]
    publish: list[float]
    engine_idle: list[float]
    step: list[float]
    group_wait: float
    """Mean over groups of the longest time that a sample spent in its environment."""
    step_wait: float
    """Mean over steps of the same."""
    tokens: list[float]
    """Trained tokens."""
    lag: float
    """Mean publishes between sampling a token and training on it."""
    rewards: list[float]
    """Mean reward of the trained samples."""
    scores: dict[str, float]
    """Evaluated reward by stage."""
    cpu: dict[str, list[float]]
    """By thread, per step: seconds on a core, and seconds of waiting for one."""


def thread_seconds() -> dict[str, tuple[float, float]]:
    """By thread of this process: seconds on a core so far, and seconds in which it could have run (Linux)."""
    found = {}
    for thread in threading.enumerate():
        with contextlib.suppress(OSError):
            on, off, _ = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
            name = thread.name.rstrip("0123456789").rstrip("-_")
            have = found.get(name, (0.0, 0.0))
            found[name] = (have[0] + int(on) / 1e9, have[1] + int(off) / 1e9)
    return found


class Clock(Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.ends: list[float] = []
        self.threads: list[dict[str, tuple[float, float]]] = []

    def on_step_start(self, info: StepInfo, control: Control) -> None:
        if self.started is None:
            self.started = time.perf_counter()

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        assert self.started is not None
        self.ends.append(time.perf_counter() - self.started)
        self.threads.append(thread_seconds())


def run_arm(overrides: Sequence[str]) -> Arm:
    """Train in this process and read what its ledger has."""
    settings = load_settings([], overrides).settings
    clock = Clock()
    register(ENV, SlowJudge)
    try:
        result = train(settings, [clock])
    finally:
        deregister(ENV)
    if not result.finished:
        raise SystemExit(f"the run stopped: {result.stop_reason}")
    reader = LedgerReader(result.run_dir)
    metrics = [row.values for row in reader.metrics("train")]
    waits: dict[int, dict[str, float]] = {}
    for file in reader.files():
        for record in reader.trajectories(phase="train", step=file.step) if file.phase == "train" else ():
            groups = waits.setdefault(file.step, {})
            member = record.trajectory
            groups[member.group_id] = max(groups.get(member.group_id, 0.0), sum(t.env_seconds for t in member.turns))
    first, last = clock.threads[0], clock.threads[-1]
    counted = max(len(clock.threads) - 1, 1)
    return Arm(
        ends=clock.ends,
        update=[m["timing/update"] for m in metrics],
        publish=[m["timing/publish"] for m in metrics],
        engine_idle=[m["perf/engine_idle_seconds"] for m in metrics],
        step=[m["timing/step"] for m in metrics],
        group_wait=statistics.fmean(w for groups in waits.values() for w in groups.values()),
        step_wait=statistics.fmean(max(groups.values()) for groups in waits.values()),
        tokens=[m["trainer/num_trained_tokens"] for m in metrics],
        lag=statistics.fmean(m.get("async/staleness_mean", 0.0) for m in metrics),
        rewards=[m["reward/avg_raw_reward"] for m in metrics],
        scores=dict(result.accuracy),
        cpu={
            name: [round((last[name][i] - first.get(name, (0.0, 0.0))[i]) / counted, 4) for i in (0, 1)]
            for name in last
        },
    )


# -- arithmetic --------------------------------------------------------------------------------------------------


def window(steps: int, fill: int = FILL, drain: int = DRAIN) -> slice:
    """The steps that count: all but the first ``fill`` and the last ``drain``; of short runs the middle step."""
    if steps < fill + drain + 1:
        fill = drain = (steps - 1) // 2
    return slice(fill, steps - drain)


def seconds_per_step(ends: Sequence[float], fill: int = FILL, drain: int = DRAIN) -> float:
    """From the end of the last step before the window to that of its last one, by their number."""
    counted = window(len(ends), fill, drain)
    begin = ends[counted.start - 1] if counted.start else 0.0
    return (ends[counted.stop - 1] - begin) / (counted.stop - counted.start)


def median_step(ends: Sequence[float]) -> float:
    """Median over all steps of a run."""
    return statistics.median(b - a for a, b in itertools.pairwise([0.0, *ends]))


def idle_share(run: Arm) -> float:
    """Share of synchronous steps, after the first, in which neither engine nor trainer had anything to do."""
    idle = sum(i - u - p for i, u, p in zip(run.engine_idle[1:], run.update[1:], run.publish[1:], strict=True))
    return idle / sum(run.step[1:])


def bound_parts(alone: Arm, group_wait: float, staleness: int = STALENESS) -> dict[str, float]:
    """Seconds that a step with one core each cannot be faster than, by cause; see the module's docstring."""
    counted = window(len(alone.step))
    generation = statistics.fmean(s - i for s, i in list(zip(alone.step, alone.engine_idle, strict=True))[counted])
    training = statistics.fmean(u + p for u, p in list(zip(alone.update, alone.publish, strict=True))[counted])
    return {
        "generation": generation,
        "training": training,
        "waiting": (group_wait + training) / (staleness + 1),
    }


def compare(sync: Arm, beside: Arm, alone: Arm) -> dict[str, Any]:
    """One seed."""
    slow, fast = seconds_per_step(sync.ends), seconds_per_step(beside.ends)
    parts = bound_parts(alone, beside.group_wait)
    least = max(parts.values())
    return {
        "speedup": slow / fast,
        "bound": slow / least,
        "fraction_of_bound": least / fast,
        "whole_run_speedup": sync.ends[-1] / beside.ends[-1],
        "sync_idle_share": idle_share(sync),
        "step_seconds": {"sync": slow, "async": fast, "bound": least},
        "median_step_seconds": {"sync": median_step(sync.ends), "async": median_step(beside.ends)},
        "steps_per_hour": {"sync": 3600 / slow, "async": 3600 / fast},
        "bound_parts": parts,
        "bound_by": max(parts, key=lambda name: parts[name]),
        "reward_start": sync.scores["start"],
        "reward_sync": sync.scores["rl"],
        "reward_async": beside.scores["rl"],
        "trained_tokens_per_step": {"sync": statistics.fmean(sync.tokens), "async": statistics.fmean(beside.tokens)},
        "async_version_lag": beside.lag,
    }


def interval(values: Sequence[float]) -> list[float]:
    """95 % t-interval of the mean; unbounded for a single value."""
    n = len(values)
    half = _T95.get(n - 1, 1.96) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.inf
    mean = statistics.fmean(values)
    return [mean - half, mean + half]


def summary(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and intervals over seeds."""
    out: dict[str, Any] = {}
    for name in ("speedup", "bound", "fraction_of_bound", "whole_run_speedup", "sync_idle_share"):
        values = [seed[name] for seed in seeds]
        out[name] = statistics.fmean(values)
        out[f"{name}_interval_95"] = interval(values)
    gaps = [seed["reward_async"] - seed["reward_sync"] for seed in seeds]
    out["steps_per_hour"] = {
        arm: statistics.fmean(seed["steps_per_hour"][arm] for seed in seeds) for arm in ("sync", "async")
    }
    for name in ("reward_start", "reward_sync", "reward_async"):
        out[name] = statistics.fmean(seed[name] for seed in seeds)
    out["reward_difference"] = statistics.fmean(gaps)
    out["reward_difference_interval_95"] = interval(gaps)
    out["not_inferior"] = interval(gaps)[0] > -MARGIN
    return out


# -- everything --------------------------------------------------------------------------------------------------


def prepare(folder: Path, seed: int, steps: int, median: float) -> None:
    """Model and data of a seed; every prompt comes once, so there are as many rows as a run can start."""
    tiny_model_dir(folder / "model", seed=seed, **MODEL)
    count = PROMPTS * (steps + STALENESS + 1)
    for name, first, n, wait in (
        ("train", 0, count, median),
        ("quick", 0, count, 0.0),
        ("eval", count, HELD_OUT, 0.0),
    ):
        lines = (json.dumps(row) + "\n" for row in rows(first, n, seed, wait))
        (folder / f"{name}.jsonl").write_text("".join(lines))


def start(name: str, arm: str, data: str, seed: int, steps: int, folder: Path, extra: Sequence[str]) -> Arm:
    """A run in a process of its own."""
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    overrides = [
        *BASE,
        *ARMS[arm],
        f"seed={seed}",
        f"run_dir={folder / name}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / data}.jsonl",
        f"data.eval={folder / 'eval'}.jsonl",
        f"schedule.steps={steps}",
        *extra,
    ]
    command = [sys.executable, __file__, "--arm", json.dumps(overrides), "--out", str(out)]
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    with log.open("w") as sink:
        done = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, env=env, check=False, timeout=DEADLINE)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    return Arm(**json.loads(out.read_text()))


def busy_seconds(seed: int, folder: Path, extra: Sequence[str]) -> float:
    """How long a synchronous step computes on this machine, now, when nothing has to be waited for."""
    prepare(folder, seed, PROBE_STEPS, 0.0)
    return statistics.median(start("probe", "sync", "quick", seed, PROBE_STEPS, folder, extra).step[1:])


def bench_seed(seed: int, steps: int, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Three runs over one model and one data set."""
    busy = busy_seconds(seed, folder / "probe", extra)
    median = median_wait(busy)
    print(
        f"seed {seed}: a synchronous step computes for {busy:.2f} s; the judge's median is {median:.3f} s", flush=True
    )
    tries: list[float] = []
    while True:
        prepare(folder, seed, steps, median)
        shutil.rmtree(folder / "sync", ignore_errors=True)
        sync = start("sync", "sync", "train", seed, steps, folder, extra)
        tries.append(idle_share(sync))
        if IDLE_RANGE[0] <= tries[-1] <= IDLE_RANGE[1] or len(tries) == TRIES:
            break
        median *= scale_of_waits(tries[-1])
        print(f"seed {seed}: idle for {tries[-1]:.0%}; the judge's median is {median:.3f} s now", flush=True)
    alone = start("alone", "alone", "quick", seed, steps, folder, extra)
    beside = start("async", "async", "train", seed, steps, folder, extra)
    runs = {"sync": asdict(sync), "async": asdict(beside), "alone": asdict(alone)}
    waits = {"median_seconds": median, "scaled_to_busy_seconds": busy, "idle_share_by_try": tries}
    return {"seed": seed, **compare(sync, beside, alone), "waits": waits, "runs": runs}


def two_cores() -> list[int]:
    """Keep this process and its children to two cores, where the system lets us."""
    if not hasattr(os, "sched_setaffinity"):
        return list(range(min(2, os.cpu_count() or 1)))
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this benchmark compares what two cores can do, and there is one")
    os.sched_setaffinity(0, cores)
    return cores


def rounded(value: Any) -> Any:
    """Four digits after the point are more than was measured; JSON has no infinity."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def show(result: Mapping[str, Any]) -> None:
    """One line of a seed or of all."""
    print(
        f"speed-up {result['speedup']:.2f} of {result['bound']:.2f} ({result['fraction_of_bound']:.0%} of the bound), "
        f"sync idle {result['sync_idle_share']:.0%}; reward {result['reward_start']:.3f} -> "
        f"{result['reward_sync']:.3f} sync, {result['reward_async']:.3f} async",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs, over its own")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # one run, in a process of its own
    options = parser.parse_args()
    if options.arm is not None:
        options.out.write_text(json.dumps(asdict(run_arm(json.loads(options.arm)))))
        return
    cores = two_cores()
    folder = Path(tempfile.mkdtemp(prefix="slipstream-async-"))
    started = time.perf_counter()
    work: dict[str, Any] = {
        "task": "share of characters before 'a'; one turn; a judge with log-normal waits",
        "max_tokens": TOKENS,
        "sequences_decoded_together": BATCH,
        "model": dict(MODEL),
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_staleness_steps": STALENESS,
        "steps": options.steps,
        "waits": {"sigma": WAIT_SIGMA, "most_in_medians": WAIT_MOST},
        "settings": {"all": [*BASE, *options.set], **{arm: list(own) for arm, own in ARMS.items()}},
    }
    result: dict[str, Any] = {"machine": {**machine(), "used_cores": cores}, "work": work}
    done: list[dict[str, Any]] = []
    try:
        for seed in range(options.seeds):
            done.append(bench_seed(seed, options.steps, folder / str(seed), options.set))
            show(done[-1])
            result |= {"seeds": len(done), **summary(done), "by_seed": done, "seconds": time.perf_counter() - started}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(rounded(result), indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(result)
    print(f"wrote {options.out}; not inferior: {result['not_inferior']}")


if __name__ == "__main__":
    main()
