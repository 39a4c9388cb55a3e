"""Token conservation.

Owns: the sum that must hold at every step, and the error that spells out its terms.
Refuses: counting.  The generator counts what it sampled, the trainer says what became of every
trajectory, and the schedule says what it still holds; this module only confronts them.  (Groups have a sum of
their own, which the schedule's ``Counters`` keep.)

    sampled = trained + filtered + stale_dropped + failed + superseded + buffered + in_flight

>>> TokenAccount(sampled=10, trained=8, filtered=2).check("step 1")
>>> TokenAccount(sampled=10, trained=8).check("step 1")
Traceback (most recent call last):
slipstream.errors.ContractError: step 1: tokens are not conserved: sampled 10 != 8 = trained 8 (off by +2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from slipstream.errors import ContractError


def _spell(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {value}" for name, value in terms.items() if value) or "nothing"


def _check_counts(owner: object, where: str) -> dict[str, int]:
    terms: dict[str, int] = asdict(owner)  # type: ignore[call-overload]
    for name, value in terms.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ContractError(f"{where}: {name} must be a count >= 0, got {value!r}")
    return terms


@dataclass(frozen=True, slots=True)
class TokenFlow:
    """What the generator and the schedule report with one step; all in sampled tokens.

    ``sampled`` is how many tokens were sampled *since the step before* by the generator's own count;
    ``buffered`` (finished, waiting for a later step) and ``in_flight`` (not finished) are held *now*.
    """

    sampled: int
    buffered: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Where every token ever sampled by this run is; cumulative over the whole run, resumes included."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0
    stale_dropped: int = 0
    failed: int = 0
    superseded: int = 0
    buffered: int = 0
    in_flight: int = 0

    def check(self, where: str = "ledger") -> None:
        """Raise ``ContractError`` with all terms unless sampled equals the sum of the rest."""
        terms = _check_counts(self, where)
        sampled = terms.pop("sampled")
        total = sum(terms.values())
        if sampled != total:
            raise ContractError(
                f"{where}: tokens are not conserved: sampled {sampled} != {total} = {_spell(terms)} "
                f"(off by {sampled - total:+d})"
            )

    def after_step(self, flow: TokenFlow, settled: Mapping[str, int]) -> TokenAccount:
        """The account after one more step; ``settled`` maps disposition kinds to tokens of that step.

        Kinds are ``trained``, ``filtered``, ``stale``, ``failed`` and ``superseded``.
        """
        return replace(
            self,
            sampled=self.sampled + flow.sampled,
            trained=self.trained + settled.get("trained", 0),
            filtered=self.filtered + settled.get("filtered", 0),
            stale_dropped=self.stale_dropped + settled.get("stale", 0),
            failed=self.failed + settled.get("failed", 0),
            superseded=self.superseded + settled.get("superseded", 0),
            buffered=flow.buffered,
            in_flight=flow.in_flight,
        )

    def rewound_to(self, kept: TokenAccount, buffered: int | None = None, in_flight: int = 0) -> TokenAccount:
        """The account of a run resumed at the step whose account was ``kept``.

        Everything the dead incarnation recorded as sampled stays sampled; what was settled after ``kept``, and what
        was unfinished and is not gone on with, is superseded.  ``buffered`` (default: what ``kept`` had) and
        ``in_flight`` are the tokens that the resumed run goes on with; a dead process may have sampled some of them
        after its last record, so they can raise ``sampled``.
        """
        buffered = kept.buffered if buffered is None else buffered
        settled = kept.trained + kept.filtered + kept.stale_dropped + kept.failed
        sampled = max(self.sampled, settled + kept.superseded + buffered + in_flight)
        return replace(
            kept,
            sampled=sampled,
            superseded=sampled - settled - buffered - in_flight,
            buffered=buffered,
            in_flight=in_flight,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> TokenAccount:
        """Read back what ``dataclasses.asdict`` wrote."""
        return cls(**{f.name: int(data.get(f.name, 0)) for f in fields(cls)})
