"""Drawing tokens: exact distributions, keyed noise, log-probabilities of what was really sampled.

Owns: penalties, bans, temperature, truncation, the draw, the log-prob, the kept set, the head.
Refuses: stop conditions, global random state.

* **Order**: penalties and bans, temperature, min-p, top-k, top-p (each on what the former left; vLLM's order).
  Every truncation keeps the tokens whose logit reaches a threshold, so ties stay together and the kept set is
  a function of the logits alone.
* **Noise**: token ``i`` of a request is drawn with ``uniform(seed, i)`` by inverse CDF.  One number per token, a
  pure function of (seed, position): what else is in the batch cannot change the draw, apart from numerics.
* **Log-prob**: of the truncated, tempered distribution, from float32 logits.  At temperature 0 the token is the
  argmax and its log-prob is that of temperature 1 (vLLM's ``processed_logprobs``).
* **Kept set**: the ids that truncation (and bans) left, for a draw that asks and whose spec truncates.
* **Head**: the most likely ids with their log-probs, of those that have any, for a draw that asks.

>>> float(uniform(np.array([7]), np.array([0]))[0]) == float(uniform(np.array([7]), np.array([0]))[0])
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from slipstream.inference.types import TopLogprobs
from slipstream.trajectory import SamplingSpec

_BLOCK = 256  # the CDF is summed in blocks, then inside one block: two short searches instead of a long one
_HEAD = 1024  # top-p first looks at so many largest tokens; if they do not hold the mass, at all of them


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seeds: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits: element ``position`` of the SplitMix64 stream that the seed starts.

    The stream's state is a counter, so any element is had directly; the seed is mixed first, so that neighbouring
    seeds start far apart.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        start = _mix(seeds.astype(np.uint64) + gamma)
        mixed = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * gamma)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: its spec, its noise, and what penalties and bans need."""

    spec: SamplingSpec
    seed: int
    position: int
    prompt: npt.NDArray[np.int64]
    output: Sequence[int]
    banned: tuple[int, ...] = ()
    report_kept: bool = False
    report_top: int = 0

    @property
    def truncates(self) -> bool:
        """Whether some ids get no probability."""
        spec = self.spec
        return not spec.greedy and (spec.min_p > 0 or spec.top_k != -1 or spec.top_p < 1)

    @property
    def penalised(self) -> bool:
        spec = self.spec
        return spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0


def _penalise(row: torch.Tensor, draw: Draw) -> None:
    """In place on (V,).  Repetition as in CTRL (Keskar 2019) over prompt and output; the others count the output."""
    spec, device = draw.spec, row.device
    output = np.asarray(draw.output, dtype=np.int64)
    if spec.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate([draw.prompt, output]))).to(device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / spec.repetition_penalty, values * spec.repetition_penalty)
    if len(output) and (spec.presence_penalty or spec.frequency_penalty):
        ids, counts = np.unique(output, return_counts=True)
        cost = spec.presence_penalty + spec.frequency_penalty * counts
        row[torch.from_numpy(ids).to(device)] -= torch.from_numpy(cost).to(device, row.dtype)


def _threshold(scaled: torch.Tensor, spec: SamplingSpec) -> torch.Tensor:
    """Smallest logit kept, for rows (M, V) of one spec: (M, 1)."""
    top = scaled.amax(-1, keepdim=True)
    floor = torch.full_like(top, -math.inf)
    if spec.min_p > 0:
        floor = top + math.log(spec.min_p)
    if 0 < spec.top_k < scaled.shape[-1]:
        floor = torch.maximum(floor, scaled.topk(spec.top_k, -1).values[:, -1:])
    if spec.top_p < 1:
        kept = scaled.masked_fill(scaled < floor, -math.inf)
        total = torch.logsumexp(kept, -1, keepdim=True)
        for size in (min(_HEAD, scaled.shape[-1]), scaled.shape[-1]):
            values = kept.topk(size, -1).values
            mass = (values - total).double().exp().cumsum(-1)
            if bool((mass[:, -1] >= spec.top_p).all()):
                break
        # The first place at which the mass reaches top-p is the last one kept.
        last = (mass < spec.top_p).sum(-1, keepdim=True).clamp_(max=values.shape[-1] - 1)
        floor = torch.maximum(floor, values.gather(-1, last))
    return floor


def _truncate(scaled: torch.Tensor, draws: Sequence[Draw]) -> None:
    by_spec: dict[SamplingSpec, list[int]] = {}
    for i, draw in enumerate(draws):
        if draw.truncates:
            by_spec.setdefault(draw.spec, []).append(i)
    for spec, members in by_spec.items():
        rows = torch.tensor(members, device=scaled.device)
        part = scaled[rows]
        scaled[rows] = part.masked_fill(part < _threshold(part, spec), -math.inf)


def _inverse_cdf(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of ``probs`` (M, V) passes ``u`` (M,) times the total."""
    rows, vocab = probs.shape
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, _BLOCK - vocab % _BLOCK))
    blocks = probs.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    target = u[:, None] * sums[:, -1:]
    # right=True finds the first running sum *above* the target, so a token of probability 0 is never chosen.
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=probs.device), block[:, 0]].double().cumsum(-1)
    # Block sums are float32, so the remainder may pass the block's own total by a rounding error.
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 2.0**-50))
    return (block * _BLOCK + torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1))[:, 0]


KeptSet: TypeAlias = npt.NDArray[np.int32]


class Sampled(NamedTuple):
    """A drawn token: its log-prob (natural, <= 0), and what the draw asked for beside it."""

    token: int
    logprob: float
    kept: KeptSet | None
    """Ascending."""
    top: TopLogprobs | None


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Draw one token per row of ``logits`` (M, V)."""
    scaled = logits.float()
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()  # rows are changed in place below
    for i, draw in enumerate(draws):
        if draw.penalised:
            _penalise(scaled[i], draw)
        if draw.banned:
            scaled[i, list(draw.banned)] = -math.inf
    temperatures = [1.0 if d.spec.greedy else d.spec.temperature for d in draws]
    if any(t != 1 for t in temperatures):
        scaled.div_(torch.tensor(temperatures, dtype=torch.float32, device=scaled.device)[:, None])
    _truncate(scaled, draws)
    probs = torch.softmax(scaled, -1)
    noise = uniform(
        np.array([d.seed & 0xFFFFFFFFFFFFFFFF for d in draws], np.uint64), np.array([d.position for d in draws])
    )
    if all(d.spec.greedy for d in draws):
        tokens = scaled.argmax(-1)
    else:
        tokens = _inverse_cdf(probs, torch.from_numpy(noise).to(probs.device))
        greedy = [i for i, d in enumerate(draws) if d.spec.greedy]
        if greedy:
            tokens[greedy] = scaled[greedy].argmax(-1)
    logprobs = probs.gather(-1, tokens[:, None])[:, 0].double().log_().clamp_(max=0.0)
    kept, heads = _kept_sets(scaled, draws), _heads(scaled, draws)
    return [Sampled(*row) for row in zip(tokens.tolist(), logprobs.tolist(), kept, heads, strict=True)]


def _kept_sets(scaled: torch.Tensor, draws: Sequence[Draw]) -> list[KeptSet | None]:
    kept: list[KeptSet | None] = [None] * len(draws)
    for i, draw in enumerate(draws):
        if draw.report_kept and draw.truncates:
            kept[i] = torch.isfinite(scaled[i]).nonzero()[:, 0].to(torch.int32).cpu().numpy()
    return kept


def _heads(scaled: torch.Tensor, draws: Sequence[Draw]) -> list[TopLogprobs | None]:
    heads: list[TopLogprobs | None] = [None] * len(draws)
    asking = [i for i, draw in enumerate(draws) if draw.report_top]
    if not asking:
        return heads
    rows = scaled if len(asking) == len(draws) else scaled[asking]
    found = rows.topk(min(max(draws[i].report_top for i in asking), rows.shape[-1]), -1)
    logprobs = (found.values - torch.logsumexp(rows, -1, keepdim=True)).clamp_(max=0.0).cpu().numpy()
    ids = found.indices.to(torch.int32).cpu().numpy()
    for place, i in enumerate(asking):
        size = min(draws[i].report_top, int(np.isfinite(logprobs[place]).sum()))
        heads[i] = ids[place, :size].copy(), logprobs[place, :size].copy()
    return heads


def target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Log-probs at temperature 1 of ``targets`` (M,) under ``logits`` (M, V)."""
    values = torch.log_softmax(logits.float(), -1).gather(-1, targets[:, None])[:, 0].clamp_(max=0.0)
    return [float(value) for value in values.tolist()]
