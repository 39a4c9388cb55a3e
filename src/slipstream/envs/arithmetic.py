"""A trivial environment for tests, first runs and examples: small sums.

Owns: the environment ``arithmetic`` and its generated rows.  Reward 1 when the last integer of the text is the
answer, else 0; one turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slipstream.envs._row import ground_truth
from slipstream.envs.chinook import draw
from slipstream.envs.core import BaseTextEnv, BaseTextEnvStepOutput
from slipstream.errors import DataError

_INTEGER = re.compile(r"-?\d+")


class ArithmeticEnv(BaseTextEnv):
    """One sum; ``extras["reward_spec"]["ground_truth"]`` is the answer (an integer or its text)."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        answer = ground_truth(extras or {}, "arithmetic")
        if not isinstance(answer, int | str) or not _INTEGER.fullmatch(str(answer)):
            raise DataError(f"arithmetic: reward_spec.ground_truth must be an integer, got {answer!r}")
        self.answer = int(answer)
        self.correct = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Reward 1 when the last integer in ``action`` is the answer; always done."""
        self.turns += 1
        # Longer digit strings than any answer are cut by the pattern's use, not parsed: int() refuses huge ones.
        numbers = [n for n in _INTEGER.findall(action) if len(n) <= 20]
        self.correct = bool(numbers) and int(numbers[-1]) == self.answer
        return BaseTextEnvStepOutput(observations=[], reward=float(self.correct), done=True, metadata={})

    def get_metrics(self) -> dict[str, float]:
        """``correct``: 0 or 1."""
        return {"correct": float(self.correct)}


def arithmetic_rows(n: int, seed: int = 0, *, largest: int = 9, operations: str = "+-") -> list[dict[str, Any]]:
    """``n`` data rows of sums of two numbers in [0, largest], fixed by ``seed``.

    Rows hold ``uid, prompt, env_class, reward_spec, data_source``; uids are unique, sums may repeat.
    """
    if n < 0 or largest < 0 or not operations or set(operations) - set("+-*"):
        raise DataError(f"arithmetic_rows: n={n}, largest={largest}, operations={operations!r} (choose from '+-*')")
    rows = []
    for i in range(n):
        a, b = (draw(largest + 1, "arithmetic", seed, i, side) for side in "ab")
        sign = operations[draw(len(operations), "arithmetic", seed, i, "sign")]
        answer = a + b if sign == "+" else a - b if sign == "-" else a * b
        rows.append(
            {
                "uid": f"arith-{seed}-{i}",
                "prompt": [{"role": "user", "content": f"What is {a} {sign} {b}? Answer with the number only."}],
                "env_class": "arithmetic",
                "reward_spec": {"ground_truth": str(answer)},
                "data_source": "arithmetic",
            }
        )
    return rows
