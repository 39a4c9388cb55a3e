"""The task text2sql in both protocols, gsm8k and arithmetic."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass

import pytest

from slipstream.config.settings import RolloutSettings
from slipstream.envs import make, sqldb, text2sql_skyrl
from slipstream.envs.arithmetic import arithmetic_rows
from slipstream.envs.chinook import chinook
from slipstream.envs.sql_questions import question_rows, questions
from slipstream.envs.sqldb import close_shared_sandboxes, shared_sandbox
from slipstream.envs.text2sql import Text2SQLEnv, extract_sql, judge
from slipstream.envs.text2sql_skyrl import extract_solution
from slipstream.errors import DataError, EnvironmentFault, SettingsError

GOLD = "SELECT COUNT(*) FROM customer WHERE country = 'Brazil'"


def build(max_turns=3, gold=GOLD, **config):
    return make("text2sql", env_config=config, extras={"reward_spec": {"ground_truth": gold}, "max_turns": max_turns})


def literal(value):
    """A value as SQL."""
    if value is None:
        return "NULL"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("SELECT 1", "SELECT 1"),
        ("SELECT 1;", "SELECT 1"),
        ("SELECT 1; SELECT 2", "SELECT 1"),
        ("SQL: SELECT a FROM t; that is it", "SELECT a FROM t"),
        ("SQL query:\nselect a", "select a"),
        ("Sure!\n```sql\nSELECT a\nFROM t;\n```\nbye", "SELECT a\nFROM t"),
        ("```sql\nSELECT 1\n```\nor better\n```sql\nSELECT 2\n```", "SELECT 2"),
        ("```\nSELECT 3", "SELECT 3"),
        ("SELECT ';' FROM t WHERE a = 'it''s;'; x", "SELECT ';' FROM t WHERE a = 'it''s;'"),
        ("WITH a AS (SELECT 1) SELECT * FROM a\n\nThis is why.", "WITH a AS (SELECT 1) SELECT * FROM a"),
        ("the query with the answer: SELECT 4", "SELECT 4"),
        ("SELECT 'open", "SELECT 'open"),
        ("no query here", None),
        ("", None),
        ("```sql\n```", None),
    ],
)
def test_the_query_is_found_in_the_text(text, sql):
    assert extract_sql(text) == sql


def test_extraction_is_linear_on_hostile_text():
    import time

    started = time.monotonic()
    for text in ("SELECT " + "'" * 50_001, "SELECT " + "\n \t" * 20_000, "WITH a" + "(" * 50_000, "```" * 30_000):
        extract_sql(text)
    assert time.monotonic() - started < 3


def test_a_right_query_ends_the_episode_with_one():
    env = build()
    assert env.init([{"role": "user", "content": "q"}])[0] == [{"role": "user", "content": "q"}]
    out = env.step("select count(id) from customer where country='Brazil';")
    assert (out["reward"], out["done"], out["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"executed": 1, "correct": 1, "repaired": 0, "coincidence": 0, "turns": 1}


def test_a_constant_that_is_right_on_the_original_is_not_right():
    (answer,) = shared_sandbox(chinook().original).execute(GOLD).rows[0]
    env = build(max_turns=1)
    out = env.step(f"SELECT {answer}")
    assert (out["reward"], out["done"]) == (0.0, True)
    assert env.get_metrics()["coincidence"] == 1


def test_every_gold_query_is_right_and_its_own_constant_never_is():
    for row in question_rows("eval", limit=36):
        gold = row["reward_spec"]["ground_truth"]
        env = make("text2sql", env_config={}, extras=row)
        assert env.step(f"```sql\n{gold}\n```")["reward"] == 1.0
        result = shared_sandbox(chinook().original).execute(gold)
        cells = [[literal(cell) for cell in line] for line in result.rows[:20]]
        constant = "VALUES " + ", ".join(f"({', '.join(line)})" for line in cells)
        env = make("text2sql", env_config={}, extras={**row, "max_turns": 1})
        assert env.step(constant)["reward"] == 0.0


def test_a_wrong_query_is_shown_its_error_or_rows_and_can_be_repaired():
    env = build(max_turns=3, repair_reward=0.5)
    first = env.step("SELECT COUNT(*) FROM customers")
    assert (first["reward"], first["done"]) == (0.0, False)
    assert "no such table: customers" in first["observations"][0]["content"]
    second = env.step("SELECT country FROM customer")
    assert "Rows: 59" in second["observations"][0]["content"]
    assert len(second["observations"][0]["content"]) < 400
    third = env.step(GOLD)
    assert (third["reward"], third["done"]) == (0.5, True)
    assert env.get_metrics()["repaired"] == 1


def test_the_last_turn_ends_the_episode_without_an_observation():
    env = build(max_turns=2)
    assert env.step("nothing")["observations"][0]["content"].startswith("No query found")
    out = env.step("still nothing")
    assert (out["reward"], out["done"], out["observations"]) == (0.0, True, [])
    assert env.get_metrics()["executed"] == 0


def test_observations_stay_short_whatever_the_rows_hold():
    env = build()
    out = env.step("SELECT hex(zeroblob(4000)), hex(zeroblob(4000)) FROM track")
    assert len(out["observations"][0]["content"]) < 400


def test_shaped_components_are_off_by_default_and_add_up_when_on():
    assert build(max_turns=1).step("SELECT 1")["metadata"]["reward_components"] == {"correct": 0.0}
    env = build(max_turns=2, executable_bonus=0.1, partial_bonus=0.2, gold="SELECT name FROM genre")
    middle = env.step("SELECT name FROM genre LIMIT 10")
    assert middle["reward"] == 0.0
    last = env.step("SELECT name FROM genre LIMIT 10")
    parts = last["metadata"]["reward_components"]
    assert parts["executable"] == 0.1
    assert 0 < parts["partial"] < 0.2
    assert last["reward"] == pytest.approx(sum(parts.values()))
    assert build(max_turns=1, executable_bonus=0.1).step("SELECT nothing")["reward"] == 0.0


def test_partial_credit_takes_the_worse_database():
    paths = (chinook().original, chinook().perturbed)
    titles = shared_sandbox(paths[0]).execute("SELECT title FROM album LIMIT 200").rows
    original_names = "VALUES " + ", ".join(f"({literal(title)})" for (title,) in titles)
    constant = judge(original_names, "SELECT title FROM album WHERE id <= 200", paths, want_overlap=True)
    assert constant.overlap < 0.9
    real = judge("SELECT title FROM album WHERE id <= 199", "SELECT title FROM album WHERE id <= 200", paths, True)
    assert real.overlap > 0.95


def test_a_hostile_turn_is_only_a_wrong_turn(tmp_path):
    env = build(max_turns=5)
    for text in (
        f"ATTACH '{tmp_path / 'x.db'}' AS x",
        f"```sql\nATTACH '{tmp_path / 'x.db'}' AS x; SELECT 1\n```",
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT x FROM r",
        "SELECT zeroblob(1000000000)",
        "SELECT 1" + " UNION SELECT 1" * 1000,
    ):
        assert env.step(text)["reward"] == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_does_not_run_the_query_is_a_fault_and_no_wrong_answer(monkeypatch):
    close_shared_sandboxes()
    env = build(max_turns=1)
    sandbox = shared_sandbox(chinook().original)
    sandbox.execute("SELECT 1")
    for pid in sandbox.pids():
        os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(sqldb, "PATIENCE", 0.1)
        with pytest.raises(EnvironmentFault, match="the machine is overloaded"):
            env.step(GOLD)
    assert build(max_turns=1).step(GOLD)["reward"] == 1.0


def test_bad_rows_and_settings_are_named():
    with pytest.raises(DataError, match="ground_truth"):
        make("text2sql", env_config={}, extras={})
    with pytest.raises(SettingsError, match="bogus"):
        build(bogus=1)
    with pytest.raises(DataError, match="gold SQL"):
        build(gold="SELECT nothing").step("SELECT 1")


def test_the_revision_names_databases_and_generator():
    env = build()
    assert isinstance(env, Text2SQLEnv)
    assert len(env.env_revision) == 16


def test_any_sqlite_file_can_be_the_database(tmp_path):
    shutil.copy(chinook().original, tmp_path / "mine.sqlite")
    env = build(db_path=str(tmp_path / "mine.sqlite"), max_turns=1)
    (answer,) = shared_sandbox(chinook().original).execute(GOLD).rows[0]
    assert env.step(f"SELECT {answer}")["reward"] == 1.0, "without a perturbed copy a constant passes"
    assert env.env_revision == "db:mine.sqlite"


# --- SkyRL's protocol --------------------------------------------------------------------------------------------


@dataclass
class SkyConfig:
    db_path: str


@pytest.fixture
def spider(tmp_path):
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    shutil.copy(chinook().original, folder / "shop.sqlite")
    return tmp_path


def sky(spider, max_turns=5):
    extras = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "SELECT name FROM genre"}}
    return make("text2sql", env_config=SkyConfig(str(spider)), extras={**extras, "max_turns": max_turns})


TRANSCRIPTS = [
    "<think>a</think><solution>SELECT name FROM genre</solution>",
    "<think>a</think><solution>SELECT name FROM genre ORDER BY name DESC</solution>",
    "<think>a</think><solution>SELECT name FROM genre UNION ALL SELECT name FROM genre</solution>",
    "<think>a</think><solution>SELECT 1</solution>",
    "<think>a</think><solution>SELECT oops</solution>",
    "<solution>SELECT name FROM genre</solution>",
    "<think>a</think><solution>x</solution><solution>y</solution>",
    "<think>a</think><solution><sql>SELECT 1</sql></solution>",
    "<think>a</think><solution>SELECT 1",
    "",
]


@pytest.mark.parametrize(("text", "reward"), list(zip(TRANSCRIPTS, [1, 1, 1, 0, 0, -1, -1, -1, -1, -1], strict=True)))
def test_skyrl_reward_rule(spider, text, reward):
    out = sky(spider, max_turns=1).step(text)
    assert (out["reward"], out["done"], out["observations"]) == (reward, True, [])


def test_skyrl_tool_turns_show_rows_and_the_turns_left(spider):
    env = sky(spider)
    out = env.step("<think>look</think><sql>SELECT id, name FROM media_type</sql>")
    text = out["observations"][0]["content"]
    assert text.startswith("\n\n<observation>")
    assert "MPEG audio file" in text
    assert "You have 4 turns left" in text
    bad = env.step("<think>hm</think><sql>SELECT nope</sql>")["observations"][0]["content"]
    assert "Error executing SQL: no such column: nope" in bad
    missing = env.step("<think>hm</think>")["observations"][0]["content"]
    assert "previous action is invalid" in missing
    end = env.step("<think>ok</think><solution>SELECT name FROM genre</solution>")
    assert (end["reward"], end["done"]) == (1.0, True)


def test_skyrl_format_needs_a_thought_right_after_each_observation(spider):
    env = sky(spider)
    env.step("<think>look</think><sql>SELECT 1</sql>")
    assert env.step("<solution>SELECT name FROM genre</solution>")["reward"] == -1.0


# Few operations, each of them slow.
SLOW = "SELECT SUM(LENGTH(REPLACE(HEX(ZEROBLOB(90000 + a.id)), '00', 'x'))) FROM track a, track b"
ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"


@pytest.mark.parametrize(("solution", "ops", "seconds"), [(SLOW, 50_000_000, 0.3), (ENDLESS, 1_000_000, 2.5)])
def test_skyrl_solution_that_is_too_slow_is_a_wrong_answer(spider, monkeypatch, solution, ops, seconds):
    monkeypatch.setattr(text2sql_skyrl, "_JUDGE_OPS", ops)
    monkeypatch.setattr(text2sql_skyrl, "_JUDGE_SECONDS", seconds)
    monkeypatch.setattr(sqldb, "PATIENCE", 100.0)  # what else runs on the machine is no part of the test
    out = sky(spider, max_turns=1).step(f"<think>a</think><solution>{solution}</solution>")
    assert (out["reward"], out["done"]) == (0.0, True)


def test_skyrl_judging_ends_before_the_deadline_of_a_step():
    longest = 2 * sqldb.PATIENCE * text2sql_skyrl._JUDGE_SECONDS
    assert longest < 0.9 * RolloutSettings().env_step_seconds


def test_null_columns_of_a_mixed_table_leave_a_row_to_the_bundled_database():
    row = {"reward_spec": {"ground_truth": GOLD}, "db_id": None, "data": None, "max_turns": None}
    plain = make("text2sql", env_config={"max_turns": 3}, extras=row)
    assert isinstance(plain, Text2SQLEnv)
    assert plain.max_turns == 3
    tags = make("text2sql", env_config={"mode": "skyrl"}, extras=row)
    assert (tags.db_id, tags.max_turns) == ("chinook", 5)
    with pytest.raises(DataError, match="db_id"):
        make("text2sql", env_config={"mode": "skyrl", "db_path": "x"}, extras={**row, "data": "spider"})


def test_skyrl_mode_runs_on_the_bundled_database():
    row = question_rows("eval", limit=1)[0]
    env = make("text2sql", env_config={"mode": "skyrl"}, extras=row)
    out = env.step(f"<think>x</think><solution>{row['reward_spec']['ground_truth']}</solution>")
    assert out["reward"] == 1.0


def test_skyrl_tool_cannot_write(spider, tmp_path):
    env = sky(spider)
    out = env.step(f"<think>x</think><sql>ATTACH '{tmp_path / 'evil.db'}' AS e</sql>")
    assert "not authorized" in out["observations"][0]["content"]
    assert not (tmp_path / "evil.db").exists()


def test_skyrl_rows_without_their_database_are_named(tmp_path):
    row = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "SELECT 1"}}
    with pytest.raises(DataError, match=r"shop\.sqlite"):
        make("text2sql", env_config={"db_path": str(tmp_path)}, extras=row)
    with pytest.raises(SettingsError, match="db_path"):
        make("text2sql", env_config={}, extras=row)
    with pytest.raises(DataError, match="wikisql"):
        make("text2sql", env_config={}, extras={**row, "data": "wikisql"})


def test_skyrl_rewards_and_observations_equal_skyrl_gyms(spider):
    skyrl = pytest.importorskip("skyrl_gym")
    extras = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "SELECT name FROM genre"}}
    look = "<think>l</think><sql>SELECT id, name, NULL FROM media_type ORDER BY id</sql>"
    episodes = [[t] for t in TRANSCRIPTS] + [[look, t] for t in TRANSCRIPTS] + [["<think>x</think>", TRANSCRIPTS[0]]]
    for turns in episodes:
        ours = make("text2sql", env_config=SkyConfig(str(spider)), extras={**extras, "max_turns": len(turns)})
        theirs = skyrl.make("text2sql", env_config=SkyConfig(str(spider)), extras={**extras, "max_turns": len(turns)})
        for text in turns:
            mine, reference = ours.step(text), theirs.step(text)
            assert (mine["reward"], mine["done"]) == (reference["reward"], reference["done"]), turns
            assert len(mine["observations"]) == len(reference["observations"])


def test_extract_solution_keeps_the_text_between_the_tags():
    assert extract_solution("<think>t</think> <solution> SELECT 1 </solution>") == "SELECT 1"


# --- gsm8k and arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [("#### 42", 1), ("so\n#### 42\n", 1), ("#### 42.", 0), ("#### $42", 0), ("42", 0), ("#### 41 #### 42", 0)],
)
def test_gsm8k_takes_the_first_marked_number(text, reward):
    env = make("gsm8k", env_config={}, extras={"reward_spec": {"ground_truth": "42"}})
    out = env.step(text)
    assert (out["reward"], out["done"]) == (reward, True)


def test_gsm8k_multi_turn_pays_for_form_and_ends_when_right():
    env = make("gsm8k_multi_turn", env_config={}, extras={"reward_spec": {"ground_truth": "1234"}, "max_turns": 4})
    first = env.step("#### 5")
    assert first["reward"] == pytest.approx(0.05)
    assert "tentative" in first["observations"][0]["content"]
    assert env.step("no idea")["reward"] == 0.0
    assert "only the final" in env.step("#### 6")["observations"][0]["content"]
    last = env.step("#### 1,234")
    assert (last["reward"], last["done"]) == (1.0, True)
    assert type(env).aggregate_metrics([env.get_metrics(), {"steps": 2}]) == {"avg_steps": 3.0}


def test_gsm8k_turn_limit_comes_from_extra_info_too():
    extras = {"reward_spec": {"ground_truth": "1"}, "extra_info": {"max_turns": 1}}
    assert make("gsm8k_multi_turn", env_config={}, extras=extras).step("x")["done"]
    with pytest.raises(DataError, match="ground_truth"):
        make("gsm8k", env_config={}, extras={})


def test_a_null_turn_limit_of_gsm8k_is_none():
    row = {"reward_spec": {"ground_truth": "1"}, "max_turns": None, "extra_info": {"max_turns": None}}
    assert make("gsm8k_multi_turn", env_config={}, extras=row).max_turns == 5
    assert make("gsm8k_multi_turn", env_config={}, extras={**row, "extra_info": None}).max_turns == 5


@pytest.mark.parametrize("env_id", ["gsm8k", "gsm8k_multi_turn", "arithmetic", "text2sql"])
def test_a_reward_spec_that_is_no_mapping_is_named(env_id):
    name = env_id.removesuffix("_multi_turn")
    with pytest.raises(DataError, match=f"{name}: the row's reward_spec must be a mapping .*got str"):
        make(env_id, env_config={}, extras={"reward_spec": "4"})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"extra_info": "x"}, "gsm8k: the row's extra_info must be a mapping"),
        ({"max_turns": "x"}, "gsm8k: the row's max_turns must be a whole number from 1 on, got 'x'"),
        ({"max_turns": 0}, "gsm8k: the row's max_turns must be"),
    ],
)
def test_other_wrong_columns_of_gsm8k_are_named(changes, rule):
    with pytest.raises(DataError, match=rule):
        make("gsm8k_multi_turn", env_config={}, extras={"reward_spec": {"ground_truth": "1"}, **changes})


def test_arithmetic_rows_are_seeded_and_solvable():
    rows = arithmetic_rows(50, seed=3, operations="+-*")
    assert rows == arithmetic_rows(50, seed=3, operations="+-*")
    assert rows != arithmetic_rows(50, seed=4, operations="+-*")
    for row in rows:
        a, sign, b = row["prompt"][0]["content"].split("What is ")[1].split("?")[0].split(" ")
        expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        env = make("arithmetic", env_config={}, extras=row)
        assert env.step(f"It is {expected}")["reward"] == 1.0
        assert env.get_metrics() == {"correct": 1.0}
        assert make("arithmetic", env_config={}, extras=row).step(f"{expected + 1}")["reward"] == 0.0


def test_arithmetic_survives_huge_numbers_and_refuses_bad_rows():
    row = arithmetic_rows(1)[0]
    assert make("arithmetic", env_config={}, extras=row).step("9" * 100_000)["reward"] == 0.0
    with pytest.raises(DataError, match="integer"):
        make("arithmetic", env_config={}, extras={"reward_spec": {"ground_truth": "x"}})
    with pytest.raises(DataError, match="operations"):
        arithmetic_rows(1, operations="/")


def test_unseen_questions_are_playable_too():
    for question in questions("eval_unseen")[:6]:
        assert build(gold=question.sql).step(question.sql)["reward"] == 1.0
