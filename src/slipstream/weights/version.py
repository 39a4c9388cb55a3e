"""The counter behind version names.

Owns: handing out ``policy/incarnation/counter``, each name once.  Refuses: knowing what the weights are.

A failed publish uses its number up: the next try of the *same* weights keeps its name, other weights never get it.
A resumed run is a new incarnation with the same counter, so that counters stay aligned with steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.trajectory import WeightVersion


class VersionCounter:
    """Versions of one policy in one incarnation of a run.

    >>> saved = VersionCounter("policy", 0).state_dict()
    >>> str(VersionCounter.resumed(saved).next())
    'policy/1/1'
    """

    def __init__(self, policy: str = "policy", incarnation: int = 0, counter: int = 0) -> None:
        self._current = WeightVersion(policy, incarnation, counter)

    @property
    def current(self) -> WeightVersion:
        """The last version handed out; the initial weights before the first ``next``."""
        return self._current

    def next(self) -> WeightVersion:
        """The name of the next publish."""
        self._current = self._current.next()
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        v = self._current
        return {"policy": v.policy, "incarnation": v.incarnation, "counter": v.counter}

    @classmethod
    def resumed(cls, state: Mapping[str, Any]) -> VersionCounter:
        """The counter of the run's next incarnation.

        Raises:
            CheckpointError: the state is not that of a version counter.
        """
        try:
            return cls(str(state["policy"]), int(state["incarnation"]) + 1, int(state["counter"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's version counter is unreadable: {state!r} ({error!r})") from error
