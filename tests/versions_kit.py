"""Re-scoring a generation under the weights that its version runs name, history included."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slipstream.trajectory import VersionRun


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
    """Mean distances in nats of one run's log-probs from those re-scored."""

    run: VersionRun
    named: float
    neighbours: dict[str, float]
    recomputed: float


def judge(model, weights, prompt, result, order: Sequence[str], least: int = 4) -> list[Verdict]:
    """Each run of at least ``least`` tokens: re-scored as named, and with each neighbouring version in its place."""

    def distance(scored, run) -> float:
        pairs = zip(scored[run.start : run.end], result.logprobs[run.start : run.end], strict=True)
        return sum(abs(a - b) for a, b in pairs) / (run.end - run.start)

    named = replay(model, weights, prompt, result.token_ids, result.versions)
    anew = recompute(model, weights, prompt, result.token_ids, result.versions)
    verdicts = []
    for i, run in enumerate(result.versions):
        if run.end - run.start < least:
            continue
        at = order.index(run.version)
        others = {}
        for other in {*order[max(at - 1, 0) : at], *order[at + 1 : at + 2]}:
            runs = [*result.versions[:i], VersionRun(other, run.start, run.end)]
            others[other] = distance(replay(model, weights, prompt, result.token_ids[: run.end], runs), run)
        verdicts.append(Verdict(run, distance(named, run), others, distance(anew, run)))
    return verdicts
