"""Identities: weight versions and the keys that sampling noise hangs on.

Owns: ``WeightVersion`` (``policy/incarnation/counter``) and ``SampleKey``.
Refuses: knowing who publishes or samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from slipstream.errors import ContractError


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """The name of one set of published weights: ``policy/incarnation/counter``.

    ``incarnation`` grows by one each time a run is started or resumed, so that a name is never
    reused for other weights, also after a crash.

    >>> str(WeightVersion("policy", 0, 3))
    'policy/0/3'
    >>> WeightVersion.parse("policy/0/3").next()
    WeightVersion(policy='policy', incarnation=0, counter=4)
    """

    policy: str
    incarnation: int
    counter: int

    def __post_init__(self) -> None:
        if not self.policy or "/" in self.policy:
            raise ContractError(f"policy name {self.policy!r} must be non-empty and must not contain '/'")
        if self.incarnation < 0 or self.counter < 0:
            raise ContractError(f"version {self.policy}/{self.incarnation}/{self.counter}: numbers must be >= 0")

    def __str__(self) -> str:
        return f"{self.policy}/{self.incarnation}/{self.counter}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read ``policy/incarnation/counter``; raises ``ContractError`` on anything else."""
        parts = text.split("/")
        if len(parts) != 3 or not parts[1].isdigit() or not parts[2].isdigit():
            raise ContractError(f"{text!r} is not a weight version (want policy/incarnation/counter)")
        return cls(parts[0], int(parts[1]), int(parts[2]))

    def next(self) -> WeightVersion:
        """The version that the next publish of the same incarnation gets."""
        return replace(self, counter=self.counter + 1)


@dataclass(frozen=True, slots=True)
class SampleKey:
    """What the noise of one generation is keyed by; never a run id or a schedule step.

    ``pass_index`` counts epochs over the data, ``attempt`` counts retries of one sample.
    """

    seed: int
    prompt_uid: str
    pass_index: int
    sample: int
    attempt: int
    turn: int

    def derive(self) -> int:
        """A 63-bit engine seed: BLAKE2b over the fields; stable across processes and platforms."""
        text = "\x1f".join(
            str(part) for part in (self.seed, self.prompt_uid, self.pass_index, self.sample, self.attempt, self.turn)
        )
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
