"""What a publish did to one replica, for the ledger.

Owns: ``Receipt`` and its JSON.  Refuses: deciding anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.weights.verify import Verification

Result = Literal["published", "rolled_back", "quarantined"]


@dataclass(frozen=True)
class Receipt:
    """One replica, one publish.

    ``digest`` names the weights themselves (over all checksums), ``bytes`` is their size, ``payload_bytes`` what an
    up-to-date replica had to be sent (a delta is less).
    ``version`` is what was to be published, ``holds`` what the replica verifiably holds now (None: unknown).
    ``seconds`` has one entry per phase (stage, pause, load, verify, resume), summed over attempts; stage is shared by
    all replicas.  ``faults`` says, in order, why attempts failed.
    """

    version: str
    replica: str
    result: Result
    holds: str | None
    transport: str
    digest: str
    names: int
    bytes: int
    payload_bytes: int
    seconds: Mapping[str, float]
    verification: Verification
    attempts: int
    faults: tuple[str, ...] = ()

    @property
    def published(self) -> bool:
        """True when the replica holds the new version and serves it."""
        return self.result == "published"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; times lie under ``seconds`` alone, so that a reader can leave the clocks out."""
        return {
            "version": self.version,
            "replica": self.replica,
            "result": self.result,
            "holds": self.holds,
            "transport": self.transport,
            "digest": self.digest,
            "names": self.names,
            "bytes": self.bytes,
            "payload_bytes": self.payload_bytes,
            "verification": self.verification.to_json(),
            "attempts": self.attempts,
            "faults": list(self.faults),
            "seconds": dict(self.seconds),
        }
