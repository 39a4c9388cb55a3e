"""The run record: what is written comes back, torn files are found, resumes supersede and never delete."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ledger_synthetic import Synth, make_run
from slipstream.errors import ContractError, LedgerError
from slipstream.ledger import Ledger, LedgerReader, TokenFlow, next_incarnation
from slipstream.ledger.journal import Journal, read_lines
from slipstream.trajectory import (
    Cancelled,
    Completed,
    Failed,
    Group,
    Missing,
    Origin,
    Reward,
    Row,
    SamplingSpec,
    SideChannel,
    Span,
    Trajectory,
    Turn,
    VersionRun,
)


def rich_trajectory(outcome: object = None) -> Trajectory:
    spec = SamplingSpec(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05)
    side = {
        "experts": SideChannel("experts", "token", [[1, 2], [3, 4]]),
        "note": SideChannel("note", "span", {"a": (1, "x"), "b": Missing("not kept")}),
    }
    first = Row(
        (
            Span.prompt([1, 2, 3]),
            Span.sampled([7, 8], [-0.1, -1 / 3], [VersionRun("p/0/1", 0, 1), VersionRun("p/0/2", 1, 2)], spec, 0, side),
            Span.synthetic([9], 0),
            Span.observation([4, 4], 0),
        )
    )
    fork = Row(
        (Span.observation([5], 1), Span.sampled([6], Missing("foreign"), Missing("foreign"), spec, 1)),
        parent=0,
        fork_point=3,
    )
    return Trajectory(
        trajectory_id="t0",
        group_id="g0",
        prompt_uid="u0",
        sample=3,
        attempt=1,
        rows=(first, fork),
        turns=(
            Turn(0, "SELECT 1", ({"role": "user", "content": "böse \u2028 row", "n": 1},), "stop", "</sql>", 0.5, 0.1),
            Turn(1, "x", (), "length", 2),
        ),
        rewards=(Reward(0, 1, "correct"), Reward(0, -0.25, "length", 1), Reward(1, Missing("judge is down"), "judge")),
        outcome=outcome or Completed(),  # type: ignore[arg-type]
        scheduled_step=4,
        pass_index=2,
        env_class="text2sql",
        env_revision="r1",
        data_source="chinook",
        prompt=({"role": "user", "content": "hi", "parts": ("a", 1)},),
        env_metrics={"rows": 3.0, "nan": 1.5},
        seconds=1.25,
    )


def step_of(
    ledger: Ledger, trajectories: list[Trajectory], fate: str = "trained", step: int = 1, **more: object
) -> dict:
    from slipstream.ledger import StepRecord

    group = Group("g0", "u0", max(1, len(trajectories)), tuple(trajectories))
    record = StepRecord(step, [group], {t.trajectory_id: fate for t in trajectories}, **more)  # type: ignore[arg-type]
    return ledger.record_step(record)


@pytest.mark.parametrize(
    "outcome", [Completed(), Failed("env_raised", "KeyError: 'x'", True), Cancelled("stale")], ids=lambda o: o.kind
)
def test_a_trajectory_comes_back_equal(tmp_path: Path, outcome: object) -> None:
    original = rich_trajectory(outcome)
    with Ledger(tmp_path, 0) as ledger:
        scores = {"t0": [[-0.2, -0.3], None]}
        step_of(ledger, [original], "failed", advantages={"t0": 0.5}, trainer_logprobs=scores)
    (record,) = LedgerReader(tmp_path).trajectories()
    assert record.trajectory == original
    assert record.advantage == 0.5
    assert record.trainer_logprobs == ((-0.2, -0.3), None)


def test_numpy_side_channels_come_back_with_dtype_and_shape(tmp_path: Path) -> None:
    array = np.arange(4, dtype=np.uint8).reshape(2, 2)
    original = rich_trajectory()
    head = original.rows[0].spans
    span = replace(head[1], side={"routes": SideChannel("routes", "token", array)})
    row = replace(original.rows[0], spans=(head[0], span, *head[2:]))
    with Ledger(tmp_path, 0) as ledger:
        step_of(ledger, [replace(original, rows=(row, original.rows[1]))], "failed")
    (record,) = LedgerReader(tmp_path).trajectories()
    back = record.trajectory.rows[0].spans[1].side["routes"].values
    assert back.dtype == np.uint8
    assert np.array_equal(back, array)


def test_a_cut_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, prompts=1, size=2, eval_prompts=1)
    file = tmp_path / "trajectories" / "step-000001.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(LedgerError, match=r"step-000001\.parquet"):
        list(LedgerReader(tmp_path).trajectories())


def test_a_missing_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, prompts=1, size=2, eval_prompts=1)
    (tmp_path / "trajectories" / "step-000001.parquet").unlink()
    with pytest.raises(LedgerError, match=r"step-000001\.parquet"):
        list(LedgerReader(tmp_path).trajectories())


@pytest.mark.parametrize("torn", [b'{"seq": 99, "ki', b'{"seq":99}'], ids=["half", "newline lost"])
def test_a_torn_last_line_is_repaired_and_recorded(tmp_path: Path, torn: bytes) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("note", message="kept")
    path = tmp_path / "events.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert [e.kind for e in LedgerReader(tmp_path).events()] == ["note"]
    with Ledger(tmp_path, 1) as ledger:
        ledger.event("note", message="after")
    events = LedgerReader(tmp_path).events()
    assert [(e.seq, e.kind) for e in events] == [(0, "note"), (1, "repaired"), (2, "note")]
    assert torn in (tmp_path / "events.jsonl.torn").read_bytes()


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("note", message="one")
        ledger.event("note", message="two")
    path = tmp_path / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"garbage\n" + lines[1])
    with pytest.raises(LedgerError, match=r"events\.jsonl, line 1"):
        LedgerReader(tmp_path).events()


def test_a_directory_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="holds no ledger"):
        LedgerReader(tmp_path / "nothing")


def test_an_incarnation_is_used_once(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("note", message="x")
    assert next_incarnation(tmp_path) == 1
    with pytest.raises(ContractError, match="use 1"):
        Ledger(tmp_path, 0)


def test_clocks_and_paths_are_kept_apart_from_content(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("checkpoint", step=1, path=tmp_path / "c", seconds=1.5, digest="abc")
    (event,) = LedgerReader(tmp_path).events()
    assert event.data == {"digest": "abc"}
    assert event.clock["seconds"] == 1.5
    assert event.clock["path"] == str(tmp_path / "c")


@pytest.mark.parametrize(("kind", "fields"), [("publish", {}), ("step", {}), ("Not a kind", {})])
def test_malformed_events_are_refused(tmp_path: Path, kind: str, fields: dict[str, object]) -> None:
    with Ledger(tmp_path, 0) as ledger, pytest.raises(ContractError):
        ledger.event(kind, **fields)


def test_every_member_needs_a_disposition(tmp_path: Path) -> None:
    record = Synth().step(1, prompts=1, size=2)
    with pytest.raises(ContractError, match="no disposition"):
        replace(record, dispositions=dict(list(record.dispositions.items())[1:]))


def test_a_step_that_loses_tokens_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    record = Synth().step(1, prompts=1, size=2)
    lost = replace(record, flow=TokenFlow(record.flow.sampled + 3))  # type: ignore[union-attr]
    with Ledger(tmp_path, 0) as ledger:
        with pytest.raises(ContractError, match=r"not conserved.*off by \+3"):
            ledger.record_step(lost)
        assert ledger.reader.files() == []
        assert list((tmp_path / "trajectories").iterdir()) == []
        ledger.record_step(record)


def test_trainer_logprobs_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger, pytest.raises(ContractError, match="3 trainer log-probs for 2 sampled"):
        step_of(ledger, [rich_trajectory()], "failed", trainer_logprobs={"t0": [[-1.0, -1.0, -1.0], None]})


def test_a_step_is_recorded_once(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.record_step(Synth().step(1))
        with pytest.raises(ContractError, match="rewind"):
            ledger.record_step(Synth().step(1))


def resume(run_dir: Path, upto: int, last: int) -> None:
    """Run steps up to ``upto``; die; resume after ``upto - 2`` and go on to ``last``."""
    synth = [Synth(seed) for seed in range(last + 1)]
    with Ledger(run_dir, 0) as ledger:
        for step in range(1, upto + 1):
            ledger.record_step(synth[step].step(step, prompts=2, size=3))
    with Ledger(run_dir, 1) as ledger:
        assert ledger.rewind(upto - 2)["steps"] == 2
        for step in range(upto - 1, last + 1):
            ledger.record_step(Synth(step).step(step, prompts=2, size=3, incarnation=1))


def test_a_rewind_supersedes_and_deletes_nothing(tmp_path: Path) -> None:
    resume(tmp_path, upto=4, last=5)
    reader = LedgerReader(tmp_path)
    assert [e.step for e in reader.events("step", live_only=True)] == [1, 2, 3, 4, 5]
    everything = list(reader.trajectories(live_only=False))
    dead = [r for r in everything if not r.live]
    assert {r.step for r in dead} == {3, 4}
    assert {r.disposition for r in dead} == {"superseded"}
    assert len(everything) == 7 * 6
    assert [m.step for m in reader.metrics("train")] == [1, 2, 3, 4, 5]
    account = reader.account_at(5)
    account.check()
    assert account.superseded == sum(r.trajectory.sampled_tokens for r in dead)
    assert account.sampled == sum(r.trajectory.sampled_tokens for r in everything)


def test_the_account_survives_two_crashes_at_the_same_step(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        for step in (1, 2):
            ledger.record_step(Synth(step).step(step, prompts=1, size=2))
    for incarnation in (1, 2):
        with Ledger(tmp_path, incarnation) as ledger:
            ledger.rewind(1)
    with Ledger(tmp_path, 3) as ledger:
        ledger.rewind(1)
        ledger.record_step(Synth(2).step(2, prompts=1, size=2, incarnation=3))
        ledger.account.check()
        everything = ledger.reader.trajectories(live_only=False)
        assert ledger.account.sampled == sum(r.trajectory.sampled_tokens for r in everything)


def test_rewinding_to_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger, pytest.raises(ContractError, match="last live step is 0"):
        ledger.rewind(7)


def test_buffered_tokens_are_trained_later_and_stay_conserved(tmp_path: Path) -> None:
    first, second = Synth(1).step(1, prompts=1, size=2), Synth(2).step(2, prompts=1, size=2)
    ahead = second.flow.sampled  # type: ignore[union-attr]
    with Ledger(tmp_path, 0) as ledger:
        ledger.record_step(replace(first, flow=TokenFlow(first.flow.sampled + ahead, buffered=ahead)))  # type: ignore[union-attr]
        ledger.record_step(replace(second, flow=TokenFlow(0)))
        assert ledger.account.buffered == 0
        ledger.account.check()


def test_equal_runs_have_equal_digests_whatever_their_clocks_paths_and_interruptions(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "a", tmp_path / "b"
    with Ledger(straight, 0) as ledger:
        for step in range(1, 6):
            record = Synth(step).step(step, prompts=2, size=3)
            slower = {k: v * 2 for k, v in record.timings.items()}
            ledger.record_step(replace(record, timings=slower))
        digest = ledger.content_digest()
    resume(resumed, upto=4, last=5)
    assert LedgerReader(resumed).content_digest() == digest
    assert LedgerReader(resumed).content_digest(4) == LedgerReader(straight).content_digest(4) != digest


def test_one_other_logprob_bit_changes_the_digest(tmp_path: Path) -> None:
    digests = []
    for name, nudge in (("a", 0.0), ("b", 1e-16)):
        trajectory = rich_trajectory()
        head = trajectory.rows[0].spans
        span = replace(head[1], logprobs=(-0.1 - nudge, -1 / 3))
        row = replace(trajectory.rows[0], spans=(head[0], span, *head[2:]))
        with Ledger(tmp_path / name, 0) as ledger:
            step_of(ledger, [replace(trajectory, rows=(row, trajectory.rows[1]))], "failed")
            digests.append(ledger.content_digest())
    assert -0.1 - 1e-16 != -0.1
    assert digests[0] != digests[1]


def test_a_repeated_evaluation_supersedes_the_earlier_one(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.record_eval(Synth(1).evaluation(0, 0.2, prompts=3))
        ledger.record_eval(Synth(2).evaluation(0, 0.9, prompts=3))
    live = LedgerReader(tmp_path).events("eval", live_only=True)
    assert len(live) == 1
    assert live[0].seq == 1
    assert len(list(LedgerReader(tmp_path).trajectories(live_only=False))) == 6


def test_metrics_come_back_and_the_step_returns_them(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        returned = ledger.record_step(Synth().step(1))
        ledger.record_metrics(1, {"sft/loss": 2.0})
    rows = LedgerReader(tmp_path).metrics()
    assert {r.phase: r.values for r in rows} == {"train": returned, "sft": {"sft/loss": 2.0}}
    assert returned["timing/update"] == 14.2
    assert all(json.dumps(v) for v in returned.values())


def test_token_texts_round_trip(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.store_token_texts({0: " a", 7: "\n", 8: "\ufffd"})
    assert LedgerReader(tmp_path).token_texts() == {0: " a", 7: "\n", 8: "\ufffd"}


def test_origins_are_kept_apart_in_the_file(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, prompts=1, size=2, eval_prompts=1)
    record = next(LedgerReader(tmp_path).trajectories(phase="train"))
    origins = [span.origin for span in record.trajectory.rows[0].spans]
    assert origins[:3] == [Origin.PROMPT, Origin.SAMPLED, Origin.SYNTHETIC]


def test_a_line_that_finds_no_room_leaves_nothing_and_others_may_follow(tmp_path: Path) -> None:
    """A limit on the size of files refuses a write in its middle, as a full disk does."""
    journal = Journal(tmp_path / "j.jsonl")
    journal.append({"n": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(LedgerError, match=r"cannot write .*j\.jsonl.*free space"):
            journal.append({"n": 2, "long": "x" * 50_000})
        journal.append({"n": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.append({"n": 4})
    journal.close()
    assert [line["n"] for line in read_lines(tmp_path / "j.jsonl")] == [1, 3, 4]


@pytest.mark.parametrize("place", ["file/j.jsonl", "folder"])
def test_a_journal_that_cannot_be_opened_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LedgerError, match=rf"{tmp_path / place} cannot be opened .*another run_dir"):
        Journal(tmp_path / place)


def test_a_ledger_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1, prompts=1, size=2)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(LedgerError, match=r"metrics\.jsonl cannot be read"):
        LedgerReader(tmp_path).metrics()
    (tmp_path / "tokens.json").write_text("[]")
    with pytest.raises(LedgerError, match=r"tokens\.json is unreadable or corrupt"):
        LedgerReader(tmp_path).token_texts()
