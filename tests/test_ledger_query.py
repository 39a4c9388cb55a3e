"""SQL over a run: the views, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger_synthetic import Synth, make_run
from slipstream.errors import DataError, LedgerError
from slipstream.ledger import Ledger, LedgerReader, query


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("o'run"), steps=3, prompts=2, size=4, eval_prompts=3)


def test_metrics_are_columns(run: Path) -> None:
    result = query(run, """SELECT step, "timing/update" FROM metrics WHERE phase = 'train' ORDER BY step""")
    assert result.columns == ("step", "timing/update")
    assert result.rows == ((1, 14.2), (2, 14.2), (3, 14.2))


def test_tokens_agree_with_the_trajectories(run: Path) -> None:
    sql = "SELECT trajectory_id, count(*), sum(logprob), count(version) FROM tokens WHERE origin = 'sampled' GROUP BY 1"
    by_id = {row[0]: row[1:] for row in query(run, sql).rows}
    for record in LedgerReader(run).trajectories():
        t = record.trajectory
        count, total, versioned = by_id[t.trajectory_id]
        assert count == versioned == t.sampled_tokens
        assert total == pytest.approx(sum(x for s in t.sampled_spans() for x in s.logprobs))  # type: ignore[union-attr]


def test_positions_rebuild_the_row(run: Path) -> None:
    record = next(LedgerReader(run).trajectories(phase="train"))
    name = record.trajectory.trajectory_id
    rows = query(
        run, f"SELECT position, token_id FROM tokens WHERE trajectory_id = '{name}' AND row = 0 ORDER BY 1"
    ).rows
    assert [r[0] for r in rows] == list(range(len(rows)))
    assert [r[1] for r in rows] == record.trajectory.row_tokens(0)


def test_trained_tokens_are_those_the_account_counts(run: Path) -> None:
    (counted,) = query(run, "SELECT count(*) FROM tokens WHERE trained").rows[0]
    assert counted == LedgerReader(run).account_at(3).trained


def test_turns_carry_their_reward(run: Path) -> None:
    (rewards,) = query(run, "SELECT sum(reward) FROM turns WHERE phase = 'train'").rows[0]
    (totals,) = query(run, "SELECT sum(total_reward) FROM trajectories WHERE phase = 'train'").rows[0]
    assert rewards == pytest.approx(totals)


def test_events_open_as_json(run: Path) -> None:
    rows = query(run, "SELECT data->>'$.settings.model.path' FROM events WHERE kind = 'run_started'").rows
    assert rows == (("smollm2-135m-instruct",),)


def test_superseded_trajectories_are_there_and_marked(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.record_step(Synth(1).step(1, prompts=1, size=2))
    with Ledger(tmp_path, 1) as ledger:
        ledger.rewind(0)
    assert query(tmp_path, "SELECT DISTINCT live, disposition FROM trajectories").rows == ((False, "superseded"),)


def test_an_empty_run_answers_with_no_rows(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("note", message="started")
    assert query(tmp_path, "SELECT * FROM tokens").rows == ()
    assert query(tmp_path, "SELECT * FROM turns").rows == ()


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO 'stolen.csv'",
        "CREATE TABLE x AS SELECT 1",
        "SELECT 1; DROP VIEW events",
        "SELECT * FROM read_text('/etc/hostname')",
        "INSTALL httpfs",
        "ATTACH 'x.db'",
    ],
)
def test_only_reading_the_run_is_allowed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        query(run, sql)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_view_is_answered_with_the_known_ones(run: Path) -> None:
    with pytest.raises(DataError, match=r"views: events, metrics.*tokens"):
        query(run, "SELECT * FROM trajectory")


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, prompts=1, size=2, eval_prompts=1)
    file = tmp_path / "trajectories" / "step-000001.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(LedgerError, match=r"step-000001\.parquet"):
        query(tmp_path, "SELECT count(*) FROM trajectories")
