"""``Problem``: one thing a plan refuses or warns about.

Owns: the record that every room uses to report a contradiction between settings.
Refuses: deciding what to do about it (``slipstream.config.plan`` raises; a command prints).

>>> Problem(("rollout.sampling.temperature",), "greedy samples cannot be trained on", "use 1.0").severity
'error'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """A contradiction, with the settings it is between, and the mend.

    ``severity`` is ``"error"`` when the run must not start and ``"warning"`` when it may.
    """

    keys: tuple[str, ...]
    message: str
    mend: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{', '.join(self.keys)}: {self.message}; {self.mend}"
