"""What tests of replay, critic and distillation share: a tiny engine's samples as trajectories of groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.inference.types import GenerateRequest, GenerateResult
from slipstream.trajectory import (
    KEPT_SETS,
    ROUTED_EXPERTS,
    TOP_LOGPROBS,
    Completed,
    Group,
    Reward,
    Row,
    SamplingSpec,
    SideChannel,
    Span,
    Trajectory,
)


def requests(
    prompts: int, samples: int, spec: SamplingSpec, *, length: int = 6, **fields: Any
) -> list[GenerateRequest]:
    """``samples`` requests for each of ``prompts`` prompts of 9 tokens."""
    made = []
    for p in range(prompts):
        ids = tuple(int(t) for t in np.random.default_rng(p).integers(3, 250, 9 + p))
        for s in range(samples):
            made.append(
                GenerateRequest(
                    f"{p}.{s}", ids, spec, max_tokens=length + s, seed=100 * p + s, ignore_eos=True, group_id=str(p),
                    **fields,
                )
            )  # fmt: skip
    return made


def trajectory(request: GenerateRequest, result: GenerateResult, reward: float) -> Trajectory:
    """One turn: the prompt and what was sampled, with the side channels that the engine returned."""
    side = {}
    if result.kept_sets is not None:
        side[KEPT_SETS] = SideChannel(KEPT_SETS, "token", result.kept_sets)
    if result.top_logprobs is not None:
        side[TOP_LOGPROBS] = SideChannel(TOP_LOGPROBS, "token", result.top_logprobs)
    before = {}
    if result.routed_experts is not None:
        routes = np.concatenate([np.full_like(result.routed_experts[:1], -1), result.routed_experts])
        n = len(request.token_ids)
        before[ROUTED_EXPERTS] = SideChannel(ROUTED_EXPERTS, "token", routes[:n])
        side[ROUTED_EXPERTS] = SideChannel(ROUTED_EXPERTS, "token", routes[n:])
    prompt = Span(Span.prompt(request.token_ids).origin, request.token_ids, side=before)
    sampled = Span.sampled(result.token_ids, result.logprobs, result.versions, request.sampling, 0, side)
    name, sample = request.request_id.split(".")
    rows, rewards = (Row((prompt, sampled)),), (Reward(0, reward),)
    return Trajectory(request.request_id, name, name, int(sample), 0, rows, (), rewards, Completed(), 0)


def groups(asked: list[GenerateRequest], results: list[GenerateResult], seed: int = 0) -> list[Group]:
    """The answers as groups; rewards are random."""
    rng = np.random.default_rng(seed)
    members: dict[str, list[Trajectory]] = {}
    for request, result in zip(asked, results, strict=True):
        members.setdefault(str(request.group_id), []).append(trajectory(request, result, float(rng.normal())))
    return [Group(name, name, len(own), tuple(own)) for name, own in members.items()]
