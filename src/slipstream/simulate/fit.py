"""A scenario from a run's ledger.

Owns: reading lengths, environment times, updates and publishes of a recorded run, and fitting a decode step to them.
Refuses: guessing what was not recorded: it says what it took from where (``RunFit.notes``).

What a replica's decode step costs is not recorded; two numbers follow from what is.  The mean seconds per token of a
sequence, ``r``, and the mean number of sequences that ran, ``n`` (Little's law: summed turn seconds over summed
collection seconds), give ``step_seconds + step_seconds_per_sequence * n = r``.  How ``r`` splits between the two is
chosen so that the simulated step takes as long as the measured one.

>>> fit = fit_run("runs/quickstart")                                                   # doctest: +SKIP
>>> fit.scenario.engines.step_seconds, fit.measured, fit.simulated                      # doctest: +SKIP
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from slipstream.config.load import load_settings
from slipstream.config.settings import RunSettings
from slipstream.errors import LedgerError
from slipstream.ledger.reader import LedgerReader
from slipstream.ledger.records import TrajectoryRecord
from slipstream.simulate.distributions import Constant, Distribution, Empirical
from slipstream.simulate.engine import simulate
from slipstream.simulate.scenario import EngineModel, Scenario, TrainerModel, WorkSettings
from slipstream.trajectory import Origin, Trajectory

KEPT = 400
"""Quantiles that stand for a measured distribution."""
SPLITS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98)


@dataclass(frozen=True)
class RunFit:
    """The scenario, how well it reproduces the run (seconds per step), and what was taken from where."""

    scenario: Scenario
    measured: float
    simulated: float
    notes: Sequence[str]


def measured(values: Iterable[float]) -> Distribution:
    """The values as a distribution; a single value is a constant, many are thinned to quantiles."""
    kept = sorted(values)
    if not kept or kept[0] == kept[-1]:
        return Constant(kept[0] if kept else 0.0)
    if len(kept) > KEPT:
        kept = [kept[int((i + 0.5) * len(kept) / KEPT)] for i in range(KEPT)]
    return Empirical(tuple(kept))


def fit_run(run_dir: Path | str) -> RunFit:
    """Fit a scenario to a run.

    Raises:
        LedgerError: the directory holds no ledger, or no finished step with timings.
    """
    run_dir = Path(run_dir)
    reader = LedgerReader(run_dir)
    settings = load_settings([run_dir / "settings.yaml"]).settings
    rows = [row.values for row in reader.metrics("train") if "timing/update" in row.values]
    records = list(reader.trajectories(phase="train"))
    members = [record.trajectory for record in records]
    if not rows or not members:
        raise LedgerError(f"{run_dir} holds no finished step to fit; run at least one")
    work, tokens, llm_seconds = _work(members, settings)
    collect = sum(row["timing/generate"] for row in rows)
    per_token = llm_seconds / max(tokens, 1)
    together = max(llm_seconds / max(collect, 1e-9), 1.0)
    step = fmean(row["timing/step"] for row in rows)
    refused, failed = _lost(records)
    scenario = Scenario(
        seed=settings.seed,
        work=work.model_copy(update={"refused_share": refused, "failed_share": failed}),
        engines=EngineModel(
            replicas=len(settings.inference.urls) or settings.inference.replicas,
            max_batch=settings.inference.max_batch_size,
            step_seconds=max(per_token, 1e-9),
            router=settings.inference.router.policy,
        ),
        trainer=TrainerModel(
            update_seconds=measured(row["timing/update"] for row in rows),
            publish_seconds=measured(row["timing/publish"] for row in rows),
            pause=settings.inference.pause_mode,
        ),
        schedule=settings.schedule.model_copy(update={"steps": max(min(len(rows), 10), 4)}),
    )
    fitted, simulated = _fit_step(scenario, per_token, together, step)
    notes = [
        f"{len(rows)} steps and {len(members)} trajectories of {run_dir}; filters refused {refused:.0%} of the groups",
        f"{per_token * 1e3:.2f} ms per token of a sequence while {together:.1f} sequences ran on average",
        f"decode step fitted as {fitted.engines.step_seconds * 1e3:.2f} ms + "
        f"{fitted.engines.step_seconds_per_sequence * 1e3:.3f} ms per sequence",
        "prefill is part of the seconds per token; prefix caches are not modelled apart",
    ]
    return RunFit(fitted.model_copy(update={"schedule": settings.schedule.model_copy(update={"steps": 30})}),
                  step, simulated, notes)  # fmt: skip


def _work(members: Sequence[Trajectory], settings: RunSettings) -> tuple[WorkSettings, int, float]:
    """The work section, all sampled tokens, all seconds of model turns."""
    turn_tokens: list[float] = []
    seconds: list[float] = []
    observed: list[float] = []
    for member in members:
        by_turn: Counter[int] = Counter()
        for span in member.sampled_spans():
            by_turn[span.turn or 0] += len(span)
        turn_tokens += [float(n) for n in by_turn.values()]
        seconds += [turn.env_seconds for turn in member.turns]
        spans = [span for row in member.rows for span in row.spans]
        total = sum(len(span) for span in spans if span.origin is Origin.OBSERVATION)
        observed.append(total / max(len(by_turn), 1))
    prompts = [
        float(sum(len(s) for s in member.rows[0].spans if s.origin is Origin.PROMPT))
        for member in members
        if member.rows
    ]
    work = WorkSettings(
        samples_per_prompt=settings.rollout.samples_per_prompt,
        prompt_tokens=measured(prompts),
        turns=measured(float(max(len(member.turns), 1)) for member in members),
        turn_tokens=measured(turn_tokens or [1.0]),
        observation_tokens=Constant(fmean(observed)),
        env_seconds=measured(seconds or [0.0]),
        common=0.0,
    )
    llm = sum(turn.llm_seconds for member in members for turn in member.turns)
    return work, int(sum(turn_tokens)), llm


def _lost(records: Sequence[TrajectoryRecord]) -> tuple[float, float]:
    """Shares of groups that filters refused, and that came back without a score.

    Groups that over-sampling left over are not counted: nobody looked further at them.
    """
    groups: dict[str, list[TrajectoryRecord]] = {}
    for record in records:
        groups.setdefault(record.trajectory.group_id, []).append(record)
    judged = [group for group in groups.values() if not any(r.disposition == "filtered:surplus" for r in group)]
    failed = sum(not any(r.trajectory.votes for r in group) for group in judged)
    refused = (
        sum(all(r.disposition.startswith("filtered:") for r in group if r.trajectory.votes) for group in judged)
        - failed
    )
    return min(refused / max(len(judged), 1), 0.95), min(failed / max(len(judged), 1), 0.04)


def _fit_step(scenario: Scenario, per_token: float, together: float, step: float) -> tuple[Scenario, float]:
    """The split between fixed and per-sequence cost whose simulated step is nearest to the measured one."""
    best: tuple[float, Scenario, float] | None = None
    for split in SPLITS:
        tried = scenario.with_(
            "engines",
            step_seconds=max(per_token * (1 - split), 1e-9),
            step_seconds_per_sequence=per_token * split * scenario.engines.replicas / together,
        )
        seconds = simulate(tried).seconds_per_step
        if best is None or abs(seconds - step) < best[0]:
            best = abs(seconds - step), tried, seconds
    assert best is not None
    return best[1], best[2]
