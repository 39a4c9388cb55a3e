"""Prompt rows: sources, checks, duplicates, the length filter, fingerprints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes import ALTERNATING, ByteTokenizer, user
from slipstream.data import PromptDataset, read_source, register_builtin
from slipstream.errors import DataError
from slipstream.rollout import Renderer

ROWS = [
    {"prompt": [user("one")], "env_class": "a", "reward_spec": {"ground_truth": "1"}, "data_source": "x"},
    {"prompt": [user("two")], "env_class": "b", "reward_spec": {"ground_truth": "2"}, "data_source": "y"},
]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **kwargs: Any) -> PromptDataset:
    return PromptDataset.load(str(path), **kwargs)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    dataset = load(write(tmp_path / f"d{suffix}", ROWS))
    assert [row.messages for row in dataset] == [(user("one"),), (user("two"),)]
    assert [row.env_class for row in dataset] == ["a", "b"]
    assert dataset[0].extras == {"reward_spec": {"ground_truth": "1"}, "data_source": "x"}
    assert dataset[1].data_source == "y"
    assert dataset.fingerprint == load(write(tmp_path / "same.jsonl", ROWS)).fingerprint


def test_text_prompt_is_one_user_message_and_env_class_may_come_from_settings(tmp_path: Path) -> None:
    (row,) = load(write(tmp_path / "d.jsonl", [{"prompt": "hello"}]), env_class="gsm8k")
    assert row.messages == (user("hello"),)
    assert row.env_class == "gsm8k"


def test_nulls_that_parquet_fills_in_are_removed_from_messages(tmp_path: Path) -> None:
    rows = [{"prompt": [user("q"), {"role": "tool", "content": "r", "name": "t"}], "env_class": "a"}]
    (row,) = load(write(tmp_path / "d.parquet", rows))
    assert row.messages == (user("q"), {"role": "tool", "content": "r", "name": "t"})


def test_a_directory_is_all_its_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.json", ROWS[:1])
    (tmp_path / "notes.txt").write_text("not data")
    assert [row.env_class for row in load(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"env_class": "a", "question": "q"}, r"d.jsonl line 2: no 'prompt' column or value \(columns: env_class, qu"),
        ({"prompt": None, "env_class": "a"}, "line 2: no 'prompt'"),
        ({"prompt": "  ", "env_class": "a"}, "line 2: 'prompt' is empty"),
        ({"prompt": [], "env_class": "a"}, "line 2: 'prompt' must be text or a list.*empty list"),
        ({"prompt": 3, "env_class": "a"}, "line 2: 'prompt' must be text or a list.*int"),
        ({"prompt": ["q"], "env_class": "a"}, r"prompt\[0\] must be an object"),
        ({"prompt": [{"content": "q"}], "env_class": "a"}, r"prompt\[0\] has no 'role'"),
        ({"prompt": [{"role": "user", "content": 3}], "env_class": "a"}, r"prompt\[0\]\['content'\] must be text"),
        ({"prompt": "q"}, "line 2: no 'env_class'; add the column or set env.id"),
        ({"prompt": "q", "env_class": "a", "uid": [1]}, "line 2: 'uid' must be"),
        ([1, 2], "line 2: a row must be an object"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_mend(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "d.jsonl", [ROWS[0], row])
    with pytest.raises(DataError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"prompt": "q"\n', "d.jsonl line 1: not valid JSON"),
        ("d.json", b'{"prompt": "q"}', "must hold a list of rows, got dict"),
        ("d.json", b"{", r"not valid JSON.*\.jsonl"),
        ("d.jsonl", b"\xff\xfe\x00", "not readable as UTF-8"),
        ("d.parquet", b"PAR1 torn", "not a readable Parquet file"),
        ("d.csv", b"a,b", "unknown kind of file"),
        ("d.jsonl", b"", "no usable row"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/missing.jsonl", "no such file"),
        ("builtin:arithmetik", r"did you mean builtin:arithmetic\?"),
        ("builtin:text2sql/trian", "the parts are train, eval"),
        ("builtin:text2sql/train?lvl=1", "unknown option 'lvl'"),
    ],
)
def test_a_bad_source_is_named(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptDataset.load(source, env_class="a")


def test_no_sources_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(DataError, match=r"data\.train"):
        PromptDataset.load([])


def test_line_separators_inside_json_strings_do_not_split_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c", "env_class": "a"}, ensure_ascii=False) + "\n", "utf-8")
    assert load(path)[0].messages == (user("a\u2028b\x85c"),)


# ---- names, duplicates, lengths


def test_uid_is_the_column_or_a_hash_of_the_content_that_stays_when_rows_move(tmp_path: Path) -> None:
    named = load(write(tmp_path / "n.jsonl", [{**ROWS[0], "uid": 7}, ROWS[1]]))
    assert named[0].uid == "7"
    assert "uid" not in named[0].extras
    moved = load(write(tmp_path / "m.jsonl", [ROWS[1], ROWS[0]]))
    assert moved[0].uid == named[1].uid
    assert moved.fingerprint != load(write(tmp_path / "o.jsonl", ROWS)).fingerprint


def test_fingerprint_changes_with_content_under_the_same_uid(tmp_path: Path) -> None:
    before = load(write(tmp_path / "a.jsonl", [{**ROWS[0], "uid": "u"}]))
    after = load(write(tmp_path / "b.jsonl", [{**ROWS[0], "uid": "u", "reward_spec": {"ground_truth": "9"}}]))
    assert before.fingerprint != after.fingerprint


def test_duplicates_are_dropped_and_counted_but_a_clash_is_an_error(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "a.jsonl", [*ROWS, ROWS[0]]))
    assert (len(dataset), dataset.report.duplicates) == (2, 1)
    clash = [{**ROWS[0], "uid": "u"}, {**ROWS[1], "uid": "u"}]
    with pytest.raises(DataError, match=r"line 2: uid 'u' is taken by a different row \(.*line 1\)"):
        load(write(tmp_path / "b.jsonl", clash))


def test_length_filter_is_the_rollouts_renderer_and_says_what_it_did(tmp_path: Path) -> None:
    renderer = Renderer(ByteTokenizer())
    rows = [{"prompt": "x" * n, "env_class": "a"} for n in (1, 5, 6, 50)]
    limit = renderer.prompt_length([user("x" * 5)])
    dataset = load(write(tmp_path / "d.jsonl", rows), length_fn=renderer.prompt_length, max_prompt_tokens=limit)
    assert [len(row.messages[0]["content"]) for row in dataset] == [1, 5]
    assert (dataset.report.too_long, dataset.report.longest) == (2, limit)
    assert str(dataset.report) == f"4 rows, 2 kept (2 longer than {limit} tokens; longest kept: {limit})"


def test_filter_that_leaves_nothing_is_an_error_with_the_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", ROWS)
    with pytest.raises(DataError, match="2 longer than 3 tokens"):
        load(path, length_fn=lambda messages: 10, max_prompt_tokens=3)


def test_prompt_that_the_template_refuses_is_a_data_error_with_its_row(tmp_path: Path) -> None:
    renderer = Renderer(ByteTokenizer(ALTERNATING))
    rows = [{"prompt": [user("a"), user("b")], "env_class": "a"}]
    with pytest.raises(DataError, match="line 1: the chat template refused"):
        load(write(tmp_path / "d.jsonl", rows), length_fn=renderer.prompt_length, max_prompt_tokens=99)


def test_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    assert [row.env_class for row in load(write(tmp_path / "d.jsonl", ROWS), limit=1)] == ["a"]


def test_builtin_provider_gets_part_and_options() -> None:
    seen: list[Any] = []

    def provider(part: str, options: Any) -> list[dict[str, Any]]:
        seen.append((part, options))
        return [{"prompt": "q"}]

    register_builtin("test-provider", provider)
    dataset = PromptDataset.load("builtin:test-provider/part?n=3&style=x", env_class="a")
    assert seen == [("part", {"n": "3", "style": "x"})]
    assert dataset[0].where == "builtin:test-provider/part?n=3&style=x row 1"


@pytest.mark.parametrize(
    "source", ["text2sql/eval?limit=-3", "text2sql/sft?n=-1", "arithmetic?n=-3", "arithmetic/eval?n=-1"]
)
def test_a_negative_number_of_rows_is_refused(source: str) -> None:
    """As the end of a slice it would leave rows out from the end."""
    with pytest.raises(DataError, match=r"option \w+=-\d must be at least 0"):
        next(read_source(f"builtin:{source}"))


def test_bundled_arithmetic_has_disjoint_streams_for_train_and_eval() -> None:
    pytest.importorskip("slipstream.envs.arithmetic")
    train = PromptDataset.load("builtin:arithmetic/train?n=20")
    evaluation = PromptDataset.load("builtin:arithmetic/eval?n=20")
    assert 0 < len(train) <= 20
    assert train.fingerprint == PromptDataset.load("builtin:arithmetic/train?n=20").fingerprint
    assert train.fingerprint != evaluation.fingerprint
