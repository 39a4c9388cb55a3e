"""What a serious run is asked before it starts: four checks on a small smoke job.

Owns: the smoke job (a short run that is killed once and resumed), the questions, the evidence.
Refuses: judging whether the task is worth learning; changing the configuration.

1. *Reward*: it varies between samples, and the same actions earn it again, also from a snapshot where there are any.
2. *Weights*: whose they are, and that after every publish each replica verifiably held the published version.
3. *Bounds*: how far sampling runs ahead, what a publish does to running requests, what is filtered, what ends the run.
4. *Recovery*: killed and resumed, every prompt is trained exactly once, tokens are conserved, an update repeats.

    findings = check_run(settings, Path("runs/check"))
    ok = all(finding.verdict != "fail" for finding in findings)
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.algorithms.filters import cut_off, without_overlong
from slipstream.config import dump_settings
from slipstream.config.schedule_checks import outstanding_groups
from slipstream.config.settings import RunSettings
from slipstream.data.prompts import PromptDataset, PromptRow
from slipstream.envs.registration import import_modules
from slipstream.errors import EnvironmentFault, SlipstreamError
from slipstream.ledger import LedgerReader, TokenAccount, TrajectoryRecord
from slipstream.rollout.environment import EnvCounters, EnvSession
from slipstream.rollout.envpool import EnvPool
from slipstream.rollout.generator import make_env_factory
from slipstream.trainers.checkpoint import CheckpointStore
from slipstream.trainers.parts import handles_of
from slipstream.trainers.replay import replay_update
from slipstream.trainers.rules import unknown_metric
from slipstream.trajectory import Missing, Trajectory

SMOKE_STEPS = 3
_REPEATED = 4


@dataclass(frozen=True)
class Finding:
    """One answer: which check, how it stands, and what was seen."""

    check: Literal["reward", "weights", "bounds", "recovery"]
    verdict: Literal["ok", "warn", "fail"]
    evidence: str

    def __str__(self) -> str:
        return f"{self.verdict:4}  {self.check:8}  {self.evidence}"


def smoke_settings(settings: RunSettings, run_dir: Path) -> RunSettings:
    """The same run in small: three steps of two prompts, a checkpoint after each, nothing evaluated."""
    schedule, rollout = settings.schedule, settings.rollout
    prompts = min(schedule.prompts_per_step, 2)
    tokens = min(rollout.sampling.max_tokens_per_turn, 64)
    updates: dict[str, Any] = {
        "run_dir": run_dir,
        "schedule": schedule.model_copy(
            update={
                "time_limit_minutes": None,
                "prompts_per_step": prompts, "steps": SMOKE_STEPS, "epochs": None, "generate_prompts_per_step": None,
                "max_running_groups": None,
            }
        ),
        "rollout": rollout.model_copy(
            update={
                "samples_per_prompt": min(rollout.samples_per_prompt, 4),
                "sampling": rollout.sampling.model_copy(update={"max_tokens_per_turn": tokens}),
            }
        ),
        "algorithm": settings.algorithm.model_copy(
            update={"minibatches_per_step": min(settings.algorithm.minibatches_per_step, prompts)}
        ),
        "sft": settings.sft.model_copy(update={"steps": 0}),
        "data": settings.data.model_copy(update={"sft": ()}),
        "eval": settings.eval.model_copy(update={"before": False, "after": False, "every_steps": 0}),
        "checkpoint": settings.checkpoint.model_copy(
            update={"every_steps": 1, "keep": SMOKE_STEPS, "resume": "auto"}
        ),
        "logging": settings.logging.model_copy(update={"sinks": ("jsonl",), "report": False}),
        "rules": (),
    }  # fmt: skip
    return settings.model_copy(update=updates)


def check_run(settings: RunSettings, folder: Path, say: Callable[[str], None] = print) -> list[Finding]:
    """Run the smoke job in ``folder`` (which must not exist) and answer the four checks.

    Raises:
        SlipstreamError: the smoke job itself cannot run; the message holds its last words.
    """
    if folder.exists():
        raise SlipstreamError(f"{folder} exists; name a directory that does not, it will hold the smoke job")
    folder.mkdir(parents=True)
    small = smoke_settings(settings, folder / "smoke")
    (folder / "settings.yaml").write_text(dump_settings(small))
    killed_at = _run_and_kill(small, folder, say)
    say("smoke job: resuming")
    _finish_smoke(folder, small)
    reader = LedgerReader(small.run_dir)
    records = [record for record in reader.trajectories(phase="train") if record.live]
    return [
        *_reward(small, records),
        *_weights(small, reader),
        *_bounds(settings, small, reader),
        *_recovery(small, reader, records, killed_at),
    ]


# -- the smoke job -----------------------------------------------------------------------------------------------


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "train", str(folder / "settings.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _run_and_kill(small: RunSettings, folder: Path, say: Callable[[str], None]) -> str:
    """Kill the job (signal 9) once its first checkpoint stands; the checkpoint's name."""
    say(f"smoke job: {SMOKE_STEPS} steps of {small.schedule.prompts_per_step} prompts in {small.run_dir}")
    process = _start(folder)
    store = CheckpointStore(small.run_dir / "checkpoints")
    until = time.monotonic() + small.schedule.step_deadline_seconds
    while not store.names():
        try:
            words, _ = process.communicate(timeout=0.05)  # it ends by itself only when something is wrong
        except subprocess.TimeoutExpired:
            if time.monotonic() < until:
                continue
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise SlipstreamError("the smoke job wrote no checkpoint within schedule.step_deadline_seconds") from None
        raise SlipstreamError(f"the smoke job ended before its first checkpoint:\n{_last_words(words)}")
    at = store.names()[-1]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    say(f"smoke job: killed after checkpoint {at}")
    return at


def _finish_smoke(folder: Path, small: RunSettings) -> None:
    process = _start(folder)
    try:
        words, _ = process.communicate(timeout=SMOKE_STEPS * small.schedule.step_deadline_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise SlipstreamError("the resumed smoke job did not end in time") from None
    if process.returncode != 0:
        raise SlipstreamError(f"the resumed smoke job failed:\n{_last_words(words)}")


def _last_words(words: str) -> str:
    return "\n".join(words.strip().splitlines()[-8:])


# -- 1: the reward -----------------------------------------------------------------------------------------------


def _reward(small: RunSettings, records: Sequence[TrajectoryRecord]) -> Iterator[Finding]:
    scored = [r.trajectory for r in records if r.trajectory.votes]
    if not scored:
        yield Finding("reward", "fail", f"none of {len(records)} samples has a reward")
        return
    groups: dict[str, set[float]] = {}
    for member in scored:
        groups.setdefault(member.group_id, set()).add(member.total_reward)
    spread = sum(len(values) > 1 for values in groups.values())
    values = sorted({v for values in groups.values() for v in values})
    seen = f"{len(scored)} of {len(records)} samples scored, {len(values)} different rewards in [{values[0]:.3g}, "
    seen += f"{values[-1]:.3g}], {spread} of {len(groups)} groups with spread"
    if len(values) == 1:
        yield Finding("reward", "fail" if len(scored) >= 8 else "warn", f"it did not vary: {seen}")
    else:
        yield Finding("reward", "ok" if spread else "warn", seen)
    components = sorted({reward.component for member in scored for reward in member.rewards})
    revisions = sorted({member.env_revision for member in scored})
    named = ", ".join(r for r in revisions if r)
    yield Finding(
        "reward",
        "ok" if named else "warn",
        f"components {', '.join(components)}; "
        + (f"environment revision {named}" if named else "the environment names no env_revision"),
    )
    yield from asyncio.run(_repeat(small, scored[:_REPEATED]))


async def _repeat(small: RunSettings, members: Sequence[Trajectory]) -> list[Finding]:
    """The same actions in fresh environments: same observations, same rewards."""
    import_modules(small.env.modules)
    rows = {row.uid: row for row in PromptDataset.load(small.data.train, env_class=small.env.id).rows}
    pool, findings, restored = EnvPool(2), [], 0
    try:
        for member in members:
            told = ""
            for from_snapshot in (False, True):
                if told:
                    break  # what does not repeat does not repeat from a snapshot either
                try:
                    told = await _repeat_one(small, rows[member.prompt_uid], member, pool, from_snapshot)
                except EnvironmentFault as fault:
                    told = f"it broke: {fault}"
                if told == "no snapshot":
                    told = ""
                    continue
                restored += from_snapshot
                if told:
                    how = "from a snapshot" if from_snapshot else "repeated"
                    findings.append(Finding("reward", "fail", f"{member.trajectory_id}, {how}: {told}"))
    finally:
        pool.close()
    if not findings:
        also = f", {restored} of them also from a snapshot" if restored else "; the environment gives no snapshots"
        findings.append(Finding("reward", "ok", f"{len(members)} episodes earned the same again{also}"))
    return findings


async def _repeat_one(
    small: RunSettings, row: PromptRow, member: Trajectory, pool: EnvPool, from_snapshot: bool
) -> str:
    """Empty when equal, else what differs."""
    extras = {**row.extras, "max_turns": small.rollout.max_turns}
    opened: list[EnvSession] = []

    async def open_session() -> EnvSession:
        session = await EnvSession.open(
            pool, make_env_factory(small.env), member.env_class, extras, small.rollout.env_step_seconds, EnvCounters()
        )
        opened.append(session)
        await session.init(row.messages)
        return session

    try:
        session = await open_session()
        for turn in member.turns:
            if from_snapshot and turn.index == 1:
                state = await session.snapshot()
                if state is None or not session.restores:
                    return "no snapshot"
                session = await open_session()
                await session.restore(state)
            info = {"finish_reason": turn.finish_reason, "stop_reason": turn.stop_reason, "tokens": 0}
            step = await session.step(turn.action, info)
            # What the run's own rules did to the rewards is not the environment's doing.
            scored = member if small.algorithm.overlong.factor == 0 else without_overlong(member)
            earned = {r.component: r.value for r in scored.rewards if r.turn == turn.index}
            zeroed = small.algorithm.zero_reward_on_non_stop and cut_off(member)
            if step.components != earned and not zeroed:
                return f"turn {turn.index} earned {_shown(step.components)}, and {_shown(earned)} in the run"
            if step.observations != turn.observations:
                return f"turn {turn.index} was answered differently"
        return "no snapshot" if from_snapshot and len(member.turns) < 2 else ""
    finally:
        for session in opened:
            await session.close()


def _shown(components: Any) -> str:
    return ", ".join(f"{k}={'missing' if isinstance(v, Missing) else f'{v:g}'}" for k, v in components.items())


# -- 2: the weights ----------------------------------------------------------------------------------------------


def _weights(small: RunSettings, reader: LedgerReader) -> Iterator[Finding]:
    algorithm, critic = small.algorithm, small.algorithm.critic
    learning_rate = small.training.optimizer.lr
    meanings = {
        "policy": f"trained by the {small.training.backend} backend (lr {learning_rate:g})",
        "reference": "the initial policy, frozen",
        "critic": "a head on the policy's backbone, trained with it"
        if critic.backbone == "shared"
        else f"a model of its own, from {critic.path or small.model.path}, trained (lr {critic.optimizer.lr:g})",
        "teacher": f"{algorithm.teacher.path}, frozen",
    }
    owners = [f"{handle}: {meanings[handle]}" for handle in handles_of(small)]
    owners += [f"teacher: served by {url}" for url in algorithm.teacher.urls]
    owners.append(f"sampling: {small.inference.engine} engine, gets every publish of the policy")
    yield Finding("weights", "ok", "; ".join(owners))
    publishes = reader.events("publish")
    receipts = [event.data["receipt"] for event in reader.events("receipt")]
    wrong = [
        f"{receipt['replica']} after {receipt['version']}: {receipt['result']}, holds {receipt['holds']}, "
        f"verification {receipt['verification'].get('verdict')}"
        for receipt in receipts
        if receipt["holds"] != receipt["version"] or receipt["verification"].get("verdict") != "ok"
    ]
    if wrong or not publishes:
        yield Finding("weights", "fail", "; ".join(wrong) or "nothing was ever published")
        return
    replicas = sorted({receipt["replica"] for receipt in receipts})
    kinds = sorted({str(receipt["verification"].get("kind")) for receipt in receipts})
    yield Finding(
        "weights",
        "ok",
        f"after each of {len(publishes)} publishes every replica ({', '.join(replicas)}) held the published version: "
        f"{receipts[-1]['names']} tensors, {receipts[-1]['bytes'] / 2**20:.1f} MiB, verified by {', '.join(kinds)}",
    )


# -- 3: the bounds -----------------------------------------------------------------------------------------------


def _bounds(settings: RunSettings, small: RunSettings, reader: LedgerReader) -> Iterator[Finding]:
    schedule = settings.schedule
    bound, small_bound = outstanding_groups(schedule), outstanding_groups(small.schedule)
    rows = reader.metrics("train")
    outstanding = max(row.values.get("schedule/outstanding", 0.0) for row in rows)
    lag = max(row.values.get("schedule/lag_max", 0.0) for row in rows)
    yield Finding(
        "bounds",
        "ok" if outstanding <= small_bound else "fail",
        f"schedule {schedule.kind}: at most {bound} groups outstanding (smoke job: {outstanding:.0f} of {small_bound} "
        f"seen, lag at most {lag:.0f} steps); a publish makes running requests "
        + _PAUSES[settings.inference.pause_mode],
    )
    algorithm = settings.algorithm
    filters = [
        *(["groups without spread"] if algorithm.drop_zero_variance else []),
        *(["truncated samples (they vote)"] if algorithm.drop_truncated else []),
        *(f"what {name} refuses" for name in algorithm.filters),
        *([f"groups older than {schedule.max_staleness_steps} steps ({schedule.on_stale})"]
          if schedule.kind == "bounded" else []),
    ]  # fmt: skip
    yield Finding("bounds", "ok", f"left out of training: {', '.join(filters) or 'nothing'}")
    budget = settings.rollout.failures
    stops = (
        f"more than {budget.max_failed_fraction:.0%} failed samples of a step, a step over "
        f"{schedule.step_deadline_seconds:g} s"
    )
    rules = ", ".join(f"{r.metric} {_bound(r.above, r.below)} over {r.window} ({r.action})" for r in settings.rules)
    yield from _rule_metrics(settings, {name for row in rows for name in row.values})
    if rules:
        yield Finding("bounds", "ok", f"the run ends by itself on {rules}, and on {stops}")
    else:
        yield Finding(
            "bounds", "warn", f"no metric ends the run (only {stops}); set rules, such as a floor on the reward"
        )


def _rule_metrics(settings: RunSettings, seen: Collection[str]) -> Iterator[Finding]:
    """Rules on metrics that will not come; the smoke job evaluates nothing, so it cannot know those of evaluations."""
    evaluates = settings.eval.every_steps > 0 and bool(settings.data.eval)
    unknown = [
        unknown_metric(rule.metric, seen)
        for rule in settings.rules
        if rule.metric not in seen and not (evaluates and rule.metric.startswith("eval/"))
    ]
    if unknown:
        yield Finding("bounds", "warn", f"rules on metrics that the smoke job did not have: {'; '.join(unknown)}")


_PAUSES = {"keep": "freeze and go on under the new weights", "wait": "finish first", "abort": "end and be asked again"}


def _bound(above: float | None, below: float | None) -> str:
    return " or ".join(
        [*([f"> {above:g}"] if above is not None else []), *([f"< {below:g}"] if below is not None else [])]
    )


# -- 4: the recovery ---------------------------------------------------------------------------------------------


def _recovery(
    small: RunSettings, reader: LedgerReader, records: Sequence[TrajectoryRecord], killed_at: str
) -> Iterator[Finding]:
    resumed = [e.data["resumed_from"] for e in reader.events("run_started") if e.data["resumed_from"]]
    store = CheckpointStore(small.run_dir / "checkpoints")
    saved = ", ".join(store.open(name).directory.name for name in store.names())
    yield Finding(
        "recovery",
        "ok" if resumed else "fail",
        f"killed after {killed_at}, resumed from {', '.join(resumed) or 'nothing'}; every file of {saved} "
        "matches its hash",
    )
    groups = {(r.trajectory.prompt_uid, r.trajectory.pass_index, r.step) for r in records if r.disposition == "trained"}
    twice = [key for key, n in Counter((uid, turn) for uid, turn, _ in groups).items() if n > 1]
    account = TokenAccount.from_json(reader.events("step", live_only=True)[-1].data["account"])
    account.check("smoke job")
    yield Finding(
        "recovery",
        "fail" if twice else "ok",
        f"trained more than once: {twice[:3]}"
        if twice
        else f"{len(groups)} prompts trained, each in one step; of "
        f"{account.sampled} sampled tokens {account.trained} were trained on and {account.superseded} superseded",
    )
    trained = [row.step for row in reader.metrics("train") if row.values.get("policy/trained_tokens", 0) > 0]
    if not trained:
        yield Finding("recovery", "warn", "no update of the smoke job trained anything, so none was repeated")
        return
    verdict = replay_update(small.run_dir, trained[-1])
    yield Finding(
        "recovery",
        "ok" if verdict.gap <= 1e-3 else "fail",
        f"the update of step {verdict.step}, repeated from the ledger and {verdict.began_at}: largest difference "
        f"{verdict.gap:.2g} over {verdict.tokens} tokens",
    )
