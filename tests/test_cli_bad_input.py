"""Bad input: one line that names the thing and the mend, exit code 2, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import slipstream, start, tiny_run, write_rows
from slipstream.envs import BaseTextEnv, BaseTextEnvStepOutput, deregister, register
from slipstream.envs.arithmetic import arithmetic_rows

RELEASE = threading.Event()


class FaultyEnv(BaseTextEnv):
    """Does what the row's ``fault`` says."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.fault = (extras or {}).get("fault")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward: Any = float(len(action))
        if self.fault == "raises":
            raise KeyError("no such table")
        if self.fault == "hangs":
            RELEASE.wait(60)
        if self.fault == "nan":
            reward = float("nan")
        if self.fault == "type":
            return ["not", "a", "step", "output"]  # type: ignore[return-value]
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


@pytest.fixture
def faulty() -> Iterator[str]:
    RELEASE.clear()
    register("faulty", FaultyEnv)
    yield "faulty"
    deregister("faulty")
    RELEASE.set()  # lets hung threads end


def refused(*arguments: object) -> str:
    """The message of a command that must be refused, in one line per error and without a traceback."""
    done = slipstream(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert "error: " in done.output
    return " ".join(done.output.split())


# ---- settings


def test_an_unknown_key_is_named_with_its_nearest() -> None:
    assert "Did you mean schedule.steps" in refused("train", "schedule.stpes=3")


def test_a_contradiction_between_native_and_skyrls_key() -> None:
    said = refused("train", "schedule.prompts_per_step=4", "trainer.train_batch_size=8")
    assert "contradicts" in said
    assert "keep one of them" in said


def test_a_contradiction_between_settings_stops_before_the_model_loads(tmp_path: Path) -> None:
    said = refused("train", *tiny_run(tmp_path / "nowhere", tmp_path / "run", rollout__samples_per_prompt=1))
    assert "every advantage is 0" in said
    assert not (tmp_path / "run").exists()


def test_a_word_that_is_neither_file_nor_override() -> None:
    assert "neither a file here nor of the form key=value" in refused("plan", "missing.yaml")


def test_a_module_that_cannot_be_imported() -> None:
    assert "env.modules: 'no_such_module_here' cannot be imported" in refused(
        "train", "env.modules=no_such_module_here"
    )


def test_debug_shows_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    done = slipstream("--debug", "train", "schedule.stpes=3")
    assert done.exit_code == 2
    assert "Traceback" in done.output
    assert "SettingsError" in done.output


# ---- models


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no usable tokenizer"),
        ("config.json", "no config.json"),
    ],
)
def test_a_model_directory_that_lacks_something(tiny_dir: Path, tmp_path: Path, removed: str, said: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    (model / removed).unlink()
    if removed == "tokenizer.json":
        (model / "tokenizer_config.json").unlink()
    message = refused("train", *tiny_run(model, tmp_path / "run"))
    assert said in message
    assert str(model) in message


def changed_weights(tiny_dir: Path, model: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the model with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_dir, model)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_a_model_that_lacks_one_tensor_is_not_filled_with_noise(tiny_dir: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    model = changed_weights(tiny_dir, tmp_path / "model", lambda tensors: tensors.pop(name))
    assert f"{model}: no weights for {name}" in refused("train", *tiny_run(model, tmp_path / "run"))


def test_a_model_with_a_nan_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    model = changed_weights(tiny_dir, tmp_path / "model", lambda tensors: tensors[name][0].fill_(float("nan")))
    assert f"NaN or infinity in {name}" in refused("train", *tiny_run(model, tmp_path / "run"))


def test_weights_of_other_shapes(tiny_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    said = refused("train", *tiny_run(model, tmp_path / "run"))
    assert f"{model}: cannot be loaded" in said
    assert "save the model again" in said


@pytest.mark.parametrize("command", ["train", "eval", "serve"])
def test_truncated_weights(tiny_dir: Path, tmp_path: Path, command: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    items = {
        "train": tiny_run(model, tmp_path / "run"),
        "eval": ["data.eval=builtin:arithmetic?n=2", "--model", model, "--out", tmp_path / "out"],
        "serve": ["--model", model, "--port", 0],
    }
    said = refused(command, *items[command])
    assert str(model) in said
    assert "save" in said


@pytest.mark.parametrize("config", ["[]", '{"model_type": "nonsense"}', '{"hidden_size": "wide"}', '{"model_type'])
def test_a_config_that_is_none(tiny_dir: Path, tmp_path: Path, config: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    (model / "config.json").write_text(config)
    assert f"{model}/config.json" in refused("train", *tiny_run(model, tmp_path / "run"))


def test_a_model_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere: no such directory" in refused("train", *tiny_run(tmp_path / "nowhere", tmp_path / "run"))


def test_a_chat_template_that_is_not_there_or_missing(tiny_dir: Path, tmp_path: Path) -> None:
    absent = tmp_path / "none.jinja"
    said = refused("train", *tiny_run(tiny_dir, tmp_path / "run", model__chat_template=absent))
    assert f"model.chat_template={absent} cannot be read" in said
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    (model / "chat_template.jinja").unlink()
    assert "set model.chat_template" in refused("train", *tiny_run(model, tmp_path / "run"))


def test_a_run_directory_that_is_a_file(tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert f"run_dir={file} cannot be made" in refused("train", *tiny_run(tiny_dir, file))
    said = refused("eval", "data.eval=builtin:arithmetic?n=2", "--model", tiny_dir, "--out", file)
    assert f"{file} cannot be written" in said
    assert file.read_text() == "mine"


# ---- data


def test_a_row_without_a_prompt(tiny_dir: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [*arithmetic_rows(1), {"question": "1 + 1?"}])
    said = refused("train", *tiny_run(tiny_dir, tmp_path / "run", data__train=rows))
    assert f"{rows} line 2: no 'prompt'" in said
    assert "add chat messages or text" in said


def test_a_prompt_longer_than_the_limit_is_left_out_and_counted(tiny_dir: Path, tmp_path: Path) -> None:
    long = {**arithmetic_rows(1)[0], "uid": "long", "prompt": "words " * 200}
    rows = write_rows(tmp_path / "rows.jsonl", [*arithmetic_rows(2), long])
    done = slipstream("train", *tiny_run(tiny_dir, tmp_path / "run", data__train=rows, schedule__prompts_per_step=2))
    assert done.exit_code == 0, done.output
    notes = slipstream("ledger", tmp_path / "run", "SELECT data FROM events WHERE kind = 'note'", "--format", "jsonl")
    assert "1 longer than 128 tokens" in notes.output


def test_only_prompts_longer_than_the_limit(tiny_dir: Path, tmp_path: Path) -> None:
    long = {**arithmetic_rows(1)[0], "prompt": "words " * 200}
    rows = write_rows(tmp_path / "rows.jsonl", [long])
    assert "1 longer than 128 tokens" in refused("train", *tiny_run(tiny_dir, tmp_path / "run", data__train=rows))


# ---- serving, and runs that are not there


@pytest.mark.parametrize("text", ['{"x": 1}', '{"threads": 0}', "{x"])
def test_serving_with_settings_that_cannot_be_used(text: str) -> None:
    assert "--settings cannot be used" in refused("serve", "--port", 0, "--model", "/nowhere", "--settings", text)


def test_a_port_in_use_is_said_before_the_model_is_looked_at() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused("serve", "--model", "/nowhere", "--port", port)
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    assert str(tmp_path) in refused("report", tmp_path)
    assert str(tmp_path) in refused("ledger", tmp_path, "SELECT 1")


def test_sql_that_would_write(tiny_dir: Path, tmp_path: Path) -> None:
    from slipstream.ledger import Ledger

    Ledger(tmp_path, 0).close()
    assert "read-only" in refused("ledger", tmp_path, "CREATE TABLE t(x INT)")


# ---- checkpoints and disks


def test_a_corrupt_checkpoint_is_never_skipped(tiny_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert slipstream("train", *tiny_run(tiny_dir, run)).exit_code == 0
    weights = next((run / "checkpoints").glob("*/policy/master.safetensors"))
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    said = refused("train", *tiny_run(tiny_dir, run, schedule__steps=2))
    assert str(weights) in said
    assert "corrupt" in said


def mount(place: Path, options: str) -> bool:
    """Mount (or remount) memory as a file system; False without the right to."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of its own that can be full, and given more room; None without the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = mount(place, "size=640k")
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_the_earlier_checkpoint(tiny_dir: Path, small_disk: Path | None) -> None:
    if small_disk is None:
        pytest.skip("needs the right to mount; the next test limits the size of files instead")
    run = small_disk / "run"
    items = tiny_run(tiny_dir, run, schedule__steps=2, checkpoint__every_steps=1, eval__before="false")
    said = refused("train", *items)
    assert "No space left" in said
    assert "Free disk space" in said
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["latest", "rl-000001"]
    assert mount(small_disk, "remount,size=50m")
    done = slipstream("train", *items)
    assert done.exit_code == 0, done.output
    assert "resumed from rl-000001" in done.output
    assert "2 RL steps" in done.output


def test_a_file_that_grows_too_large_is_a_failed_checkpoint(
    tiny_dir: Path, tmp_path: Path, small_disk: Path | None
) -> None:
    """As a full disk, without rights: the system limits the size of files, in a process of its own."""
    if small_disk is not None:
        pytest.skip("the test before has used a disk that was really full")
    items = tiny_run(tiny_dir, tmp_path / "run")
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        f"sys.argv = ['slipstream', 'train', *{items!r}]\n"
        "from slipstream.cli.main import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Free disk space" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


# ---- environments


@pytest.mark.parametrize(
    ("fault", "found"), [("raises", "raises"), ("hangs", "hang"), ("nan", "not finite"), ("type", "type")]
)
def test_check_env_finds_the_fault(faulty: str, tmp_path: Path, fault: str, found: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "go", "fault": fault}])
    done = slipstream("check", "env", faulty, "--data", rows, "--deadline", 0.3)
    assert done.exit_code == 1
    assert found in done.output
    assert "mend:" in done.output


LEAKY = """
import threading
from concurrent.futures import ThreadPoolExecutor
from slipstream.envs.arithmetic import ArithmeticEnv

FOREVER = threading.Event()


class Thread(ArithmeticEnv):
    def init(self, prompt):
        threading.Thread(target=FOREVER.wait, daemon=False).start()
        return prompt, {}


class Executor(ArithmeticEnv):
    def init(self, prompt):
        ThreadPoolExecutor(1).submit(FOREVER.wait)
        return prompt, {}


class Broken(Thread):
    def close(self):
        FOREVER.wait()
"""


@pytest.mark.parametrize("name", ["Thread", "Executor", "Broken"])
def test_check_env_ends_although_the_class_leaves_threads_that_wait(tmp_path: Path, name: str) -> None:
    """Python joins such threads at its end, also the (daemon) threads of an executor."""
    (tmp_path / "leaky_env.py").write_text(LEAKY)
    options = ["--data", "builtin:arithmetic", "--rows", 1, "--deadline", 2]
    process = start("check", "env", f"leaky_env:{name}", *options, cwd=tmp_path)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (1, "")
    assert ("threads left" if name != "Broken" else "[hang]") in out
    assert out.endswith("warnings\n")


def test_check_env_of_an_unknown_id() -> None:
    assert "No registered env with id: nowhere" in refused("check", "env", "nowhere")


@pytest.mark.parametrize("text", ["a=[1", "a=@x", "a=${b", "=1", "a"])
@pytest.mark.parametrize("command", [("env", "arithmetic"), ("loss", "ppo_clip")])
def test_a_setting_that_cannot_be_read_is_named(command: tuple[str, str], text: str) -> None:
    assert f"--setting {text!r}" in refused("check", *command, "--setting", "b=1", "--setting", text)


def test_check_env_of_a_class_that_is_not_in_its_module() -> None:
    assert "module 'json' has no 'Nothing'" in refused("check", "env", "json:Nothing")


def faulty_rows(path: Path, *faults: str | None) -> Path:
    return write_rows(
        path, [{"prompt": f"question {i}", "uid": f"{fault}-{i}", "fault": fault} for i, fault in enumerate(faults)]
    )


def test_a_run_goes_on_over_failures_within_its_budget(faulty: str, tiny_dir: Path, tmp_path: Path) -> None:
    rows = faulty_rows(tmp_path / "rows.jsonl", "raises", "hangs", "nan", "type", *[None] * 6)
    run = tmp_path / "run"
    items = tiny_run(
        tiny_dir, run, data__train=rows, env__id=faulty, schedule__prompts_per_step=10, rollout__env_step_seconds=0.3
    )
    done = slipstream("train", *items)
    assert done.exit_code == 0, done.output
    sql = "SELECT fault, count(*) AS n FROM trajectories WHERE disposition = 'failed' GROUP BY 1 ORDER BY 1"
    counted = [json.loads(line) for line in slipstream("ledger", run, sql, "--format", "jsonl").output.splitlines()]
    assert {row["fault"]: row["n"] for row in counted} == {
        "env_raised": 2,
        "env_timeout": 2,
        "env_type": 2,
        "reward_not_finite": 2,
    }
    trained = slipstream(
        "ledger", run, "SELECT count(*) FROM trajectories WHERE disposition = 'trained'", "--format", "csv"
    )
    assert int(trained.output.split()[1]) > 0


def test_a_run_stops_when_its_failure_budget_is_spent(faulty: str, tiny_dir: Path, tmp_path: Path) -> None:
    rows = faulty_rows(tmp_path / "rows.jsonl", "nan", "nan", "nan", None)
    said = refused("train", *tiny_run(tiny_dir, tmp_path / "run", data__train=rows, env__id=faulty))
    assert "rollout.failures.max_failed_fraction" in said
    assert "reward_not_finite" in said
