"""Rules that end a run: a metric has left its bounds.

Owns: watching the metrics of steps and evaluations, the verdict and its evidence.
Refuses: ending anything itself (``Control`` does, at the next step border).

A rule takes the mean of a metric over its last ``window`` values, those of earlier starts of the run included, once
there are so many; what is no number is out of bounds.  ``rollback`` names a checkpoint of the run's lineage from before
the window began: this start ends, and the next one goes on from there.

A metric that has not come in ``window`` steps (``eval/``: evaluations, ``sft/``: steps of the warm start), or in the
whole run, is warned of.

>>> rule = RuleSettings(metric="reward/avg_raw_reward", below=0.1, window=2)
>>> verdict(rule, [0.5, 0.2]), verdict(rule, [0.1, 0.05])
(None, 'reward/avg_raw_reward was 0.075 over the last 2 values, below 0.1')
"""

from __future__ import annotations

import difflib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from slipstream.config.settings import RuleSettings
from slipstream.ledger import Ledger
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.checkpoint import CheckpointStore

_KINDS = ("eval/", "sft/")
"""Metrics with these prefixes come from evaluations and from the supervised warm start, all others from steps of RL."""


def verdict(rule: RuleSettings, values: Sequence[float]) -> str | None:
    """Why the run has to end, or None."""
    if len(values) < rule.window:
        return None
    mean = fmean(list(values)[-rule.window :])
    if math.isnan(mean):
        bound = "which is no number"
    elif rule.above is not None and mean > rule.above:
        bound = f"above {rule.above:g}"
    elif rule.below is not None and mean < rule.below:
        bound = f"below {rule.below:g}"
    else:
        return None
    over = "" if rule.window == 1 else f" over the last {rule.window} values"
    return f"{rule.metric} was {mean:.4g}{over}, {bound}"


def unknown_metric(metric: str, known: Collection[str]) -> str:
    """That a metric has not come, and which ones like it have."""
    near = difflib.get_close_matches(metric, sorted(known), n=3)
    return f"{metric} has not come" + (f" (there is {', '.join(near)})" if near else "")


class RuleKeeper(Callback):
    """Watches the rules of a run."""

    def __init__(self, rules: Sequence[RuleSettings], ledger: Ledger, store: CheckpointStore) -> None:
        self.rules = tuple(rules)
        self._ledger, self._store = ledger, store
        longest = max((rule.window for rule in rules), default=1)
        self._values: dict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=longest))
        self._known: set[str] = set()
        self._missed: Counter[str] = Counter()
        self._told: set[str] = set()

    def on_train_start(self, info: StepInfo, control: Control) -> None:
        if not self.rules:
            return
        for row in self._ledger.reader.metrics("sft"):
            self._note(row.values, row.step)
        for row in self._ledger.reader.metrics("train"):
            if row.step <= info.step:
                self._note(row.values, row.step)
        for event in self._ledger.reader.events("eval", live_only=True):
            if event.step is not None and event.step <= info.step:
                self._note(event.data["scores"], event.step)

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        self._judge(info, control)
        self._miss(info.step, "sft/" if info.phase == "sft" else "")

    def on_eval_end(self, info: StepInfo, control: Control) -> None:
        self._judge(StepInfo(info.phase, info.step, info.total_steps, _only_eval(info.metrics)), control)
        self._miss(info.step, "eval/")

    def on_train_end(self, info: StepInfo, control: Control) -> None:
        for rule in self.rules if info.step >= info.total_steps else ():
            self._tell(rule.metric, info.step)

    def _miss(self, step: int, kind: str) -> None:
        """Count how often what has not come could have: ``kind`` is a prefix, or empty for steps of RL."""
        rules = [rule for rule in self.rules if kind == next((k for k in _KINDS if rule.metric.startswith(k)), "")]
        self._missed.update({rule.metric for rule in rules})
        for rule in rules:
            if self._missed[rule.metric] >= rule.window:
                self._tell(rule.metric, step)

    def _tell(self, metric: str, step: int) -> None:
        """Warn, once, of a rule that watches nothing."""
        if metric not in self._known and metric not in self._told:
            self._told.add(metric)
            words = f"a rule watches a metric that is not there: {unknown_metric(metric, self._known)} by step {step}"
            self._ledger.event("warning", message=words)

    def _note(self, metrics: Mapping[str, float], step: int) -> None:
        self._known |= metrics.keys()
        for name in {rule.metric for rule in self.rules} & metrics.keys():
            self._values[name].append((step, float(metrics[name])))

    def _judge(self, info: StepInfo, control: Control) -> None:
        self._note(info.metrics, info.step)
        for rule in self.rules:
            if rule.metric not in info.metrics:
                continue
            seen = list(self._values[rule.metric])
            why = verdict(rule, [value for _, value in seen])
            if why is None:
                continue
            self._ledger.event("rule", step=info.step, rule=rule, verdict=why)
            if rule.action == "stop":
                control.stop(f"rule: {why}")
                continue
            target = rule.to or self._before(seen[-rule.window][0])
            if target is None or target not in self._store.names():
                control.stop(f"rule: {why}; there is no checkpoint {target or 'from before'} to go back to")
            else:
                control.roll_back(target, f"rule: {why}; going back to {target}")

    def _before(self, step: int) -> str | None:
        """The newest checkpoint from before this step."""
        there = set(self._store.names())
        # Checkpoints of steps that the run went back from may still lie there; their events are not live.
        saved = self._ledger.reader.events("checkpoint", live_only=True)
        names = [e.data["name"] for e in saved if e.step is not None and e.step < step]
        return max((name for name in names if name in there and name.startswith("rl-")), default=None)


def _only_eval(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}
