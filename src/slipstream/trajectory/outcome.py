"""How a trajectory ended, as types.

Owns: the four outcomes and ``Missing``.  Refuses: turning a failure into a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slipstream.errors import ContractError


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that is typed as absent, with the reason; whatever needs it refuses, naming the reason."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ContractError("Missing needs a reason")


@dataclass(frozen=True, slots=True)
class Completed:
    """The environment ended the episode."""

    kind: ClassVar[str] = "completed"
    votes: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Truncated:
    """A budget ended the episode (``turn_tokens``, ``total_tokens``, ``max_turns``, ``context``)."""

    reason: str
    kind: ClassVar[str] = "truncated"
    votes: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Failed:
    """Something broke; the member is absent from its group.

    ``fault`` is a stable short name (``env_raised``, ``env_timeout``, ``env_type``, ``reward_not_finite``,
    ``engine_error``, ``template``, ``prompt_too_long`` ...), ``reason`` is for people.
    """

    fault: str
    reason: str
    retryable: bool
    kind: ClassVar[str] = "failed"
    votes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The scheduler or the user took the trajectory back."""

    why: str
    kind: ClassVar[str] = "cancelled"
    votes: ClassVar[bool] = False


Outcome = Completed | Truncated | Failed | Cancelled
