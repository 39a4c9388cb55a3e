"""Groups: retries, budgets, concurrency, cancellation, exact waves."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fakes import EOS, VOCAB, ByteTokenizer, EnvMaker, ScriptedEnv, step, user
from slipstream.config.settings import EnvSettings, FailureBudget, RolloutSettings, SamplingSettings
from slipstream.envs import BaseTextEnv, deregister, register
from slipstream.errors import BudgetExceededError, InferenceError
from slipstream.inference.fake import FakeEngine
from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.ledger import eval_metrics
from slipstream.rollout import (
    AttemptCancelled,
    AttemptSuperseded,
    GroupFinished,
    GroupTask,
    MemberFinished,
    Renderer,
    RolloutEvent,
    TurnGenerator,
    WaveGate,
    make_env_factory,
)
from slipstream.trajectory import Cancelled, Failed, Group, SamplingSpec

TOKENIZER = ByteTokenizer()


def task(number: int = 0, n: int = 2, **more: Any) -> GroupTask:
    return GroupTask(f"g{number}", f"p{number}", (user(f"question {number}"),), "env", n=n, **more)


def fake(**kwargs: Any) -> FakeEngine:
    return FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, **{"scale": 2.0, **kwargs})


def generator(engine: Any, env: Any, events: list[RolloutEvent] | None = None, **kwargs: Any) -> TurnGenerator:
    determinism = kwargs.pop("determinism", "fast")
    settings = RolloutSettings(**{"max_turns": 3, "sampling": SamplingSettings(max_tokens_per_turn=6), **kwargs})
    return TurnGenerator(
        engine,
        Renderer(TOKENIZER),
        env,
        settings,
        seed=3,
        determinism=determinism,
        on_event=events.append if events is not None else None,
    )


def two_turns(_: int) -> list[Any]:
    return [step(0.0, "more"), step(1.0, done=True)]


# ---- groups


async def test_group_holds_every_sample_with_its_own_noise_and_environment() -> None:
    maker, events = EnvMaker(two_turns), []
    rollout = generator(fake(), maker, events)
    group = await rollout.generate_group(task(n=4))
    await rollout.aclose()
    assert [m.sample for m in group.members] == [0, 1, 2, 3]
    assert group.size == 4
    assert len({next(m.sampled_spans()).token_ids for m in group.members}) > 1
    assert len(maker.made) == 4
    assert [type(e) for e in events] == [MemberFinished] * 4 + [GroupFinished]
    assert rollout.counters.open == 0


async def test_same_seed_same_tokens_and_another_pass_other_tokens() -> None:
    async def tokens(pass_index: int) -> list[tuple[int, ...]]:
        rollout = generator(fake(), EnvMaker(two_turns))
        group = await rollout.generate_group(task(n=3, pass_index=pass_index))
        await rollout.aclose()
        return [span.token_ids for m in group.members for span in m.sampled_spans()]

    assert await tokens(0) == await tokens(0)
    assert await tokens(0) != await tokens(1)


async def test_retryable_failure_is_tried_again_on_a_fresh_environment() -> None:
    maker = EnvMaker(lambda nth: [RuntimeError("blip")] if nth == 0 else [step(1.0, done=True)])
    events: list[RolloutEvent] = []
    rollout = generator(fake(), maker, events, failures=FailureBudget(attempts=3))
    group = await rollout.generate_group(task(n=1))
    await rollout.aclose()
    (member,) = group.members
    assert member.attempt == 1
    assert member.votes
    assert [env.closed for env in maker.made] == [1, 1]
    superseded = [e.trajectory for e in events if isinstance(e, AttemptSuperseded)]
    assert [(t.attempt, t.outcome.kind) for t in superseded] == [(0, "failed")]
    assert superseded[0].sampled_tokens > 0
    assert rollout.failures.fraction("train", 0) == 0.0


async def test_a_retry_draws_fresh_noise() -> None:
    engine = fake()
    maker = EnvMaker(lambda nth: [RuntimeError("blip")] if nth == 0 else [step(1.0, done=True)])
    rollout = generator(engine, maker)
    await rollout.generate_group(task(n=1))
    await rollout.aclose()
    assert engine.requests[0].token_ids == engine.requests[1].token_ids
    assert engine.requests[0].seed != engine.requests[1].seed


async def test_permanent_failure_is_not_retried() -> None:
    maker = EnvMaker(lambda nth: ["not a mapping"] if nth == 0 else [step(1.0, done=True)])
    rollout = generator(fake(), maker, failures=FailureBudget(attempts=5))
    group = await rollout.generate_group(task(n=2))
    await rollout.aclose()
    assert len(maker.made) == 2
    assert len(group.voters) == 1
    assert group.size == 2


async def test_siblings_of_a_failure_finish_and_vote() -> None:
    maker = EnvMaker(lambda nth: [ValueError("x")] if nth == 0 else [step(1.0, done=True)])
    rollout = generator(fake(), maker, failures=FailureBudget(attempts=1))
    group = await rollout.generate_group(task(n=8))
    await rollout.aclose()
    assert len(group.voters) == 7
    assert sum(isinstance(m.outcome, Failed) for m in group.members) == 1


async def test_budget_stops_the_run_and_names_the_first_cause() -> None:
    def build(nth: int) -> list[Any]:
        return [ValueError(f"boom {nth}")] if nth < 6 else [step(1.0, done=True)]

    rollout = generator(fake(), EnvMaker(build), failures=FailureBudget(attempts=1, max_failed_fraction=0.25))
    with pytest.raises(
        BudgetExceededError, match=r"[3-6] of 8 samples of train step 0 failed.*x env_raised .first: .*boom"
    ):
        await rollout.generate_groups([task(0, 4), task(1, 4)])
    await rollout.aclose()
    assert rollout.counters.open == 0


async def test_one_bad_group_does_not_stop_a_healthy_step() -> None:
    class Choosy(ScriptedEnv):
        def step(self, action: str) -> Any:
            if "question 0" in self.prompt[0]["content"]:
                raise ValueError
            return step(1.0, done=True)

    rollout = generator(fake(), lambda c, e: Choosy([], e), failures=FailureBudget(attempts=1))
    groups = await rollout.generate_groups([task(i, 2) for i in range(4)])
    await rollout.aclose()
    assert [len(group.voters) for group in groups] == [0, 2, 2, 2]
    assert rollout.failures.fraction("train", 0) == 0.25


async def test_dead_engine_ends_the_run_and_an_evaluation_too() -> None:
    def die(request: GenerateRequest) -> Sequence[int]:
        raise InferenceError("dead")

    rollout = generator(fake(reply=die), EnvMaker(two_turns), failures=FailureBudget(max_failed_fraction=1.0))
    for evaluation in (False, True):
        with pytest.raises(BudgetExceededError, match=r"engine_error.*dead"):
            await rollout.generate_groups([task(i, 2, eval=evaluation) for i in range(2)])
    await rollout.aclose()


async def test_evaluation_uses_its_own_sampling_and_failures_count_zero_apart() -> None:
    maker = EnvMaker(lambda nth: [ValueError("x")] if nth == 0 else [step(1.0, done=True)])
    engine = fake()
    rollout = generator(engine, maker, failures=FailureBudget(attempts=1, max_failed_fraction=0.1))
    greedy = SamplingSettings(temperature=0.0, max_tokens_per_turn=3)
    groups = await rollout.generate_groups([task(i, 1, eval=True, sampling=greedy) for i in range(4)])
    await rollout.aclose()
    assert {request.sampling for request in engine.requests} == {SamplingSpec(temperature=0.0)}
    assert {request.max_tokens for request in engine.requests} == {3}
    scores = eval_metrics(groups)
    assert {name.split("/")[-1]: value for name, value in scores.items()} == {
        "avg_score": 0.75,
        "pass_at_n": 0.75,
        "mean_positive_reward": 0.75,
        "failed_share": 0.25,
        "truncated_share": 0.75,
        "num_prompts": 4,
    }


async def test_concurrency_bounds_episodes_in_flight() -> None:
    now = most = 0
    lock = threading.Lock()

    class Counting(ScriptedEnv):
        def init(self, prompt: Any) -> Any:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            return super().init(prompt)

        def close(self) -> None:
            nonlocal now
            with lock:
                now -= 1

    rollout = generator(fake(), lambda c, e: Counting(two_turns(0), e), concurrency=3)
    await rollout.generate_groups([task(i, 3) for i in range(4)])
    await rollout.aclose()
    assert 1 < most <= 3


async def test_when_the_budget_ends_a_group_every_token_is_told_of() -> None:
    """Also those of the members whose failures ended it."""
    told: list[Any] = []
    maker = EnvMaker(lambda _: [step(0.0, "more"), RuntimeError("boom"), RuntimeError("boom")])
    settings = RolloutSettings(
        max_turns=3,
        sampling=SamplingSettings(max_tokens_per_turn=2),
        failures=FailureBudget(attempts=2, max_failed_fraction=0.1),
    )
    rollout = TurnGenerator(fake(), Renderer(TOKENIZER), maker, settings, 0, on_event=told.append)
    with pytest.raises(BudgetExceededError):
        await rollout.generate_group(task(n=4))
    await rollout.aclose()
    assert rollout.held_tokens() == 0
    tokens = sum(e.trajectory.sampled_tokens for e in told if isinstance(e, AttemptSuperseded | AttemptCancelled))
    assert tokens == rollout.meter.delivered["train"] > 0


async def test_an_episode_that_is_cancelled_while_its_session_is_ended_is_told_of() -> None:
    ending = asyncio.Event()

    class Slow(FakeEngine):
        async def finish_session(self, session_id: str) -> None:
            ending.set()
            await asyncio.Event().wait()

    told: list[Any] = []
    engine = Slow(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, reply=lambda _: list(b"ok"))
    maker = EnvMaker(lambda _: [step(1.0, done=True)])
    rollout = TurnGenerator(engine, Renderer(TOKENIZER), maker, RolloutSettings(), 0, on_event=told.append)
    running = asyncio.create_task(rollout.generate_group(task(n=1)))
    await ending.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rollout.aclose()
    assert [e.trajectory.sampled_tokens for e in told if isinstance(e, AttemptCancelled)] == [3]
    assert (rollout.meter.delivered["train"], rollout.held_tokens()) == (3, 0)


async def test_cache_salt_is_the_weight_version() -> None:
    engine = fake(weight_version="policy/2/7")
    settings = RolloutSettings(sampling=SamplingSettings(max_tokens_per_turn=2))
    maker = EnvMaker(lambda _: [step(1.0, done=True)])
    rollout = TurnGenerator(engine, Renderer(TOKENIZER), maker, settings, 0, use_cache_salt=True)
    await rollout.generate_group(task(n=1))
    await rollout.aclose()
    assert engine.requests[0].cache_salt == "policy/2/7"


async def test_a_turn_after_an_update_has_the_salt_of_the_weights_that_answer_it() -> None:
    engine = fake(weight_version="policy/2/7")

    published: list[str] = []

    def update(action: str) -> Any:
        published.append("policy/2/8")
        return step(0.0, "more")

    maker = EnvMaker(lambda _: [step(0.0, "more"), update, step(1.0, done=True)])
    settings = RolloutSettings(max_turns=3, sampling=SamplingSettings(max_tokens_per_turn=2))
    rollout = TurnGenerator(
        engine,
        Renderer(TOKENIZER),
        maker,
        settings,
        0,
        use_cache_salt=True,
        published=lambda: published[-1] if published else None,
    )
    await rollout.generate_group(task(n=1))
    await rollout.aclose()
    assert [request.cache_salt for request in engine.requests] == ["policy/2/7", "policy/2/7", "policy/2/8"]


# ---- cancellation


async def test_cancelled_group_closes_every_environment_once_and_reports_its_tokens() -> None:
    stepping = threading.Barrier(4)
    closed_in_mid_step: list[bool] = []

    class Slow(ScriptedEnv):
        def step(self, action: str) -> Any:
            if len(self.actions) == 1:
                stepping.wait(10)
                time.sleep(0.05)
                closed_in_mid_step.append(bool(self.closed))
            return super().step(action)

    made: list[Slow] = []

    def factory(env_class: str, extras: dict[str, Any]) -> Slow:
        made.append(Slow([step(0.0, "a"), step(0.0, "b"), step(1.0, done=True)], extras))
        return made[-1]

    events: list[RolloutEvent] = []
    rollout = generator(fake(), factory, events)
    running = asyncio.ensure_future(rollout.generate_group(task(n=3)))
    await asyncio.to_thread(stepping.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rollout.aclose()
    assert closed_in_mid_step == [False] * 3
    assert [env.closed for env in made] == [1, 1, 1]
    assert rollout.counters.open == 0
    cancelled = [e.trajectory for e in events if isinstance(e, AttemptCancelled)]
    assert len(cancelled) == 3
    assert all(isinstance(t.outcome, Cancelled) and t.sampled_tokens > 0 for t in cancelled)
    assert not any(isinstance(e, GroupFinished) for e in events)


async def test_a_member_that_was_taken_back_and_told_of_is_not_held_too() -> None:
    """One member is back at once, another still in its environment: a step that ends in between counts each once."""
    inside, leave = threading.Event(), threading.Event()

    class Stuck(ScriptedEnv):
        def step(self, action: str) -> Any:
            if self.extras["stuck"].pop():
                inside.set()
                leave.wait(10)
            return super().step(action)

    turns = iter([[True], [False]])
    maker = lambda env_class, extras: Stuck([step(1.0, "more"), step(1.0, done=True)], {"stuck": next(turns) * 9})  # noqa: E731
    told: list[RolloutEvent] = []
    engine = fake(step_seconds=0.02)
    rollout = generator(engine, maker, told)
    running = asyncio.ensure_future(rollout.generate_group(task(n=2)))
    await asyncio.to_thread(inside.wait, 10)
    running.cancel()
    while not told:
        await asyncio.sleep(0.001)
    apart = sum(e.trajectory.sampled_tokens for e in told if isinstance(e, AttemptCancelled))
    assert apart + rollout.held_tokens() == rollout.meter.delivered["train"]
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rollout.aclose()
    apart = sum(e.trajectory.sampled_tokens for e in told if isinstance(e, AttemptCancelled))
    assert (apart, rollout.held_tokens()) == (rollout.meter.delivered["train"], 0)


async def test_cancelling_while_the_engine_works_closes_environments() -> None:
    maker = EnvMaker(two_turns)
    rollout = generator(fake(step_seconds=10.0), maker, determinism="exact")
    running = asyncio.ensure_future(rollout.generate_group(task(n=2)))
    while not rollout.engine.requests:  # type: ignore[attr-defined]
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rollout.aclose()
    assert [env.closed for env in maker.made] == [1, 1]
    for _ in range(20):  # the wave's own task ends a few turns of the loop later
        await asyncio.sleep(0)
    metrics = await rollout.engine.metrics()
    assert metrics["num_requests_running"] + metrics["num_requests_waiting"] == 0


# ---- exact mode


class Batching(FakeEngine):
    """Records the composition of each ``generate_many``."""

    def __init__(self) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, scale=2.0)
        self.batches: list[list[str]] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        raise AssertionError("exact mode must submit waves")

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.batches.append([request.request_id for request in requests])
        return await super().generate_many(requests)


class Jittery(ScriptedEnv):
    """Steps and construction take a random time."""

    def __init__(self, script: Sequence[Any], extras: Any, noise: random.Random) -> None:
        super().__init__(script, extras)
        self.noise = noise
        time.sleep(self.noise.random() * 0.01)

    def step(self, action: str) -> Any:
        time.sleep(self.noise.random() * 0.02)
        return super().step(action)


async def waves(seed: int, together: bool) -> tuple[list[list[str]], list[Group]]:
    noise = random.Random(seed)
    engine = Batching()

    def factory(env_class: str, extras: dict[str, Any]) -> Jittery:
        turns = extras["turns"]
        return Jittery([*[step(0.0, "x")] * (turns - 1), step(1.0, done=True)], extras, noise)

    rollout = generator(engine, factory, determinism="exact", max_turns=4)
    tasks = [task(i, 2, extras={"turns": 1 + i}) for i in range(3)]
    if together:
        groups = await rollout.generate_groups(tasks)
    else:
        groups = list(await asyncio.gather(*(rollout.generate_group(t) for t in tasks)))
    await rollout.aclose()
    assert rollout.gate is not None
    assert rollout.gate.sizes == [len(batch) for batch in engine.batches]
    return engine.batches, groups


@pytest.mark.parametrize("together", [True, False])
async def test_waves_do_not_depend_on_how_long_environments_take(together: bool) -> None:
    first, groups = await waves(1, together)
    second, again = await waves(2, together)
    assert first == second
    assert first == [
        ["g0/s0/a0/t0", "g0/s1/a0/t0", "g1/s0/a0/t0", "g1/s1/a0/t0", "g2/s0/a0/t0", "g2/s1/a0/t0"],
        ["g1/s0/a0/t1", "g1/s1/a0/t1", "g2/s0/a0/t1", "g2/s1/a0/t1"],
        ["g2/s0/a0/t2", "g2/s1/a0/t2"],
    ]
    rows = [[m.row_tokens(0) for m in group.members] for group in groups]
    assert rows == [[m.row_tokens(0) for m in group.members] for group in again]


async def test_exact_and_fast_sample_the_same_tokens() -> None:
    async def tokens(determinism: str) -> list[list[int]]:
        rollout = generator(fake(), EnvMaker(two_turns), determinism=determinism)
        groups = await rollout.generate_groups([task(i, 2) for i in range(2)])
        await rollout.aclose()
        return [m.row_tokens(0) for group in groups for m in group.members]

    assert await tokens("exact") == await tokens("fast")


async def test_failing_and_retried_members_do_not_stop_the_waves() -> None:
    class Flaky(ScriptedEnv):
        made = 0

        def __init__(self, extras: Any) -> None:
            super().__init__(two_turns(0), extras)
            type(self).made += 1
            self.number = type(self).made

        def init(self, prompt: Any) -> Any:
            if self.number == 1:
                raise OSError("sandbox")
            return super().init(prompt)

        def step(self, action: str) -> Any:
            if self.number == 2 and not self.actions:
                self.actions.append(action)
                raise ValueError("blip")
            return super().step(action)

    rollout = generator(fake(), lambda c, e: Flaky(e), determinism="exact")
    async with asyncio.timeout(10):
        groups = await rollout.generate_groups([task(i, 2) for i in range(2)])
    await rollout.aclose()
    assert all(len(group.voters) == 2 for group in groups)


async def test_a_wave_that_fails_tells_every_asker_the_cause() -> None:
    class Dying(FakeEngine):
        async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
            raise InferenceError("engine thread died")

    gate = WaveGate(Dying(VOCAB), seconds=5)
    seats = [gate.join((0, i)) for i in range(2)]
    answers = await asyncio.gather(
        *(seat.submit(GenerateRequest(f"r{i}", (1,))) for i, seat in enumerate(seats)), return_exceptions=True
    )
    assert [str(answer) for answer in answers] == ["engine thread died"] * 2


async def test_a_wave_waits_for_a_seat_until_it_asks_or_leaves() -> None:
    gate = WaveGate(fake(), seconds=5)
    a, b = gate.join((0, 0)), gate.join((0, 1))
    asked = asyncio.ensure_future(a.submit(GenerateRequest("a", (1,), max_tokens=1)))
    await asyncio.sleep(0.02)
    assert not asked.done()
    assert gate.sizes == []
    b.leave()
    b.leave()
    assert (await asked).request_id == "a"
    assert gate.sizes == [1]


# ---- with many


async def test_a_hundred_episodes_with_random_faults_leave_nothing_open() -> None:
    noise = random.Random(0)
    release = threading.Event()
    choices = [
        two_turns(0),
        [step(1.0, done=True)],
        [ValueError("x")],
        ["wrong"],
        [step(float("nan"))],
        [lambda _: release.wait(30)],
    ]
    maker = EnvMaker(lambda _: noise.choices(choices, [8, 8, 1, 1, 1, 0.3])[0])
    rollout = generator(
        fake(), maker, env_workers=8, env_step_seconds=0.1, failures=FailureBudget(max_failed_fraction=0.9)
    )
    async with asyncio.timeout(30):
        groups = await rollout.generate_groups([task(i, 4) for i in range(25)])
    assert sum(len(group.members) for group in groups) == 100
    assert rollout.counters.open == 0
    assert all(env.closed == 1 for env in maker.made)
    assert rollout.pool.leaked == rollout.pool.abandoned > 0
    assert rollout.pool.threads <= 8
    release.set()
    await rollout.aclose()


# ---- the environments of a run


class Configured(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.config, self.extras = env_config, extras


@pytest.fixture
def two_environments() -> Iterator[None]:
    register("mine", Configured)
    register("another", Configured)
    yield
    deregister("mine")
    deregister("another")


@pytest.mark.usefixtures("two_environments")
def test_the_settings_of_the_runs_environment_are_not_those_of_another() -> None:
    build = make_env_factory(EnvSettings(id="mine", kwargs={"level": 3}))
    assert build("mine", {}).config.level == 3
    assert build("another", {}).config == {}


@pytest.mark.usefixtures("two_environments")
def test_instances_share_no_part_of_their_settings() -> None:
    settings = EnvSettings(id="mine", kwargs={"seen": [], "deep": {"a": [1]}})
    build = make_env_factory(settings)
    first, second = build("mine", {}), build("mine", {})
    first.config["seen"].append("x")
    first.config["deep"]["a"].append(2)
    assert second.config == settings.kwargs == {"seen": [], "deep": {"a": [1]}}


def test_task_without_samples_or_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="n must be >= 1"):
        task(n=0)
    with pytest.raises(ValueError, match="no messages"):
        replace(task(), messages=())
