"""Calibration against published step times, with residuals.

Owns: fitting the few numbers that authors do not publish, predicting the rest, and stating how far off each is.
Refuses: more free numbers than are named here.

verl publishes the stages of every row.  Free: one number for all rows (a busy GPU's seconds per token).  A row's decode
latency follows from its published synchronous generation time.  Predicted: three asynchronous step times.

NeMo-RL publishes totals only.  Free: one number per case (generation's share of the on-policy step), chosen to fit all
rows of the case.  Predicted: what is left of 2 or 3 rows per case, and the sign: does asynchrony win at equal GPUs?

>>> fit = fit_nemo(NEMO[5], shares=[0.3])                                             # doctest: +SKIP
>>> fit.predicted_ratio < 1                                                            # doctest: +SKIP
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.simulate.engine import simulate
from slipstream.simulate.outcome import Outcome
from slipstream.simulate.published import (
    NEMO,
    VERL,
    VERL_PARTS,
    NemoCase,
    NemoRow,
    VerlRow,
    nemo_scenario,
    verl_scenario,
)
from slipstream.simulate.scenario import Scenario

SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
"""Generation shares that are tried first; then those ``FINER`` beside the best."""
FINER = 0.05
VERL_CANDIDATES = (2.5e-5, 6e-5, 1.4e-4, 3.4e-4)
BOUND = 0.2
"""Part of a decode step that grows with the batch, from the published shapes (weights against KV cache reads)."""


@dataclass(frozen=True)
class Prediction:
    """One published time and what the simulator says, in seconds."""

    what: str
    published: float
    predicted: float

    @property
    def residual(self) -> float:
        """Relative error."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class CaseFit:
    """A case, what was fitted, and every row; ratios are synchronous over asynchronous step time."""

    name: str
    fitted: dict[str, float]
    rows: Sequence[Prediction]
    published_ratio: float
    predicted_ratio: float
    outcome: Outcome

    @property
    def same_sign(self) -> bool:
        """Whether both say that asynchrony wins, or both that it loses."""
        return (self.published_ratio > 1) == (self.predicted_ratio > 1)

    def as_json(self) -> dict[str, Any]:
        """For a results file."""
        return {
            "case": self.name,
            "fitted": self.fitted,
            "published_ratio": round(self.published_ratio, 3),
            "predicted_ratio": round(self.predicted_ratio, 3),
            "ratio_residual": round(self.predicted_ratio / self.published_ratio - 1, 3),
            "same_sign": self.same_sign,
            "rows": [
                {
                    "what": row.what,
                    "published_s": row.published,
                    "predicted_s": round(row.predicted, 1),
                    "residual": round(row.residual, 3),
                }
                for row in self.rows
            ],
            "trainer_idle": round(self.outcome.trainer_idle, 3),
            "engine_idle": round(self.outcome.engine_idle, 3),
            "lags": {str(k): round(v, 3) for k, v in self.outcome.lags.items()},
        }


def _slower(scenario: Scenario, factor: float) -> Scenario:
    """Decode steps ``factor`` times as long, whatever the batch."""
    engines = scenario.engines
    return scenario.with_(
        "engines",
        step_seconds=engines.step_seconds * factor,
        step_seconds_per_sequence=engines.step_seconds_per_sequence * factor,
    )


# -- NeMo-RL ---------------------------------------------------------------------------------------------------------


def fit_nemo(case: NemoCase, shares: Sequence[float] = SHARES, bound: float = BOUND) -> CaseFit:
    """The share that fits the case's rows best (least squares of relative errors)."""
    unit = simulate(nemo_scenario(case, case.on_policy, share=0.5, bound=bound)).collect_seconds

    def fit(share: float) -> CaseFit:
        return _nemo_fit(case, share, bound, share * case.on_policy.step / unit)

    def error(made: CaseFit) -> float:
        return sum(row.residual**2 for row in made.rows)

    best = min(map(fit, shares), key=error)
    if len(shares) > 1:
        middle = best.fitted["generation_share"]
        near = [fit(round(middle + d, 2)) for d in (-FINER, FINER) if 0 < middle + d < 1]
        best = min([best, *near], key=error)
    return best


def _nemo_fit(case: NemoCase, share: float, bound: float, factor: float) -> CaseFit:
    def run(row: NemoRow) -> Outcome:
        return simulate(_slower(nemo_scenario(case, row, share=share, bound=bound), factor))

    outcomes = {row: run(row) for row in case.rows}
    return CaseFit(
        f"NeMo-RL {case.name}",
        {"generation_share": share},
        [
            Prediction(f"{row.gpus} GPUs, {row.lag} steps off", row.step, outcomes[row].seconds_per_step)
            for row in case.rows
        ],
        case.published_ratio,
        outcomes[case.on_policy].seconds_per_step / outcomes[case.off_policy].seconds_per_step,
        outcomes[case.off_policy],
    )


# -- verl ------------------------------------------------------------------------------------------------------------


def fit_verl(candidates: Sequence[float], rows: Sequence[VerlRow] = VERL) -> list[CaseFit]:
    """The one ``seconds_per_token`` that fits the asynchronous steps of all rows best."""

    def fits(seconds: float) -> list[CaseFit]:
        return [_verl_fit(row, seconds) for row in rows]

    def error(made: list[CaseFit]) -> float:
        return sum(fit.rows[1].residual ** 2 for fit in made)

    best = min(map(fits, candidates), key=error)
    if len(candidates) > 1:
        middle, factor = best[0].fitted["gpu_seconds_per_token"], (candidates[1] / candidates[0]) ** 0.5
        best = min([best, fits(middle / factor), fits(middle * factor)], key=error)
    return best


def _verl_fit(row: VerlRow, seconds: float) -> CaseFit:
    def sync(latency: float, steps: int = 2) -> Outcome:
        base = verl_scenario(row, asynchronous=False, seconds_per_token=seconds, steps=steps)
        return simulate(base.with_("engines", step_seconds=latency), warmup=0)

    latency = _root(lambda x: sync(x).collect_seconds - row.sync_gen, 1e-5, 0.03)
    asynchronous = verl_scenario(row, asynchronous=True, seconds_per_token=seconds)
    outcome = simulate(asynchronous.with_("engines", step_seconds=latency))
    predicted_sync, predicted = sync(latency, 4).seconds_per_step, outcome.seconds_per_step * VERL_PARTS
    return CaseFit(
        f"verl, {row.gpus} H20",
        {"gpu_seconds_per_token": seconds, "decode_latency_s": round(latency, 5)},
        [
            Prediction("synchronous step", row.sync_step, predicted_sync),
            Prediction("asynchronous step", row.async_step, predicted),
        ],
        row.published_ratio,
        predicted_sync / predicted,
        outcome,
    )


def _root(function: Callable[[float], float], low: float, high: float, rounds: int = 3) -> float:
    """Where a nearly linear increasing function crosses 0, by secants from both ends; ``low`` if it starts above."""
    at_low, at_high = function(low), function(high)
    if at_low >= 0:
        return low
    for _ in range(rounds):
        middle = low - at_low * (high - low) / (at_high - at_low)
        value = function(middle)
        if value > 0:
            high, at_high = middle, value
        else:
            low, at_low = middle, value
    return low - at_low * (high - low) / (at_high - at_low)


def calibrate() -> list[CaseFit]:
    """Every published case."""
    return [*(fit_nemo(case) for case in NEMO), *fit_verl(VERL_CANDIDATES)]
