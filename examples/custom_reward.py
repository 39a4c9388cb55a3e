"""A reward of your own: named components, and a reward that may be missing.

    python examples/custom_reward.py

The task is the bundled arithmetic; only what is paid for changes.  Components show up by name in the ledger and the
report.  ``None`` means "there is no score" (a judge did not answer, say): such a sample never counts as a zero, and
never moves the baseline of its group.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from slipstream.config.settings import RunSettings
from slipstream.envs import BaseTextEnvStepOutput, register
from slipstream.envs.arithmetic import ArithmeticEnv
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.ledger import query
from slipstream.trainers.run import train


class PlainAnswer(ArithmeticEnv):
    """Correctness, a little for looking like a number, and no score for an answer that nobody could judge."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        output = super().step(action)
        if "?" in action:  # stands for a judge that failed
            return BaseTextEnvStepOutput(observations=[], reward=None, done=True, metadata={})  # type: ignore[typeddict-item]
        correct = float(output["reward"])
        form = 0.2 * sum(char.isdigit() for char in action) / max(len(action), 1)
        output["reward"] = correct + form
        output["metadata"] = {"reward_components": {"correct": correct, "form": form}}
        return output


def main() -> None:
    register("plain-answer", PlainAnswer)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        settings = {
            "run_dir": run_dir,
            "model": {"path": str(tiny_model_dir(Path(scratch) / "model")), "dtype": "float32"},
            "inference": {"dtype": "float32", "kv_cache_tokens": 8192},
            # Rows name their own environment; this one has no env_class, so that env.id decides.
            "data": {"train": str(_rows(Path(scratch) / "rows.jsonl"))},
            "env": {"id": "plain-answer"},
            "rollout": {"max_prompt_tokens": 128, "max_total_tokens": 160, "sampling": {"max_tokens_per_turn": 8}},
            "schedule": {"steps": 4, "prompts_per_step": 4},
            "training": {"optimizer": {"lr": 2e-3}},
            "logging": {"report": False},
        }
        train(RunSettings.model_validate(settings))
        by_component = """
            SELECT r.component, round(avg(r.value), 4) AS mean, count(*) AS n, count(r.missing) AS missing
            FROM trajectories, unnest(rewards) AS u(r) GROUP BY 1 ORDER BY 1
        """
        for row in query(run_dir, by_component).dicts():
            print(row)


def _rows(path: Path) -> Path:
    import json

    from slipstream.envs.arithmetic import arithmetic_rows

    rows = ({k: v for k, v in row.items() if k != "env_class"} for row in arithmetic_rows(16))
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


if __name__ == "__main__":
    main()
