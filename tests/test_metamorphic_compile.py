"""Random trees of rows: whatever the shape, each sampled token is trained exactly once, as sampled."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithm_builders import sampled, trajectory
from slipstream.algorithms import compile_batch, row_segments, token_rewards
from slipstream.trajectory import Group, Reward, Row, Span


@st.composite
def trees(draw):
    """A trajectory whose sampled tokens all have different ids (>= 1000), so that each can be counted."""
    rows: list[Row] = []
    lengths: list[int] = []
    fresh = iter(range(1000, 100_000))
    turn = 0
    for index in range(draw(st.integers(1, 4))):
        spans = []
        parent, fork = None, 0
        if index == 0 or draw(st.booleans()):
            spans.append(Span.prompt(range(1, 1 + draw(st.integers(1, 3)))))
        else:
            parent = draw(st.integers(0, index - 1))
            fork = draw(st.integers(1, lengths[parent]))
        for kind in draw(st.lists(st.sampled_from("sosy"), max_size=5)):
            n = draw(st.integers(1, 3))
            if kind == "s":
                ids = [next(fresh) for _ in range(n)]
                spans.append(sampled(ids, [-i / 1e5 for i in ids], turn=turn))
                turn += 1
            else:
                spans.append(Span.observation([500] * n) if kind == "o" else Span.synthetic([501] * n))
        rows.append(Row(tuple(spans), parent, fork))
        lengths.append(fork + sum(len(s) for s in spans))
    rewards = [Reward(t, float(t + 1)) for t in range(turn)]
    return trajectory("t", rows=rows, rewards=rewards)


@settings(max_examples=150, deadline=None)
@given(trees())
def test_each_sampled_token_is_trained_exactly_once_with_its_own_logprob_and_advantage(member):
    per_token = np.arange(1.0, 1.0 + member.sampled_tokens)
    ids_in_order = [token for span in member.sampled_spans() for token in span.token_ids]
    batch = compile_batch([Group("g", "p", 1, (member,))], {"t": per_token} if member.votes else {}, "token_mean")
    trained = [
        (int(token), float(logprob), float(advantage))
        for row in batch.rows
        for token, logprob, advantage in zip(
            row.targets_T[row.trained_T],
            row.behaviour_logprobs_T[row.trained_T],
            row.advantages_T[row.trained_T],
            strict=True,
        )
    ]
    want = [(token, -token / 1e5, float(i + 1)) for i, token in enumerate(ids_in_order)]
    assert trained == (want if member.votes else [])
    assert all(count == 1 for count in Counter(token for token, _, _ in trained).values())


@settings(max_examples=100, deadline=None)
@given(trees())
def test_segments_spell_the_row_and_inputs_are_its_tokens_but_the_last(member):
    for index in range(len(member.rows)):
        spelled = [t for s in row_segments(member, index) for t in s.span.token_ids[s.start : s.stop]]
        assert spelled == member.row_tokens(index)
    for row in compile_batch([Group("g", "p", 1, (member,))], None, "token_mean").rows:
        tokens = member.row_tokens(int(row.row_id.split("/")[1]))
        assert row.inputs_T.tolist() == tokens[:-1]
        assert row.targets_T.tolist() == tokens[1:]


@settings(max_examples=100, deadline=None)
@given(trees())
def test_rewards_on_tokens_sum_to_the_total(member):
    assert token_rewards(member).sum() == member.total_reward
