"""Packed micro-batches: which token sits where, and which prompt is computed once.

Owns: turning ``BatchRow``s into padding-free layouts under a token budget, sharing a group's common
prefix, dropping inputs behind the last trained target, and the index that gathers predictors of trained
tokens.  Refuses: torch, models, losses.

Shape legend: ``T`` packed tokens of one layout, ``N`` trained tokens of it, ``R`` its rows.

A layout is a list of *blocks*.  A block is one run of tokens attended causally (the *stem*: a whole row, or
the prefix that several rows share), followed by the remainders (*branches*) of the rows that share it.  A
branch attends to the whole stem and causally to itself, so a block is exactly the set of rows it stands for:

>>> blocks = plan_layouts(rows, max_tokens=8192)      # rows 0 and 1 share three inputs
>>> blocks[0].blocks[0]
Block(start=0, stem=3, branches=(2, 4))
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.algorithms.batch import BatchRow, IntArray
from slipstream.errors import ContractError


@dataclass(frozen=True)
class Block:
    """``stem`` tokens from packed position ``start``, then one run of tokens per branch, back to back."""

    start: int
    stem: int
    branches: tuple[int, ...] = ()

    @property
    def split(self) -> int:
        """Packed position where the branches begin."""
        return self.start + self.stem

    @property
    def end(self) -> int:
        """Packed position after the block."""
        return self.split + sum(self.branches)

    def branch_spans(self) -> list[tuple[int, int]]:
        """``(start, end)`` of every non-empty branch."""
        edges = np.cumsum([self.split, *self.branches])
        return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if b > a]


@dataclass(frozen=True)
class Layout:
    """One micro-batch.

    ``row_ids_R`` indexes the batch's rows.  ``at_N`` is the packed position of the input that predicts each
    trained token, ``row_N`` the place of its row in ``row_ids_R``; trained tokens are in row order.
    """

    ids_T: IntArray
    positions_T: IntArray
    blocks: tuple[Block, ...]
    row_ids_R: tuple[int, ...]
    at_N: IntArray
    targets_N: IntArray
    row_N: IntArray

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.ids_T)


def plan_layouts(rows: Sequence[BatchRow], max_tokens: int, *, share: bool = True) -> list[Layout]:
    """Pack every row that trains something, in order, into layouts of at most ``max_tokens`` tokens.

    A row is never split: one that is longer than the budget gets a layout of its own.  Rows of one
    ``prefix_key`` stay together as far as the budget allows; where they do not fit, the prefix is computed
    again in the next layout.

    Raises:
        ContractError: two rows of one ``prefix_key`` disagree inside their shared prefix.
    """
    if max_tokens < 1:
        raise ContractError(f"max_tokens must be >= 1, got {max_tokens}")
    builder = _Builder(rows, max_tokens)
    for family in _families(rows, share):
        builder.add(family)
    return builder.finish()


def _used_length(row: BatchRow) -> int:
    """Inputs up to the predictor of the last trained target; later ones cannot matter under causality."""
    trained = np.flatnonzero(row.trained_T)
    return int(trained[-1]) + 1 if len(trained) else 0


def _families(rows: Sequence[BatchRow], share: bool) -> list[list[int]]:
    """Rows that may share a prefix, in order of first appearance; rows that train nothing are left out."""
    families: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        if _used_length(row) == 0:
            continue
        key: object = row.prefix_key if share and row.prefix_key and row.shared_prefix > 0 else ("row", index)
        families.setdefault(key, []).append(index)
    return list(families.values())


class _Builder:
    """Next-fit packing; keeps the open layout's blocks as lists of ``(row indices, stem length)``."""

    def __init__(self, rows: Sequence[BatchRow], max_tokens: int) -> None:
        self.rows = rows
        self.max_tokens = max_tokens
        self.used = {i: _used_length(row) for i, row in enumerate(rows)}
        self.done: list[Layout] = []
        self.open: list[tuple[list[int], int]] = []
        self.tokens = 0

    def add(self, family: list[int]) -> None:
        stem = self._stem(family)
        whole = stem + sum(self.used[i] - stem for i in family)
        if self.tokens + whole > self.max_tokens:
            self._close()
        members: list[int] = []
        for index in family:
            cost = self.used[index] - (stem if members else 0)
            if self.tokens + cost > self.max_tokens and (members or self.open):
                self._push(members, stem)
                self._close()
                members, cost = [], self.used[index]
            members.append(index)
            self.tokens += cost
        self._push(members, stem)

    def finish(self) -> list[Layout]:
        self._close()
        return self.done

    def _stem(self, family: list[int]) -> int:
        """Common prefix length of a family, checked; a lone row is all stem."""
        first = self.rows[family[0]]
        if len(family) == 1:
            return self.used[family[0]]
        stem = min(min(self.rows[i].shared_prefix, self.used[i]) for i in family)
        for index in family[1:]:
            row = self.rows[index]
            if not np.array_equal(row.inputs_T[:stem], first.inputs_T[:stem]):
                raise ContractError(
                    f"rows {first.row_id} and {row.row_id} have prefix_key {row.prefix_key!r} but differ in their "
                    f"first {stem} inputs; shared_prefix must count inputs that are equal"
                )
        return stem

    def _push(self, members: list[int], stem: int) -> None:
        if members:
            self.open.append((members, stem if len(members) > 1 else self.used[members[0]]))

    def _close(self) -> None:
        if self.open:
            self.done.append(self._build())
        self.open, self.tokens = [], 0

    def _build(self) -> Layout:
        ids: list[IntArray] = []
        positions: list[IntArray] = []
        blocks: list[Block] = []
        parts: list[tuple[int, IntArray, IntArray]] = []
        cursor = 0
        for members, stem in self.open:
            ids.append(self.rows[members[0]].inputs_T[:stem])
            positions.append(np.arange(stem))
            branches = []
            branch_at = cursor + stem
            for index in members:
                row, used = self.rows[index], self.used[index]
                ids.append(row.inputs_T[stem:used])
                positions.append(np.arange(stem, used))
                trained = np.flatnonzero(row.trained_T)
                parts.append((index, np.where(trained < stem, cursor + trained, branch_at + trained - stem), trained))
                branches.append(used - stem)
                branch_at += used - stem
            blocks.append(Block(cursor, stem, tuple(branches) if any(branches) else ()))
            cursor = branch_at
        parts.sort(key=lambda part: part[0])
        return Layout(
            ids_T=np.concatenate(ids),
            positions_T=np.concatenate(positions),
            blocks=tuple(blocks),
            row_ids_R=tuple(index for index, _, _ in parts),
            at_N=np.concatenate([at for _, at, _ in parts]),
            targets_N=np.concatenate([self.rows[i].targets_T[trained] for i, _, trained in parts]),
            row_N=np.repeat(np.arange(len(parts)), [len(trained) for _, _, trained in parts]),
        )
