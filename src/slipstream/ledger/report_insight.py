"""What a run says: what improved, by how much, and what to try next.

Owns: the headline and the advice, each computed from ``RunFacts`` by a stated rule.
Refuses: praise.  A change inside its own uncertainty is called no clear change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.ledger.report_charts import number, percent
from slipstream.ledger.report_data import EvalPoint, RunFacts
from slipstream.ledger.sinks import format_duration

Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Change:
    """One score before and after, with a 95 % half-width where it can be told (scores in [0, 1], n prompts)."""

    before: float
    after: float
    half_width: float | None

    @property
    def delta(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def clear(self) -> bool:
        """Whether the change is larger than its half-width."""
        return abs(self.delta) > (self.half_width or 0.0) and self.delta != 0


@dataclass(frozen=True, slots=True)
class Headline:
    """The first lines of the report."""

    text: str
    detail: str
    tone: str
    """``up``, ``down`` or ``flat``."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to try, and the number that suggests it."""

    action: str
    because: str


def change(before: EvalPoint, after: EvalPoint, shares: bool = True) -> Change | None:
    """Score change between two evaluations of one set; prompts count as independent draws.

    With ``shares`` (every sample scored within [0, 1]) the half-width is an upper bound: no spread of such
    scores is wider than that of zeros and ones with the same mean.
    """
    a, b = before.score, after.score
    if a is None or b is None:
        return None
    half = None
    if shares and before.prompts and after.prompts:
        half = Z95 * math.sqrt(a * (1 - a) / before.prompts + b * (1 - b) / after.prompts)
    return Change(a, b, half)


def rl_pair(facts: RunFacts, name: str) -> tuple[EvalPoint, EvalPoint] | None:
    """The evaluation before the first RL step and the last one after it; None unless both exist."""
    points = [e for e in facts.evals if e.name == name]
    before = [e for e in points if e.stage != "rl" or e.step == 0]
    after = [e for e in points if e.stage == "rl" and e.step > 0]
    return (before[-1], after[-1]) if before and after else None


def sft_pair(facts: RunFacts, name: str) -> tuple[EvalPoint, EvalPoint] | None:
    """The untouched model's evaluation and the one after the supervised warm start; None unless both exist."""
    points = [e for e in facts.evals if e.name == name]
    before = [e for e in points if e.stage == "start"]
    after = [e for e in points if e.stage == "sft"]
    return (before[-1], after[-1]) if before and after else None


def score_text(value: float, unit: bool) -> str:
    """A score as per cent when all scores are shares, else as a number."""
    return percent(value) if unit else number(value)


def delta_text(delta: float, unit: bool) -> str:
    """A signed change, in points for shares."""
    return f"{100 * delta:+.1f} points" if unit else f"{delta:+.3f}"


def headline(facts: RunFacts) -> Headline:
    """The result in one sentence and one line of detail."""
    steps = len(facts.train)
    effort = f"in {steps} step{'s' if steps != 1 else ''} and {format_duration(60 * facts.minutes)}"
    for name in facts.eval_names():
        pair = rl_pair(facts, name)
        result = change(*pair, facts.eval_shares) if pair else None
        if pair is None or result is None:
            continue
        unit = result.half_width is not None
        label = f"{name.replace('_', ' ')} {pair[1].metric.replace('avg_score', 'score')}"
        label = label[0].upper() + label[1:]
        span = f"from {score_text(result.before, unit)} to {score_text(result.after, unit)}"
        verb, tone = ("rose", "up") if result.delta > 0 else ("fell", "down")
        if not result.clear:
            verb, tone = "shows no clear change:", "flat"
        detail = f"{delta_text(result.delta, unit)} from reinforcement learning alone, {effort}"
        if result.half_width is not None:
            detail += f"; 95 % interval at most ±{100 * result.half_width:.1f} points over {pair[1].prompts} prompts"
        warm = sft_pair(facts, name)
        if warm and (gain := change(*warm, facts.eval_shares)):
            detail += f". The supervised warm start before it: {delta_text(gain.delta, unit)}"
        return Headline(f"{label} {verb} {span}", detail + ".", tone)
    return _reward_headline(facts, effort)


def _reward_headline(facts: RunFacts, effort: str) -> Headline:
    rewards = facts.series("reward/avg_raw_reward")[1]
    if len(rewards) < 2:
        return Headline("No result yet", f"{len(facts.train)} step(s) recorded.", "flat")
    window = max(1, len(rewards) // 10)
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    tone = "up" if last > first else "down" if last < first else "flat"
    return Headline(
        f"Training reward went from {number(first)} to {number(last)}",
        f"means of the first and last {window} step(s), {effort}. No evaluation brackets the run, so this is not a "
        "held-out result.",
        tone,
    )


def advice(facts: RunFacts) -> list[Advice]:
    """What the numbers suggest, most pressing first; at most five."""
    found = [a for rule in _RULES if (a := rule(facts)) is not None]
    return found[:5] or [
        Advice("Run longer, or with another seed", "no guard is out of its range; one seed is not evidence")
    ]


def _recent(facts: RunFacts, name: str) -> float | None:
    return facts.mean(name, last=max(3, len(facts.train) // 5))


def _failures(facts: RunFacts) -> Advice | None:
    share = _recent(facts, "guard/failed_share")
    if share is None or share < 0.05:
        return None
    faults = [k for k in facts.outcomes if k.startswith("failed")]
    return Advice(
        f"Find out why samples fail{f' (mostly {faults[0]})' if faults else ''}",
        f"{percent(share)} of the samples of the last steps failed; they are absent from every baseline",
    )


def _duplicates(facts: RunFacts) -> Advice | None:
    share = _recent(facts, "guard/duplicate_rate")
    if share is None or share < 0.3:
        return None
    return Advice(
        "Sample hotter, or ask harder questions (rollout.sampling.temperature)",
        f"{percent(share)} of the samples repeat another one of their group word for word",
    )


def _zero_spread(facts: RunFacts) -> Advice | None:
    share = _recent(facts, "guard/zero_spread_share")
    if share is None or share < 0.4:
        return None
    reward = _recent(facts, "reward/avg_raw_reward") or 0.0
    solved = _recent(facts, "reward/avg_pass_at_n")
    if solved is not None and solved > 0.8 and reward > 0.5:
        action = "Move on to harder prompts; these are nearly solved"
    else:
        action = "Raise rollout.samples_per_prompt, or draw more prompts and keep those with spread"
    return Advice(action, f"in {percent(share)} of the groups every sample earned the same, which teaches nothing")


def _truncated(facts: RunFacts) -> Advice | None:
    share = _recent(facts, "guard/truncated_share")
    if share is None or share < 0.2:
        return None
    return Advice(
        "Raise the token or turn budget (rollout.sampling.max_tokens_per_turn, rollout.max_turns)",
        f"{percent(share)} of the samples ran into a budget",
    )


def _gap(facts: RunFacts) -> Advice | None:
    gap = _recent(facts, "policy/rollout_train_logprobs_abs_diff_mean")
    if gap is None or gap < 0.1:
        return None
    return Advice(
        "Bring sampler and trainer together (same dtype, or algorithm.old_logprobs=recompute)",
        f"their log-probs differ by {number(gap)} a token on average",
    )


def _entropy(facts: RunFacts) -> Advice | None:
    values = facts.series("policy/policy_entropy")[1]
    if len(values) < 6 or values[0] <= 0 or (ratio := values[-1] / values[0]) > 0.25:
        return None
    return Advice(
        "Slow the collapse: a lower learning rate, a KL term, or an entropy bonus",
        f"policy entropy is down to {percent(ratio)} of its start",
    )


def _still_rising(facts: RunFacts) -> Advice | None:
    rewards = facts.series("reward/avg_raw_reward")[1]
    if len(rewards) < 9:
        return None
    third = len(rewards) // 3
    middle, last = rewards[third : 2 * third], rewards[2 * third :]
    gain = sum(last) / len(last) - sum(middle) / len(middle)
    noise = (sum((r - sum(last) / len(last)) ** 2 for r in last) / len(last)) ** 0.5 / math.sqrt(len(last))
    if gain <= 2 * noise:
        return None
    return Advice(
        "Train for more steps (schedule.steps); the reward is still rising",
        f"the last third of the steps earned {number(gain)} more than the middle third",
    )


def _time(facts: RunFacts) -> Advice | None:
    parts = facts.rollout_seconds
    total = sum(parts.values())
    if not total or (share := parts["environment"] / total) < 0.3:
        return None
    return Advice(
        "Give the environments more room (rollout.env_workers), or make a step faster",
        f"trajectories spend {percent(share)} of their time in the environment",
    )


def _weakest(facts: RunFacts) -> Advice | None:
    for name in facts.eval_names():
        pair = rl_pair(facts, name)
        if pair is None:
            continue
        scores = {k: v for k, v in pair[1].by_source(pair[1].metric).items() if k != "all"}
        if len(scores) < 2:
            continue
        worst = min(scores, key=lambda k: scores[k])
        mean = sum(scores.values()) / len(scores)
        if scores[worst] < 0.6 * mean:
            return Advice(
                f"Draw more prompts like {worst}",
                f"it scores {number(scores[worst])} against {number(mean)} over all sources",
            )
    return None


_RULES: tuple[Callable[[RunFacts], Advice | None], ...] = (
    _failures,
    _zero_spread,
    _truncated,
    _duplicates,
    _gap,
    _entropy,
    _still_rising,
    _time,
    _weakest,
)
