"""An endless order over a dataset, with a cursor that survives a restart.

Owns: the order of each pass and the cursor.  Refuses: loading data; deciding how many rows a step takes.

Every pass visits each uid exactly once.  A shuffled pass sorts the uids by a hash of (seed, pass, uid): the order
depends on nothing else, not on a library's random stream, and not on the order of the files.

>>> class Row:
...     def __init__(self, uid: str) -> None:
...         self.uid = uid
>>> class Data:
...     rows, fingerprint = [Row("a"), Row("b")], "f"
>>> sampler = Sampler(Data(), seed=0, shuffle=False)
>>> [(row.uid, number) for row, number in (sampler.next() for _ in range(3))]
[('a', 0), ('b', 0), ('a', 1)]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from slipstream.errors import CheckpointError, DataError


class HasUid(Protocol):
    """A row with a name."""

    @property
    def uid(self) -> str: ...


RowT = TypeVar("RowT", bound=HasUid)
RowT_co = TypeVar("RowT_co", bound=HasUid, covariant=True)


class Dataset(Protocol[RowT_co]):
    """Rows with uids, and a fingerprint of all of them."""

    @property
    def rows(self) -> Sequence[RowT_co]: ...

    @property
    def fingerprint(self) -> str: ...


class Sampler(Generic[RowT]):
    """See the module's docstring.

    Args:
        dataset: rows with unique uids.
        seed: of the shuffle.
        shuffle: False keeps the dataset's order in every pass.
    """

    def __init__(self, dataset: Dataset[RowT], *, seed: int = 0, shuffle: bool = True) -> None:
        if not dataset.rows:
            raise DataError("an empty dataset cannot be sampled")
        if len({row.uid for row in dataset.rows}) != len(dataset.rows):
            raise DataError("the dataset's uids are not unique")
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self.pass_index = 0
        self.position = 0
        self._order = self._ordered(0)

    def __len__(self) -> int:
        """Rows of one pass."""
        return len(self._order)

    def next(self) -> tuple[RowT, int]:
        """The next row and the pass it belongs to; never ends."""
        if self.position == len(self._order):
            self.pass_index += 1
            self.position = 0
            self._order = self._ordered(self.pass_index)
        row = self._order[self.position]
        self.position += 1
        return row, self.pass_index

    def row(self, uid: str) -> RowT:
        """The row of this name; raises ``DataError`` when there is none."""
        for row in self._order:
            if row.uid == uid:
                return row
        raise DataError(f"the dataset has no row {uid!r}")

    def take(self, count: int) -> list[tuple[RowT, int]]:
        """The next ``count`` rows; a pass may end within them."""
        return [self.next() for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor, as JSON."""
        return {
            "fingerprint": self._dataset.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "pass_index": self.pass_index,
            "position": self.position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken; raises ``CheckpointError`` when that is impossible."""
        here = self.state_dict()
        for key in here:
            if key not in state:
                raise CheckpointError(f"the data cursor lacks {key!r}; the checkpoint is torn or of another version")
        if state["fingerprint"] != here["fingerprint"]:
            raise CheckpointError(
                f"the data changed since the checkpoint (fingerprint {state['fingerprint']}, now "
                f"{here['fingerprint']}); resume with the same data, or start a new run in another run_dir"
            )
        for key in ("seed", "shuffle"):
            if state[key] != here[key]:
                raise CheckpointError(
                    f"the data order's {key} was {state[key]!r}, now {here[key]!r}; keep it to resume"
                )
        pass_index, position = state["pass_index"], state["position"]
        if type(pass_index) is not int or type(position) is not int or pass_index < 0:
            raise CheckpointError(f"the data cursor is damaged: pass {pass_index!r}, position {position!r}")
        if not 0 <= position <= len(self._order):
            raise CheckpointError(f"the data cursor stands at {position} of {len(self._order)} rows")
        self.pass_index, self.position = pass_index, position
        self._order = self._ordered(pass_index)

    def _ordered(self, pass_index: int) -> list[RowT]:
        rows = list(self._dataset.rows)
        if self._shuffle:
            prefix = f"{self._seed}\x1f{pass_index}\x1f"
            rows.sort(key=lambda row: hashlib.blake2b((prefix + row.uid).encode(), digest_size=16).digest())
        return rows
