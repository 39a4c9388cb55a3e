"""The turn loop: token in, token out.

Owns: one episode, from the prompt to an outcome; the only place where a policy and an environment talk.
Refuses: groups, retries, advantages.  Nothing that breaks in a turn is an exception here: it is an outcome.

One turn: the row's ids go to the engine as they are; what comes back is a SAMPLED span with its log-probs, versions
and sampling spec; the text goes to the environment; its messages are rendered behind the turn as an OBSERVATION.
The list of messages that the environment's ``init`` returned is the history, and stays the same object throughout
(environments may edit it); the turn and the observations are appended to it after ``step``.

How an episode ends:

* ``Completed``: the environment said ``done`` and the last turn ended by itself.
* ``Truncated``: ``turn_tokens`` (the last turn was cut), ``total_tokens`` or ``context`` (no room for another turn),
  ``max_turns``.  Rewards earned so far stay.
* ``Failed``: see ``trajectory.Failed``; sampled tokens stay in the record and are not trained.
* ``Cancelled``: the task was taken back, or the records that it was to go on from do not fit any more.

An episode that was begun by an earlier start of the run (``Job.past``) repeats its completed turns first: the sampled
spans as they are, and the environment by snapshot or by its actions; see ``progress``.

>>> trajectory = await Episode(job, services).run()   # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from slipstream.config.settings import RolloutSettings
from slipstream.errors import ContractError, InferenceError
from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.rollout.environment import EnvCounters, EnvFactory, EnvFault, EnvSession, StepResult
from slipstream.rollout.envpool import EnvPool
from slipstream.rollout.meter import TokenMeter
from slipstream.rollout.progress import TurnRecord, context_digest
from slipstream.rollout.renderer import Renderer, TemplateError
from slipstream.rollout.rows import RowBuilder
from slipstream.rollout.types import GroupTask, OnEvent, TurnCompleted, TurnRecovered, sampling_spec
from slipstream.trajectory import (
    KEPT_SETS,
    TOP_LOGPROBS,
    Cancelled,
    Completed,
    Failed,
    Message,
    Outcome,
    Reward,
    Row,
    SampleKey,
    SideChannel,
    Span,
    Trajectory,
    Truncated,
    Turn,
)

Submit = Callable[[GenerateRequest], Awaitable[GenerateResult]]
_IDLE_ABORTS = 3
_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Services:
    """What every episode of a generator shares."""

    renderer: Renderer
    pool: EnvPool
    counters: EnvCounters
    env_factory: EnvFactory
    settings: RolloutSettings
    seed: int
    context_tokens: int
    meter: TokenMeter
    cache_salt: str | None = None
    model: str = "policy"
    published: Callable[[], str | None] | None = None
    """The version that was published last: the cache salt of a later turn, where salts are on."""
    tell: OnEvent | None = None
    """Told of completed turns (with the environment's snapshot, where it gives one)."""
    tell_recovered: OnEvent | None = None
    """Told of turns that were gone on with after an engine or an environment was lost."""
    routed_experts: bool = False
    """Ask the engine for the experts of every token, for routing replay."""
    top_logprobs: int = 0
    """Ask the engine for so many of the most likely tokens in every place."""


@dataclass(frozen=True)
class Job:
    """Which episode: the group's task, the sample's index, the try, and the turns that are completed already."""

    task: GroupTask
    sample: int
    attempt: int
    past: tuple[TurnRecord, ...] = ()

    @property
    def trajectory_id(self) -> str:
        """``group/sSAMPLE/aATTEMPT``."""
        return f"{self.task.group_id}/s{self.sample}/a{self.attempt}"


@dataclass(frozen=True)
class _Reply:
    """One turn as sampled; its spans are in the builder already."""

    spans: tuple[Span, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(span) for span in self.spans)

    @property
    def info(self) -> dict[str, Any]:
        """How the turn ended, for the environment."""
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason, "tokens": self.tokens}


class _Stop(Exception):
    """Not an error: it carries an outcome out of the loop."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class _EngineLost(_Stop):
    """A request that was not answered."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed)
        self.failed = failed


class Episode:
    """One try at one sample.  ``run`` is called once."""

    def __init__(self, job: Job, services: Services, submit: Submit) -> None:
        self.job = job
        self._services = services
        self._submit = submit
        settings = job.task.sampling or services.settings.sampling
        self._sampling = settings
        self._spec = sampling_spec(settings)
        self._builder: RowBuilder | None = None
        self._turns: list[Turn] = []
        self._played: list[tuple[_Reply, StepResult]] = []
        self._snapshot: Any = None
        self._salt = services.cache_salt
        self._rewards: list[Reward] = []
        self._session: EnvSession | None = None
        self._prompt: tuple[Message, ...] = job.task.messages
        self._metrics: dict[str, float] = {}
        self._started = time.perf_counter()
        self._repeated = 0

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens that the episode holds, those of turns it has still to repeat included."""
        built = self._builder.sampled_tokens if self._builder is not None else 0
        return built + sum(record.tokens for record in self.job.past[self._repeated :])

    async def run(self) -> Trajectory:
        """Play the episode; the environment is closed whatever happens.

        A cancelled task raises ``CancelledError`` as usual; ``trajectory(Cancelled(...))`` tells what there was.
        """
        try:
            outcome = await self._play()
            if self._session is not None and not isinstance(outcome, Failed):
                self._metrics = await self._session.metrics()
        finally:
            if self._session is not None:
                await self._session.close()
        return self.trajectory(outcome)

    def trajectory(self, outcome: Outcome) -> Trajectory:
        """The record of the episode as far as it got; called once, at its end."""
        job, task = self.job, self.job.task
        self._services.meter.dropped += sum(record.tokens for record in job.past[self._repeated :])
        self._repeated = len(job.past)
        rows: tuple[Row, ...] = self._builder.rows() if self._builder is not None else ()
        return Trajectory(
            trajectory_id=job.trajectory_id,
            group_id=task.group_id,
            prompt_uid=task.prompt_uid,
            sample=job.sample,
            attempt=job.attempt,
            rows=rows,
            turns=tuple(self._turns),
            rewards=tuple(self._rewards),
            outcome=outcome,
            scheduled_step=task.scheduled_step,
            pass_index=task.pass_index,
            env_class=task.env_class,
            env_revision=self._session.revision if self._session is not None else "",
            data_source=task.data_source,
            prompt=self._prompt,
            env_metrics=dict(self._metrics),
            seconds=time.perf_counter() - self._started,
        )

    def cancelled(self, why: str) -> Trajectory:
        """The record of an episode that was taken back."""
        return self.trajectory(Cancelled(why))

    async def _play(self) -> Outcome:
        try:
            history, builder = await self._begin()
            turns = self._turn_limit()
            for turn in range(turns):
                if turn < len(self.job.past):
                    reply, step = await self._repeat(self.job.past[turn], history, builder)
                else:
                    reply, step = await self._new_turn(turn, history, builder)
                ended = self._ended(step, reply)
                if ended is not None:
                    return ended
                if turn + 1 < turns:
                    self._observe(turn, reply, step, history, builder)
            return Truncated("max_turns")
        except _Stop as stop:
            return stop.outcome
        except EnvFault as fault:
            return Failed(fault.fault, fault.reason, fault.retryable)
        except TemplateError as error:
            return Failed("template", str(error), retryable=False)

    def _turn_limit(self) -> int:
        """``rollout.max_turns``, or less where the data row says so in ``max_turns``."""
        most = self._services.settings.max_turns
        own = self.job.task.extras.get("max_turns")
        if own is None:  # also a null, which Parquet fills in where only other rows have the column
            return most
        if isinstance(own, bool) or not isinstance(own, int) or own < 1:
            reason = f"the row's max_turns must be a whole number from 1 on, got {own!r}"
            raise _Stop(Failed("bad_row", reason, retryable=False))
        return min(most, own)

    async def _begin(self) -> tuple[list[Message], RowBuilder]:
        services, task = self._services, self.job.task
        settings = services.settings
        self._session = await self._open()
        history = await self._session.init(task.messages)
        if not history:
            raise EnvFault("env_type", "init returned no messages", retryable=False)
        self._prompt = tuple(dict(message) for message in history)
        builder = RowBuilder(services.renderer, history)
        if not builder.ids:
            raise _Stop(Failed("template", "the chat template rendered an empty prompt", retryable=False))
        limit = min(settings.max_prompt_tokens, self._limit()[0] - 1)
        if len(builder.ids) > limit:
            raise _Stop(
                Failed(
                    "prompt_too_long",
                    f"the prompt has {len(builder.ids)} tokens, the limit is {limit} (rollout.max_prompt_tokens, "
                    "rollout.max_total_tokens and the engine's context); raise it or filter the data",
                    retryable=False,
                )
            )
        self._builder = builder
        return history, builder

    async def _open(self) -> EnvSession:
        services, task = self._services, self.job.task
        extras = {**task.extras, "max_turns": self._turn_limit()}
        seconds = services.settings.env_step_seconds
        return await EnvSession.open(
            services.pool, services.env_factory, task.env_class, extras, seconds, services.counters
        )

    def _limit(self) -> tuple[int, str]:
        """Tokens a row may have, and the name of the budget that says so."""
        total, context = self._services.settings.max_total_tokens, self._services.context_tokens
        return (total, "total_tokens") if total <= context else (context, "context")

    async def _new_turn(self, turn: int, history: list[Message], builder: RowBuilder) -> tuple[_Reply, StepResult]:
        """Sample a turn and give it to the environment."""
        session, tell = self._session, self._services.tell
        assert session is not None
        context = context_digest(builder.ids) if tell is not None else ""
        reply = await self._generate(turn, builder)
        before = session.env_seconds
        step = await self._act(turn, reply, history)
        if tell is not None:
            session = self._session  # it may be another one now
            assert session is not None
            self._snapshot = None if step.done else await session.snapshot()
            record = TurnRecord(
                turn, context, reply.spans, reply.text, reply.finish_reason, reply.stop_reason, reply.seconds,
                session.env_seconds - before, step, self._snapshot,
            )  # fmt: skip
            tell(TurnCompleted(self.job.task, self.job.sample, self.job.attempt, record))
        return reply, step

    async def _repeat(
        self, record: TurnRecord, history: list[Message], builder: RowBuilder
    ) -> tuple[_Reply, StepResult]:
        """Take a completed turn from its record, and bring the environment to where it was after it."""
        session, past = self._session, self.job.past
        assert session is not None
        if context_digest(builder.ids) != record.context:
            raise _Stop(Cancelled(f"resume: turn {record.turn} continued other tokens than the prompt has now"))
        for span in record.spans:
            builder.add(span)
        self._repeated = record.turn + 1
        reply = _Reply(record.spans, record.text, record.finish_reason, record.stop_reason, record.llm_seconds)
        if past[-1].snapshot is not None and session.restores:
            if record is past[-1]:
                await session.restore(record.snapshot)
                self._snapshot = record.snapshot
            self._note(record.turn, reply, record.step, record.env_seconds, history)
            return reply, record.step
        step = await self._act(record.turn, reply, history)
        if step != record.step:
            raise _Stop(Cancelled(f"resume: repeating turn {record.turn}, the environment answered something else"))
        return reply, step

    # ---- sampling

    async def _generate(self, turn: int, builder: RowBuilder) -> _Reply:
        """One turn from the engine.

        An engine that was interrupted (``abort``) returns what it has; the turn goes on from there.  One that is lost
        under a later turn is asked once more, so that completed turns need not be sampled again; a pool has another
        replica, or restarts this one.
        """
        started = time.perf_counter()
        budget = min(self._sampling.max_tokens_per_turn, self._limit()[0] - len(builder.ids))
        parts: list[GenerateResult] = []
        spans: list[Span] = []
        idle = lost = 0
        while True:
            made = sum(len(part.token_ids) for part in parts)
            try:
                result = await self._ask(turn, builder, budget - made, part=len(parts) + idle + lost)
            except _EngineLost as error:
                if lost or not self._played:
                    raise
                lost += 1
                self._recovered(turn, error.failed)
                continue
            if result.token_ids:
                builder.add(self._span(turn, result))
                self._note_routes(turn, result, builder)
                spans.append(builder.last)
                parts.append(result)
            elif result.finish_reason == "abort":
                idle += 1
            if result.finish_reason != "abort" or made + len(result.token_ids) >= budget or idle >= _IDLE_ABORTS:
                break
        if not parts:
            raise _Stop(Failed("empty_generation", f"turn {turn}: the engine returned no tokens", retryable=True))
        finish = "length" if result.finish_reason == "abort" and idle < _IDLE_ABORTS else result.finish_reason
        reply = _Reply(
            tuple(spans),
            self._text(parts),
            finish,
            result.stop_reason,
            time.perf_counter() - started,
        )
        if finish == "abort":
            self._turns.append(Turn(turn, reply.text, (), finish, None, reply.seconds))
            raise _Stop(Failed("engine_abort", f"turn {turn}: the engine keeps aborting the request", retryable=True))
        return reply

    async def _ask(self, turn: int, builder: RowBuilder, max_tokens: int, part: int) -> GenerateResult:
        job, services, sampling = self.job, self._services, self._sampling
        key = SampleKey(services.seed, job.task.prompt_uid, job.task.pass_index, job.sample, job.attempt, turn)
        if turn and self._salt is not None and services.published is not None:
            # The weights may have changed since the turns before; what they left in a cache is not for this one.
            self._salt = services.published() or self._salt
        request = GenerateRequest(
            request_id=f"{job.trajectory_id}/t{turn}" + (f".{part}" if part else ""),
            token_ids=tuple(builder.ids),
            sampling=self._spec,
            max_tokens=max_tokens,
            stop=sampling.stop,
            # A continuation draws fresh noise: reusing position 0's would repeat the start of the turn.
            seed=(key.derive() + part * _MIX) & 0x7FFFFFFFFFFFFFFF,
            model=services.model,
            session_id=job.trajectory_id,
            group_id=job.task.group_id,
            cache_salt=self._salt,
            # What the update has to replay; an evaluation is never trained on.
            kept_sets=self._spec.cut and not job.task.eval,
            routed_experts=services.routed_experts and not job.task.eval,
            top_logprobs=0 if job.task.eval else services.top_logprobs,
        )
        services.meter.asked()
        try:
            result = await self._submit(request)
        except BaseException as error:
            services.meter.lost()
            if not isinstance(error, (InferenceError, TimeoutError, OSError)):
                raise
            reason = f"turn {turn}: {type(error).__name__}: {error}"  # fault boundary: an engine may die
            raise _EngineLost(Failed("engine_error", reason, retryable=True)) from error
        services.meter.answered(job.task.phase, len(result.token_ids))
        return result

    def _span(self, turn: int, result: GenerateResult) -> Span:
        try:
            side: dict[str, SideChannel] = {}
            if result.kept_sets is not None:
                side[KEPT_SETS] = SideChannel(KEPT_SETS, "token", result.kept_sets)
            if result.top_logprobs is not None:
                side[TOP_LOGPROBS] = SideChannel(TOP_LOGPROBS, "token", result.top_logprobs)
            return Span.sampled(result.token_ids, result.logprobs, result.versions, self._spec, turn, side)
        except ContractError as error:
            self._services.meter.refused += len(result.token_ids) if not self.job.task.eval else 0
            reason = f"turn {turn}: the engine's answer breaks the contract: {error}"
            raise _Stop(Failed("engine_contract", reason, retryable=False)) from error

    def _note_routes(self, turn: int, result: GenerateResult, builder: RowBuilder) -> None:
        """Keep the experts of everything that was fed: the row's tokens but the newest."""
        routes = result.routed_experts
        if routes is None:
            return
        if len(routes) != len(builder.ids) - 1:
            reason = f"turn {turn}: experts of {len(routes)} tokens for {len(builder.ids) - 1} that were fed"
            raise _Stop(Failed("engine_contract", reason, retryable=False))
        builder.note_routes(routes)

    def _text(self, parts: list[GenerateResult]) -> str:
        if len(parts) == 1:
            return parts[0].text
        text = self._services.renderer.decode([token for part in parts for token in part.token_ids])
        stop = parts[-1].stop_reason
        at = text.find(stop) if isinstance(stop, str) else -1
        return text if at < 0 else text[:at]

    # ---- the environment

    async def _act(self, turn: int, reply: _Reply, history: list[Message]) -> StepResult:
        """Give the turn to the environment, then append it and the observations to the history.

        An environment that breaks on a later turn (its server may have died) gets one more chance: a fresh one is
        brought to where it was, so that completed turns need not be sampled again.
        """
        assert self._session is not None
        before = self._session.env_seconds
        try:
            try:
                step = await self._session.step(reply.text, reply.info)
            except EnvFault as fault:
                if fault.fault != "env_raised" or not self._played:
                    raise
                await self._replace_environment(fault)
                self._recovered(turn, Failed(fault.fault, fault.reason, fault.retryable))
                step = await self._session.step(reply.text, reply.info)
        except BaseException:  # the turn is recorded also when the environment breaks on it
            self._add_turn(turn, reply, (), self._session.env_seconds - before)
            raise
        self._note(turn, reply, step, self._session.env_seconds - before, history)
        return step

    async def _replace_environment(self, fault: EnvFault) -> None:
        """A fresh environment in the state that follows the completed turns; raises ``fault`` where there is none."""
        old = self._session
        assert old is not None
        await old.close()
        self._session = session = await self._open()
        session.env_seconds += old.env_seconds
        differs = EnvFault(fault.fault, f"{fault.reason}; a fresh environment did not repeat the turns before", True)
        # One trajectory names one revision of its environment.
        if tuple(await session.init(self.job.task.messages)) != self._prompt or session.revision != old.revision:
            raise differs from fault
        if self._snapshot is not None and session.restores:
            await session.restore(self._snapshot)
            return
        for reply, step in self._played:
            if await session.step(reply.text, reply.info) != step:
                raise differs from fault

    def _recovered(self, turn: int, failed: Failed) -> None:
        if self._services.tell_recovered is not None:
            job = self.job
            self._services.tell_recovered(TurnRecovered(job.task, job.trajectory_id, turn, failed.fault, failed.reason))

    def _add_turn(self, turn: int, reply: _Reply, observations: tuple[Message, ...], env_seconds: float) -> None:
        self._turns.append(
            Turn(turn, reply.text, observations, reply.finish_reason, reply.stop_reason, reply.seconds, env_seconds)
        )

    def _note(self, turn: int, reply: _Reply, step: StepResult, env_seconds: float, history: list[Message]) -> None:
        """Record a turn and what the environment said, and append both to the history."""
        self._add_turn(turn, reply, step.observations, env_seconds)
        self._played.append((reply, step))
        self._rewards.extend(Reward(turn, value, name) for name, value in step.components.items())
        action = reply.text if step.postprocessed_action is None else step.postprocessed_action
        history.append({"role": "assistant", "content": action})
        history.extend(dict(message) for message in step.observations)

    def _ended(self, step: StepResult, reply: _Reply) -> Outcome | None:
        if not step.done:
            return None
        if reply.finish_reason != "length":
            return Completed()
        whole_turn = reply.tokens >= self._sampling.max_tokens_per_turn
        return Truncated("turn_tokens" if whole_turn else self._limit()[1])

    def _observe(self, turn: int, reply: _Reply, step: StepResult, history: list[Message], builder: RowBuilder) -> None:
        """Put the observations behind the turn, or stop when no token could follow them."""
        action = reply.text if step.postprocessed_action is None else step.postprocessed_action
        glue = builder.plan(action, history, rewritten=action != reply.text)
        limit, budget = self._limit()
        if builder.length_after(glue) >= limit:
            raise _Stop(Truncated(budget))
        builder.apply(glue, turn)


async def run_cancellable(
    episode: Episode, on_cancel: Callable[[Trajectory], None], slot: AbstractAsyncContextManager[Any]
) -> Trajectory:
    """``episode.run()`` within ``slot``; a cancelled episode's record goes to ``on_cancel`` before the error goes on.

    That holds also for one that still waits for its slot: it may have turns of an earlier start.
    """
    try:
        async with slot:
            return await episode.run()
    except asyncio.CancelledError:
        on_cancel(episode.cancelled("the task was cancelled"))
        raise
