"""The failure budget of a run.

Owns: counting failed samples per step and phase, naming the first causes, stopping the run when too many failed.
Refuses: retrying (the generator does), turning a failure into a reward.

A step's samples are *planned* before any of them can fail, so the share is taken of the whole step; where groups are
started one by one, of at least ``samples_per_step``.  Training stops when more than ``max_failed_fraction`` of a step's
samples failed, and in any phase when all of them did: an engine that is down must not look like a model that scores 0.

>>> from slipstream.config.settings import FailureBudget
>>> ledger = FailureLedger(FailureBudget(max_failed_fraction=0.5))
>>> ledger.plan("train", 0, 4)
>>> ledger.failed("train", 0, "env_raised", "ValueError: boom")
>>> ledger.fraction("train", 0)
0.25
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slipstream.config.settings import FailureBudget
from slipstream.errors import BudgetExceededError


@dataclass
class StepFailures:
    """One step of one phase."""

    planned: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_reason: dict[str, str] = field(default_factory=dict)


class FailureLedger:
    """See the module's docstring.  Keeps the counts of the last 64 (phase, step) pairs."""

    def __init__(self, budget: FailureBudget, samples_per_step: int = 0) -> None:
        self._budget = budget
        self._usual = samples_per_step
        self._steps: dict[tuple[str, int], StepFailures] = {}
        self.faults: Counter[str] = Counter()
        """Failed samples by fault over the whole run."""

    def plan(self, phase: str, step: int, samples: int) -> None:
        """These samples will be tried in this step."""
        self._step(phase, step).planned += samples

    def failed(self, phase: str, step: int, fault: str, reason: str) -> None:
        """A sample failed for good; raises ``BudgetExceededError`` when the budget is spent."""
        counts = self._step(phase, step)
        counts.failed += 1
        counts.faults[fault] += 1
        counts.first_reason.setdefault(fault, reason)
        self.faults[fault] += 1
        limit = self._budget.max_failed_fraction if phase == "train" else 1.0
        whole = max(counts.planned, self._usual if phase == "train" else 0)
        if counts.failed > limit * whole or counts.failed >= whole:
            raise BudgetExceededError(self._message(phase, step, counts, limit))

    def fraction(self, phase: str, step: int) -> float:
        """Failed share of the planned samples; 0 when nothing is planned."""
        counts = self._steps.get((phase, step), StepFailures())
        return counts.failed / counts.planned if counts.planned else 0.0

    def _step(self, phase: str, step: int) -> StepFailures:
        counts = self._steps.setdefault((phase, step), StepFailures())
        while len(self._steps) > 64:
            del self._steps[next(iter(self._steps))]
        return counts

    @staticmethod
    def _message(phase: str, step: int, counts: StepFailures, limit: float) -> str:
        causes = "; ".join(
            f"{number} x {fault} (first: {counts.first_reason[fault]})"
            for fault, number in counts.faults.most_common(3)
        )
        return (
            f"{counts.failed} of {counts.planned} samples of {phase} step {step} failed; the budget "
            f"(rollout.failures.max_failed_fraction) is {limit:g}.  Causes: {causes}"
        )
