"""Group counters and their invariant.

Owns: how many groups were submitted and what became of each.  Refuses: knowing how a rollout is done.

The unit is the group.  At every event ``submitted = accepted + filtered + running + failed + cancelled``,
where ``accepted`` counts groups that are buffered or were trained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from slipstream.errors import ContractError


@dataclass
class Counters:
    """Cumulative over a run; ``check`` raises ``ContractError`` when the books do not balance."""

    submitted: int = 0
    accepted: int = 0
    filtered: int = 0
    running: int = 0
    failed: int = 0
    cancelled: int = 0

    def move(self, source: str, target: str, n: int = 1) -> None:
        """Move ``n`` groups from one state to another and check the invariant."""
        have = getattr(self, source)
        if have < n:
            raise ContractError(f"schedule: cannot move {n} groups from {source} to {target}; only {have} there")
        setattr(self, source, have - n)
        setattr(self, target, getattr(self, target) + n)
        self.check()

    def submit(self, n: int = 1) -> None:
        """``n`` groups start running."""
        self.submitted += n
        self.running += n
        self.check()

    def check(self) -> None:
        """Raise unless the invariant holds and nothing is negative."""
        parts = self.accepted + self.filtered + self.running + self.failed + self.cancelled
        if self.submitted != parts or min(asdict(self).values()) < 0:
            raise ContractError(f"schedule counters do not balance: {self}")

    def state_dict(self) -> dict[str, int]:
        """A JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, int]) -> Counters:
        """The inverse of ``state_dict``; checks the invariant."""
        counters = cls(**state)
        counters.check()
        return counters
