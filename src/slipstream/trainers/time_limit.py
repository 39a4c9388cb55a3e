"""The end of a run by the clock.

Owns: when ``schedule.time_limit_minutes`` ends RL.  Refuses: ending anything but at a step border.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.trainers.callbacks import Callback, Control, StepInfo


class TimeLimit(Callback):
    """Finishes the run at the last step border from which another step and the last evaluation still fit.

    Both are taken to last as long as the latest of their kind.  ``elapsed`` and ``evaluation`` are seconds: of the
    run so far, and of its latest evaluation.
    """

    def __init__(self, minutes: float | None, elapsed: Callable[[], float], evaluation: Callable[[], float]) -> None:
        self._minutes, self._elapsed, self._evaluation = minutes, elapsed, evaluation
        self._began = 0.0

    def on_step_start(self, info: StepInfo, control: Control) -> None:
        self._began = self._elapsed()

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if self._minutes is None or info.phase != "rl" or info.step >= info.total_steps:
            return
        now = self._elapsed()
        if now + (now - self._began) + self._evaluation() > 60 * self._minutes:
            control.finish(
                f"the time limit of {self._minutes:g} minutes, after {info.step} of {info.total_steps} steps"
            )
