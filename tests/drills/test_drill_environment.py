"""Environments that lose their server, hang, or answer late."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from drill_kit import ASYNC, ENDLESS, MOMENTS, Drill, cause, drilling, sound

from run_kit import tiny_settings
from slipstream.envs import BaseTextEnv, register
from slipstream.errors import BudgetExceededError
from slipstream.inference.launch.process import free_port
from slipstream.ledger import LedgerReader
from slipstream.rollout.envpool import EnvPool
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.run import train

pytestmark = pytest.mark.proof
STARTS = 200


class Until(Callback):
    """Ends an endless run once enough has been injected."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        self._enough = enough

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if self._enough():
            control.stop("enough")


def rows_for(env: str, folder: Path) -> str:
    """A data set whose rows name an environment."""
    path = folder / f"{env}.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "env_class": env} for i in range(24)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"data.train={path}"


def run_until(settings: Any, enough: Callable[[], bool]) -> Counter[str]:
    """Start a run again and again until enough has been injected; why it stopped in between."""
    stopped: Counter[str] = Counter()
    for _ in range(STARTS):
        try:
            train(settings, [Until(enough)])
        except BudgetExceededError as error:
            stopped[first_cause(error)] += 1
            continue
        return stopped
    raise AssertionError(f"not done after {STARTS} starts: {stopped}")


def first_cause(error: BudgetExceededError) -> str:
    """What the budget's message says the first failure was."""
    return cause(BudgetExceededError(str(error).partition("Causes: ")[2]))


# ---- a server that is killed

SERVER = """
import http.server, json, sys
class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        action = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = json.dumps(sum(c < "a" for c in action) / max(len(action), 1)).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""


class Server:
    """An environment server as a process, on one port for good."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", SERVER, str(self.port)])
        until = time.monotonic() + 60
        while True:
            try:
                ask(self.port, "a")
                return
            except OSError:
                assert time.monotonic() < until, "the drill's environment server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """Signal 9."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)


def ask(port: int, action: str) -> float:
    """The server's reward; raises ``OSError`` when there is none."""
    call = urllib.request.Request(f"http://127.0.0.1:{port}/", data=action.encode(), method="POST")
    with urllib.request.urlopen(call, timeout=30) as answer:
        return float(json.loads(answer.read()))


class Remote(BaseTextEnv):
    """Two turns; a server grades them."""

    port = 0

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        time.sleep(0.02)
        reward, done = ask(self.port, action), self.turns == 2
        observations = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}


register(id="remote_drill", entry_point=Remote)


def test_an_environment_server_that_comes_back(tiny_dir: Path, tmp_path: Path) -> None:
    injected = "signal 9 at a random moment; it is back after up to half a second"
    with drilling("kill the environment server", injected) as drill, drill.nothing_left() as ports:
        server = Server()
        Remote.port = server.port
        ports.add(server.port)
        server.start()
        killed, over = 0, threading.Event()

        def kills() -> None:
            nonlocal killed
            while killed < MOMENTS and not over.wait(drill.rng.uniform(0.2, 1.5)):
                server.kill()
                killed += 1
                over.wait(drill.rng.uniform(0.0, 0.5))
                server.start()

        thread = threading.Thread(target=kills)
        thread.start()
        try:
            more = [*ASYNC, *ENDLESS, rows_for("remote_drill", tmp_path), "rollout.failures.attempts=3"]
            settings = tiny_settings(tiny_dir, tmp_path / "r", *more)
            stopped = run_until(settings, lambda: not thread.is_alive())
        finally:
            over.set()
            thread.join()
            server.kill()
        sound(tmp_path / "r")
        judge_stops(drill, killed, stopped, "refused|reset|Remote|closed")
        note_fates(drill, tmp_path / "r")


def judge_stops(drill: Drill, injected: int, stopped: Counter[str], words: str) -> None:
    """Every stop has named the fault; the rest of what was injected was lived through."""
    for why, times in stopped.items():
        assert re.search(words, why), why
        drill.happened(f"stopped, naming it ({why}); resumed", times)
    drill.happened("the run went on", max(injected - stopped.total(), 0))


def note_fates(drill: Drill, run_dir: Path) -> None:
    """How many samples were trained, failed, superseded."""
    fates = Counter(r.disposition.partition(":")[0] for r in LedgerReader(run_dir).trajectories(phase="train"))
    drill.notes["samples"] = dict(sorted(fates.items()))
    drill.notes["turns_gone_on_with"] = len(LedgerReader(run_dir).events("recovered"))


def test_an_environment_server_that_stays_away(tiny_dir: Path, tmp_path: Path) -> None:
    name = "kill the environment server for good"
    with drilling(name, "signal 9 at a random moment; it is back for the next start") as drill:
        with drill.nothing_left() as ports:
            server = Server()
            Remote.port = server.port
            ports.add(server.port)
            settings = tiny_settings(tiny_dir, tmp_path / "r", *ASYNC, *ENDLESS, rows_for("remote_drill", tmp_path))
            for _ in range(MOMENTS):
                server.start()
                timer = threading.Timer(drill.rng.uniform(0.5, 3.0), server.kill)
                timer.start()
                with pytest.raises(BudgetExceededError, match=r"env_raised.*(refused|reset|Remote|closed)") as caught:
                    train(settings)
                timer.join()
                drill.happened(f"stopped, naming it: {first_cause(caught.value)}")
            server.start()
            steps = 0

            def three_more() -> bool:
                nonlocal steps
                steps += 1
                return steps >= 3

            train(settings, [Until(three_more)])
            server.kill()
        sound(tmp_path / "r")
        note_fates(drill, tmp_path / "r")


# ---- environments that hang, answer late, or raise


class Faulty(BaseTextEnv):
    """Rewards what comes before 'a'; some of its calls misbehave; which, depends on a seed and the count."""

    faults = 0
    kind = ""
    rng = random.Random(0)
    released = threading.Event()
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._maybe(0.02)

    def init(self, prompt: Any) -> Any:
        self._maybe(0.02)
        return super().init(prompt)

    def close(self) -> None:
        self._maybe(0.02)
        super().close()

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        self._maybe(0.1)
        done = self.turns == 2
        observations = [] if done else [{"role": "user", "content": "again"}]
        reward = sum(c < "a" for c in action) / max(len(action), 1)
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

    def _maybe(self, share: float) -> None:
        with self.lock:
            if self.rng.random() >= share:
                return
            type(self).faults += 1
            delay = self.rng.random()
        if self.kind == "hang":
            self.released.wait(3600)
        elif self.kind == "late":
            time.sleep(2 * SECONDS * delay)  # as often within the deadline as after it
        else:
            raise RuntimeError("the sandbox is gone")


register(id="faulty_drill", entry_point=Faulty)
SECONDS = 1.0
FAULTS = {
    "hang": ("hang an environment", "a random call never returns"),
    "late": ("slow a verifier: rewards", "a random call answers late, half of the time after its deadline"),
    "raise": ("raise in an environment", "a random call raises"),
}


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_a_faulty_environment(kind: str, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[EnvPool] = []
    made = EnvPool.__init__

    def noted(self: EnvPool, workers: int) -> None:
        made(self, workers)
        pools.append(self)

    monkeypatch.setattr(EnvPool, "__init__", noted)
    with drilling(*FAULTS[kind]) as drill, drill.nothing_left():
        Faulty.kind, Faulty.faults, Faulty.released = kind, 0, threading.Event()
        Faulty.rng = random.Random(f"{drill.seed}:{kind}")
        more = [
            *ASYNC, *ENDLESS, rows_for("faulty_drill", tmp_path), f"rollout.env_step_seconds={SECONDS}",
            "rollout.failures.attempts=3", "rollout.env_workers=4",
        ]  # fmt: skip
        settings = tiny_settings(tiny_dir, tmp_path / "r", *more)
        stopped = run_until(settings, lambda: Faulty.faults >= MOMENTS)
        injected = Faulty.faults
        Faulty.released.set()
        until = time.monotonic() + 60
        while left := [t for t in threading.enumerate() if t.name.startswith("slipstream-env")]:
            assert time.monotonic() < until, f"threads left: {left}"
            time.sleep(0.05)
        assert not any(pool.leaked for pool in pools)
        sound(tmp_path / "r")
        judge_stops(drill, injected, stopped, {"raise": "sandbox is gone"}.get(kind, "env_timeout"))
        note_fates(drill, tmp_path / "r")
        drill.notes["threads_given_up"] = sum(pool.abandoned for pool in pools)
