"""A generator of your own: the model answers, is asked to check itself, and answers again.

    python examples/custom_generator.py

A generator turns a task into a group of trajectories.  ``RowBuilder`` keeps every token's origin straight: what the
model sampled is trained, what the template and the question add is context.  The loop around it is ``grpo_loop.py``.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from grpo_loop import SAMPLING, Policy, mean_reward, open_policy, show_format, update

from slipstream.config.settings import AlgorithmSettings
from slipstream.envs import make
from slipstream.envs.arithmetic import arithmetic_rows
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.inference.types import GenerateRequest
from slipstream.rollout import GroupTask, RowBuilder
from slipstream.trajectory import Completed, Group, Reward, Span, Trajectory, Turn


class SelfCheck:
    """Implements ``slipstream.rollout.Generator``."""

    question = "Check your answer. The number only."

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    async def generate_group(self, task: GroupTask) -> Group:
        members = await asyncio.gather(*(self._episode(task, sample) for sample in range(task.n)))
        return Group(task.group_id, task.prompt_uid, task.n, tuple(members))

    async def _episode(self, task: GroupTask, sample: int) -> Trajectory:
        name = f"{task.group_id}/{sample}"
        messages: list[dict[str, Any]] = list(task.messages)
        builder = RowBuilder(self.policy.renderer, messages)
        turns: list[Turn] = []
        for turn in range(2):
            request = GenerateRequest(f"{name}/{turn}", tuple(builder.ids), SAMPLING, max_tokens=4, session_id=name)
            result = await self.policy.engine.generate(request)
            builder.add(Span.sampled(result.token_ids, result.logprobs, result.versions, SAMPLING, turn))
            turns.append(Turn(turn, result.text, finish_reason=result.finish_reason))
            if turn == 0:
                messages += [{"role": "assistant", "content": result.text}, {"role": "user", "content": self.question}]
                builder.apply(builder.plan(result.text, messages), turn)
        with make(task.env_class, extras=dict(task.extras)) as env:
            rewards = tuple(Reward(turn.index, float(env.step(turn.action)["reward"])) for turn in turns)
        return Trajectory(
            trajectory_id=name, group_id=task.group_id, prompt_uid=task.prompt_uid, sample=sample, attempt=0,
            rows=builder.rows(), turns=tuple(turns), rewards=rewards, outcome=Completed(),
            scheduled_step=task.scheduled_step,
        )  # fmt: skip


async def run(model: str) -> None:
    rows = arithmetic_rows(8, largest=3, operations="+")
    async with open_policy(model, lr=4e-4) as policy:
        await show_format(policy, rows, steps=40, seed=0)
        generator = SelfCheck(policy)
        for step in range(1, 4):
            tasks = [
                GroupTask(f"{row['uid']}@{step}", row["uid"], tuple(row["prompt"]), row["env_class"], row, n=8)
                for row in rows
            ]
            groups = await asyncio.gather(*map(generator.generate_group, tasks))
            metrics = await update(policy, groups, AlgorithmSettings(), step)
            print(f"step {step}: reward {mean_reward(groups):.3f}, {metrics['trained']:.0f} tokens trained")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(str(tiny_model_dir(scratch))))
