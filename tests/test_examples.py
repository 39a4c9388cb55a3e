"""The examples run as they are, and the configurations can be planned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli_helpers import slipstream

EXAMPLES = Path(__file__).parent.parent / "examples"


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(name: str, *arguments: str, cwd: Path) -> str:
    return python(str(EXAMPLES / name), *arguments, cwd=cwd)


OWN_PARTS = {
    "custom_env.py": "trained 6 steps",
    "custom_reward.py": "'component': 'form'",
    "custom_loss.py": "by hand: [-1.1052 -2.4   ]",
    "custom_generator.py": "step 3: reward",
}


@pytest.fixture(scope="module")
def own_parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example printed; one process runs them all as scripts, since importing torch is most of the time."""
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        f"for name in {list(OWN_PARTS)!r}:\n"
        f"    print('@', name, flush=True); runpy.run_path({str(EXAMPLES)!r} + '/' + name, run_name='__main__')\n"
    )
    out = python("-c", code, cwd=tmp_path_factory.mktemp("examples"))
    parts = re.split(r"^@ (\S+)$", out, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_grpo_loop_learns(tmp_path: Path) -> None:
    out = run("grpo_loop.py", "--steps", "40", cwd=tmp_path)
    first, last = (
        float(number) for number in re.findall(r"mean reward: first steps (\S+) -> last steps (\S+)", out)[0]
    )
    assert last > first + 0.05, out


def test_the_grpo_loop_is_short_enough_to_read() -> None:
    assert len((EXAMPLES / "grpo_loop.py").read_text().splitlines()) < 300


@pytest.mark.parametrize("name", list(OWN_PARTS))
def test_an_example_of_ones_own_part_runs(name: str, own_parts: dict[str, str]) -> None:
    assert OWN_PARTS[name] in own_parts[name]
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


def test_gsm8k_rows_fit_the_environment(tmp_path: Path) -> None:
    from slipstream.data import PromptDataset
    from slipstream.envs import make

    (tmp_path / "in.jsonl").write_text(json.dumps({"question": "2 x 700?", "answer": "2 x 700 is\n#### 1,400"}) + "\n")
    run("prepare_gsm8k.py", "in.jsonl", "out/rows.parquet", cwd=tmp_path)
    (row,) = PromptDataset.load(str(tmp_path / "out" / "rows.parquet"))
    env = make(row.env_class, env_config={}, extras=dict(row.extras))
    assert env.step("I say #### 1400")["reward"] == 1.0


@pytest.mark.parametrize("config", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_can_be_planned(config: Path) -> None:
    done = slipstream("plan", config)
    assert done.exit_code == 0, done.output
    assert "refused" not in done.output
