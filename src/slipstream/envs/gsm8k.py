"""GSM8K answers, single and multi-turn, with skyrl-gym's reward rule.

The answer is the first ``#### <number>`` of a turn, commas removed, compared as text with
``reward_spec.ground_truth`` ("42." is not "42"; "#### $42" is no answer).

* ``gsm8k``: one turn, reward 1 or 0.
* ``gsm8k_multi_turn``: up to ``max_turns`` (from ``extras`` or ``extras.extra_info``, default 5); 1 when right, which
  ends the episode; ``0.2 / max_turns`` for a well-formed wrong answer; else 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.envs._row import ground_truth, section, turn_limit
from slipstream.envs.core import BaseTextEnv, BaseTextEnvStepOutput
from slipstream.errors import DataError

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_FORM_REWARD = 0.2
_TURNS = 5


def extract_answer(text: str) -> str | None:
    r"""The first ``#### <number>`` without commas, or None.

    >>> extract_answer("so\n#### 1,234")
    '1234'
    """
    found = _ANSWER.search(text)
    return found.group(1).replace(",", "") if found else None


def _ground_truth(extras: Mapping[str, Any]) -> str:
    answer = ground_truth(extras, "gsm8k")
    if answer is None:
        raise DataError("gsm8k: the row needs reward_spec.ground_truth, the final number as text")
    return str(answer)


class GSM8kEnv(BaseTextEnv):
    """One question, one answer."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.ground_truth = _ground_truth(extras or {})

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Reward 1 for the right number, else 0; always done."""
        self.turns += 1
        reward = float(extract_answer(action) == self.ground_truth)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class GSM8kMultiTurnEnv(BaseTextEnv):
    """One question, several tries with rewards per turn."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        self.ground_truth = _ground_truth(row)
        usual = turn_limit(section(row, "extra_info", "gsm8k"), _TURNS, "gsm8k")
        self.max_turns = turn_limit(row, usual, "gsm8k")
        self.format_score_per_turn = _FORM_REWARD / self.max_turns

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the turn's answer; while turns remain, ask again."""
        self.turns += 1
        answer = extract_answer(action)
        right = answer == self.ground_truth
        done = right or self.turns >= self.max_turns
        reward = 1.0 if right else 0.0 if answer is None else self.format_score_per_turn
        observations = [] if done else [{"role": "user", "content": self._request()}]
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})

    def _request(self) -> str:
        if self.max_turns - self.turns > 1:
            return (
                "Please provide your step-by-step reasoning, and also include a tentative numeric answer at the end in "
                "the exact format: '#### ANSWER'."
            )
        return "Now provide only the final numeric answer in the exact format: '#### ANSWER'."

    def get_metrics(self) -> dict[str, Any]:
        """``steps``: turns taken."""
        return {"steps": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """``avg_steps`` over the episodes."""
        if not metrics:
            return {}
        return {"avg_steps": sum(float(m.get("steps", 0)) for m in metrics) / len(metrics)}
