"""The default generator: a group's episodes side by side, with retries and a failure budget.

Owns: concurrency, retries, the failure ledger, exact mode's waves, the life of the environment pool.
Refuses: what happens inside an episode (``episode``), which groups are made (``schedule``), writing anything down.

Lifecycle: construct -> ``await start()`` (checks the chat template; implied by the first group) ->
``generate_group`` any number of times, also at once -> ``await aclose()``.  In exact mode call all ``generate_group``
of a step together (``asyncio.gather``) or use ``generate_groups``: the members of a wave are those groups that have
been asked for when the first episode asks the engine.

>>> generator = TurnGenerator(engine, Renderer(tokenizer), env_factory, settings, seed=0)  # doctest: +SKIP
>>> group = await generator.generate_group(task)                                          # doctest: +SKIP
>>> [member.outcome.kind for member in group.members]                                     # doctest: +SKIP
['completed', 'failed']
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from slipstream.config.settings import EnvSettings, RolloutSettings
from slipstream.inference.types import Engine, KeepsSessions
from slipstream.rollout.environment import EnvCounters, EnvFactory
from slipstream.rollout.envpool import EnvPool
from slipstream.rollout.episode import Episode, Job, Services, run_cancellable
from slipstream.rollout.failures import FailureLedger
from slipstream.rollout.meter import TokenMeter
from slipstream.rollout.progress import MemberProgress
from slipstream.rollout.renderer import Renderer, TemplateReport
from slipstream.rollout.types import (
    AttemptCancelled,
    AttemptSuperseded,
    GroupFinished,
    GroupTask,
    MemberFinished,
    OnEvent,
    RolloutEvent,
)
from slipstream.rollout.waves import DirectLine, Line, WaveGate, WaveLog
from slipstream.trajectory import Cancelled, Failed, Group, Trajectory


class _Open:
    """A group that runs: finished members, and the latest episode of each other one."""

    def __init__(self, task: GroupTask) -> None:
        self.task = task
        self.done: dict[int, Trajectory] = {}
        self.live: dict[int, Episode] = {}
        self.told: set[int] = set()
        """Members that were taken back and told of: their tokens are the listener's, though others still end."""

    @property
    def tokens(self) -> int:
        """Sampled tokens of the group, those of an earlier start that no episode has taken up yet included."""
        known = self.done.keys() | self.live.keys() | self.told
        waiting = [p for i, p in self.task.progress.items() if i not in known]
        return (
            sum(member.sampled_tokens for member in self.done.values())
            + sum(episode.sampled_tokens for episode in self.live.values())
            + sum(progress.tokens for progress in waiting)
        )


def make_env_factory(settings: EnvSettings) -> EnvFactory:
    """``slipstream.envs.make`` with ``env_config`` and ``extras``, as skyrl-gym's generator calls it.

    ``env_config`` holds ``env.kwargs``, a copy for each instance, where a row names the run's own environment
    (``env.id``); the settings of that one are not those of another, which gets an empty ``env_config``.
    """
    from slipstream.envs import make
    from slipstream.envs.registration import EnvConfig

    def factory(env_class: str, extras: dict[str, Any]) -> Any:
        own = copy.deepcopy(settings.kwargs) if env_class == settings.id else {}
        return make(env_class, env_config=EnvConfig(own), extras=extras)

    return factory


class TurnGenerator:
    """See the module's docstring.

    Args:
        engine: any ``Engine``.
        renderer: the one renderer of the run; the engine's EOS ids are added to it at ``start``.
        env_factory: ``(env_class, extras) -> environment``.
        settings: budgets, concurrency, sampling defaults.
        seed: the run's seed; noise is keyed by ``SampleKey``.
        determinism: ``exact`` submits lock-step waves (``concurrency`` then does not bound; the engine's batch does).
        engine_seconds: deadline of one engine call (of one wave in exact mode).
        use_cache_salt: separate prefix caches by weight version, as captured when a group starts.
        published: the version that was published last; later turns take it for their salt.
        on_event: told of completed turns, of superseded and cancelled attempts, and of finished members and groups, on
            the event loop.
        samples_per_step: training samples that a step usually asks for; the failure budget is a share of at least
            these, since groups may be asked for one by one.
        waves: records exact mode's waves, or repeats recorded ones.
        record_turns: tell of completed turns of training groups, with snapshots of environments that give them.
        routed_experts: ask the engine for the experts of every training token (``training.routing_replay``).
        top_logprobs: ask the engine for so many of the most likely tokens in every place of a training sample.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        env_factory: EnvFactory,
        settings: RolloutSettings,
        seed: int,
        *,
        determinism: Literal["fast", "exact"] = "fast",
        engine_seconds: float = 600.0,
        use_cache_salt: bool = False,
        model: str = "policy",
        on_event: OnEvent | None = None,
        samples_per_step: int = 0,
        waves: WaveLog | None = None,
        record_turns: bool = False,
        routed_experts: bool = False,
        top_logprobs: int = 0,
        published: Callable[[], str | None] | None = None,
    ) -> None:
        self.engine, self.renderer, self.settings, self.seed = engine, renderer, settings, seed
        self.counters = EnvCounters()
        self.meter = TokenMeter()
        self.pool = EnvPool(settings.env_workers)
        self.failures = FailureLedger(settings.failures, samples_per_step)
        self.template: TemplateReport | None = None
        self._env_factory = env_factory
        self._engine_seconds, self._salted, self._model = engine_seconds, use_cache_salt, model
        self._on_event, self._record_turns = on_event, record_turns
        self._routed_experts, self._top_logprobs = routed_experts, top_logprobs
        self._published = published
        self.gate = WaveGate(engine, engine_seconds, waves) if determinism == "exact" else None
        self._direct = DirectLine(engine, engine_seconds)
        self._order = itertools.count()
        self._context_tokens = 0
        self._open: dict[str, _Open] = {}
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def start(self) -> TemplateReport:
        """Ask the engine for its limits, check the chat template both ways; idempotent."""
        if self.template is None:
            info = await self.engine.info()
            self._context_tokens = info.max_model_len
            self.renderer.add_eos(info.eos_token_ids)
            self.template = self.renderer.check()
        return self.template

    async def aclose(self) -> None:
        """End the pool's idle threads.  Environments are closed by their episodes already."""
        self.pool.close()

    def held_tokens(self) -> int:
        """Sampled tokens of training groups that are not finished."""
        return sum(group.tokens for group in self._open.values() if not group.task.eval)

    async def generate_groups(self, tasks: Sequence[GroupTask]) -> list[Group]:
        """All groups at once, in the order of ``tasks``; in exact mode they share their waves."""
        entered = [(task, self._enter(task)) for task in tasks]
        try:
            return await together([self._generate(task, lines) for task, lines in entered])
        finally:  # also for groups that were cancelled before they began
            for _, lines in entered:
                for line in lines:
                    line.leave()

    async def generate_group(self, task: GroupTask) -> Group:
        """All ``n`` samples of one prompt; see ``Generator``."""
        # No await before this line: all groups asked for together must be known before one of them can ask.
        return await self._generate(task, self._enter(task))

    def _enter(self, task: GroupTask) -> list[Line]:
        """Register the group with the budget and, in exact mode, with the waves."""
        self.failures.plan(task.phase, task.scheduled_step, task.n)
        number = next(self._order)
        if self.gate is None:
            return [self._direct] * task.n
        gate = self.gate
        return [gate.join((number, sample)) for sample in range(task.n)]

    async def _generate(self, task: GroupTask, lines: Sequence[Line]) -> Group:
        here = self._open[task.group_id] = _Open(task)
        try:
            await self.start()
            salt = await self._salt() if self._salted else None
            services = Services(
                self.renderer,
                self.pool,
                self.counters,
                self._env_factory,
                self.settings,
                self.seed,
                self._context_tokens,
                self.meter,
                salt,
                self._model,
                published=self._published,
                tell=self._on_event if self._record_turns and not task.eval else None,
                tell_recovered=self._tell,
                routed_experts=self._routed_experts,
                top_logprobs=self._top_logprobs,
            )
            members = await together([self._sample(here, i, services, lines[i]) for i in range(task.n)])
        except BaseException:
            for member in here.done.values():  # the episodes that were under way tell for themselves
                self._tell(AttemptCancelled(task, member))
            raise
        finally:
            del self._open[task.group_id]
            for line in lines:
                line.leave()
        group = Group(task.group_id, task.prompt_uid, task.n, tuple(members))
        self._tell(GroupFinished(task, group))
        return group

    async def _sample(self, here: _Open, sample: int, services: Services, line: Line) -> Trajectory:
        """One member: retryable failures are tried again on a fresh environment, up to the budget.

        What an earlier start of the run completed is not done again; if it does not fit any more (``Cancelled``), the
        sample begins anew.
        """
        task, failures = here.task, self.settings.failures
        known = task.progress.get(sample, MemberProgress(task.first_attempt))
        try:
            if known.finished is not None:
                here.done[sample] = known.finished
                return known.finished
            past, tries = known.turns, known.attempt - task.first_attempt
            for attempt in itertools.count(known.attempt):
                trajectory = await self._attempt(here, Job(task, sample, attempt, past), services, line)
                outcome, past = trajectory.outcome, ()
                tries += 1
                for_good = isinstance(outcome, Failed) and (not outcome.retryable or tries >= failures.attempts)
                if for_good or not isinstance(outcome, Failed | Cancelled):
                    break
                self._tell(AttemptSuperseded(task, trajectory))
            here.done[sample] = trajectory
            del here.live[sample]
            if isinstance(outcome, Failed):  # may raise: the group is then taken back, this member with the others
                self.failures.failed(task.phase, task.scheduled_step, outcome.fault, outcome.reason)
            self._tell(MemberFinished(task, trajectory))
            return trajectory
        finally:
            line.leave()

    async def _attempt(self, here: _Open, job: Job, services: Services, line: Line) -> Trajectory:
        episode = here.live[job.sample] = Episode(job, services, line.submit)

        def told(trajectory: Trajectory) -> None:
            here.told.add(job.sample)
            here.live.pop(job.sample, None)
            self._tell(AttemptCancelled(job.task, trajectory))

        ended: Trajectory | None = None
        try:
            # Waves need every live episode at the gate, so a bound here would stop them.
            slot = self._semaphore() if self.gate is None else contextlib.nullcontext()
            ended = await run_cancellable(episode, told, slot)
            return ended
        finally:
            if isinstance(self.engine, KeepsSessions):
                try:
                    await self.engine.finish_session(job.trajectory_id)
                except asyncio.CancelledError:  # an engine that is being replaced may keep it waiting
                    if ended is not None:
                        told(ended)
                    raise

    async def _salt(self) -> str:
        """What was published last; before that, what the engine says."""
        published = self._published() if self._published is not None else None
        return published or await self.engine.weight_version()

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.settings.concurrency))
        return self._slots[1]

    def _tell(self, event: RolloutEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


async def together(coroutines: Sequence[Any]) -> list[Any]:
    """Results in order; the first error cancels the others, waits for them, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in running]
