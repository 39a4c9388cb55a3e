"""A generator object written for SkyRL, used as a Slipstream generator.

Owns: building SkyRL's documented generator input from a task, calling ``generate``, converting its output.
Refuses: what ``skyrl`` refuses; hiding a broken output (a ``ContractError`` stops the run: it would repeat).

>>> generator = SkyRLGenerator(my_generator, RolloutSettings())   # doctest: +SKIP
>>> group = await generator.generate_group(task)                  # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from slipstream.config.settings import RolloutSettings, SamplingSettings
from slipstream.errors import ContractError
from slipstream.rollout.failures import FailureLedger
from slipstream.rollout.skyrl import Conversion, Slot, groups_from_skyrl
from slipstream.rollout.types import AttemptSuperseded, GroupFinished, GroupTask, OnEvent, sampling_spec
from slipstream.trajectory import Failed, Group, Trajectory


@dataclass(frozen=True)
class BatchMetadata:
    """What SkyRL tells a generator about the batch."""

    global_step: int
    training_phase: Literal["train", "eval"]


class SkyRLStyle(Protocol):
    """SkyRL's generator interface."""

    async def generate(self, input_batch: dict[str, Any]) -> Any:
        """Batched input -> batched output, same order, same count."""
        ...


class SkyRLGenerator:
    """Implements ``Generator`` over an object with ``async generate(input_batch)``.

    Args:
        generator: the user's object.
        settings: samples' sampling, failure budget.
        seconds: deadline of one ``generate`` call.
        step_rewards: see ``Conversion``.
        version: called before each batch; the weight version its tokens will carry, or None if it may change inside.
        decode: ids -> text, for the record of turns.
        on_event: as in ``TurnGenerator``.
    """

    def __init__(
        self,
        generator: SkyRLStyle,
        settings: RolloutSettings,
        *,
        seconds: float = 3600.0,
        step_rewards: Literal["last", "each"] | None = None,
        version: Any = None,
        decode: Any = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._generator, self._settings, self._seconds = generator, settings, seconds
        self._step_rewards, self._version, self._decode = step_rewards, version, decode
        self._on_event = on_event
        self.failures = FailureLedger(settings.failures)

    async def generate_group(self, task: GroupTask) -> Group:
        """One ``generate`` call per group (and one per retry of its failed members)."""
        self.failures.plan(task.phase, task.scheduled_step, task.n)
        members: dict[int, Trajectory] = {}
        waiting = list(range(task.n))
        for attempt in range(self._settings.failures.attempts):
            last = attempt + 1 == self._settings.failures.attempts
            for member in await self._attempt(task, waiting, attempt):
                members[member.sample] = member
            waiting = [i for i in waiting if isinstance(o := members[i].outcome, Failed) and o.retryable and not last]
            if not waiting:
                break
            for i in waiting:
                if self._on_event is not None:
                    self._on_event(AttemptSuperseded(task, members[i]))
        ordered = tuple(members[i] for i in range(task.n))
        for member in ordered:
            if isinstance(member.outcome, Failed):
                self.failures.failed(task.phase, task.scheduled_step, member.outcome.fault, member.outcome.reason)
        group = Group(task.group_id, task.prompt_uid, task.n, ordered)
        if self._on_event is not None:
            self._on_event(GroupFinished(task, group))
        return group

    async def _attempt(self, task: GroupTask, samples: list[int], attempt: int) -> tuple[Trajectory, ...]:
        sampling = task.sampling or self._settings.sampling
        slots = [
            Slot(
                task.group_id,
                task.prompt_uid,
                sample,
                task.n,
                task.env_class,
                task.messages,
                task.data_source,
                attempt,
            )
            for sample in samples
        ]
        how = Conversion(
            sampling_spec(sampling),
            task.scheduled_step,
            task.pass_index,
            self._version() if self._version is not None else None,
            self._step_rewards,
            self._decode,
        )
        try:
            async with asyncio.timeout(self._seconds):
                output = await self._generator.generate(self._input(task, slots, sampling))
        except ContractError:
            raise
        except Exception as error:  # noqa: BLE001 - fault boundary: user code; each member gets a typed failure
            kind = "generator_timeout" if isinstance(error, TimeoutError) else "generator_raised"
            failure = Failed(kind, f"{type(error).__name__}: {error}", retryable=True)
            return tuple(_failed(slot, how, failure) for slot in slots)
        (group,) = groups_from_skyrl(output, slots, how)
        return group.members

    def _input(self, task: GroupTask, slots: list[Slot], sampling: SamplingSettings) -> dict[str, Any]:
        return {
            "prompts": [copy.deepcopy(list(task.messages)) for _ in slots],
            "env_classes": [task.env_class for _ in slots],
            "env_extras": [copy.deepcopy(dict(task.extras)) for _ in slots],
            "sampling_params": {
                "max_generate_length": sampling.max_tokens_per_turn,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "stop": list(sampling.stop) or None,
                "logprobs": 1,
            },
            "trajectory_ids": [slot.trajectory_id for slot in slots],
            "batch_metadata": BatchMetadata(task.scheduled_step, "eval" if task.eval else "train"),
        }


def _failed(slot: Slot, how: Conversion, outcome: Failed) -> Trajectory:
    """A member of which there is nothing but its failure."""
    return Trajectory(
        trajectory_id=f"{slot.group_id}/s{slot.sample}/a{slot.attempt}",
        group_id=slot.group_id,
        prompt_uid=slot.prompt_uid,
        sample=slot.sample,
        attempt=slot.attempt,
        rows=(),
        turns=(),
        rewards=(),
        outcome=outcome,
        scheduled_step=how.scheduled_step,
        pass_index=how.pass_index,
        env_class=slot.env_class,
        data_source=slot.data_source,
        prompt=slot.prompt,
    )
