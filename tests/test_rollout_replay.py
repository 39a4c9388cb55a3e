"""What the trainer replays travels from the engine's answers to the rows: kept sets, and the experts of every input."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import EOS, VOCAB, ByteTokenizer, EnvMaker, ScriptedEnv, step, user
from slipstream.algorithms.compile import compile_batch
from slipstream.config.settings import FailureBudget, RolloutSettings, SamplingSettings
from slipstream.errors import BudgetExceededError
from slipstream.inference.fake import FakeEngine
from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.rollout import GroupTask, Renderer, TurnGenerator
from slipstream.training.replay import row_routes
from slipstream.trajectory import KEPT_SETS, ROUTED_EXPERTS, TOP_LOGPROBS, Group, Origin
from test_rollout_episode import Interrupting

TOKENIZER = ByteTokenizer()


class Routing:
    """An engine's answers with experts that tell which token went through them: (id % 100, id // 100)."""

    short = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)  # type: ignore[misc]
        if not request.routed_experts:
            return result
        fed = np.array([*request.token_ids, *result.token_ids])[: -1 - self.short]
        routes = np.stack([fed % 100, fed // 100], -1)[:, None].astype(np.int16)
        return replace(result, routed_experts=routes)


class RoutingEngine(Routing, FakeEngine):
    def __init__(self) -> None:
        super().__init__(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, reply=lambda _: list(b"ok"))


class RoutingInterrupted(Routing, Interrupting):
    pass


def play(
    engine: Any, script: Any = None, env: Any = None, *, eval: bool = False, top_logprobs: int = 0, **settings: Any
) -> Group:
    maker = env or EnvMaker(lambda _: script or [step(1.0, done=True)])
    budget = FailureBudget(attempts=1, max_failed_fraction=1)
    rollout = RolloutSettings(**{"max_turns": 3, "failures": budget, **settings})
    task = GroupTask("g", "p", (user("q"), user("scratch")), "env", {}, n=2, eval=eval)

    async def run() -> Group:
        generator = TurnGenerator(
            engine, Renderer(TOKENIZER), maker, rollout, seed=5, routed_experts=True, top_logprobs=top_logprobs
        )
        try:
            return await generator.generate_group(task)
        finally:
            await generator.aclose()

    return asyncio.run(run())


def check_routes(group: Group) -> None:
    """Every input of every compiled row has the experts that its own id stands for."""
    batch = compile_batch([group], None, "token_mean")
    assert batch.rows
    for row in batch.rows:
        routes = row_routes(row, 1, 2)
        ids = routes[:, 0, 0].astype(int) + 100 * routes[:, 0, 1].astype(int)
        assert ids.tolist() == row.inputs_T.tolist()


def test_every_input_of_a_row_has_its_experts_over_all_turns() -> None:
    group = play(RoutingEngine(), [step(0.0, "an observation"), step(0.0, "more"), step(1.0, done=True)])
    assert {len(m.turns) for m in group.members} == {3}
    check_routes(group)


def test_forked_rows_have_theirs_too() -> None:
    class Popping(ScriptedEnv):
        def step(self, action: str) -> Any:
            self.prompt.pop()
            return super().step(action)

    script = [step(0.0, "x"), step(1.0, done=True)]
    group = play(RoutingEngine(), env=lambda c, e: Popping(list(script), e))
    assert {len(m.rows) for m in group.members} == {2}
    check_routes(group)


def test_an_interrupted_turn_has_the_experts_of_all_its_parts() -> None:
    group = play(RoutingInterrupted(b"hello world", 3))
    assert all(len(list(m.sampled_spans())) == 4 for m in group.members)
    check_routes(group)


def test_experts_that_do_not_cover_what_was_fed_fail_the_sample() -> None:
    engine = RoutingEngine()
    engine.short = 1
    with pytest.raises(BudgetExceededError, match=r"engine_contract.*experts of \d+ tokens for \d+ that were fed"):
        play(engine)


@pytest.mark.parametrize("eval", [False, True])
def test_kept_sets_are_asked_for_where_a_truncated_sample_is_trained(eval: bool) -> None:
    engine = FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, scale=3.0)
    sampling = SamplingSettings(top_k=5, max_tokens_per_turn=4)
    group = play(engine, eval=eval, sampling=sampling)
    assert {request.kept_sets for request in engine.requests} == {not eval}
    spans = [s for m in group.members for s in m.sampled_spans() if s.origin is Origin.SAMPLED]
    assert all((KEPT_SETS in span.side) == (not eval) for span in spans)
    assert all(ROUTED_EXPERTS not in span.side for span in spans)
    if not eval:
        for row in compile_batch([group], None, "token_mean").rows:
            kept = row.side_T[KEPT_SETS][row.trained_T]
            assert all(
                token in own and len(own) == 5 for token, own in zip(row.targets_T[row.trained_T], kept, strict=True)
            )


@pytest.mark.parametrize("eval", [False, True])
def test_heads_are_asked_for_where_a_sample_is_trained(eval: bool) -> None:
    engine = FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER, scale=3.0)
    group = play(engine, eval=eval, top_logprobs=4)
    assert {request.top_logprobs for request in engine.requests} == {0 if eval else 4}
    for member in group.members:
        for span in member.sampled_spans():
            assert (TOP_LOGPROBS in span.side) == (not eval)


def test_whole_distributions_have_no_kept_sets() -> None:
    engine = FakeEngine(VOCAB, eos_token_ids=(EOS,), tokenizer=TOKENIZER)
    play(engine)
    assert not any(request.kept_sets for request in engine.requests)
