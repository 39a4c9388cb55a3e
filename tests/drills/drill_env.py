"""An environment that takes a moment, so that a run is long enough to be hit in all of its phases."""

from __future__ import annotations

import time
from typing import Any

from run_env import Letters
from slipstream.envs import register


class Pause(Letters):
    """``Letters`` with a pause in each turn."""

    def step(self, action: str) -> dict[str, Any]:
        time.sleep(0.05)
        return super().step(action)


register(id="pause_drill", entry_point=Pause)
