"""The loop's side of the token account: what was sampled since the last step, and where what is not settled lies.

Owns: confronting the generator's count (tokens that were handed over) with the engine's own (tokens it says it made).
Refuses: settling trajectories (the ledger does, from their dispositions).

The engine's count may exceed what was handed over by what is in the engine now, and, once nothing is asked of it any
more, by what it made for requests that were lost.  Any other difference is a hole in the books and an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.errors import ContractError
from slipstream.ledger.conservation import TokenFlow
from slipstream.rollout.types import Generator, Metered


@dataclass(frozen=True)
class Flow:
    """A step's token flow, and tokens that are settled though no trajectory holds them, by disposition kind."""

    flow: TokenFlow | None
    unheld: dict[str, int] = field(default_factory=dict)


class TokenBooks:
    """Books of one start of a run; ``engine_tokens`` is the engine's count when it begins."""

    def __init__(self, generator: Generator, engine_tokens: int | None) -> None:
        self._metered = generator if isinstance(generator, Metered) else None
        self._last = engine_tokens
        self._made = 0
        self._lost = 0
        self._lost_requests = 0
        self._refused = 0
        self._dropped = 0
        self._reported = 0
        if self._metered is not None:  # evaluations before the first step are no business of the account
            meter = self._metered.meter
            self._made = sum(meter.delivered.values())
            self._lost_requests = meter.lost_requests

    def close(self, engine_tokens: int | None, buffered: int, unclaimed: int, where: str) -> Flow:
        """The flow since the last call.

        Args:
            engine_tokens: the engine's count now, or a moment ago; None when it has none.
            buffered: tokens of finished groups that no step has recorded.
            unclaimed: tokens of an earlier start whose groups do not run yet.
            where: named in errors.

        Raises:
            ContractError: the engine made tokens that were neither handed over nor lost.
        """
        if self._metered is None:
            return Flow(None)
        meter, unheld = self._metered.meter, {"failed": 0, "superseded": 0}
        in_engine = self._in_engine(engine_tokens)
        if in_engine and meter.outstanding == 0:
            if meter.lost_requests == self._lost_requests:
                raise ContractError(
                    f"{where}: the engine says it made {in_engine} tokens more than it handed over, and no request is "
                    "outstanding or was lost"
                )
            unheld["failed"] += in_engine
            self._lost += in_engine
            in_engine = 0
        if meter.outstanding == 0:
            self._lost_requests = meter.lost_requests
        unheld["failed"] += meter.refused - self._refused
        unheld["superseded"] += meter.dropped - self._dropped
        self._refused, self._dropped = meter.refused, meter.dropped
        total = meter.delivered["train"] + self._lost + in_engine
        sampled, self._reported = total - self._reported, total
        flow = TokenFlow(sampled, buffered, self._metered.held_tokens() + unclaimed + in_engine)
        return Flow(flow, {kind: tokens for kind, tokens in unheld.items() if tokens})

    def _in_engine(self, engine_tokens: int | None) -> int:
        assert self._metered is not None
        if engine_tokens is None or self._last is None:
            return 0
        # A counter that fell is that of an engine that was started again.
        made = engine_tokens - self._last if engine_tokens >= self._last else engine_tokens
        self._made, self._last = self._made + made, engine_tokens
        return max(self._made - sum(self._metered.meter.delivered.values()) - self._lost, 0)

    @property
    def idle_seconds(self) -> float:
        """Seconds since the start in which nothing was asked of the engine; 0 when it is not known."""
        return self._metered.meter.idle_seconds if self._metered is not None else 0.0
