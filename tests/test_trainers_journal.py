"""What a killed run need not do again: the journal, and a kill -9 in the middle of asynchronous work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from algorithm_builders import trajectory
from fakes import ScriptedEnv, step
from run_kit import start, tiny_settings
from slipstream.errors import LedgerError
from slipstream.ledger import LedgerReader
from slipstream.ledger.journal import read_lines
from slipstream.rollout import AttemptCancelled, AttemptSuperseded, GroupFinished, MemberFinished, TurnCompleted
from slipstream.rollout.progress import MemberProgress
from slipstream.trainers.journal import RolloutJournal, recover
from slipstream.trajectory import Failed, Group
from test_rollout_generator import fake, generator, task
from test_trainers_async import ASYNC
from test_trainers_run import trained_prompts


def two_turns(nth: int) -> list[Any]:
    return [step(0.5, "more"), step(1.0, done=True)]


async def play(maker: Any, events: list[Any], given: Any, version: str = "policy/0/3") -> Group:
    rollout = generator(fake(weight_version=version), maker, events)
    rollout._record_turns = True
    group = await rollout.generate_group(given)
    assert rollout.held_tokens() == 0
    await rollout.aclose()
    return group


class Replaying(ScriptedEnv):
    """Says the same thing to the same action, always."""


def env(_: str, extras: dict[str, Any]) -> ScriptedEnv:
    return Replaying(two_turns(0), extras)


async def test_work_of_a_group_that_has_started_again_and_said_nothing_yet_is_cut_too(tmp_path: Path) -> None:
    """Else two kills in a row would lose what the first one left."""
    group = await journalled(tmp_path, turns=1)
    _, progress = recover(tmp_path, "rl-000003", None, 3)
    journal = RolloutJournal(tmp_path, "rl-000003")
    journal.started(replace(task(n=2), progress=progress[group.group_id]))
    lines = journal.cut("rl-000004", [], {})
    journal.close()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    _, again = recover(tmp_path, "rl-000004", tmp_path / "checkpoint", 3)
    assert again == progress


def test_a_failure_is_no_finished_work() -> None:
    failed = trajectory("t", outcome=Failed("env_raised", "the server is down", True))
    assert MemberProgress(1, finished=failed).sampled_by(9) is None


async def journalled(run_dir: Path, *, turns: int = 9, version: str = "policy/0/3") -> Group:
    """Play a group of two into a journal, of which only each sample's first ``turns`` turns survive (9: everything)."""
    events: list[Any] = []
    group = await play(env, events, task(n=2), version)
    journal = RolloutJournal(run_dir, "rl-000003")
    for event in events:
        if turns == 9 or (isinstance(event, TurnCompleted) and event.record.turn < turns):
            journal.on_event(event)
    journal.close()
    return group


async def test_a_group_goes_on_from_its_completed_turns_and_no_finished_token_is_sampled_again(tmp_path: Path) -> None:
    whole = await journalled(tmp_path, turns=1)
    groups, progress = recover(tmp_path, "rl-000003", None, newest=3)
    assert groups == []
    known = progress["g0"]
    assert {i: len(m.turns) for i, m in known.items()} == {0: 1, 1: 1}
    events: list[Any] = []
    again = await play(env, events, replace(task(n=2), progress=known), "policy/1/3")
    for old, new in zip(whole.members, again.members, strict=True):
        spans = [list(m.sampled_spans()) for m in (old, new)]
        assert spans[1][0] == spans[0][0], "the completed turn is kept, with its version"
        assert spans[1][1].versions[0].version == "policy/1/3"
        assert new.rewards == old.rewards
        assert [t.observations for t in new.turns] == [t.observations for t in old.turns]
    assert [type(e) for e in events if isinstance(e, TurnCompleted)] == [TurnCompleted] * 2, "only the second turns"


async def test_a_sample_that_is_taken_back_while_it_waits_for_its_turn_is_told_of_with_what_it_had(
    tmp_path: Path,
) -> None:
    """One of two samples plays (``concurrency`` 1); both have a turn of an earlier start, and no token may vanish."""
    await journalled(tmp_path, turns=1)
    known = recover(tmp_path, "rl-000003", None, newest=3)[1]["g0"]
    carried = sum(member.tokens for member in known.values())
    told: list[Any] = []
    engine = fake(step_seconds=10.0)
    rollout = generator(engine, env, told, concurrency=1)
    running = asyncio.ensure_future(rollout.generate_group(replace(task(n=2), progress=known)))
    while not rollout.meter.outstanding:
        await asyncio.sleep(0.001)
    assert rollout.held_tokens() == carried
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rollout.aclose()
    cancelled = [event.trajectory for event in told if isinstance(event, AttemptCancelled)]
    assert sorted(member.sample for member in cancelled) == [0, 1]
    assert carried > 0
    apart = sum(member.sampled_tokens for member in cancelled)
    assert apart + rollout.meter.dropped + rollout.held_tokens() == carried + rollout.meter.delivered["train"]


async def test_finished_members_are_kept_whole(tmp_path: Path) -> None:
    whole = await journalled(tmp_path)
    known = recover(tmp_path, "rl-000003", None, newest=3)[1]["g0"]
    assert all(member.finished is not None for member in known.values())
    maker_calls: list[str] = []

    def never(name: str, extras: dict[str, Any]) -> ScriptedEnv:
        maker_calls.append(name)
        return env(name, extras)

    again = await play(never, [], replace(task(n=2), progress=known))
    assert again == whole
    assert maker_calls == []


async def test_work_of_weights_that_are_lost_is_not_gone_on_with(tmp_path: Path) -> None:
    await journalled(tmp_path, turns=1, version="policy/0/4")
    assert recover(tmp_path, "rl-000003", None, newest=3)[1] == {}


async def test_an_environment_that_answers_otherwise_begins_the_sample_anew(tmp_path: Path) -> None:
    await journalled(tmp_path, turns=1)
    known = recover(tmp_path, "rl-000003", None, newest=3)[1]["g0"]
    made = 0

    def forgetful(name: str, extras: dict[str, Any]) -> ScriptedEnv:
        nonlocal made
        made += 1
        first = [step(0.5, "something else"), step(1.0, done=True)]
        return ScriptedEnv(first, extras)

    events: list[Any] = []
    group = await play(forgetful, events, replace(task(n=2), progress=known))
    lost = [e.trajectory for e in events if isinstance(e, AttemptSuperseded)]
    assert [t.outcome.kind for t in lost] == ["cancelled", "cancelled"]
    assert all("answered something else" in t.outcome.why for t in lost)
    assert sum(t.sampled_tokens for t in lost) == sum(m.tokens for m in known.values()), "they stay in the account"
    assert [m.attempt for m in group.members] == [1, 1]
    assert made == 4


async def test_an_environment_with_snapshots_is_restored_and_not_stepped(tmp_path: Path) -> None:
    class Snapshots(ScriptedEnv):
        restored: ClassVar[list[Any]] = []

        def snapshot(self) -> Any:
            return {"actions": list(self.actions)}

        def restore(self, state: Any) -> None:
            type(self).restored.append(state)
            self.actions = list(state["actions"])

    def maker(_: str, extras: dict[str, Any]) -> ScriptedEnv:
        return Snapshots(two_turns(0), extras)

    events: list[Any] = []
    whole = await play(maker, events, task(n=1))
    journal = RolloutJournal(tmp_path, "start")
    journal.on_event(events[0])
    journal.close()
    known = recover(tmp_path, "start", None, newest=3)[1]["g0"]
    again = await play(maker, [], replace(task(n=1), progress=known))
    assert [s["actions"] for s in Snapshots.restored] == [[whole.members[0].turns[0].action]]
    assert again.members[0].rewards == whole.members[0].rewards


async def test_a_checkpoint_holds_what_was_open_and_a_new_file_follows_it(tmp_path: Path) -> None:
    events: list[Any] = []
    group = await play(env, events, task(n=2))
    journal = RolloutJournal(tmp_path, "start")
    for event in events[:3]:
        journal.on_event(event)
    finished = await play(env, [], task(1))
    lines = journal.cut("rl-000001", [finished], {"g9": {0: MemberProgress(2)}})
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    for event in events[3:]:
        journal.on_event(event)
    journal.close()
    groups, progress = recover(tmp_path, "rl-000001", tmp_path / "ckpt", newest=3)
    assert groups == [finished]
    assert tuple(progress["g0"][i].finished for i in range(2)) == group.members
    assert "g9" not in progress, "an attempt without a turn is nothing"
    assert isinstance(events[-1], GroupFinished)
    assert sum(isinstance(e, MemberFinished) for e in events) == 2


async def test_a_torn_last_line_is_ignored_and_damage_is_named(tmp_path: Path) -> None:
    await journalled(tmp_path, turns=1)
    path = tmp_path / "rollouts" / "after-rl-000003.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(recover(tmp_path, "rl-000003", None, newest=3)[1]["g0"]) == 1
    path.write_bytes(b"{torn\n" + whole)
    with pytest.raises(LedgerError, match="line 1"):
        recover(tmp_path, "rl-000003", None, newest=3)


SLOW = '''
import time
from slipstream.envs import BaseTextEnv, register


class Slow(BaseTextEnv):
    """Three turns; waits, so that a kill finds episodes half done."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()

    def step(self, action):
        self.turns += 1
        time.sleep(0.15)
        done = self.turns == 3
        observations = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": observations, "reward": len(action) / 100, "done": done, "metadata": {}}


register(id="slow", entry_point=Slow)
'''


def test_kill_9_in_the_middle_of_asynchronous_work_keeps_completed_turns(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW)
    more = [
        *ASYNC, "env.id=slow", "env.modules=[slow_env]", "rollout.max_turns=3", "data.eval=[]", "schedule.steps=8",
        "checkpoint.every_steps=1", "rollout.env_workers=4",
    ]  # fmt: skip
    run_dir = tmp_path / "r"
    process = start(tiny_dir, run_dir, *more, path=tmp_path)
    wait_for(run_dir / "rollouts", "after-rl-00000[1-5].jsonl", '"kind":"turn"', process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    at = (run_dir / "checkpoints" / "latest").read_text()
    journal = run_dir / "rollouts" / f"after-{at}.jsonl"
    kept = [line for line in read_lines(journal) if line["kind"] in ("turn", "member")]
    resumed = start(tiny_dir, run_dir, *more, path=tmp_path)
    output, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, output
    counts = trained_prompts(run_dir)
    assert set(counts.values()) == {1}
    assert len(counts) == 32
    reader = LedgerReader(run_dir)
    account = reader.events("step", live_only=True)[-1].data["account"]
    assert account["sampled"] == sum(v for k, v in account.items() if k != "sampled")
    versions = {
        run.version.split("/")[1]
        for record in reader.trajectories(phase="train")
        if record.live and record.incarnation == 1
        for span in record.trajectory.sampled_spans()
        for run in span.versions
    }
    assert versions == {"0", "1"}, f"the dead start's work is trained on after the resume ({len(kept)} lines)"


def wait_for(folder: Path, pattern: str, text: str, process: subprocess.Popen[str]) -> None:
    """Until ``text`` stands in a file of ``folder`` that fits ``pattern``; ends with the process's words if it ends."""
    import time

    until = time.monotonic() + 240
    while time.monotonic() < until:
        for path in folder.glob(pattern):
            try:
                if text in path.read_text():
                    return
            except FileNotFoundError:  # a later checkpoint has taken it away
                continue
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.005)
    raise AssertionError(f"no {pattern} in {folder} ever held {text}")


def test_the_journal_is_off_where_a_restart_gives_the_same_bits(tiny_dir: Path, tmp_path: Path) -> None:
    from slipstream.trainers.saving import keeps_rollouts

    def keeps(*overrides: str) -> bool:
        return keeps_rollouts(tiny_settings(tiny_dir, tmp_path, *overrides))

    assert keeps()
    assert keeps(*ASYNC, "training.determinism=exact")
    assert not keeps("training.determinism=exact")
    assert not keeps("checkpoint.rollouts=restart")
