"""A writer killed at any moment leaves a ledger that opens, resumes and stays conserved."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

from ledger_synthetic import Synth
from slipstream.ledger import Ledger, LedgerReader, next_incarnation

WRITER = """
import sys
from ledger_synthetic import Synth
from slipstream.ledger import Ledger, next_incarnation
run = sys.argv[1]
incarnation = next_incarnation(run)
with Ledger(run, incarnation) as ledger:
    ledger.rewind(max(0, ledger.last_step - 1))
    step = ledger.last_step
    while True:
        step += 1
        ledger.event("note", message="x" * 3000)
        ledger.record_step(Synth(step).step(step, prompts=1, size=2, incarnation=incarnation))
        print(step, flush=True)
"""


def test_a_killed_writer_leaves_a_ledger_that_goes_on(tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
        )
        assert writer.stdout is not None
        for _ in range(rng.randint(2, 5)):
            assert writer.stdout.readline(), "the writer died by itself"
        try:
            writer.wait(timeout=rng.random() * 0.03)  # somewhere within the next step
        except subprocess.TimeoutExpired:
            writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
        writer.stdout.close()
        reader = LedgerReader(tmp_path)
        everything = list(reader.trajectories(live_only=False))
        assert [e.seq for e in reader.events()] == list(range(len(reader.events())))
        steps = [e.step for e in reader.events("step", live_only=True)]
        assert steps == list(range(1, len(steps) + 1))
        assert all(record.trajectory.rows for record in everything)
    with Ledger(tmp_path, next_incarnation(tmp_path)) as ledger:
        last = ledger.last_step
        ledger.rewind(last)
        ledger.record_step(Synth(0).step(last + 1, prompts=1, size=2))
        ledger.account.check()
        assert ledger.account.superseded > 0
        everything = list(ledger.reader.trajectories(live_only=False))
        assert ledger.account.sampled == sum(r.trajectory.sampled_tokens for r in everything)
