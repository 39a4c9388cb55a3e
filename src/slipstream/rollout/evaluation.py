"""Scores of evaluated groups.

Owns: the rule that in evaluation a failed sample counts 0 and is reported apart.
Refuses: generating; saving the evaluation's spec (the trainer does).

>>> score_groups([]).scored
0
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slipstream.trajectory import Failed, Group, Truncated


@dataclass(frozen=True)
class EvalScore:
    """What a set of groups scored.

    ``mean`` is over prompts of the mean over samples; ``pass_at_n`` is the share of prompts of which a sample earned
    at least ``threshold``.  Absent samples count 0 in both, and stand in ``failed`` (by fault) and ``absent``.
    """

    mean: float
    pass_at_n: float
    prompts: int
    samples: int
    scored: int
    truncated: int
    failed: Mapping[str, int] = field(default_factory=dict)
    by_source: Mapping[str, float] = field(default_factory=dict)

    @property
    def absent(self) -> int:
        """Samples without a score: failed, cancelled, unscored."""
        return self.samples - self.scored


def score_groups(groups: Iterable[Group], threshold: float = 1.0) -> EvalScore:
    """Score groups; see ``EvalScore``."""
    means: list[float] = []
    passed = samples = scored = truncated = 0
    faults: Counter[str] = Counter()
    sources: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards = [member.total_reward for member in group.voters]
        samples += group.size
        scored += len(rewards)
        truncated += sum(isinstance(m.outcome, Truncated) for m in group.members)
        for member in group.members:
            if isinstance(member.outcome, Failed):
                faults[member.outcome.fault] += 1
            elif not member.votes:
                faults["unscored" if member.unscored is not None else member.outcome.kind] += 1
        means.append(sum(rewards) / group.size if group.size else 0.0)
        passed += any(reward >= threshold for reward in rewards)
        source = next((m.data_source for m in group.members), "")
        sources[source].append(means[-1])
    prompts = len(means)
    return EvalScore(
        mean=sum(means) / prompts if prompts else 0.0,
        pass_at_n=passed / prompts if prompts else 0.0,
        prompts=prompts,
        samples=samples,
        scored=scored,
        truncated=truncated,
        failed=dict(faults),
        by_source={name: sum(values) / len(values) for name, values in sorted(sources.items()) if name},
    )
