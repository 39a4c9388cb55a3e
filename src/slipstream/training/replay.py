"""What an engine knew while it sampled, as tensors for the update: kept sets, likely tokens, each input's experts.

Owns: reading the side channels of a batch's rows, checking them, gathering them for a layout.
Refuses: rows whose sampling cannot be replayed; restricted scores themselves (``scorer``), routers (``routing``).

With top-p, top-k or min-p a token was drawn from the kept ids alone: scored over the whole vocabulary, every ratio
would be low by the mass that was cut off.  With a mixture of experts, rounding may send a token to other experts in
the trainer than in the engine; replaying the engine's choice makes both compute one function (R3, arXiv 2510.11370).

>>> check_sampling(batch.rows)                              # doctest: +SKIP
>>> kept = kept_sets(batch.rows, layout, torch.device("cpu"))  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.algorithms.batch import BatchRow, IntArray
from slipstream.algorithms.objective import likely_tokens
from slipstream.errors import ContractError
from slipstream.training.layout import Layout
from slipstream.training.scorer import Kept
from slipstream.trajectory import KEPT_SETS, ROUTED_EXPERTS

Routes = npt.NDArray[np.int16]


def check_sampling(rows: Sequence[BatchRow]) -> None:
    """Raise ``ContractError`` for a row that cannot be scored under the distribution it was sampled from."""
    for row in rows:
        spec = row.sampling
        if spec.greedy:
            raise ContractError(f"row {row.row_id} was sampled at temperature 0, which is for evaluation only")
        if spec.penalised:
            raise ContractError(
                f"row {row.row_id} was sampled with {spec}: penalties depend on the tokens before and are not "
                "replayed; switch them off for training"
            )
        if spec.cut and any(kept is None for kept in _kept_of(row)):
            raise ContractError(
                f"row {row.row_id} was sampled with {spec}, but its tokens have no kept sets; ask the engine for them, "
                "or sample with top_p=1, top_k=-1, min_p=0"
            )


def _kept_of(row: BatchRow) -> Sequence[Any]:
    """The kept set of each trained token; None where there is none."""
    values = row.side_T.get(KEPT_SETS)
    return [None] * row.n_trained if values is None else [values[i] for i in np.flatnonzero(row.trained_T)]


def kept_sets(rows: Sequence[BatchRow], layout: Layout, device: torch.device) -> Kept | None:
    """Kept sets of a layout's trained tokens; None when no row of it was sampled under a truncation.

    Raises ``ContractError`` when a kept set does not contain the token that was sampled from it.
    """
    if not any(rows[i].sampling.cut for i in layout.row_ids_R):
        return None
    sets: list[Any] = []
    for i in layout.row_ids_R:
        sets.extend(_kept_of(rows[i]) if rows[i].sampling.cut else [None] * rows[i].n_trained)
    limited = np.array([kept is not None for kept in sets])
    sizes = np.array([0 if kept is None else len(kept) for kept in sets])
    ids = np.concatenate([np.asarray(kept, dtype=np.int64) for kept in sets if kept is not None])
    token = np.repeat(np.arange(len(sets)), sizes)
    held = np.zeros(len(sets), dtype=np.bool_)
    held[token[ids == layout.targets_N[token]]] = True
    if lost := np.flatnonzero(limited & ~held).tolist():
        row = rows[layout.row_ids_R[int(layout.row_N[lost[0]])]]
        raise ContractError(f"row {row.row_id}: a kept set does not contain the token that was sampled from it")
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    as_tensor = (torch.as_tensor(part, device=device) for part in (ids, token, limited))
    return Kept(*as_tensor, edges)


def top_width(rows: Sequence[BatchRow]) -> int:
    """Length of the longest list of likely tokens; raises ``ContractError`` where a row does not say."""
    return max((len(ids) for row in rows for ids, _ in likely_tokens(row)), default=0)


def top_ids(rows: Sequence[BatchRow], layout: Layout, width: int, device: torch.device) -> Tensor:
    """``(N, K)`` int64: the ids that the sampler held most likely in the place of each trained token of a layout.

    ``K = width`` is that of the whole batch (``top_width``), so that layouts can be joined; shorter lists are filled
    with id 0, which a loss knows by the sampler's log-prob of -inf.
    """
    out = np.zeros((len(layout.at_N), width), dtype=np.int64)
    for place, (ids, _) in enumerate(entry for i in layout.row_ids_R for entry in likely_tokens(rows[i])):
        out[place, : len(ids)] = ids
    return torch.as_tensor(out, device=device)


def row_routes(row: BatchRow, layers: int, top_k: int) -> Routes | None:
    """``(T, layers, top-k)``: the experts of each input of a row, -1 where unknown; None for a row of given text.

    Inputs of the context that the engine did not speak of route by themselves.  Raises ``ContractError`` when a sampled
    row has no experts, lacks those that predict a trained token, or has another model's.
    """
    values = row.side_T.get(ROUTED_EXPERTS)
    if values is None:
        if np.isfinite(row.behaviour_logprobs_T[row.trained_T]).any():
            raise ContractError(
                f"row {row.row_id} was sampled, but holds no routed experts; routing replay needs an engine that "
                "returns them (training.routing_replay)"
            )
        return None
    unknown = np.full((layers, top_k), -1, dtype=np.int16)
    out = np.stack([unknown if value is None else np.asarray(value, dtype=np.int16) for value in values])
    if out.shape[1:] != (layers, top_k):
        raise ContractError(
            f"row {row.row_id}: experts of {out.shape[1]} layers and top-{out.shape[2]}, but the trained model has "
            f"{layers} layers and top-{top_k}; engine and trainer must hold the same model"
        )
    if lost := np.flatnonzero((out < 0).any(axis=(1, 2)) & row.trained_T).tolist():
        raise ContractError(
            f"row {row.row_id}: the engine did not report the experts that predicted token {lost[0] + 1}"
        )
    return out


def route_keys(rows: Sequence[BatchRow], routes: Sequence[Routes | None]) -> list[IntArray]:
    """Per row one number per input: equal exactly where id and experts are, so that only equal inputs are shared."""
    table: dict[tuple[int, bytes], int] = {}
    keys = []
    for row, own in zip(rows, routes, strict=True):
        parts = [b""] * len(row.inputs_T) if own is None else [part.tobytes() for part in own]
        pairs = zip(row.inputs_T.tolist(), parts, strict=True)
        keys.append(np.array([table.setdefault(pair, len(table)) for pair in pairs], dtype=np.int64))
    return keys


def layout_routes(
    layout: Layout, routes: Sequence[Routes | None], layers: int, top_k: int, device: torch.device
) -> Tensor:
    """``(T, layers, top-k)`` int64 for a layout's packed tokens; -1 where a row has none."""
    out = np.full((layout.n_tokens, layers, top_k), -1, dtype=np.int64)
    for owner in np.unique(layout.owner_T):
        own = routes[int(owner)]
        if own is not None:
            here = layout.owner_T == owner
            out[here] = own[layout.positions_T[here]]
    return torch.as_tensor(out, device=device)
