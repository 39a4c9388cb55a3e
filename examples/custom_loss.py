"""A loss of your own: one ratio per sequence, as in GSPO (arXiv 2507.18071).

    python examples/custom_loss.py

A loss sees flat arrays over the trained tokens (nothing is masked or padded) and returns one value per unit: here
``row``.  Weights, denominators and micro-batches are not its business.  It is written against ``xp``, so that one
source runs on torch and on numpy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.algorithms import LossInputs, LossMetric, LossValues, Ops, log_ratio, numpy_ops, register_loss
from slipstream.config.settings import RunSettings
from slipstream.inference.embedded.tiny import tiny_model_dir
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.run import train


@register_loss("sequence_clip", unit="row", defaults={"clip_low": 0.2, "clip_high": 0.2, "floor": 0.0})
def sequence_clip(xp: Ops, inputs: LossInputs, settings: Mapping[str, Any]) -> LossValues:
    """``-min(s A, clip(s) A)`` with ``s = exp(mean over the row of log pi - log old)``."""
    gap = inputs.mean(xp, log_ratio(xp, inputs.logprobs, inputs.old_logprobs), "row")
    ratio, advantage = xp.exp(gap), inputs.mean(xp, inputs.advantages, "row")
    low = max(settings["floor"], 1.0 - settings["clip_low"])
    clipped = xp.clip(ratio, low, 1.0 + settings["clip_high"]) * advantage
    metrics = {"sequence_ratio": LossMetric("mean", xp.stop_gradient(ratio), "row")}
    return LossValues(-xp.minimum(ratio * advantage, clipped), metrics)


def by_hand() -> None:
    """On numpy: two rows of two tokens; the first row's ratio is exp(0.1), the second's is clipped at 1.2."""
    inputs = LossInputs(
        logprobs=np.array([-1.0, -1.0, -0.5, -0.5]), old_logprobs=np.array([-1.1, -1.1, -1.5, -1.5]),
        behaviour_logprobs=None, ref_logprobs=None, entropy=None, advantages=np.array([1.0, 1.0, 2.0, 2.0]),
        weights=np.full(4, 0.25), row_index=np.array([0, 0, 1, 1]), n_rows=2,
    )  # fmt: skip
    values = sequence_clip(numpy_ops(), inputs, {"clip_low": 0.2, "clip_high": 0.2, "floor": 0.0}).values
    print("by hand:", np.round(values, 4))


def main() -> None:
    by_hand()
    with tempfile.TemporaryDirectory() as scratch:
        settings = {
            "run_dir": Path(scratch) / "run",
            "model": {"path": str(tiny_model_dir(Path(scratch) / "model")), "dtype": "float32"},
            "inference": {"dtype": "float32", "kv_cache_tokens": 8192},
            "data": {"train": "builtin:arithmetic?n=16"},
            "algorithm": {"loss": "sequence_clip", "loss_settings": {"floor": 0.5}, "drop_zero_variance": False},
            "rollout": {"max_prompt_tokens": 128, "max_total_tokens": 160, "sampling": {"max_tokens_per_turn": 6}},
            "schedule": {"steps": 3, "prompts_per_step": 4},
            "logging": {"report": False},
        }
        seen: list[float] = []
        train(RunSettings.model_validate(settings), callbacks=[_Watch(seen)])
        print("sequence ratio per step:", [round(value, 4) for value in seen])


class _Watch(Callback):
    """The loss's own metric, as the run reports it."""

    def __init__(self, seen: list[float]) -> None:
        self.seen = seen

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        self.seen.append(info.metrics["policy/loss_metrics/sequence_ratio"])


if __name__ == "__main__":
    main()
