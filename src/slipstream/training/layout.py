"""Packed micro-batches: which token sits where, and which beginnings are computed once.

Owns: turning ``BatchRow``s into padding-free layouts under a token budget, computing what rows begin with in common
only once, dropping inputs behind the last trained target, and the index that gathers predictors of trained tokens.
Refuses: torch, models, losses.

Shape legend: ``T`` packed tokens of one layout, ``N`` trained tokens of it, ``R`` its rows.

The inputs of rows form a tree: a system message that every prompt begins with, below it each group's question, below
that each sample's answer.  A layout is that tree in preorder, as a list of *runs* of tokens.  A run attends causally
to itself and wholly to the runs it hangs from; since whatever hangs from a run directly follows it, three numbers
say all of that.  Rows are compared by their ids alone, so that nobody has to declare what is shared:

>>> (layout,) = plan_layouts(rows, max_tokens=8192)      # 30 common inputs, then 4 of row 0 and 5 of row 1
>>> layout.runs
(Run(start=0, stop=30, reach=39), Run(start=30, stop=34, reach=34), Run(start=34, stop=39, reach=39))
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.algorithms.batch import BatchRow, IntArray
from slipstream.errors import ContractError

_LEAST_SAVED = 16
"""Tokens: a fork that saves fewer costs more bookkeeping than it spares."""

_MERGES_PER_TOKEN = 32
"""Every token behind a fork merges one more part of its attention; about so many merges cost as much as one token."""


@dataclass(frozen=True)
class Run:
    """Packed tokens ``[start, stop)``: causal among themselves, and seen whole by the tokens ``[stop, reach)``."""

    start: int
    stop: int
    reach: int


@dataclass(frozen=True)
class Layout:
    """One micro-batch.

    ``runs`` cover the packed tokens in order; packed place ``p`` sees place ``k`` exactly when
    ``k <= p < reach``, with the ``reach`` of the run that holds ``k``.  ``row_ids_R`` indexes the batch's rows.
    ``at_N`` is the packed position of the input that predicts each trained token, ``row_N`` the place of its row in
    ``row_ids_R``; trained tokens are in row order.  Packed place ``p`` holds input ``positions_T[p]`` of batch row
    ``owner_T[p]``, and of every row that shares it.
    """

    ids_T: IntArray
    positions_T: IntArray
    owner_T: IntArray
    runs: tuple[Run, ...]
    row_ids_R: tuple[int, ...]
    at_N: IntArray
    targets_N: IntArray
    row_N: IntArray

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.ids_T)


def plan_layouts(
    rows: Sequence[BatchRow], max_tokens: int, *, share: bool = True, keys: Sequence[IntArray] | None = None
) -> list[Layout]:
    """Pack every row that trains something into layouts of at most ``max_tokens`` tokens.

    Rows are taken in order of first appearance in the tree, so rows that begin alike stay together as far as the
    budget allows; where they do not fit, what they share is computed again in the next layout.  A row is never
    split: one that is longer than the budget gets a layout of its own.  ``keys`` (per row, like ``inputs_T``) replaces
    the ids when rows are compared, for inputs that are more than their id.
    """
    if max_tokens < 1:
        raise ContractError(f"max_tokens must be >= 1, got {max_tokens}")
    tree = _Tree(rows, share, keys)
    return [_build(rows, tree, chosen) for chosen in _cut(tree, max_tokens)]


def _used_length(row: BatchRow) -> int:
    """Inputs up to the predictor of the last trained target; later ones cannot matter under causality."""
    trained = np.flatnonzero(row.trained_T)
    return int(trained[-1]) + 1 if len(trained) else 0


@dataclass(frozen=True)
class _Node:
    """Inputs ``[low, high)`` of ``row`` and of all rows below; ``parent`` is a node's number, -1 above a root."""

    parent: int
    low: int
    high: int
    row: int


class _Tree:
    """The rows' inputs as a radix tree whose nodes are numbered in preorder.

    ``paths`` maps each row that trains something to its nodes from the root down; its order is the tree's.
    """

    def __init__(self, rows: Sequence[BatchRow], share: bool, keys: Sequence[IntArray] | None = None) -> None:
        self.nodes: list[_Node] = []
        self.paths: dict[int, tuple[int, ...]] = {}
        self._used = {i: n for i, row in enumerate(rows) if (n := _used_length(row))}
        self._inputs = {i: (rows[i].inputs_T if keys is None else keys[i])[:n] for i, n in self._used.items()}
        if share:
            self._grow()
        else:
            for i, n in self._used.items():
                self._add((), 0, n, i, [i])

    def _grow(self) -> None:
        # Rows that agree before ``known`` and whose inputs before ``low`` lie on ``above``.
        waiting: list[tuple[list[int], tuple[int, ...], int, int]] = [(list(self._used), (), 0, 0)]
        while waiting:
            members, above, low, known = waiting.pop()
            high = self._agreed(members, known)
            ended = [i for i in members if self._used[i] == high]
            parts: dict[int, list[int]] = {}
            for i in members:
                if self._used[i] > high:
                    parts.setdefault(int(self._inputs[i][high]), []).append(i)
            forks = list(parts.values())
            if self._worth(members, low, high, len(forks)):
                above = self._add(above, low, high, members[0], ended)
                low = high
            elif forks:
                # The inputs since ``low`` go into each fork.  A row that ends here begins every fork: it joins one.
                forks[0] = sorted(ended + forks[0])
            # The last one is popped first; reversed, forks are numbered in order of their first rows.
            waiting.extend((fork, above, low, high) for fork in reversed(forks))

    def _agreed(self, members: list[int], known: int) -> int:
        """How many leading inputs all members have in common, at least ``known``."""
        first = self._inputs[members[0]] if members else np.zeros(0, np.int64)
        high = len(first)
        for i in members[1:]:
            high = min(high, self._used[i])
            differs = np.flatnonzero(self._inputs[i][known:high] != first[known:high])
            high = known + int(differs[0]) if len(differs) else high
        return high

    def _worth(self, members: list[int], low: int, high: int, forks: int) -> bool:
        """Whether inputs ``[low, high)`` of these rows, which go on in so many different ways, become a node."""
        if forks < 2:
            return high > low
        saved = (high - low) * (len(members) - 1)
        behind = sum(self._used[i] - high for i in members)
        return saved >= max(_LEAST_SAVED, behind / _MERGES_PER_TOKEN)

    def _add(self, above: tuple[int, ...], low: int, high: int, row: int, ended: list[int]) -> tuple[int, ...]:
        path = (*above, len(self.nodes))
        self.nodes.append(_Node(above[-1] if above else -1, low, high, row))
        self.paths.update(dict.fromkeys(ended, path))
        return path

    def size(self, node: int) -> int:
        """Tokens of one node."""
        return self.nodes[node].high - self.nodes[node].low

    def weights(self) -> list[int]:
        """Per node, the tokens of it and of all that hangs from it."""
        total = [self.size(n) for n in range(len(self.nodes))]
        for n in range(len(self.nodes) - 1, -1, -1):
            if (parent := self.nodes[n].parent) >= 0:
                total[parent] += total[n]
        return total


def _cut(tree: _Tree, max_tokens: int) -> list[list[int]]:
    """Rows of each layout: next-fit in tree order, where a subtree that fits into one layout is not torn."""
    layouts: list[list[int]] = []
    placed: set[int] = set()
    tokens = 0
    weights = tree.weights()
    for row, path in tree.paths.items():
        cost = need = 0
        for n in path:
            if n not in placed:
                # A subtree begins here.  What has to fit now is the row, and the subtree if it could lie in one layout.
                if tree.nodes[n].low + weights[n] <= max_tokens:
                    need = max(need, cost + weights[n])
                cost += tree.size(n)
        if not layouts or tokens + max(cost, need) > max_tokens:
            layouts.append([])
            placed, tokens, cost = set(), 0, tree.nodes[path[-1]].high
        layouts[-1].append(row)
        placed.update(path)
        tokens += cost
    return layouts


def _build(rows: Sequence[BatchRow], tree: _Tree, chosen: list[int]) -> Layout:
    """The part of the tree that these rows need, as one layout."""
    numbers = sorted({n for row in chosen for n in tree.paths[row]})
    nodes = [tree.nodes[n] for n in numbers]
    start = dict(zip(numbers, itertools.accumulate((tree.size(n) for n in numbers), initial=0), strict=False))
    row_ids = tuple(sorted(chosen))
    at, targets = [], []
    for i in row_ids:
        trained = np.flatnonzero(rows[i].trained_T)
        lows = np.array([tree.nodes[n].low for n in tree.paths[i]])
        shift = np.array([start[n] for n in tree.paths[i]]) - lows
        at.append(trained + shift[np.searchsorted(lows, trained, side="right") - 1])
        targets.append(rows[i].targets_T[trained])
    return Layout(
        ids_T=np.concatenate([rows[node.row].inputs_T[node.low : node.high] for node in nodes]),
        positions_T=np.concatenate([np.arange(node.low, node.high) for node in nodes]),
        owner_T=np.repeat([node.row for node in nodes], [node.high - node.low for node in nodes]),
        runs=_runs(numbers, nodes, start),
        row_ids_R=row_ids,
        at_N=np.concatenate(at),
        targets_N=np.concatenate(targets),
        row_N=np.repeat(np.arange(len(row_ids)), [len(part) for part in at]),
    )


def _runs(numbers: list[int], nodes: list[_Node], start: dict[int, int]) -> tuple[Run, ...]:
    """Nodes in preorder to runs; a node with one child here is no fork, and goes on in the same run."""
    forks = Counter(node.parent for node in nodes)
    run_of: dict[int, int] = {}
    starts: list[int] = []
    parents: list[int] = []
    for n, node in zip(numbers, nodes, strict=True):
        above = run_of.get(node.parent, -1)
        if above >= 0 and forks[node.parent] == 1:
            run_of[n] = above
        else:
            run_of[n] = len(starts)
            starts.append(start[n])
            parents.append(above)
    stops = [*starts[1:], start[numbers[-1]] + nodes[-1].high - nodes[-1].low]
    reach = list(stops)
    for child in range(len(starts) - 1, -1, -1):
        if (above := parents[child]) >= 0:
            reach[above] = max(reach[above], reach[child])
    return tuple(map(Run, starts, stops, reach))
