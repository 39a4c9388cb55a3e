"""An environment that even a random model earns different rewards in."""

from __future__ import annotations

from typing import Any

from slipstream.envs import BaseTextEnv, register


class Letters(BaseTextEnv):
    """Two turns; a turn earns the share of its characters that come before 'a' in the alphabet of bytes."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        reward = sum(c < "a" for c in action) / max(len(action), 1)
        done = self.turns == 2
        observations = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}


register(id="letters", entry_point=Letters)
