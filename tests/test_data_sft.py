"""Supervised rows: which tokens are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import ALTERNATING, CHATML, EOS, MERGE_TOOLS, STRIP_THINKING, ByteTokenizer, user
from slipstream.data import SftDataset, alpaca_messages, chat_trajectory
from slipstream.errors import DataError
from slipstream.rollout import Renderer
from slipstream.trajectory import Origin, Trajectory


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHAT = [{"role": "system", "content": "s"}, user("q1"), assistant("a1"), user("q2"), assistant("a2")]


def learnt(trajectory: Trajectory, tokenizer: ByteTokenizer) -> list[str]:
    return [tokenizer.decode(s.token_ids) for r in trajectory.rows for s in r.spans if s.origin is Origin.TARGET]


@pytest.mark.parametrize("template", [CHATML, MERGE_TOOLS])
def test_each_assistant_message_with_its_end_of_turn_is_learnt_and_the_newline_is_not(template: str) -> None:
    tokenizer = ByteTokenizer(template)
    trajectory = chat_trajectory(CHAT, Renderer(tokenizer), "u")
    assert learnt(trajectory, tokenizer) == ["a1<|im_end|>", "a2<|im_end|>"]
    (row,) = trajectory.rows
    assert [s.origin for s in row.spans] == [Origin.PROMPT, Origin.TARGET, Origin.OBSERVATION, Origin.TARGET]
    assert tokenizer.decode(row.spans[2].token_ids) == "\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    # The row is the template's own rendering, up to the end of the last turn.
    whole = tokenizer.encode(tokenizer.apply_chat_template(CHAT))
    assert trajectory.row_tokens(0) == whole[:-1]
    assert whole[-2:] == [EOS, 10]


def test_last_assistant_message_only() -> None:
    tokenizer = ByteTokenizer()
    trajectory = chat_trajectory(CHAT, Renderer(tokenizer), "u", train_on="last_assistant_message")
    assert learnt(trajectory, tokenizer) == ["a2<|im_end|>"]
    assert [s.origin for s in trajectory.rows[0].spans] == [Origin.PROMPT, Origin.TARGET]
    assert trajectory.row_tokens(0) == chat_trajectory(CHAT, Renderer(tokenizer), "u").row_tokens(0)


def test_template_that_strips_thinking_forks_and_learns_each_turn_as_it_would_be_sampled() -> None:
    tokenizer = ByteTokenizer(STRIP_THINKING)
    chat = [user("q1"), assistant("<think>w</think>a1"), user("q2"), assistant("<think>v</think>a2")]
    trajectory = chat_trajectory(chat, Renderer(tokenizer), "u")
    assert learnt(trajectory, tokenizer) == ["<think>w</think>a1<|im_end|>", "<think>v</think>a2<|im_end|>"]
    assert len(trajectory.rows) == 2
    assert tokenizer.decode(trajectory.row_tokens(1)).count("<think>") == 1


def test_adjacent_tool_messages_stand_in_context_as_the_template_merges_them() -> None:
    tokenizer = ByteTokenizer(MERGE_TOOLS)
    tools = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    chat = [user("q"), assistant("call"), *tools, assistant("done")]
    trajectory = chat_trajectory(chat, Renderer(tokenizer), "u")
    assert trajectory.row_tokens(0) == tokenizer.encode(tokenizer.apply_chat_template(chat))[:-1]
    assert learnt(trajectory, tokenizer) == ["call<|im_end|>", "done<|im_end|>"]


def test_generation_header_that_opens_thinking_is_context_and_the_text_is_learnt() -> None:
    opening = CHATML.replace(
        "<|im_start|>assistant\n' }}{% endif %}", "<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    tokenizer = ByteTokenizer(opening)
    trajectory = chat_trajectory([user("q"), assistant("a")], Renderer(tokenizer), "u")
    assert learnt(trajectory, tokenizer) == ["a<|im_end|>"]
    assert tokenizer.decode(trajectory.row_tokens(0)).endswith("assistant\n<think>\na<|im_end|>")


def test_an_end_of_turn_spelt_out_in_a_message_does_not_end_its_target() -> None:
    tokenizer = ByteTokenizer()
    chat = [user("q"), assistant("say <|im_end|> now")]
    assert learnt(chat_trajectory(chat, Renderer(tokenizer), "u"), tokenizer) == ["say <|im_end|> now<|im_end|>"]


@pytest.mark.parametrize("chat", [[user("q")], [assistant("a"), user("q")]])
def test_chat_without_anything_to_learn_is_refused(chat: list[dict[str, str]]) -> None:
    with pytest.raises(DataError, match="here: no assistant message"):
        chat_trajectory(chat, Renderer(ByteTokenizer()), "u", where="here")


def test_template_refusal_names_the_row() -> None:
    with pytest.raises(DataError, match="row 9: the chat template refused"):
        chat_trajectory(
            [user("a"), user("b"), assistant("c")], Renderer(ByteTokenizer(ALTERNATING)), "u", where="row 9"
        )


# ---- files


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_alpaca_columns_are_a_chat() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "calc"}
    assert alpaca_messages(row, "w") == (
        {"role": "system", "content": "calc"},
        user("Add\n\n1 2"),
        assistant("3"),
    )
    assert alpaca_messages({"instruction": "Add", "output": "3"}, "w") == (user("Add"), assistant("3"))


def test_dataset_counts_duplicates_and_long_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [user("q"), assistant("a")]},
        {"instruction": "q", "output": "b"},
        {"messages": [user("q"), assistant("a")]},
        {"messages": [user("q"), assistant("a" * 99)]},
    ]
    dataset = SftDataset.load(write(tmp_path / "d.jsonl", rows), Renderer(ByteTokenizer()), max_tokens=80)
    assert (len(dataset), dataset.report.duplicates, dataset.report.too_long) == (2, 1, 1)
    assert len({row.uid for row in dataset}) == 2


def test_fingerprint_covers_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"messages": [user("q"), assistant("a")]}])
    one = SftDataset.load(path, Renderer(ByteTokenizer()))
    other = SftDataset.load(path, Renderer(ByteTokenizer(CHATML.replace("assistant", "model"))))
    assert one.fingerprint == SftDataset.load(path, Renderer(ByteTokenizer())).fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"line 1: neither 'messages' nor 'instruction'/'output' \(columns: text\)"),
        ({"messages": [user("q")]}, "line 1: no assistant message"),
        ({"messages": "q"}, "line 1: no assistant message"),
        ({"messages": [user("q"), assistant("a")], "tools": "t"}, "line 1: 'tools' must be a list"),
        ({"instruction": "q", "output": None}, "line 1: 'output' must be text"),
        ({"instruction": "q", "output": "a", "input": 3}, "line 1: 'input' must be text"),
        ({"messages": [user("q"), {"role": "assistant"}]}, r"messages\[1\]\['content'\] must be text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SftDataset.load(write(tmp_path / "d.jsonl", [row]), Renderer(ByteTokenizer()))
