"""An environment of your own: check it, register it, train on it.

    python examples/custom_env.py

The task has two turns: write something, hear how many vowels it had, write again.  The reward is the share of vowels.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from slipstream.config.settings import RunSettings
from slipstream.data import register_builtin
from slipstream.envs import BaseTextEnv, BaseTextEnvStepOutput, register
from slipstream.envs.checker import check_env
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.trainers.run import train


class VowelsEnv(BaseTextEnv):
    """One instance plays one episode; everything that it needs comes with its row (``extras``)."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.max_turns = min(2, (extras or {}).get("max_turns", 2))
        self.best = 0.0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        vowels = sum(letter in "aeiou" for letter in action.lower())
        share = vowels / max(len(action), 8)  # a single vowel is not enough
        gain, self.best = max(share - self.best, 0.0), max(share, self.best)
        done = self.turns >= self.max_turns
        hint = [] if done else [{"role": "user", "content": f"{vowels} vowels. More?"}]
        return BaseTextEnvStepOutput(observations=hint, reward=gain, done=done, metadata={})

    def get_metrics(self) -> dict[str, float]:
        return {"best_share": self.best}


def rows(part: str, options: Any) -> list[dict[str, Any]]:
    """Data rows are ordinary dicts: ``prompt`` for the model, every other column for the environment."""
    topics = ("sea", "air", "idea", "oasis")
    return [{"prompt": [{"role": "user", "content": f"Vowels, please: {topic}"}], "topic": topic} for topic in topics]


def main() -> None:
    register("vowels", VowelsEnv)
    register_builtin("vowels", rows)
    for finding in check_env("vowels", rows("", {}), max_turns=2):
        print(finding)
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "run_dir": Path(scratch) / "run",
            "model": {"path": str(tiny_model_dir(Path(scratch) / "model")), "dtype": "float32"},
            "inference": {"dtype": "float32", "kv_cache_tokens": 8192},
            "data": {"train": "builtin:vowels"},
            "env": {"id": "vowels"},
            "rollout": {"max_turns": 2, "max_prompt_tokens": 128, "max_total_tokens": 256,
                        "sampling": {"max_tokens_per_turn": 12}},
            "schedule": {"steps": 6, "prompts_per_step": 4},
            "training": {"optimizer": {"lr": 2e-3}},
            "logging": {"report": False},
        }  # fmt: skip
        result = train(RunSettings.model_validate(settings))
        print(f"trained {result.steps} steps in {result.seconds:.0f} s")


if __name__ == "__main__":
    main()
