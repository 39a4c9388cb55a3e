"""Does every preset learn, and which corrections hold up when samples are stale?

    python benchmarks/learning.py                 # everything (make bench-learning)
    python benchmarks/learning.py --presets grpo ppo --seeds 3 --tasks   # these presets, no stale samples

A tiny random model answers fixed prompts in one turn and earns the share of its characters that come before 'a'
(blanks, digits, capitals, punctuation).  Every part is the library's: engine, turn loop, filters, update, publisher.
Runs differ in nothing but the section ``algorithm``, so a new preset takes part by being registered; one that needs a
teacher gets a model that was trained on the same task.

Reported per preset: mean reward of fresh samples before and after, and the gain's mean with a 95 % t-interval over
seeds.  ``learns`` says that the whole interval lies above 0.

Staleness: the engine samples with the weights of ``lag`` publishes ago.  Two tasks: ``early`` is the one above, whose
best policy lies at the end of a road (a late step in its direction still helps); ``balanced`` pays most for half early
characters and half late ones, so whoever learns from old samples runs past the goal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine

from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.filters import apply_filters
from slipstream.algorithms.losses import LOSSES
from slipstream.config import load_settings, resolve_settings
from slipstream.config.presets import PRESETS
from slipstream.config.settings import RunSettings
from slipstream.envs import BaseTextEnv
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.pretrained import load_tokenizer
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.rollout import GroupTask, Renderer, TurnGenerator
from slipstream.trainers.parts import build_backend
from slipstream.trainers.update import PolicyUpdate
from slipstream.trajectory import Group
from slipstream.weights import InProcessTransport, Publisher, Replica, VersionCounter

RESULTS = Path(__file__).parent / "results" / "learning.json"
PROMPTS = 4
STEPS, LAG_STEPS = 24, 30
TEACHER_STEPS = 30
RATE, LAG_RATE = 0.004, 0.01
BASE = (
    "model.dtype=float32",
    "inference.dtype=float32",
    "inference.threads=1",
    "training.threads=1",
    "training.optimizer.weight_decay=0",
    "rollout.samples_per_prompt=8",
    "rollout.sampling.max_tokens_per_turn=10",
    "rollout.max_prompt_tokens=64",
    "rollout.max_total_tokens=96",
    f"schedule.prompts_per_step={PROMPTS}",
    "data.train=builtin:arithmetic",  # only so that the plan is whole: the prompts are made here
)
LAGS = (0, 2, 8)
CORRECTIONS: Mapping[str, Sequence[str]] = {
    # The stale samples as if they were fresh: the ratio is taken from the weights before the update, so it starts at 1.
    "none": ("algorithm.old_logprobs=recompute",),
    # PPO's own clip, measured from the sampler.
    "clip": ("algorithm.old_logprobs=sampler",),
    "tis": ("algorithm.old_logprobs=recompute", "algorithm.off_policy.tis=token"),
    "geometric_mask": (
        "algorithm.old_logprobs=recompute",
        "algorithm.off_policy.sequence_mask=geometric",
        "algorithm.off_policy.geometric_low=0.9",
        "algorithm.off_policy.geometric_high=1.1",
    ),
    "decoupled": ("algorithm.preset=decoupled_ppo",),
}
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}


TASKS: Mapping[str, Callable[[float], float]] = {
    "early": lambda share: share,
    "balanced": lambda share: 1 - 2 * abs(share - 0.5),
}
"""Reward from the share of characters that come before 'a'."""


class OneTurn(BaseTextEnv):
    """One turn; earns what its task pays for the share of early characters."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self._reward = TASKS[task]

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        reward = self._reward(sum(c < "a" for c in action) / max(len(action), 1))
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


@dataclass(frozen=True)
class Outcome:
    """One run: mean reward of fresh samples before and after, CPU seconds, optimiser steps that were applied."""

    before: float
    after: float
    seconds: float
    applied: int


@dataclass
class Learner:
    """Engine and trainer of one run, with the weights of the last few publishes at hand."""

    settings: RunSettings
    generator: TurnGenerator
    update: PolicyUpdate
    publisher: Publisher
    versions: VersionCounter
    history: list[list[Any]]
    lag: int

    async def rollout(self, step: int, phase: str) -> list[Group]:
        """All prompts of a step; ``phase`` keys the noise, so that before and after draw alike."""
        tasks = [
            GroupTask(
                f"{phase}/{step}/{p}",
                f"p{p}",
                ({"role": "user", "content": f"question {p}"},),
                "one_turn",
                n=self.settings.rollout.samples_per_prompt,
                scheduled_step=step,
                pass_index=step,
                eval=phase != "train",
                sampling=self.settings.rollout.sampling,
            )
            for p in range(PROMPTS)
        ]
        return list(await asyncio.gather(*(self.generator.generate_group(task) for task in tasks)))

    async def score(self) -> float:
        """Mean reward of fresh samples, four per training sample."""
        groups = [group for i in range(4) for group in await self.rollout(10_000 + i, "score")]
        return statistics.fmean(m.total_reward for group in groups for m in group.voters)

    async def publish(self, lag: int) -> None:
        """Hand over the weights of ``lag`` steps ago (the oldest there are, if fewer)."""
        weights = self.history[max(0, len(self.history) - 1 - lag)]
        await self.publisher.publish(iter(weights), self.versions.next())

    def remember(self) -> None:
        """Copy the present weights."""
        weights = [e._replace(tensor=e.tensor.clone()) for e in self.update.backend.export_weights("policy")]
        self.history = [*self.history[-max(LAGS) :], weights]

    async def train(self, steps: int) -> int:
        """So many steps; returns the optimiser steps that were applied."""
        applied = 0
        for step in range(steps):
            groups = await self.rollout(step, "train")
            filtered = apply_filters(groups, self.settings.algorithm, self.settings.rollout)
            applied += (await self.update(filtered, step, str(self.versions.current))).applied
            self.remember()
            await self.publish(self.lag)
        return applied


@contextlib.asynccontextmanager
async def learner(
    model: Path, overrides: Sequence[str], seed: int, lag: int = 0, task: str = "early"
) -> AsyncIterator[Learner]:
    """Everything of one run, closed at its end."""
    settings = load_settings([], [*BASE, f"model.path={model}", f"seed={seed}", *overrides]).settings
    settings = resolve_settings(settings)
    tokenizer = load_tokenizer(str(model))
    async with contextlib.AsyncExitStack() as stack:
        engine = EmbeddedEngine(str(model), tokenizer, settings.inference)
        stack.push_async_callback(engine.close)
        await engine.start()
        backend = build_backend(settings)
        stack.callback(backend.close)
        replica = Replica(engine)
        generator = TurnGenerator(replica, Renderer(tokenizer), lambda c, e: OneTurn(task), settings.rollout, seed)
        stack.push_async_callback(generator.aclose)
        made = Learner(
            settings,
            generator,
            PolicyUpdate(backend, settings.algorithm, 600.0),
            Publisher([replica], InProcessTransport("float32")),
            VersionCounter("policy"),
            [],
            lag,
        )
        made.remember()
        await made.publish(0)
        yield made


async def run(
    model: Path, overrides: Sequence[str], seed: int, steps: int, lag: int = 0, task: str = "early"
) -> Outcome:
    """Train and measure."""
    started = time.process_time()
    async with learner(model, overrides, seed, lag, task) as made:
        before = await made.score()
        applied = await made.train(steps)
        await made.publish(0)
        after = await made.score()
    return Outcome(before, after, time.process_time() - started, applied)


async def make_teacher(model: Path, folder: Path) -> Path:
    """A model that has learnt the task, for presets that need one."""
    async with learner(model, [f"training.optimizer.lr={RATE}", "algorithm.drop_zero_variance=false"], 1000) as made:
        await made.train(TEACHER_STEPS)
        made.update.backend.save_pretrained("policy", folder).result(600)
    return folder


def needs(name: str) -> set[str]:
    """What a preset's estimator and loss read besides rewards."""
    values = PRESETS[name].values
    return {*ADVANTAGES.get(values.get("advantage", "grpo")).needs, *LOSSES.get(values.get("loss", "ppo_clip")).needs}


def preset_overrides(name: str, teacher: Path | None) -> list[str]:
    """A preset by name, with the models that it needs."""
    given = [f"algorithm.preset={name}", f"training.optimizer.lr={RATE}"]
    if "values" in needs(name):
        given.append("algorithm.critic.optimizer.lr=0.01")
    if "teacher_logprobs" in needs(name):
        given += [f"algorithm.teacher.path={teacher}", "algorithm.teacher.dtype=float32"]
    return given


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Means, and the gain with its 95 % interval over seeds."""
    gains = [o.after - o.before for o in outcomes]
    mean, n = statistics.fmean(gains), len(gains)
    half = _T95.get(n - 1, 1.96) * statistics.stdev(gains) / math.sqrt(n) if n > 1 else math.inf
    return {
        "seeds": n,
        "before": [round(o.before, 4) for o in outcomes],
        "after": [round(o.after, 4) for o in outcomes],
        "before_mean": round(statistics.fmean(o.before for o in outcomes), 4),
        "after_mean": round(statistics.fmean(o.after for o in outcomes), 4),
        "gain_mean": round(mean, 4),
        "gain_interval_95": [round(mean - half, 4), round(mean + half, 4)],
        "learns": mean - half > 0,
        "optimizer_steps": round(statistics.fmean(o.applied for o in outcomes), 1),
        "cpu_seconds_per_run": round(statistics.fmean(o.seconds for o in outcomes), 1),
    }


def show(label: str, result: Mapping[str, Any]) -> None:
    low, high = result["gain_interval_95"]
    print(
        f"{label:32s} {result['before_mean']:.3f} -> {result['after_mean']:.3f}   gain {result['gain_mean']:+.3f} "
        f"[{low:+.3f}, {high:+.3f}]  {'learns' if result['learns'] else 'NOT SHOWN'}  "
        f"{result['cpu_seconds_per_run']:.1f} CPU s/run",
        flush=True,
    )


async def bench_presets(names: Sequence[str], seeds: int, folder: Path) -> dict[str, Any]:
    """Every preset over every seed; each seed has a model of its own."""
    models = [tiny_model_dir(folder / f"model{s}", seed=s) for s in range(seeds)]
    teachers: dict[int, Path] = {}
    found: dict[str, Any] = {}
    for name in names:
        outcomes = []
        for seed, model in enumerate(models):
            if "teacher_logprobs" in needs(name) and seed not in teachers:
                teachers[seed] = await make_teacher(model, folder / f"teacher{seed}")
            outcomes.append(await run(model, preset_overrides(name, teachers.get(seed)), seed, STEPS))
        found[name] = summary(outcomes)
        show(name, found[name])
    return found


async def bench_staleness(
    options: argparse.Namespace, folder: Path, task: str, tasks: dict[str, Any], write: Callable[[], None]
) -> None:
    """Corrections x lags on one task, into ``tasks``; ``write`` is called after each cell."""
    models = [tiny_model_dir(folder / f"{task}{s}", seed=s) for s in range(options.seeds)]
    made: dict[str, Any] = {"steps": LAG_STEPS, "lr": LAG_RATE}
    before = tasks.get(task, {})
    keep = options.resume and made == {name: before.get(name) for name in made}
    tasks[task] = {**made, "gains": before["gains"] if keep else {}}
    table = tasks[task]["gains"]
    for correction, overrides in CORRECTIONS.items():
        for lag in LAGS:
            if str(lag) in table.get(correction, {}):
                continue
            given = [*overrides, f"training.optimizer.lr={LAG_RATE}"]
            outcomes = [await run(model, given, seed, LAG_STEPS, lag, task) for seed, model in enumerate(models)]
            table.setdefault(correction, {})[str(lag)] = summary(outcomes)
            show(f"{task}: {correction}, lag {lag}", table[correction][str(lag)])
            write()


def cell(result: Mapping[str, Any]) -> str:
    """A gain with its interval."""
    low, high = result["gain_interval_95"]
    return f"{result['gain_mean']:+.2f} [{low:+.2f}, {high:+.2f}]"


def tables(record: Mapping[str, Any]) -> str:
    """The record as the Markdown of docs/algorithms.md."""
    rows = ["| preset | reward before | after | gain [95 %] |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {r['before_mean']:.2f} | {r['after_mean']:.2f} | {cell(r)} |"
        for name, r in record["presets"].items()
    ]
    lags = " | ".join(f"lag {lag}" for lag in LAGS)
    for task, of_task in record["staleness"]["tasks"].items():
        head = f"task `{task}`, {of_task['steps']} steps at a rate of {of_task['lr']:g}"
        rows += ["", f"| {head} | {lags} |", "|---|" + "---|" * len(LAGS)]
        for correction in CORRECTIONS:
            found = of_task["gains"].get(correction, {})
            cells = [cell(found[str(lag)]) if str(lag) in found else "–" for lag in LAGS]
            rows.append(f"| `{correction}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="*", default=list(PRESETS), help="which ones; default: every registered one")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), help="of the staleness table; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="what is not run again stays in it as it is")
    parser.add_argument("--resume", action="store_true", help="keep the cells of the staleness table that are there")
    parser.add_argument("--tables", action="store_true", help="print the record as Markdown and run nothing")
    options = parser.parse_args()
    if options.tables:
        print(tables(json.loads(options.out.read_text())))
        return
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="slipstream-learning-"))
    started = time.perf_counter()
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    result |= {
        "task": "share of characters before 'a'; tiny random model, 4 prompts x 8 samples, 10 tokens, one turn",
        "machine": {**machine(), "threads": 1},
        "steps": STEPS,
        "lr": RATE,
        "staleness": {
            "lag": "publishes between the weights that sample and the weights that are updated",
            "settings": {name: list(given) for name, given in CORRECTIONS.items()},
            "tasks": result.get("staleness", {}).get("tasks", {}),
        },
    }
    result.setdefault("presets", {})

    def write() -> None:
        result["seconds"] = round(time.perf_counter() - started, 1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        result["presets"] |= asyncio.run(bench_presets(options.presets, options.seeds, folder))
        write()
        for task in options.tasks:
            asyncio.run(bench_staleness(options, folder, task, result["staleness"]["tasks"], write))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missing = [name for name, r in result["presets"].items() if not r["learns"]]
    print(f"wrote {options.out}" + (f"; not shown to learn: {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
