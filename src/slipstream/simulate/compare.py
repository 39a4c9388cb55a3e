"""One scenario under several schedules.

Owns: which schedules are compared, and the bound that no schedule can pass.  Refuses: printing.

>>> [name for name, _ in variants(Scenario(), 2)][:3]
['sync', 'one_step_off', 'fully_async S=2']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.simulate.engine import simulate
from slipstream.simulate.outcome import Outcome
from slipstream.simulate.scenario import Scenario


@dataclass(frozen=True)
class Compared:
    """A named schedule, its outcome, and its speed relative to the first one."""

    name: str
    scenario: Scenario
    outcome: Outcome
    speedup: float


def variants(scenario: Scenario, staleness: int) -> list[tuple[str, Scenario]]:
    """The same work under every schedule; those with a bound at ``staleness`` steps."""
    more: list[tuple[str, dict[str, Any]]] = [("one_step_off", {"kind": "one_step_off"})]
    bounds: dict[str, Any] = {"max_staleness_steps": staleness}
    more.append((f"fully_async S={staleness}", {"kind": "fully_async", **bounds}))
    for how in ("wait", "drop", "requeue"):
        more.append((f"bounded S={staleness}, {how}", {"kind": "bounded", "on_stale": how, **bounds}))
    more.append((f"windowed S={staleness}", {"kind": "windowed", **bounds}))
    return [("sync", scenario.under(kind="sync")), *((name, scenario.under(**given)) for name, given in more)]


def compare(named: Sequence[tuple[str, Scenario]], warmup: int | None = None) -> list[Compared]:
    """Run each; speed is relative to the first, in trained tokens per second (a schedule that drops groups may be
    faster per step and still train on less).
    """
    out: list[Compared] = []
    for name, scenario in named:
        outcome = simulate(scenario, warmup)
        speedup = outcome.tokens_per_second / out[0].outcome.tokens_per_second if out else 1.0
        out.append(Compared(name, scenario, outcome, speedup))
    return out


def overlap_bound(outcome: Outcome, scenario: Scenario) -> float:
    """Seconds per step that no schedule beats: the slower of trainer and engines, each never idle.

    Trainer: an update and a publish.  Engines: a step's sampled tokens at the best rate of a full batch, and the
    publish, during which they stand still.
    """
    steps = outcome.steady
    tokens = sum(s.tokens for s in steps) / len(steps)
    trainer = scenario.trainer
    publish = trainer.publish_seconds.average() / trainer.publish_every
    update = trainer.update_seconds.average() + trainer.update_seconds_per_token * tokens
    engines = scenario.engines
    best = engines.replicas * engines.max_batch / engines.seconds_per_token(engines.max_batch)
    return max(update, tokens / best) + publish
