"""Evaluation: the same turn loop on held-out prompts, its whole spec kept with each score.

Owns: eval tasks, scores, the record.  Refuses: a second episode loop; averaging over what failed (a failure counts 0
and is reported apart).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.settings import EvalSettings, RolloutSettings
from slipstream.data.prompts import PromptRow
from slipstream.errors import DeadlineError
from slipstream.ledger import EvalRecord, Ledger, eval_metrics
from slipstream.ledger.records import Stage
from slipstream.rollout.generator import together
from slipstream.rollout.types import Generator, GroupTask
from slipstream.trajectory import Group


@dataclass(frozen=True)
class EvalResult:
    """``accuracy`` is the mean score over all samples asked for; ``scores`` are the ledger's eval metrics."""

    stage: Stage
    step: int
    accuracy: float
    scores: Mapping[str, float]
    seconds: float


class Evaluator:
    """Runs one evaluation set through a generator and records it."""

    def __init__(
        self,
        generator: Generator,
        rows: Sequence[PromptRow],
        settings: EvalSettings,
        rollout: RolloutSettings,
        ledger: Ledger,
        *,
        name: str = "held_out",
        deadline: float = 3600.0,
        spec: Mapping[str, Any] | None = None,
    ) -> None:
        self.generator = generator
        self.rows = list(rows)
        self.settings = settings
        self.rollout = rollout
        self.ledger = ledger
        self.name = name
        self.deadline = deadline
        self.spec = {
            **settings.model_dump(mode="json"),
            "max_turns": rollout.max_turns,
            "max_prompt_tokens": rollout.max_prompt_tokens,
            "max_total_tokens": rollout.max_total_tokens,
            "prompts": len(self.rows),
            **(spec or {}),
        }

    def _task(self, index: int, row: PromptRow, stage: str, step: int) -> GroupTask:
        return GroupTask(
            group_id=f"eval/{self.name}/{stage}/{step}/{index}",
            prompt_uid=row.uid,
            messages=tuple(row.messages),
            env_class=row.env_class,
            extras=row.extras,
            n=self.settings.samples_per_prompt,
            scheduled_step=step,
            eval=True,
            sampling=self.settings.sampling,
        )

    async def __call__(self, stage: Stage, step: int, weight_version: str) -> EvalResult:
        """Evaluate every row; raises ``DeadlineError`` when the whole evaluation takes longer than its deadline."""
        started = time.perf_counter()
        tasks = [self._task(i, row, stage, step) for i, row in enumerate(self.rows)]
        try:
            groups: Sequence[Group] = await asyncio.wait_for(run_groups(self.generator, tasks), self.deadline)
        except TimeoutError as error:
            raise DeadlineError(
                f"evaluation {self.name!r} of {len(tasks)} prompts did not finish within {self.deadline:.0f} s"
            ) from error
        seconds = time.perf_counter() - started
        scores = eval_metrics(groups)
        self.ledger.record_eval(
            EvalRecord(
                step=step,
                name=self.name,
                spec=self.spec,
                groups=groups,
                scores=scores,
                stage=stage,
                weight_version=weight_version,
                timings={"evaluate": seconds},
            )
        )
        return EvalResult(stage, step, scores["eval/all/avg_score"], scores, seconds)


async def run_groups(generator: Generator, tasks: Sequence[GroupTask]) -> list[Group]:
    """All groups, in order; the first error cancels the rest, waits for them, and is raised as itself."""
    return await together([generator.generate_group(task) for task in tasks])
