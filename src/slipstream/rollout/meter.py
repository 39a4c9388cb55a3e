"""Counting tokens at the door: what engines handed over, what they still hold, what was lost.

Owns: one half of the token account (the other is what trajectories hold).  Refuses: knowing what becomes of a token.

A request is *outstanding* from the moment it is asked until its answer is taken; when it ends in an error or is taken
back, whatever the engine sampled for it is *lost*: nobody will ever see those tokens.

>>> meter = TokenMeter(clock=lambda: 0.0)
>>> meter.asked()
>>> meter.answered("train", 5)
>>> meter.delivered["train"], meter.outstanding
(5, 0)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable


class TokenMeter:
    """Counts of one generator, cumulative since it was built; used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.delivered: Counter[str] = Counter()
        """Sampled tokens handed over, by phase (``train``, ``eval``)."""
        self.outstanding = 0
        """Requests that have been asked and not been answered."""
        self.lost_requests = 0
        """Requests that ended without an answer."""
        self.dropped = 0
        """Tokens of an earlier start of the run that could not be continued, and that no trajectory holds."""
        self.refused = 0
        """Tokens of answers that broke the engine's contract; no trajectory holds them."""
        self._clock = clock
        self._idle = 0.0
        self._idle_since: float | None = clock()

    def asked(self) -> None:
        """A request goes to the engine."""
        if self._idle_since is not None:
            self._idle += self._clock() - self._idle_since
            self._idle_since = None
        self.outstanding += 1

    def answered(self, phase: str, tokens: int) -> None:
        """Its answer was taken."""
        self.delivered[phase] += tokens
        self._ended()

    def lost(self) -> None:
        """It ended without an answer."""
        self.lost_requests += 1
        self._ended()

    def _ended(self) -> None:
        self.outstanding -= 1
        if self.outstanding == 0:
            self._idle_since = self._clock()

    @property
    def idle_seconds(self) -> float:
        """Seconds in which no request was outstanding."""
        return self._idle + (0.0 if self._idle_since is None else self._clock() - self._idle_since)
