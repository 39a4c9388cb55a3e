"""The turn loop: one behaviour of an episode each."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fakes import ALTERNATING, EOS, VOCAB, ByteTokenizer, EnvMaker, ScriptedEnv, step, user
from slipstream.config.settings import FailureBudget, RolloutSettings, SamplingSettings
from slipstream.errors import InferenceError
from slipstream.inference.fake import FakeEngine
from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.rollout import GroupTask, Renderer, TurnGenerator, TurnRecovered
from slipstream.trajectory import (
    Completed,
    Failed,
    Message,
    Missing,
    Origin,
    SampleKey,
    Trajectory,
    Truncated,
    VersionRun,
)

ONE_TRY = FailureBudget(attempts=1, max_failed_fraction=1)
TOKENIZER = ByteTokenizer()
HUGE = pytest.param(10**400, id="too large for a float")


def turn_of(request: GenerateRequest) -> int:
    return int(request.request_id.rpartition("/t")[2].partition(".")[0])


class Stage:
    """One scripted episode and everything it touched."""

    def __init__(
        self,
        script: Sequence[Any],
        *,
        reply: Callable[[GenerateRequest], Sequence[int] | None] | None = None,
        env: Callable[[str, dict[str, Any]], Any] | None = None,
        engine: Any = None,
        messages: tuple[Message, ...] = (user("hi"),),
        extras: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.maker = EnvMaker(lambda _: script)
        self.engine = engine or FakeEngine(
            VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, reply=reply or (lambda _: list(b"ok"))
        )
        settings = {"max_turns": 3, "failures": ONE_TRY, **settings}
        self.settings = RolloutSettings(**settings)
        self.env = env or self.maker
        self.task = GroupTask("g", "p", messages, "env", extras or {}, n=1)
        self.generator: TurnGenerator | None = None

    def play(self) -> Trajectory:
        async def run() -> Trajectory:
            self.generator = TurnGenerator(self.engine, Renderer(TOKENIZER), self.env, self.settings, seed=5)
            self.generator.failures.plan("train", 0, 1)  # as if a sibling were still to come
            try:
                group = await self.generator.generate_group(self.task)
            finally:
                await self.generator.aclose()
            return group.members[0]

        trajectory = asyncio.run(run())
        assert self.generator is not None
        assert self.generator.counters.open == 0
        return trajectory


def faulty(output: Any, **settings: Any) -> tuple[Failed, Stage]:
    stage = Stage([output], **settings)
    trajectory = stage.play()
    assert isinstance(trajectory.outcome, Failed)
    assert not trajectory.votes
    assert [env.closed for env in stage.maker.made] == [1] * len(stage.maker.made)
    return trajectory.outcome, stage


# ---- what is recorded


def test_spans_turns_rewards_and_metrics_of_a_two_turn_episode() -> None:
    stage = Stage([step(0.5, "more"), step(1, done=True)], extras={"data_source": "toy", "x": 1})
    trajectory = stage.play()
    assert [span.origin for span in trajectory.rows[0].spans] == [
        Origin.PROMPT,
        Origin.SAMPLED,
        Origin.OBSERVATION,
        Origin.SAMPLED,
    ]
    for span in trajectory.sampled_spans():
        assert span.logprobs == pytest.approx([-math.log(VOCAB)] * 3)
        assert span.versions == (VersionRun("policy/0/0", 0, 3),)
        assert span.sampling is not None
        assert span.sampling.temperature == 1.0
    assert [span.turn for span in trajectory.sampled_spans()] == [0, 1]
    assert trajectory.turn_rewards() == {0: 0.5, 1: 1.0}
    assert [turn.action for turn in trajectory.turns] == ["ok", "ok"]
    assert trajectory.turns[0].observations == (user("more"),)
    assert all(turn.env_seconds > 0 and turn.llm_seconds > 0 for turn in trajectory.turns)
    assert trajectory.outcome == Completed()
    assert trajectory.env_metrics == {"steps": 2.0}
    assert trajectory.data_source == "toy"
    assert trajectory.prompt == (user("hi"),)
    assert trajectory.trajectory_id == "g/s0/a0"


def test_requests_carry_session_group_and_a_seed_keyed_by_what_is_sampled() -> None:
    stage = Stage([step(0.0), step(1.0, done=True)])
    stage.play()
    for turn, request in enumerate(stage.engine.requests):
        assert request.seed == SampleKey(5, "p", 0, 0, 0, turn).derive()
        assert (request.session_id, request.group_id) == ("g/s0/a0", "g")


def test_observations_of_the_last_turn_are_recorded_but_not_tokenised() -> None:
    trajectory = Stage([step(1.0, "bye", done=True)]).play()
    assert trajectory.turns[0].observations == (user("bye"),)
    assert trajectory.rows[0].spans[-1].origin is Origin.SAMPLED


def test_reward_components_keep_their_names_and_add_up() -> None:
    output = step(1.0, done=True, metadata={"reward_components": {"format": 0.25, "correct": 0.5}})
    trajectory = Stage([output]).play()
    assert {r.component: r.value for r in trajectory.rewards} == {"format": 0.25, "correct": 0.5, "reward": 0.25}
    assert trajectory.total_reward == 1.0


@pytest.mark.parametrize("value", [True, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_of_any_kind_are_rewards(value: Any) -> None:
    trajectory = Stage([{"observations": [], "reward": value, "done": np.bool_(True)}]).play()
    assert trajectory.outcome == Completed()
    assert trajectory.total_reward == 1.0


@pytest.mark.parametrize("value", [None, Missing("grader down")])
def test_no_reward_is_missing_and_not_zero(value: Any) -> None:
    trajectory = Stage([step(value, done=True)]).play()
    assert trajectory.outcome == Completed()
    assert isinstance(trajectory.rewards[0].value, Missing)
    assert not trajectory.votes


# ---- the contract that environments rely on


def test_environment_gets_its_own_copies_and_max_turns() -> None:
    task_messages = (user("hi"),)
    extras = {"nested": {"k": []}}
    stage = Stage([step(1.0, done=True)], messages=task_messages, extras=extras)
    stage.play()
    env = stage.maker.made[0]
    env.extras["nested"]["k"].append(1)
    env.prompt[0]["content"] = "changed"
    assert extras == {"nested": {"k": []}}
    assert task_messages[0]["content"] == "hi"
    assert env.extras["max_turns"] == 3


def test_history_is_one_list_changed_in_place_after_step() -> None:
    seen: list[list[str]] = []

    class Watching(ScriptedEnv):
        def step(self, action: str) -> Any:
            seen.append([message["role"] for message in self.prompt])
            return super().step(action)

    stage = Stage([], env=lambda c, e: Watching([step(0.0, "x"), step(1.0, done=True)], e))
    stage.play()
    assert seen == [["user"], ["user", "assistant", "user"]]


def test_environment_that_pops_the_history_forks_a_row() -> None:
    class Popping(ScriptedEnv):
        def step(self, action: str) -> Any:
            self.prompt.pop()
            return super().step(action)

    trajectory = Stage(
        [], env=lambda c, e: Popping([step(0.0, "x"), step(1.0, done=True)], e), messages=(user("q"), user("scratch"))
    ).play()
    assert len(trajectory.rows) == 2
    assert "scratch" not in TOKENIZER.decode(trajectory.row_tokens(1))
    assert trajectory.sampled_tokens == 6


def test_postprocessed_action_forks_and_leaves_the_sampled_ids_alone() -> None:
    stage = Stage(
        [step(0.0, "x", postprocessed_action="ok, tidied"), step(1.0, done=True)], reply=lambda _: list(b"ok junk")
    )
    trajectory = stage.play()
    assert len(trajectory.rows) == 2
    assert next(trajectory.sampled_spans()).token_ids == (*b"ok junk", EOS)
    second = TOKENIZER.decode(stage.engine.requests[1].token_ids)
    assert "assistant\nok, tidied<|im_end|>" in second
    assert "junk" not in second
    assert trajectory.turns[0].action == "ok junk"


def test_a_forked_row_in_which_nothing_was_sampled_is_left_out() -> None:
    def reply(request: GenerateRequest) -> Sequence[int]:
        if turn_of(request) == 1:
            raise InferenceError("gone")
        return list(b"ok")

    trajectory = Stage([step(0.0, "x", postprocessed_action="changed")], reply=reply).play()
    assert isinstance(trajectory.outcome, Failed)
    assert len(trajectory.rows) == 1
    assert trajectory.sampled_tokens == 3


def test_environment_may_hear_how_the_turn_ended_before_it_scores_it() -> None:
    class Curious(ScriptedEnv):
        def on_generation(self, info: dict[str, Any]) -> None:
            self.info = info

        def step(self, action: str) -> Any:
            return step(-1.0 if self.info["finish_reason"] == "length" else 1.0, done=True)

    cut = Stage([], env=lambda c, e: Curious([], e), sampling=SamplingSettings(max_tokens_per_turn=1)).play()
    assert cut.total_reward == -1.0
    assert Stage([], env=lambda c, e: Curious([], e)).play().total_reward == 1.0


def test_environment_without_close_or_metrics_is_fine() -> None:
    class Bare:
        def init(self, prompt: Any) -> Any:
            return prompt, {}

        def step(self, action: str) -> Any:
            return step(1.0, done=True)

    assert Stage([], env=lambda c, e: Bare()).play().votes


# ---- how an episode ends


def test_cut_turn_is_scored_and_truncated() -> None:
    trajectory = Stage([step(0.5, done=True)], sampling=SamplingSettings(max_tokens_per_turn=2)).play()
    assert trajectory.outcome == Truncated("turn_tokens")
    assert trajectory.votes
    assert trajectory.total_reward == 0.5


def test_episode_goes_on_after_a_cut_turn_and_can_complete() -> None:
    replies = {0: list(b"too long"), 1: list(b"y")}
    trajectory = Stage(
        [step(0.0, "x"), step(1.0, done=True)],
        reply=lambda request: replies[turn_of(request)],
        sampling=SamplingSettings(max_tokens_per_turn=4),
    ).play()
    assert trajectory.outcome == Completed()
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "stop"]


def test_a_row_may_ask_for_fewer_turns_than_the_run_allows() -> None:
    stage = Stage([step(0.1, "x"), step(0.2, "y")], max_turns=2, extras={"max_turns": 1})
    trajectory = stage.play()
    assert trajectory.outcome == Truncated("max_turns")
    assert len(trajectory.turns) == 1
    assert stage.maker.made[0].extras["max_turns"] == 1
    assert Stage([step(0.1, "x"), step(0.2, "y")], max_turns=1, extras={"max_turns": 5}).play().outcome == Truncated(
        "max_turns"
    )


@pytest.mark.parametrize("wrong", [0, "2", True, 1.5])
def test_a_row_with_a_wrong_turn_limit_fails_by_name(wrong: Any) -> None:
    outcome = Stage([step(0.1, "x")], extras={"max_turns": wrong}).play().outcome
    assert isinstance(outcome, Failed)
    assert outcome.fault == "bad_row"
    assert repr(wrong) in outcome.reason


def test_a_null_turn_limit_is_none() -> None:
    """Parquet fills it in where only other rows have the column."""
    stage = Stage([step(0.1, "x"), step(0.2, "y")], max_turns=2, extras={"max_turns": None})
    trajectory = stage.play()
    assert trajectory.outcome == Truncated("max_turns")
    assert len(trajectory.turns) == 2
    assert stage.maker.made[0].extras["max_turns"] == 2


def test_last_turn_is_max_turns() -> None:
    trajectory = Stage([step(0.1, "x"), step(0.2, "y")], max_turns=2).play()
    assert trajectory.outcome == Truncated("max_turns")
    assert trajectory.total_reward == pytest.approx(0.3)


def test_no_room_for_another_turn_is_total_tokens_and_keeps_rewards() -> None:
    stage = Stage([step(0.5, "o" * 100)], max_total_tokens=100)
    trajectory = stage.play()
    assert trajectory.outcome == Truncated("total_tokens")
    assert trajectory.total_reward == 0.5
    assert len(trajectory.rows[0]) <= 100
    assert trajectory.rows[0].spans[-1].origin is Origin.SAMPLED
    assert len(stage.engine.requests) == 1


def test_turn_is_cut_at_the_total_budget_and_says_so() -> None:
    stage = Stage([step(0.0, done=True)], reply=lambda _: [104] * 500, max_total_tokens=40)
    trajectory = stage.play()
    assert len(trajectory.rows[0]) == 40
    assert trajectory.outcome == Truncated("total_tokens")


def test_engine_context_is_a_budget_of_its_own() -> None:
    engine = FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, max_model_len=40, reply=lambda _: [104] * 500)
    trajectory = Stage([step(0.0, done=True)], engine=engine).play()
    assert trajectory.outcome == Truncated("context")


def test_too_long_prompt_fails_once_and_names_the_limit() -> None:
    stage = Stage([], messages=(user("x" * 80),), max_prompt_tokens=64, failures=FailureBudget(attempts=3))
    trajectory = stage.play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "prompt_too_long"
    assert not trajectory.outcome.retryable
    assert "limit is 64" in trajectory.outcome.reason
    assert len(stage.maker.made) == 1
    assert not stage.engine.requests


# ---- environments that break


def test_raising_step_is_a_value_and_the_turn_is_recorded() -> None:
    outcome, _ = faulty(ValueError("boom"))
    assert (outcome.fault, outcome.retryable) == ("env_raised", True)
    assert "ScriptedEnv.step raised ValueError: boom" in outcome.reason


def test_hanging_step_is_a_value_and_the_pool_stays_usable() -> None:
    release = threading.Event()
    stage = Stage([lambda _: release.wait(30)], env_step_seconds=0.05, env_workers=1)
    trajectory = stage.play()
    release.set()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "env_timeout"
    assert trajectory.sampled_tokens == 3  # sampled tokens stay in the record
    assert stage.maker.made[0].closed == 1
    assert stage.generator is not None
    assert stage.generator.counters.timeouts == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan"), Fraction(10**400), HUGE])
def test_reward_that_is_not_finite_is_a_failure(value: Any) -> None:
    outcome, _ = faulty(step(value, done=True))
    assert (outcome.fault, outcome.retryable) == ("reward_not_finite", False)


@pytest.mark.parametrize("components", [{"a": 10**400}, {"a": math.nan}, {"a": 1e308, "b": 1e308}])
def test_components_that_are_not_finite_are_a_failure(components: dict[str, Any]) -> None:
    outcome, _ = faulty(step(1.0, done=True, metadata={"reward_components": components}))
    assert outcome.fault == "reward_not_finite"
    assert "component" in outcome.reason


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (None, "step must return a mapping"),
        ({"observations": [], "reward": 1.0}, "lacks done"),
        ({"observations": "text", "reward": 1.0, "done": True}, "observations must be a list"),
        ({"observations": ["text"], "reward": 1.0, "done": True}, r"observations\[0\] must be a dict"),
        ({"observations": [{"role": "user", "content": 3}], "reward": 1.0, "done": True}, "must be text"),
        ({"observations": [], "reward": "1", "done": True}, "reward must be a number"),
        ({"observations": [], "reward": 1.0, "done": "yes"}, "done must be True or False"),
        ({"observations": [], "reward": 1.0, "done": True, "postprocessed_action": 1}, "postprocessed_action"),
        (step(1.0, metadata={"reward_components": [1]}), "reward_components"),
    ],
)
def test_wrong_types_name_what_is_wrong_and_are_not_retried(output: Any, names: str) -> None:
    outcome, _ = faulty(output)
    assert (outcome.fault, outcome.retryable) == ("env_type", False)
    assert re.search(names, outcome.reason)


@pytest.mark.parametrize("value", ["text", (["x"], {}), (None, {}), ([], {})])
def test_wrong_init_is_env_type(value: Any) -> None:
    class Wrong(ScriptedEnv):
        def init(self, prompt: Any) -> Any:
            return value

    trajectory = Stage([], env=lambda c, e: Wrong([], e)).play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "env_type"


def test_constructor_that_raises_is_env_raised() -> None:
    def factory(env_class: str, extras: dict[str, Any]) -> Any:
        raise RuntimeError("no database")

    trajectory = Stage([], env=factory).play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "env_raised"
    assert "constructing 'env': RuntimeError: no database" in trajectory.outcome.reason
    assert trajectory.rows == ()


def test_close_and_metrics_that_raise_do_not_change_a_result() -> None:
    class Messy(ScriptedEnv):
        def get_metrics(self) -> Any:
            raise ValueError

        def close(self) -> None:
            super().close()
            raise OSError

    stage = Stage([], env=lambda c, e: Messy([step(1.0, done=True)], e))
    trajectory = stage.play()
    assert trajectory.outcome == Completed()
    assert trajectory.env_metrics == {"env_metrics_failed": 1.0}
    assert stage.generator is not None
    assert stage.generator.counters.close_failed == 1


def test_metrics_that_no_finite_float_holds_are_left_out() -> None:
    class Measured(ScriptedEnv):
        def get_metrics(self) -> Any:
            return {"huge": 10**400, "nan": math.nan, "text": "x", "list": [1.0], "n": 3, "half": np.float32(0.5)}

    trajectory = Stage([], env=lambda c, e: Measured([step(1.0, done=True)], e)).play()
    assert trajectory.outcome == Completed()
    assert trajectory.env_metrics == {"n": 3.0, "half": 0.5}


def test_template_that_refuses_an_observation_is_a_typed_failure() -> None:
    tokenizer = ByteTokenizer(ALTERNATING)
    # user, assistant, then two user messages: not what this template allows
    maker = EnvMaker(lambda _: [step(0.0, "x", "y")])

    async def run() -> Trajectory:
        engine = FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=tokenizer, reply=lambda _: list(b"a"))
        settings = RolloutSettings(max_turns=2, failures=ONE_TRY)
        generator = TurnGenerator(engine, Renderer(tokenizer), maker, settings, seed=0)
        generator.failures.plan("train", 0, 1)
        group = await generator.generate_group(GroupTask("g", "p", (user("hi"),), "env"))
        await generator.aclose()
        return group.members[0]

    trajectory = asyncio.run(run())
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "template"
    assert maker.made[0].closed == 1


# ---- engines that break


class Wrapped(FakeEngine):
    """A fake engine whose answers pass through ``change``."""

    def __init__(self, change: Callable[[GenerateRequest, GenerateResult], GenerateResult]) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, reply=lambda _: list(b"ok"))
        self._change = change

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return self._change(request, await super().generate(request))


def test_engine_error_is_a_retryable_failure_and_never_a_reward() -> None:
    def die(request: GenerateRequest) -> Sequence[int]:
        raise InferenceError("out of memory")

    trajectory = Stage([], reply=die).play()
    assert isinstance(trajectory.outcome, Failed)
    assert (trajectory.outcome.fault, trajectory.outcome.retryable) == ("engine_error", True)
    assert trajectory.rewards == ()


def test_engine_that_never_answers_meets_its_deadline() -> None:
    class Silent(FakeEngine):
        async def generate(self, request: GenerateRequest) -> GenerateResult:
            await asyncio.Event().wait()
            raise AssertionError

    async def run() -> Trajectory:
        maker = EnvMaker(lambda _: [])
        engine = Silent(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER)
        generator = TurnGenerator(
            engine, Renderer(TOKENIZER), maker, RolloutSettings(failures=ONE_TRY), seed=0, engine_seconds=0.05
        )
        generator.failures.plan("train", 0, 1)
        group = await generator.generate_group(GroupTask("g", "p", (user("hi"),), "env"))
        await generator.aclose()
        assert maker.made[0].closed == 1
        return group.members[0]

    trajectory = asyncio.run(run())
    assert isinstance(trajectory.outcome, Failed)
    assert "has not answered g/s0/a0/t0 within 0.05 s" in trajectory.outcome.reason


def test_empty_answer_does_not_vote_and_never_reaches_the_environment() -> None:
    def empty(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return GenerateResult(request.request_id, (), (), "stop", None, ())

    stage = Stage([], engine=Wrapped(empty))
    trajectory = stage.play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "empty_generation"
    assert trajectory.sampled_tokens == 0
    assert stage.maker.made[0].actions == []


def test_answer_without_finite_logprobs_is_refused() -> None:
    def broken(request: GenerateRequest, result: GenerateResult) -> GenerateResult:
        return GenerateResult(
            request.request_id, result.token_ids, (math.nan,) * 3, "stop", None, result.versions, "ok"
        )

    trajectory = Stage([], engine=Wrapped(broken)).play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.fault == "engine_contract"
    assert "must be finite" in trajectory.outcome.reason


class Interrupting(FakeEngine):
    """Aborts every request after ``k`` tokens, as a paused engine does."""

    def __init__(self, text: bytes, k: int) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER)
        self.text, self.k = text, k
        self.start_length: int | None = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        self.start_length = self.start_length or len(request.token_ids)
        made = len(request.token_ids) - self.start_length
        whole = [*self.text, EOS][made:][: request.max_tokens]
        ids = tuple(whole[: self.k])
        done = len(ids) == len(whole)
        reason = ("stop" if ids and ids[-1] == EOS else "length") if done else "abort"
        runs = (VersionRun(f"policy/0/{len(self.requests)}", 0, len(ids)),) if ids else ()
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        return GenerateResult(request.request_id, ids, (-1.0,) * len(ids), reason, None, runs, text)


def test_interrupted_turn_goes_on_and_equals_the_unbroken_one() -> None:
    engine = Interrupting(b"hello world", 3)
    stage = Stage([step(1.0, done=True)], engine=engine)
    trajectory = stage.play()
    assert trajectory.turns[0].action == "hello world"
    assert stage.maker.made[0].actions == ["hello world"]
    assert tuple(t for s in trajectory.sampled_spans() for t in s.token_ids) == (*b"hello world", EOS)
    assert {span.turn for span in trajectory.sampled_spans()} == {0}
    assert trajectory.versions() == {f"policy/0/{i}": 3 for i in range(1, 5)}
    assert len({request.seed for request in engine.requests}) == 4
    assert trajectory.outcome == Completed()


def test_interrupted_turn_keeps_to_its_token_budget() -> None:
    trajectory = Stage(
        [step(0.0, done=True)], engine=Interrupting(b"x" * 50, 3), sampling=SamplingSettings(max_tokens_per_turn=7)
    ).play()
    assert trajectory.sampled_tokens == 7
    assert trajectory.outcome == Truncated("turn_tokens")


def test_engine_that_aborts_without_progress_is_given_up() -> None:
    engine = Interrupting(b"hello", 0)
    trajectory = Stage([], engine=engine).play()
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.retryable
    assert len(engine.requests) == 3


# ---- going on from completed turns


class Losing(FakeEngine):
    """Loses the requests of the given turns, so many times each."""

    def __init__(self, lose: dict[int, int]) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, reply=lambda _: list(b"ok"))
        self.lose = dict(lose)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        turn = turn_of(request)
        if self.lose.get(turn, 0):
            self.lose[turn] -= 1
            raise InferenceError("connection reset")
        return await super().generate(request)


def recovering(stage: Stage) -> tuple[Trajectory, list[tuple[int, str]]]:
    told: list[Any] = []

    async def run() -> Trajectory:
        generator = TurnGenerator(
            stage.engine, Renderer(TOKENIZER), stage.env, stage.settings, seed=5, on_event=told.append
        )
        generator.failures.plan("train", 0, 1)
        try:
            (member,) = (await generator.generate_group(stage.task)).members
        finally:
            await generator.aclose()
        assert generator.counters.open == 0
        assert generator.meter.delivered["train"] == member.sampled_tokens
        return member

    trajectory = asyncio.run(run())
    return trajectory, [(event.turn, event.fault) for event in told if isinstance(event, TurnRecovered)]


def test_an_engine_lost_under_a_later_turn_is_asked_again_and_nothing_is_sampled_twice() -> None:
    engine = Losing({1: 1})
    script = [step(0, "more"), step(1, done=True)]
    trajectory, recovered = recovering(Stage(script, engine=engine))
    assert isinstance(trajectory.outcome, Completed)
    assert [turn_of(request) for request in engine.asked] == [0, 1, 1]
    assert len({request.request_id for request in engine.asked}) == 3
    assert engine.asked[1].seed != engine.asked[2].seed
    assert engine.asked[1].token_ids == engine.asked[2].token_ids
    assert recovered == [(1, "engine_error")]


def test_an_engine_lost_twice_under_one_turn_fails_the_attempt() -> None:
    trajectory, recovered = recovering(Stage([step(0, "more")], engine=Losing({1: 2})))
    assert isinstance(trajectory.outcome, Failed)
    assert (trajectory.outcome.fault, recovered) == ("engine_error", [(1, "engine_error")])


def test_a_first_turn_has_nothing_to_go_on_from() -> None:
    trajectory, recovered = recovering(Stage([], engine=Losing({0: 1})))
    assert isinstance(trajectory.outcome, Failed)
    assert recovered == []


LOST = ConnectionError("the server went away")


def made_in_turn(*scripts: Sequence[Any]) -> Stage:
    stage = Stage([])
    stage.env = stage.maker = EnvMaker(lambda nth: scripts[nth])
    return stage


def test_an_environment_lost_under_a_later_turn_is_replaced_and_repeats_the_turns_before() -> None:
    first, last = step(0.5, "more"), step(1, done=True)
    stage = made_in_turn([first, LOST], [first, last])
    trajectory, recovered = recovering(stage)
    assert isinstance(trajectory.outcome, Completed)
    assert recovered == [(1, "env_raised")]
    assert [env.actions for env in stage.maker.made] == [["ok", "ok"], ["ok", "ok"]]
    assert [env.closed for env in stage.maker.made] == [1, 1]
    assert trajectory.turn_rewards() == {0: 0.5, 1: 1.0}  # a repeated turn earns nothing twice
    assert [turn.action for turn in trajectory.turns] == ["ok", "ok"]
    assert len(stage.engine.requests) == 2


@pytest.mark.parametrize("again", [[step(0.25, "more")], [step(0.5, "other")], [LOST]])
def test_an_environment_that_does_not_repeat_itself_fails_the_attempt(again: list[Any]) -> None:
    stage = made_in_turn([step(0.5, "more"), LOST], [*again, step(1, done=True)])
    trajectory, recovered = recovering(stage)
    assert isinstance(trajectory.outcome, Failed)
    assert (trajectory.outcome.fault, trajectory.outcome.retryable, recovered) == ("env_raised", True, [])
    assert "server went away" in trajectory.outcome.reason
    assert [env.closed for env in stage.maker.made] == [1, 1]
    assert trajectory.turn_rewards() == {0: 0.5}


def test_an_environment_of_another_revision_is_no_replacement() -> None:
    made: list[ScriptedEnv] = []

    def build(env_class: str, extras: dict[str, Any]) -> ScriptedEnv:
        made.append(ScriptedEnv([[step(0, "more"), LOST], [step(0, "more"), step(1, done=True)]][len(made)], extras))
        made[-1].env_revision = f"r{len(made)}"  # type: ignore[attr-defined]
        return made[-1]

    trajectory, recovered = recovering(Stage([], env=build))
    assert isinstance(trajectory.outcome, Failed)
    assert (recovered, [env.closed for env in made]) == ([], [1, 1])


def test_an_environment_that_breaks_again_fails_the_attempt() -> None:
    first = step(0, "more")
    trajectory, recovered = recovering(made_in_turn([first, LOST], [first, LOST]))
    assert isinstance(trajectory.outcome, Failed)
    assert recovered == [(1, "env_raised")]
    assert len(trajectory.turns) == 2


def test_a_replaced_environment_is_restored_from_its_snapshot() -> None:
    class Remembers(ScriptedEnv):
        restored: Any = None

        def snapshot(self) -> Any:
            return {"turns": len(self.actions)}

        def restore(self, state: Any) -> None:
            self.restored = state
            self.actions = ["restored"] * state["turns"]

    made: list[Remembers] = []
    scripts = [[step(0, "more"), LOST], [AssertionError("not repeated"), step(1, done=True)]]

    def build(env_class: str, extras: dict[str, Any]) -> Remembers:
        made.append(Remembers(scripts[len(made)], extras))
        return made[-1]

    stage = Stage([], env=build)
    told: list[Any] = []

    async def run() -> Trajectory:
        generator = TurnGenerator(
            stage.engine,
            Renderer(TOKENIZER),
            stage.env,
            stage.settings,
            seed=5,
            on_event=told.append,
            record_turns=True,
        )
        generator.failures.plan("train", 0, 1)
        try:
            return (await generator.generate_group(stage.task)).members[0]
        finally:
            await generator.aclose()

    trajectory = asyncio.run(run())
    assert isinstance(trajectory.outcome, Completed)
    assert made[1].restored == {"turns": 1}
    assert [type(event).__name__ for event in told].count("TurnRecovered") == 1
