"""What a simulation found.

Owns: the figures of one simulated run and their definitions.  Refuses: drawing them (``picture``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Lane = Literal["update", "publish", "wait"]


@dataclass(frozen=True)
class Stretch:
    """What the trainer did between two moments (seconds)."""

    kind: Lane
    start: float
    end: float


@dataclass(frozen=True)
class StepFigures:
    """One step; ``started`` and ``ended`` in seconds, ``lags`` by scheduled step, ``token_lags`` by token version."""

    started: float
    selected: float
    ended: float
    groups: int
    tokens: float
    lags: Mapping[int, int]
    token_lags: Mapping[int, float]
    mixed: int
    """Trajectories with tokens of more than one version."""
    trajectories: int
    waits: Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """A simulated run.  Shares are of all seconds; rates leave out the first and the last steps.

    ``warmup`` steps fill the pipeline; in the last ``cooldown`` nothing more is started, because no step would use it.

    ``trainer_idle`` counts neither updates nor publishes; ``engine_idle`` is time without a running sequence, averaged
    over replicas, publishes not counted; ``batch`` is the mean number of sequences on a busy replica.
    """

    schedule: str
    steps: Sequence[StepFigures]
    warmup: int
    cooldown: int
    seconds: float
    trainer_idle: float
    engine_idle: float
    engine_paused: float
    batch: float
    cache_hits: float
    """Share of prompt and context tokens that came from a prefix cache."""
    group_seconds: Sequence[float]
    turn_seconds: Sequence[float]
    left_out: Mapping[str, int]
    evicted_share: float
    length_bias: float
    """Mean sampled tokens of trained groups over that of all sampled groups, minus 1."""
    timeline: Sequence[Stretch] = ()
    occupancy: Sequence[tuple[float, int]] = field(default_factory=tuple)
    """``(second, running sequences)`` at every change, over all replicas."""

    @property
    def steady(self) -> Sequence[StepFigures]:
        """The steps that rates are taken from."""
        return self.steps[self.warmup : len(self.steps) - self.cooldown]

    @property
    def seconds_per_step(self) -> float:
        """Seconds from one publish to the next."""
        return (self.steady[-1].ended - self.steady[0].started) / len(self.steady)

    @property
    def steps_per_hour(self) -> float:
        """Steps in an hour at that rate."""
        return 3600.0 / self.seconds_per_step

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second."""
        return sum(s.tokens for s in self.steady) / (self.steady[-1].ended - self.steady[0].started)

    @property
    def collect_seconds(self) -> float:
        """Mean seconds that a step waits for its groups."""
        return sum(s.selected - s.started for s in self.steady) / len(self.steady)

    @property
    def lags(self) -> dict[int, float]:
        """Share of trained groups by lag in steps."""
        return _shares(Counter[int](), [s.lags for s in self.steady])

    @property
    def token_lags(self) -> dict[int, float]:
        """Share of trained tokens by lag of the version that sampled them."""
        return _shares(Counter[int](), [s.token_lags for s in self.steady])

    @property
    def mixed_share(self) -> float:
        """Share of trained trajectories whose tokens are of several versions."""
        return sum(s.mixed for s in self.steady) / max(sum(s.trajectories for s in self.steady), 1)

    def figures(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON."""
        return {
            "schedule": self.schedule,
            "steps": len(self.steps),
            "seconds_per_step": self.seconds_per_step,
            "steps_per_hour": self.steps_per_hour,
            "tokens_per_second": self.tokens_per_second,
            "collect_seconds": self.collect_seconds,
            "trainer_idle": self.trainer_idle,
            "engine_idle": self.engine_idle,
            "engine_paused": self.engine_paused,
            "batch": self.batch,
            "cache_hits": self.cache_hits,
            "group_seconds_p50": quantile(self.group_seconds, 0.5),
            "group_seconds_p90": quantile(self.group_seconds, 0.9),
            "turn_seconds_p50": quantile(self.turn_seconds, 0.5),
            "turn_seconds_p90": quantile(self.turn_seconds, 0.9),
            "queue_seconds_p90": quantile([w for s in self.steady for w in s.waits], 0.9),
            "lags": self.lags,
            "token_lags": self.token_lags,
            "mixed_share": self.mixed_share,
            "left_out": dict(self.left_out),
            "evicted_share": self.evicted_share,
            "length_bias": self.length_bias,
        }


def _shares(total: Counter[int], parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    for part in parts:
        for key, count in part.items():
            total[key] += count  # type: ignore[assignment]
    whole = sum(total.values()) or 1
    return {key: total[key] / whole for key in sorted(total)}


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q``-quantile, 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else 0.0
