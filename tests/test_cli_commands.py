"""What the commands do when all is well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from cli_helpers import slipstream, tiny_run, write_rows
from slipstream import __version__
from slipstream.ledger.codec import decode
from slipstream.trajectory import Origin


def test_version() -> None:
    assert slipstream("--version").output.strip() == __version__


def test_plan_counts_rows_and_accepts(tiny_dir: Path, tmp_path: Path) -> None:
    done = slipstream("plan", *tiny_run(tiny_dir, tmp_path / "run", schedule__steps=6))
    assert done.exit_code == 0, done.output
    assert "3.00" in done.output  # 6 steps x 4 prompts over 8 rows


def test_plan_shows_what_becomes_of_skyrls_keys(tmp_path: Path) -> None:
    done = slipstream("plan", "trainer.train_batch_size=8", "data.train=builtin:arithmetic")
    assert "trainer.train_batch_size" in done.output
    assert "schedule.prompts_per_step=8" in done.output


def test_plan_refuses_with_exit_code_2() -> None:
    done = slipstream("plan", "data.train=builtin:arithmetic", "rollout.samples_per_prompt=1")
    assert done.exit_code == 2
    assert "every advantage is 0" in " ".join(done.output.split())


def test_plan_warns_of_a_file_that_is_not_here() -> None:
    done = slipstream("plan", "data.train=nowhere.parquet")
    assert done.exit_code == 0
    assert "nowhere.parquet is not here" in " ".join(done.output.split())


def test_files_and_overrides_come_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "a=b.yaml"  # an equals sign in a file's name is no override
    file.write_text("schedule: {prompts_per_step: 5}\n")
    done = slipstream("explain", "schedule.prompts_per_step", "schedule.steps=7", file)
    assert done.exit_code == 0
    assert "a=b.yaml" in "".join(done.output.split())


def test_explain_knows_skyrls_names() -> None:
    assert "schedule.prompts_per_step" in slipstream("explain", "trainer.train_batch_size").output


def test_eval_saves_scores_with_their_spec(tiny_dir: Path, tmp_path: Path) -> None:
    items = tiny_run(Path("never-read"), tmp_path / "run", data__eval="builtin:arithmetic/eval?n=3", seed=5)
    done = slipstream("eval", *items, "--model", tiny_dir, "--out", tmp_path / "eval")
    assert done.exit_code == 0, done.output
    saved = json.loads((tmp_path / "eval" / "scores.json").read_text())
    assert saved["spec"]["sampling"]["temperature"] == 0
    assert saved["spec"]["model"] == str(tiny_dir)
    assert saved["spec"]["seed"] == 5
    assert saved["scores"]["eval/arithmetic/num_prompts"] == 3
    counted = slipstream("ledger", tmp_path / "eval", "SELECT count(*) AS n FROM trajectories", "--format", "jsonl")
    assert json.loads(counted.output) == {"n": 3}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_generate_writes_whole_trajectories(tiny_dir: Path, tmp_path: Path, suffix: str) -> None:
    from slipstream.ledger.codec import read_parquet

    output = tmp_path / f"out.{suffix}"
    items = tiny_run(tiny_dir, tmp_path / "run")
    done = slipstream("generate", *items, "--limit", 2, "--output", output)
    assert done.exit_code == 0, done.output
    raw = read_parquet(output) if suffix == "parquet" else map(json.loads, output.read_text().splitlines())
    records = [decode(row) for row in raw]
    assert {record.trajectory.sample for record in records} == {0, 1}
    assert len(records) == 4
    for record in records:
        prompt, sampled = record.trajectory.rows[0].spans[:2]
        assert (prompt.origin, sampled.origin) == (Origin.PROMPT, Origin.SAMPLED)
        assert len(sampled.logprobs) == len(sampled.token_ids)


def test_generate_samples_greedily_from_eval_prompts(tiny_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    items = tiny_run(tiny_dir, tmp_path / "run", data__eval="builtin:arithmetic/eval?n=2")
    assert slipstream("generate", *items, "--split", "eval", "--output", output).exit_code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["rows"][0]["spans"][1]["sampling"]["temperature"] for row in rows] == [0.0, 0.0]


def test_train_then_ledger_then_report(tiny_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = slipstream("train", *tiny_run(tiny_dir, run, schedule__steps=2))
    assert done.exit_code == 0, done.output
    assert "2 RL steps" in done.output
    asked = slipstream(
        "ledger", run, "SELECT step, count(*) AS n FROM trajectories GROUP BY 1 ORDER BY 1", "--format", "csv"
    )
    assert asked.output.splitlines() == ["step,n", "1,8", "2,8"]
    page = tmp_path / "page.html"
    assert slipstream("report", run, "--out", page).exit_code == 0
    assert "<html" in page.read_text()[:300]
    assert slipstream("ledger", run, "SELECT step FROM metrics").output.count("2 rows") == 1


def test_sft_trains_without_rl(tiny_dir: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": chat}])
    items = [
        item for item in tiny_run(tiny_dir, tmp_path / "run") if not item.startswith(("schedule.steps", "data.train"))
    ]
    done = slipstream("sft", *items, f"data.sft={rows}", "sft.steps=2", "sft.rows_per_step=1")
    assert done.exit_code == 0, done.output
    assert "0 RL steps" in done.output
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("items", "said"),
    [(["sft.steps=2", "schedule.steps=3"], "slipstream train"), ([], "sft.steps is 0")],
    ids=["with RL steps", "without SFT steps"],
)
def test_sft_refuses_what_is_no_sft(items: list[str], said: str) -> None:
    done = slipstream("sft", *items)
    assert done.exit_code == 2
    assert said in done.output


def test_check_machine_gives_verdicts() -> None:
    done = slipstream("check", "machine")
    assert done.exit_code == 0, done.output
    for what in ("python", "cores", "memory", "torch", "bfloat16", "disk", "sandbox", "browser"):
        assert f"{what}  " in done.output


def test_check_env_is_content_with_a_bundled_environment() -> None:
    done = slipstream("check", "env", "arithmetic", "--rows", 1)
    assert done.exit_code == 0
    assert done.output.strip().endswith("nothing found")


def test_check_env_takes_a_class_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_cli_env.py").write_text(
        "from slipstream.envs.arithmetic import ArithmeticEnv\n\n\n"
        "class Mine(ArithmeticEnv):\n"
        "    def __init__(self, env_config=None, extras=None):\n"
        "        assert env_config.level == 2\n"
        "        super().__init__(env_config, extras)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = slipstream(
        "check", "env", "my_cli_env:Mine", "--data", "builtin:arithmetic", "--setting", "level=2", "--rows", 1
    )
    assert done.exit_code == 0, done.output


def test_serve_answers_and_eval_asks_it(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve`` in a thread of this process: its server is told to stop as a signal would."""
    import uvicorn

    servers: list[uvicorn.Server] = []
    original = uvicorn.Server.__init__

    def remember(self: uvicorn.Server, config: uvicorn.Config) -> None:
        original(self, config)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", remember)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    from slipstream.cli.main import serve

    thread = threading.Thread(target=serve, kwargs={"model": str(tiny_dir), "port": port, "dtype": "float32"})
    thread.start()
    try:
        url = f"http://127.0.0.1:{port}"
        # The socket listens before the engine has loaded; the request waits for it.
        listed = httpx.Client(transport=httpx.HTTPTransport(retries=20)).get(f"{url}/v1/models", timeout=60).json()
        assert [card["id"] for card in listed["data"]] == [tiny_dir.name]
        items = [item for item in tiny_run(tiny_dir, tmp_path / "run") if not item.startswith("schedule")]
        more = [f"inference.urls={url}", "inference.engine=http", "data.eval=builtin:arithmetic/eval?n=2"]
        done = slipstream("eval", *items, *more, "--out", tmp_path / "eval")
        assert done.exit_code == 0, done.output
        assert "mean score" in done.output
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, asyncio.CancelledError, OSError])
def test_logs_of_engines_stay_after_an_error_only(tmp_path, error):
    from slipstream.cli.play import _removing

    logs = tmp_path / "logs"
    logs.mkdir()
    with pytest.raises(error) if error else contextlib.nullcontext(), contextlib.ExitStack() as stack:
        stack.push(_removing(logs))
        if error:
            raise error
    assert logs.exists() is (error is OSError)


def test_plan_refuses_a_loss_of_your_own_that_a_run_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wild_losses.py").write_text(
        "from slipstream.algorithms import LossValues\n"
        "def wild(xp, inputs, settings):\n"
        "    return LossValues(-xp.exp(inputs.logprobs - inputs.behaviour_logprobs) * inputs.advantages)\n"
    )
    given = ["data.train=builtin:arithmetic", "env.id=arithmetic", "algorithm.loss=wild_losses:wild"]
    monkeypatch.syspath_prepend(str(tmp_path))
    done = slipstream("plan", *given)
    assert done.exit_code == 2
    assert "breaks its contract" in " ".join(done.output.split())
