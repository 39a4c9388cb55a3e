"""Rows of trajectories to a ``Batch``.

Owns: which token is trained, in which row, with which advantage and weight; mini-batches.
Refuses: padding, devices, computing advantages, finding what rows have in common (the backend compares their ids).

Every SAMPLED token of a voter is trained exactly once, in the row that owns its span; in child rows the
inherited prefix is context.  PROMPT, OBSERVATION and SYNTHETIC tokens are never trained; TARGET tokens are
trained in mode ``likelihood`` only.  Members without a vote give no rows.  Arrays lie on targets: the token at
position ``p`` of a row is target ``p - 1``, so a row's first token, which nothing predicts, is no target.

    advantages = compute_advantages(groups, settings)
    batch = compile_batch(groups, advantages, settings.reduction, step=step)
    for part in split_minibatches(batch, settings.minibatches_per_step, settings.reduction): ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from slipstream.algorithms.batch import Batch, BatchRow, FloatArray
from slipstream.algorithms.reduce import ReductionSpec, reweigh
from slipstream.errors import ContractError
from slipstream.trajectory import KEPT_SETS, Group, Missing, Origin, SamplingSpec, Span, Trajectory, WeightVersion

Mode = Literal["policy", "likelihood"]
Advantage = float | FloatArray
"""One number for the whole trajectory, or ``(S,)``: one per sampled token, in row order."""


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of ``span`` as they appear in a row; ``owned`` when this row owns the span."""

    span: Span
    start: int
    stop: int
    owned: bool

    def __len__(self) -> int:
        return self.stop - self.start


def row_segments(trajectory: Trajectory, index: int) -> list[Segment]:
    """All tokens of a row as pieces of spans, the prefix inherited from its parent first."""
    row = trajectory.rows[index]
    segments: list[Segment] = []
    if row.parent is not None:
        left = row.fork_point
        for piece in row_segments(trajectory, row.parent):
            take = min(len(piece), left)
            if take:
                segments.append(Segment(piece.span, piece.start, piece.start + take, owned=False))
            left -= take
    segments.extend(Segment(span, 0, len(span), owned=True) for span in row.spans if len(span))
    return segments


def row_name(trajectory_id: str, index: int) -> str:
    """``BatchRow.row_id`` of a trajectory's row."""
    return f"{trajectory_id}/{index}"


def compile_batch(
    groups: Sequence[Group],
    advantages: Mapping[str, Advantage] | None,
    reduction: str | ReductionSpec,
    *,
    step: int = 0,
    mode: Mode = "policy",
    excluded: Collection[str] = frozenset(),
    copies: Mapping[str, int] | None = None,
) -> Batch:
    """All rows to train in one optimiser step (or to score, with ``advantages=None``, which puts zeros).

    ``advantages`` has an entry for every voter that is trained (in mode ``likelihood`` it is ignored and each
    token's advantage is 1).  ``excluded`` names trajectories that a filter left out: they give no rows and
    count in no denominator.  ``copies`` says, by group id, how often a group stands in the step.  In mode
    ``likelihood`` members need no reward, only an outcome that votes.

    Raises ``ContractError``: a missing, alien or non-finite advantage, one of the wrong length; a sampled token
    that nothing predicts; a row whose spans were sampled under different specs; greedy or truncated sampling.
    """
    rows: list[BatchRow] = []
    for group in groups:
        for member in group.members:
            eligible = member.votes if mode == "policy" else member.outcome.votes
            if eligible and member.trajectory_id not in excluded:
                rows.extend(_trajectory_rows(member, advantages, mode))
    if copies:
        rows = [replace(row, copies=copies.get(row.group_id, 1)) for row in rows]
    if mode == "policy" and advantages is not None:
        known = {m.trajectory_id for g in groups for m in g.voters}
        if alien := sorted(set(advantages) - known):
            raise ContractError(f"advantage given for {alien[0]!r}, which is no voter of these groups")
    if len({row.row_id for row in rows}) != len(rows):
        raise ContractError("two trajectories of one batch share an id; ids must be unique over groups and attempts")
    return Batch(reweigh(rows, reduction), step)


def _trajectory_rows(member: Trajectory, advantages: Mapping[str, Advantage] | None, mode: Mode) -> Iterator[BatchRow]:
    advantage_S = _advantage_per_token(member, advantages, mode)
    at = 0
    for index in range(len(member.rows)):
        segments = row_segments(member, index)
        sampled = sum(len(s) for s in segments if s.owned and s.span.origin is Origin.SAMPLED)
        row = _compile_row(member, index, segments, advantage_S[at : at + sampled], mode)
        at += sampled
        if row is not None:
            yield row


def _advantage_per_token(member: Trajectory, advantages: Mapping[str, Advantage] | None, mode: Mode) -> FloatArray:
    """``(S,)`` over the member's sampled tokens."""
    size = member.sampled_tokens
    if mode == "likelihood":
        return np.ones(size)
    if advantages is None:
        return np.zeros(size)
    try:
        given = advantages[member.trajectory_id]
    except KeyError:
        raise ContractError(f"{member.trajectory_id}: a voter has no advantage; the estimator left it out") from None
    values = np.asarray(given, dtype=np.float64)
    if values.ndim == 0:
        values = np.full(size, float(values))
    if values.shape != (size,):
        raise ContractError(f"{member.trajectory_id}: advantages of shape {values.shape} for {size} sampled tokens")
    if not np.all(np.isfinite(values)):
        raise ContractError(f"{member.trajectory_id}: an advantage is not finite")
    return values


def _trains(segment: Segment, mode: Mode) -> bool:
    origins = (Origin.SAMPLED,) if mode == "policy" else (Origin.SAMPLED, Origin.TARGET)
    return segment.owned and segment.span.origin in origins


def _compile_row(
    member: Trajectory, index: int, segments: Sequence[Segment], advantages: FloatArray, mode: Mode
) -> BatchRow | None:
    """One row, or None when nothing in it is trained.  Works on positions, then drops the first one."""
    name = row_name(member.trajectory_id, index)
    length = sum(len(s) for s in segments)
    ids = np.zeros(length, dtype=np.int64)
    trained = np.zeros(length, dtype=np.bool_)
    behaviour = np.full(length, np.nan)
    # Slots that are not trained hold NaN on purpose: were one ever to reach a loss, the step would be refused.
    advantage = np.full(length, np.nan)
    versions = np.full(length, -1, dtype=np.int64)
    at = used = 0
    for segment in segments:
        span, here = segment.span, slice(at, at + len(segment))
        ids[here] = span.token_ids[segment.start : segment.stop]
        if _trains(segment, mode):
            if at == 0 and span.origin is Origin.SAMPLED:
                raise ContractError(f"row {name} begins with a sampled token, which nothing predicts; add a prompt")
            trained[here] = True
            advantage[here] = 1.0
        if segment.owned and span.origin is Origin.SAMPLED:
            advantage[here] = advantages[used : used + len(segment)]
            used += len(segment)
            if span.logprobs is not None and not isinstance(span.logprobs, Missing):
                behaviour[here] = span.logprobs
            if not isinstance(span.versions, Missing):
                for run in span.versions or ():
                    versions[at + run.start : at + run.end] = _counter(run.version)
        at += len(segment)
    if not trained[1:].any():
        return None
    return BatchRow(
        row_id=name,
        trajectory_id=member.trajectory_id,
        group_id=member.group_id,
        inputs_T=ids[:-1],
        targets_T=ids[1:],
        trained_T=trained[1:],
        weights_T=np.zeros(length - 1),
        advantages_T=advantage[1:],
        behaviour_logprobs_T=behaviour[1:],
        sampling=_row_sampling(name, segments) if mode == "policy" else SamplingSpec(),
        side_T=_side_channels(segments, length),
        versions_T=versions[1:],
    )


def _counter(version: str) -> int:
    """The publish counter of a version's name; -1 for a name of another form (a foreign server's)."""
    try:
        return WeightVersion.parse(version).counter
    except ContractError:
        return -1


def _row_sampling(name: str, segments: Sequence[Segment]) -> SamplingSpec:
    """The one spec under which the row's own tokens were sampled, if it can be trained on."""
    spans = [s.span for s in segments if s.owned and s.span.origin is Origin.SAMPLED]
    specs = {span.sampling for span in spans if span.sampling is not None}
    if len(specs) != 1:
        raise ContractError(f"row {name} mixes {len(specs)} sampling specs; a row is scored under exactly one")
    spec = specs.pop()
    if spec.greedy:
        raise ContractError(f"row {name} was sampled at temperature 0, which is for evaluation only; sample at T > 0")
    if spec.truncated:
        penalised = spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0
        kept = all(KEPT_SETS in s.side and not isinstance(s.side[KEPT_SETS].values, Missing) for s in spans)
        if penalised or not kept:
            raise ContractError(
                f"row {name} was sampled under {spec}: the trainer would score another distribution. "
                "Use top_p=1, top_k=-1, min_p=0 and no penalties, or return the engine's kept sets"
            )
    return spec


def _side_channels(segments: Sequence[Segment], length: int) -> dict[str, Any]:
    """Token-aligned channels, cut by the same pieces as the ids; tokens without a value hold None."""
    names = {
        name
        for segment in segments
        for name, channel in segment.span.side.items()
        if channel.align == "token" and not isinstance(channel.values, Missing)
    }
    out: dict[str, Any] = {}
    for name in sorted(names):
        values = np.full(length, None, dtype=object)
        at = 0
        for segment in segments:
            channel = segment.span.side.get(name)
            if channel is not None and not isinstance(channel.values, Missing):
                for offset in range(len(segment)):
                    values[at + offset] = channel.values[segment.start + offset]
            at += len(segment)
        out[name] = values[1:]
    return out


@dataclass(frozen=True)
class Minibatch:
    """One optimiser step's share of a batch; ``rows`` are indices into the whole batch."""

    batch: Batch
    rows: tuple[int, ...]


def split_minibatches(batch: Batch, count: int, reduction: str | ReductionSpec) -> list[Minibatch]:
    """Cut a batch into at most ``count`` optimiser steps of whole groups, in order, and weigh each anew.

    Groups are spread as evenly as their number allows; with fewer groups than ``count`` there are fewer parts,
    never an empty one.  ``LossSpec.take(part.rows)`` gives the spec that belongs to a part.
    """
    if count < 1:
        raise ContractError(f"minibatches must be >= 1, got {count}")
    by_group: dict[str, list[int]] = {}
    for i, row in enumerate(batch.rows):
        by_group.setdefault(row.group_id, []).append(i)
    groups = list(by_group.values())
    parts = min(count, len(groups))
    out: list[Minibatch] = []
    for part in range(parts):
        chosen = groups[part * len(groups) // parts : (part + 1) * len(groups) // parts]
        indices = tuple(i for rows in chosen for i in rows)
        out.append(Minibatch(Batch(reweigh([batch.rows[i] for i in indices], reduction), batch.step), indices))
    return out
