"""What users suffer from, as laws over spans: text round trips, EOS origins, stripped thinking, stops inside tokens."""

from __future__ import annotations

import asyncio
import re
from typing import Any, ClassVar

import pytest

from fakes import CHATML, EOS, STRIP_THINKING, VOCAB, ByteTokenizer, EnvMaker, MergeTokenizer, step, user
from slipstream.config.settings import RolloutSettings, SamplingSettings
from slipstream.inference.fake import FakeEngine
from slipstream.inference.types import GenerateRequest
from slipstream.rollout import GroupTask, Renderer, TurnGenerator
from slipstream.trajectory import Origin, Trajectory


class ThinkTokenizer(ByteTokenizer):
    """The think tags are one ordinary token each: decoding shows them."""

    TAGS: ClassVar = {258: b"<think>", 259: b"</think>"}

    def __init__(self, template: str) -> None:
        super().__init__(template, {"<|im_start|>": 256, "<|im_end|>": EOS})

    def _pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(</?think>)", text):
            ids.extend({"<think>": [258], "</think>": [259]}.get(piece, list(piece.encode())))
        return ids

    def _bytes(self, token: int) -> bytes:
        return self.TAGS.get(token) or bytes([token])


def play(
    tokenizer: ByteTokenizer, replies: list[list[int]], script: list[Any], *, vocab: int = VOCAB, **sampling: Any
) -> tuple[Trajectory, FakeEngine]:
    def reply(request: GenerateRequest) -> list[int]:
        return replies[int(request.request_id.rpartition("/t")[2])]

    engine = FakeEngine(vocab, eos_token_ids=(EOS,), tokenizer=tokenizer, reply=reply)
    settings = RolloutSettings(max_turns=len(replies), sampling=SamplingSettings(**sampling))

    async def run() -> Trajectory:
        generator = TurnGenerator(engine, Renderer(tokenizer), EnvMaker(lambda _: script), settings, seed=0)
        try:
            group = await generator.generate_group(GroupTask("g", "p", (user("hi"),), "env"))
        finally:
            await generator.aclose()
        return group.members[0]

    return asyncio.run(run()), engine


def test_sampled_ids_survive_a_tokenizer_that_would_merge_them() -> None:
    tokenizer = MergeTokenizer()
    assert tokenizer.encode(tokenizer.decode([97, 98])) == [MergeTokenizer.AB]
    trajectory, engine = play(
        tokenizer, [[97, 98], [99]], [step(0.0, "go on"), step(1.0, done=True)], vocab=MergeTokenizer.DOTS + 1
    )
    first = next(trajectory.sampled_spans())
    assert first.token_ids == (97, 98, EOS)
    assert isinstance(first.logprobs, tuple)
    assert len(first.logprobs) == 3
    assert len(trajectory.rows) == 1
    # Turn 2's prompt begins with exactly the ids of turn 1.
    prompt_1, prompt_2 = (request.token_ids for request in engine.requests)
    assert prompt_2[: len(prompt_1) + 3] == (*prompt_1, 97, 98, EOS)


def test_sampled_eos_is_trained_with_its_logprob_and_not_rendered_again() -> None:
    trajectory, _ = play(ByteTokenizer(), [[104], [105]], [step(0.0, "x"), step(1.0, done=True)])
    spans = trajectory.rows[0].spans
    assert spans[1].origin is Origin.SAMPLED
    assert spans[1].token_ids == (104, EOS)
    assert spans[2].origin is Origin.OBSERVATION
    assert spans[2].token_ids[:2] == (10, 256)  # the boundary newline, then the next header: no second EOS
    assert all(span.origin is not Origin.SYNTHETIC for span in spans)


def test_cut_turn_gets_a_synthetic_end_that_is_never_trained() -> None:
    tokenizer = ByteTokenizer()
    trajectory, _ = play(tokenizer, [[104] * 20, [105]], [step(0.0, "x"), step(1.0, done=True)], max_tokens_per_turn=4)
    sampled, synthetic, observation = trajectory.rows[0].spans[1:4]
    assert sampled.token_ids == (104,) * 4
    assert synthetic.origin is Origin.SYNTHETIC
    assert synthetic.token_ids == (EOS,)
    assert synthetic.logprobs is None
    assert not synthetic.trained
    assert observation.token_ids[0] == 10
    # Either way the model reads the same text as if it had ended the turn itself.
    assert tokenizer.decode(trajectory.row_tokens(0)).startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhhhh<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    )


def test_stop_string_turn_carries_reward_on_its_last_sampled_token_and_a_synthetic_end() -> None:
    trajectory, _ = play(ByteTokenizer(), [list(b"a;bc"), [105]], [step(0.25, "x"), step(1.0, done=True)], stop=(";",))
    spans = trajectory.rows[0].spans
    assert spans[1].token_ids == tuple(b"a;")
    assert spans[2].origin is Origin.SYNTHETIC
    assert trajectory.rewards[0].turn == 0
    assert trajectory.rewards[0].value == 0.25
    assert trajectory.turns[0].action == "a"


def test_eos_only_output_is_a_trained_turn() -> None:
    trajectory, _ = play(ByteTokenizer(), [[EOS]], [step(0.0, done=True)])
    assert [span.token_ids for span in trajectory.sampled_spans()] == [(EOS,)]
    assert trajectory.votes


@pytest.mark.parametrize(("template", "rows"), [(STRIP_THINKING, 2), (CHATML, 1)])
def test_stripped_thinking_forks_a_row_and_trains_each_token_once(template: str, rows: int) -> None:
    tokenizer = ThinkTokenizer(template)
    replies = [[258, 120, 259, 97], [258, 259, 98]]  # 5 and 4 tokens with their EOS
    trajectory, engine = play(tokenizer, replies, [step(0.0, "next"), step(1.0, done=True)], vocab=260)
    assert len(trajectory.rows) == rows
    assert trajectory.sampled_tokens == 9
    assert [span.token_ids for span in trajectory.sampled_spans()] == [(258, 120, 259, 97, EOS), (258, 259, 98, EOS)]
    # What the engine was asked to continue in turn 2 is what the last row says.
    last = trajectory.row_tokens(rows - 1)
    assert tuple(last[: len(engine.requests[1].token_ids)]) == engine.requests[1].token_ids
    shown = tokenizer.decode(engine.requests[1].token_ids)
    assert ("<think>" in shown) == (template == CHATML)
    if rows == 2:
        child = trajectory.rows[1]
        parent = trajectory.row_tokens(0)
        assert child.parent == 0
        assert last[: child.fork_point] == parent[: child.fork_point]
        assert child.spans[0].origin is Origin.OBSERVATION
    assert trajectory.votes


def test_stop_string_inside_a_token_keeps_the_whole_token() -> None:
    trajectory, _ = play(
        MergeTokenizer(),
        [[97, MergeTokenizer.DOTS, 98]],
        [step(1.0, done=True)],
        vocab=MergeTokenizer.DOTS + 1,
        stop=("..",),
    )
    span = next(trajectory.sampled_spans())
    assert span.token_ids == (97, MergeTokenizer.DOTS)
    assert isinstance(span.logprobs, tuple)
    assert len(span.logprobs) == 2
    assert trajectory.turns[0].action == "a"
    assert trajectory.turns[0].stop_reason == ".."


def test_stop_string_split_over_two_tokens_keeps_both() -> None:
    trajectory, _ = play(ByteTokenizer(), [list(b"xENDy")], [step(1.0, done=True)], stop=("END",))
    assert next(trajectory.sampled_spans()).token_ids == tuple(b"xEND")
    assert trajectory.turns[0].action == "x"
