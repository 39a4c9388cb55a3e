"""The plan: what a run will do, computed before any model loads.

Owns: batch arithmetic, the schedule's length, memory by phase, and the verdict on contradictions.
Refuses: loading models or data; it is told how many rows there are and reads sizes from ``config.json``.

>>> plan = make_plan(RunSettings.model_validate({"data": {"train": "builtin:text2sql/train"}}))
>>> plan.batch.samples_per_step, plan.schedule.optimizer_steps
(128, 100)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.config.checks import Known, check_settings
from slipstream.config.facts import ModelFacts
from slipstream.config.memory import MemoryPlan, estimate_memory
from slipstream.config.problems import Problem
from slipstream.config.resolve import most_sampled_tokens, optimizer_steps, prompts_drawn, resolve_settings
from slipstream.config.settings import NO_LIMIT, RunSettings
from slipstream.config.skyrl import Note
from slipstream.errors import SettingsError


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One RL step.  Token figures are upper bounds; ``rows`` counts one row per trajectory (a fork adds one)."""

    prompts_drawn: int
    prompts_trained: int
    samples_per_step: int
    rows_trained: int
    optimizer_steps: int
    groups_per_minibatch: int
    rows_per_minibatch: int
    sampled_tokens: int
    trained_row_tokens: int
    microbatches_per_minibatch: int


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The whole run.  ``steps`` and what follows from it are None while the number of rows is unknown."""

    steps: int | None
    optimizer_steps: int | None
    sft_steps: int
    passes_over_data: float | None
    evaluations: int | None
    evaluation_samples: int | None
    checkpoints: int | None
    trajectories: int | None


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the run; ``settings`` are resolved."""

    settings: RunSettings
    batch: BatchPlan
    schedule: SchedulePlan
    memory: MemoryPlan | None
    facts: ModelFacts | None
    problems: Sequence[Problem] = ()
    notes: Sequence[Note] = ()

    @property
    def errors(self) -> list[Problem]:
        """Problems that forbid the run."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        """Problems that do not."""
        return [problem for problem in self.problems if problem.severity == "warning"]

    def raise_if_refused(self) -> None:
        """``SettingsError`` with every error, if there is one."""
        errors = [str(problem) for problem in self.errors]
        if len(errors) == 1:
            raise SettingsError(errors[0])
        if errors:
            raise SettingsError("the settings contradict each other:\n" + "\n".join(f"  - {e}" for e in errors))


def make_plan(
    settings: RunSettings,
    facts: ModelFacts | None = None,
    n_train_rows: int | None = None,
    n_eval_rows: int | None = None,
    *,
    notes: Sequence[Note] = (),
    problems: Sequence[Problem] = (),
    memory_bytes: int | None = None,
) -> Plan:
    """Plan a run.

    Args:
        settings: as loaded; they are resolved here when the number of rows allows it.
        facts: sizes of the model; None leaves memory out.
        n_train_rows: training prompts that are usable; None is unknown.
        n_eval_rows: evaluation prompts, before ``data.eval_limit``.
        notes: what became of SkyRL's keys (``Loaded.notes``).
        problems: what other rooms found, such as ``slipstream.algorithms``.
        memory_bytes: memory of the machine; a plan that exceeds it warns.
    """
    known = Known(facts, n_train_rows, n_eval_rows)
    unlimited = settings.schedule.steps == NO_LIMIT and not n_train_rows
    resolved = settings if unlimited else resolve_settings(settings, n_train_rows)
    memory = None if facts is None else estimate_memory(resolved, facts)
    found = check_settings(resolved, known)
    seen = {frozenset(problem.keys) for problem in found}  # rooms may report one contradiction twice
    found += [problem for problem in problems if frozenset(problem.keys) not in seen]
    if memory is not None and memory_bytes is not None and memory.peak > memory_bytes:
        found.append(
            Problem(
                ("training.max_tokens_per_microbatch", "inference.kv_cache_tokens"),
                f"the {memory.peak_phase} phase may take {memory.peak / 1e9:.1f} GB of {memory_bytes / 1e9:.1f} GB",
                "lower them, or set model.gradient_checkpointing=true",
                "warning",
            )
        )
    return Plan(
        settings=resolved,
        batch=_batch(resolved),
        schedule=_schedule(resolved, known, unlimited=unlimited),
        memory=memory,
        facts=facts,
        problems=sorted(found, key=lambda problem: problem.severity != "error"),
        notes=tuple(notes),
    )


def _batch(settings: RunSettings) -> BatchPlan:
    rollout, algorithm = settings.rollout, settings.algorithm
    drawn, trained = prompts_drawn(settings), settings.schedule.prompts_per_step
    samples, rows = drawn * rollout.samples_per_prompt, trained * rollout.samples_per_prompt
    groups = _ceil(trained, algorithm.minibatches_per_step)
    per_minibatch = groups * rollout.samples_per_prompt
    return BatchPlan(
        prompts_drawn=drawn,
        prompts_trained=trained,
        samples_per_step=samples,
        rows_trained=rows,
        optimizer_steps=optimizer_steps(settings),
        groups_per_minibatch=groups,
        rows_per_minibatch=per_minibatch,
        sampled_tokens=samples * most_sampled_tokens(rollout),
        trained_row_tokens=rows * rollout.max_total_tokens,
        microbatches_per_minibatch=_ceil(
            per_minibatch,
            max(1, settings.training.max_tokens_per_microbatch // rollout.max_total_tokens),
        ),
    )


def _schedule(settings: RunSettings, known: Known, *, unlimited: bool) -> SchedulePlan:
    if unlimited:
        return SchedulePlan(None, None, settings.sft.steps, None, None, None, None, None)
    steps, drawn = settings.schedule.steps, prompts_drawn(settings)
    evaluations = len(evaluation_points(settings)) if settings.data.eval else 0
    rows = known.n_eval_rows
    if rows is not None and settings.data.eval_limit is not None:
        rows = min(rows, settings.data.eval_limit)
    return SchedulePlan(
        steps=steps,
        optimizer_steps=steps * optimizer_steps(settings),
        sft_steps=settings.sft.steps,
        passes_over_data=steps * drawn / known.n_train_rows if known.n_train_rows else None,
        evaluations=evaluations,
        evaluation_samples=None if rows is None else evaluations * rows * settings.eval.samples_per_prompt,
        checkpoints=len(_multiples(settings.checkpoint.every_steps, steps) | {steps}),
        trajectories=steps * drawn * settings.rollout.samples_per_prompt,
    )


def evaluation_points(settings: RunSettings) -> list[int]:
    """Steps after which the run evaluates; 0 is before the first, and no step is evaluated twice."""
    points = _multiples(settings.eval.every_steps, settings.schedule.steps)
    if settings.eval.before:
        points.add(0)
    if settings.eval.after:
        points.add(settings.schedule.steps)
    return sorted(points)


def _multiples(every: int, steps: int) -> set[int]:
    return set(range(every, steps + 1, every)) if every > 0 else set()


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)
