"""Re-scoring a generation under the weights that its version runs name, history included."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.trajectory import VersionRun

_LEAST_TOKENS = 4


@contextlib.contextmanager
def holding(model, weights: Mapping[str, torch.Tensor]):
    """The model with other weights."""
    held = {name: value.clone() for name, value in model.state_dict().items() if name in weights}
    model.load_state_dict(dict(weights), strict=False)
    try:
        yield model
    finally:
        model.load_state_dict(held, strict=False)


def replay(
    model,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    prompt: Sequence[int],
    output: Sequence[int],
    runs: Sequence[VersionRun],
) -> list[float]:
    """Log-probs of ``output`` when each position's keys and values come from the version that computed it.

    The step that sampled token i read token i - 1 (for i = 0, the prompt): both are of the version of token i.
    """
    cache, scored = None, []
    for run in runs:
        fresh = prompt if run.start == 0 else [output[run.start - 1]]
        ids = torch.tensor([[*fresh, *output[run.start : run.end - 1]]])
        with holding(model, weights[run.version]), torch.inference_mode():
            answer = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        rows = torch.log_softmax(answer.logits[0].float(), -1)[-(run.end - run.start) :]
        scored += rows[torch.arange(run.end - run.start), torch.tensor(output[run.start : run.end])].tolist()
    return scored


def recompute(
    model,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    prompt: Sequence[int],
    output: Sequence[int],
    runs: Sequence[VersionRun],
) -> list[float]:
    """Log-probs when everything is computed anew under each run's version: what a trainer's forward pass sees."""
    scored: list[float] = []
    for run in runs:
        whole = [VersionRun(run.version, 0, run.end)]
        scored += replay(model, weights, prompt, output[: run.end], whole)[run.start :]
    return scored


@dataclass
class Verdict:
    """Mean distances in nats of one run's log-probs from those re-scored.

    ``other`` is the distance when the keys and values of earlier runs are thought of the other way: what an engine that
    keeps them differs from a forward pass by, or one that rebuilds them from a replay.
    """

    run: VersionRun
    named: float
    neighbours: dict[str, float]
    other: float


def judge(model, weights, prompt, result, order: Sequence[str], kv: Literal["kept", "rebuilt"]) -> list[Verdict]:
    """Each run of a few tokens: re-scored as named, and with each neighbouring version in its place."""
    score, otherwise = (replay, recompute) if kv == "kept" else (recompute, replay)

    def distance(how, runs) -> float:
        run = runs[-1]
        scored = how(model, weights, prompt, result.token_ids[: run.end], runs)
        pairs = zip(scored[run.start :], result.logprobs[run.start : run.end], strict=True)
        return sum(abs(a - b) for a, b in pairs) / (run.end - run.start)

    verdicts = []
    for i, run in enumerate(result.versions):
        if run.end - run.start < _LEAST_TOKENS:
            continue
        before, at = list(result.versions[:i]), order.index(run.version)
        neighbours = {*order[max(at - 1, 0) : at], *order[at + 1 : at + 2]}
        wrong = {name: distance(score, [*before, VersionRun(name, run.start, run.end)]) for name in neighbours}
        as_named = [*before, run]
        verdicts.append(Verdict(run, distance(score, as_named), wrong, distance(otherwise, as_named)))
    return verdicts
