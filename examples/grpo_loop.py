"""The whole of GRPO in one file, on the public low-level API.

    python examples/grpo_loop.py                                # a tiny random model, under a minute on a CPU
    python examples/grpo_loop.py --model smollm2-135m-instruct  # a real one

Read it from top to bottom.  One step is five calls:

    rollout            prompts -> tokens, log-probs, weight versions -> rewards -> groups
    compute_advantages groups -> one number per answer: better or worse than its siblings
    compile_batch      groups -> rows of ids with signed weights that already contain 1/denominator
    forward_backward   rows -> gradients;  optim_step -> new weights
    publish            new weights -> the engine, verified, under a new version

``slipstream train`` does the same with retries, checkpoints, evaluation, records and every setting; nothing in here
is another implementation of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.algorithms import LossSpec, apply_filters, compile_batch, compute_advantages, loss_spec
from slipstream.config.settings import (
    AlgorithmSettings,
    InferenceSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    TrainingSettings,
)
from slipstream.data import chat_trajectory
from slipstream.envs import make
from slipstream.envs.arithmetic import arithmetic_rows
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.pretrained import load_tokenizer
from slipstream.inference.types import Engine, GenerateRequest, GenerateResult
from slipstream.rollout import Renderer
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import (
    Completed,
    Group,
    Reward,
    Row,
    SampleKey,
    SamplingSpec,
    Span,
    Trajectory,
    Truncated,
    Turn,
)
from slipstream.weights import InProcessTransport, Publisher, Replica, VersionCounter

SAMPLING = SamplingSpec(temperature=1.0)  # travels with every sampled span: the trainer scores under the same one


@dataclass
class Policy:
    """One model twice: where it samples (``engine``) and where it learns (``backend``)."""

    renderer: Renderer
    engine: Engine
    backend: TorchBackend
    publisher: Publisher
    versions: VersionCounter

    async def publish(self) -> str:
        """Hand the trained weights to the engine; the publisher verifies that it holds exactly these."""
        receipts = await self.publisher.publish(self.backend.export_weights("policy"), self.versions.next())
        return str(receipts[0].version)


@contextlib.asynccontextmanager
async def open_policy(model: str, lr: float, dtype: Any = "float32") -> AsyncIterator[Policy]:
    """Load the model for sampling and for training; both are closed at the end."""
    tokenizer = load_tokenizer(model)
    engine = EmbeddedEngine(model, tokenizer, InferenceSettings(dtype=dtype))
    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(engine.close)
        await engine.start()
        optimizer = OptimizerSettings(lr=lr, weight_decay=0.0)
        backend = TorchBackend(ModelSettings(path=model, dtype=dtype), TrainingSettings(optimizer=optimizer))
        closing.callback(backend.close)
        # The replica is the gate: while weights change, and until they are verified, it answers nobody.
        replica = Replica(engine)
        publisher = Publisher([replica], InProcessTransport(dtype))
        yield Policy(Renderer(tokenizer), replica, backend, publisher, VersionCounter("policy"))


# ---- rollout: rows of data -> groups of trajectories


async def rollout(
    policy: Policy, rows: Sequence[dict[str, Any]], n: int, max_tokens: int, *, step: int, seed: int
) -> list[Group]:
    """``n`` answers to every row, all in one batch of the engine."""
    prompts = [policy.renderer.render_prompt(row["prompt"]).ids for row in rows]
    requests = [
        GenerateRequest(
            request_id=f"step{step}/{row['uid']}/{sample}",
            token_ids=prompt,
            sampling=SAMPLING,
            max_tokens=max_tokens,
            group_id=row["uid"],  # the engine computes a shared prompt once
            # Noise is keyed by what the sample is, so that a run can be repeated.
            seed=SampleKey(seed, row["uid"], pass_index=step, sample=sample, attempt=0, turn=0).derive(),
        )
        for row, prompt in zip(rows, prompts, strict=True)
        for sample in range(n)
    ]
    results = await policy.engine.generate_many(requests)
    groups = []
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        own = results[i * n : (i + 1) * n]
        members = tuple(_trajectory(row, prompt, result, sample, step) for sample, result in enumerate(own))
        groups.append(Group(f"{row['uid']}@{step}", row["uid"], n, members))
    return groups


def _trajectory(
    row: dict[str, Any], prompt: tuple[int, ...], result: GenerateResult, sample: int, step: int
) -> Trajectory:
    """One answer and its reward.  Ids, log-probs and versions go in exactly as the engine reported them."""
    extras = {key: value for key, value in row.items() if key != "prompt"}
    with make(row["env_class"], env_config={}, extras=extras) as env:
        env.init(list(row["prompt"]))
        reward = float(env.step(result.text)["reward"])
    answer = Span.sampled(result.token_ids, result.logprobs, result.versions, SAMPLING, turn=0)
    return Trajectory(
        trajectory_id=f"{row['uid']}@{step}/{sample}",
        group_id=f"{row['uid']}@{step}",
        prompt_uid=row["uid"],
        sample=sample,
        attempt=0,
        rows=(Row((Span.prompt(prompt), answer)),),
        turns=(Turn(0, result.text, finish_reason=result.finish_reason),),
        rewards=(Reward(turn=0, value=reward),),
        outcome=Completed() if result.finish_reason == "stop" else Truncated("max_tokens"),
        scheduled_step=step,
    )


# ---- update: groups -> gradients -> new weights


async def update(policy: Policy, groups: Sequence[Group], algorithm: AlgorithmSettings, step: int) -> dict[str, float]:
    """One optimiser step on whole groups, and a publish.  Groups without spread teach nothing and are left out."""
    kept = apply_filters(groups, algorithm, RolloutSettings())
    advantages = compute_advantages(kept.groups, algorithm)
    batch = compile_batch(kept.groups, advantages, algorithm.reduction, step=step, excluded=kept.excluded)
    if batch.n_trained == 0:
        return {"trained": 0.0}
    return {**await learn(policy, [(batch, loss_spec(algorithm))]), "trained": float(batch.n_trained)}


async def learn(policy: Policy, batches: Sequence[Any]) -> dict[str, float]:
    """Gradients of every batch add up; then one step, and the new weights go to the engine."""
    metrics: dict[str, float] = {}
    for batch, loss in batches:
        out = await asyncio.wrap_future(policy.backend.forward_backward("policy", batch, loss))
        metrics.update(out.metrics)
    applied = await asyncio.wrap_future(policy.backend.optim_step("policy"))
    if not applied.applied:
        raise SystemExit(f"the step was refused: {applied.reason}")
    await policy.publish()
    return {**metrics, "grad_norm": applied.grad_norm}


async def show_format(policy: Policy, rows: Sequence[dict[str, Any]], steps: int, seed: int) -> None:
    """Teach a random model to answer with *some* number and to stop; the numbers are drawn at random.

    A model that has never written a digit earns nothing, and where nobody earns there is nothing to compare.
    """
    rng = random.Random(seed)
    for step in range(steps):
        chats = []
        for row in rng.choices(rows, k=32):
            answer = {"role": "assistant", "content": str(rng.randrange(7))}
            chats.append(chat_trajectory([*row["prompt"], answer], policy.renderer, f"{step}/{len(chats)}"))
        groups = [Group(chat.group_id, chat.prompt_uid, 1, (chat,)) for chat in chats]
        batch = compile_batch(groups, None, "token_mean", mode="likelihood")
        await learn(policy, [(batch, LossSpec("cross_entropy"))])


# ---- the loop


def mean_reward(groups: Sequence[Group]) -> float:
    """Over all answers that can be scored."""
    rewards = [member.total_reward for group in groups for member in group.voters]
    return sum(rewards) / len(rewards)


async def run(args: argparse.Namespace, model: str) -> tuple[float, float]:
    """The loop; returns the mean reward of the first and of the last ten steps."""
    rows = arithmetic_rows(args.questions, args.seed, largest=args.largest, operations="+")
    algorithm = AlgorithmSettings(loss="ppo_clip", reduction="token_mean", entropy_coef=args.entropy)
    rng = random.Random(args.seed)
    history: list[float] = []
    async with open_policy(model, args.lr, args.dtype) as policy:
        await policy.publish()
        if args.format_steps:
            await show_format(policy, rows, args.format_steps, args.seed)
            print(f"shown the form of an answer in {args.format_steps} steps")
        for step in range(1, args.steps + 1):
            started = time.perf_counter()
            chosen = rng.sample(rows, args.prompts)
            groups = await rollout(policy, chosen, args.samples, args.max_tokens, step=step, seed=args.seed)
            sampled = time.perf_counter()
            metrics = await update(policy, groups, algorithm, step)
            history.append(mean_reward(groups))
            if step == 1 or step % args.print_every == 0:
                recent = history[-args.print_every :]
                print(
                    f"step {step:3d}  reward {sum(recent) / len(recent):.3f}  tokens {metrics['trained']:4.0f}  "
                    f"sampling {sampled - started:.2f} s  update {time.perf_counter() - sampled:.2f} s"
                )
    return sum(history[:10]) / len(history[:10]), sum(history[-10:]) / len(history[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny (random), a directory, a hub id, a bundled name")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--prompts", type=int, default=12, help="prompts per step")
    parser.add_argument("--samples", type=int, default=12, help="answers per prompt: the size of a group")
    parser.add_argument("--questions", type=int, default=64, help="rows of data")
    parser.add_argument("--largest", type=int, default=3, help="sums of numbers up to this")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--lr", type=float, default=None, help="default: 4e-4 for tiny, 1e-5 for any other model")
    parser.add_argument("--entropy", type=float, default=0.03, help="bonus that keeps answers varied; 0 leaves it out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--format-steps", type=int, default=None, help="default: 40 for tiny, 0 for any other model")
    parser.add_argument("--print-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tiny = args.model == "tiny"
    args.lr = args.lr if args.lr is not None else (4e-4 if tiny else 1e-5)
    args.format_steps = args.format_steps if args.format_steps is not None else (40 if tiny else 0)
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if tiny:
            from slipstream.inference.embedded.tiny import tiny_model_dir

            model = str(tiny_model_dir(scratch, seed=args.seed))
        first, last = asyncio.run(run(args, model))
    print(f"mean reward: first steps {first:.3f} -> last steps {last:.3f}")


if __name__ == "__main__":
    main()
