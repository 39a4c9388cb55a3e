"""The endless sampler: passes, order, exact resume."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from slipstream.data import Sampler
from slipstream.errors import CheckpointError, DataError


@dataclass(frozen=True)
class Row:
    uid: str


class Data:
    def __init__(self, n: int, fingerprint: str = "f") -> None:
        self.rows = [Row(f"r{i}") for i in range(n)]
        self.fingerprint = fingerprint


PINNED = ["r3", "r5", "r0", "r2", "r4", "r1"]


def uids(sampler: Sampler[Row], count: int) -> list[tuple[str, int]]:
    return [(row.uid, number) for row, number in sampler.take(count)]


def test_every_uid_exactly_once_per_pass() -> None:
    drawn = uids(Sampler(Data(7), seed=1), 21)
    for number in range(3):
        assert sorted(uid for uid, of in drawn if of == number) == [f"r{i}" for i in range(7)]


def test_passes_have_their_own_order_and_so_have_seeds() -> None:
    drawn = [uid for uid, _ in uids(Sampler(Data(20), seed=1), 40)]
    assert drawn[:20] != drawn[20:]
    assert drawn[:20] != [uid for uid, _ in uids(Sampler(Data(20), seed=2), 20)]
    assert drawn == [uid for uid, _ in uids(Sampler(Data(20), seed=1), 40)]


def test_order_does_not_depend_on_the_order_of_the_files() -> None:
    data, turned = Data(9), Data(9)
    turned.rows = turned.rows[::-1]
    assert uids(Sampler(data, seed=3), 9) == uids(Sampler(turned, seed=3), 9)


def test_the_order_is_pinned() -> None:
    # A change here means that runs cannot be resumed across versions.
    assert [uid for uid, _ in uids(Sampler(Data(6), seed=0), 6)] == PINNED


def test_without_shuffle_the_dataset_keeps_its_order() -> None:
    assert uids(Sampler(Data(2), shuffle=False), 3) == [("r0", 0), ("r1", 0), ("r0", 1)]


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 10, 13])
def test_resume_goes_on_exactly_where_it_stopped(cut: int) -> None:
    whole = uids(Sampler(Data(5), seed=4), 20)
    first = Sampler(Data(5), seed=4)
    head = uids(first, cut)
    second = Sampler(Data(5), seed=4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + uids(second, 20 - cut) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "other"}, "the data changed since the checkpoint.*start a new run in another run_dir"),
        ({"seed": 9}, "order's seed was 9, now 4"),
        ({"shuffle": False}, "order's shuffle"),
        ({"position": 99}, "stands at 99 of 5 rows"),
        ({"position": "1"}, "cursor is damaged"),
        ({"pass_index": -1}, "cursor is damaged"),
    ],
)
def test_a_cursor_that_does_not_fit_is_refused_and_nothing_moves(change: dict[str, object], message: str) -> None:
    sampler = Sampler(Data(5), seed=4)
    sampler.take(2)
    before = sampler.state_dict()
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_a_torn_cursor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks 'fingerprint'"):
        Sampler(Data(5)).load_state_dict({})


def test_empty_data_and_double_uids_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        Sampler(Data(0))
    doubled = Data(2)
    doubled.rows[1] = doubled.rows[0]
    with pytest.raises(DataError, match="not unique"):
        Sampler(doubled)
