"""One GRPO step against TRL with transformers generation, on the bundled model, in one run.

The work is the same on both sides: 2 prompts, 8 samples each, 48 new tokens of forced length, then one optimiser step
over all of them.  Prompts are of about 30 and about 600 tokens; both sides get the same token ids.  TRL lives in a
virtual environment of its own, made here on first use.

A *side* is a process (``slipstream`` or ``trl``) with one dtype and one prompt length; it makes one warm-up step and
``--steps`` timed ones.  Sides of one case alternate ``--rounds`` times, and each side's fastest step counts: other
tenants of a machine only ever add time, to either side.  With long prompts, of which one step takes TRL minutes, each
side has one process and one timed step.  ``cpu`` is processor time, which on one thread (``--threads 1``) a neighbour
hardly moves.  TRL runs without gradient checkpointing, which is faster here than its default; long prompts in float32
then need 24 GB, and a side that the system kills for that has no time in the record.

    python benchmarks/vs_trl.py                      # writes benchmarks/results/vs_trl.json
    python benchmarks/vs_trl.py --lengths short --dtypes float32 --steps 1 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

HERE = Path(__file__).resolve().parent
MEMBERS, NEW_TOKENS = 8, 48
TRL_VERSION, TORCH_VERSION = "1.16.*", "2.13.0"
SHORT = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle and decides to answer it, "
    "although nobody will read the answer.",
    "Explain to a curious child why the sky is blue during the day, red in the evening, and black at night, "
    "without using any formulas.",
)
FILLER = (
    "The following notes were taken during a long walk along the coast. They mention gulls, ropes, salt, old maps, "
    "a broken compass, seven barrels of flour and a debt that was never paid. "
)


def prompts(length: str, tokenizer: Any) -> list[str]:
    """Two different texts of about 30 or about 600 tokens."""
    if length == "short":
        return list(SHORT)
    texts = []
    for number, text in enumerate(SHORT):
        head = f"Case {number}. "
        while len(tokenizer(head + text).input_ids) < 590:
            head += FILLER
        texts.append(head + text)
    return texts


def reward(token_ids: Any) -> float:
    """Varies within a group, costs nothing."""
    return len(set(token_ids)) / len(token_ids)


# ---- the two sides


def run_slipstream(options: argparse.Namespace) -> list[dict[str, float]]:
    """Engine -> spans -> batch -> update -> verified publish, all through the public rooms."""
    import asyncio

    return asyncio.run(_slipstream_steps(options))


async def _slipstream_steps(options: argparse.Namespace) -> list[dict[str, float]]:
    import asyncio

    from slipstream.algorithms.objective import LossSpec
    from slipstream.config.settings import InferenceSettings, ModelSettings, OptimizerSettings, TrainingSettings
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.pretrained import load_tokenizer
    from slipstream.training.torch_backend import TorchBackend
    from slipstream.weights import Publisher, Replica, VersionCounter

    tokenizer = load_tokenizer(options.model)
    ids = [tuple(tokenizer(text).input_ids) for text in prompts(options.length, tokenizer)]
    settings = InferenceSettings(dtype=options.dtype, threads=options.threads)
    counter = VersionCounter("policy", 0)
    engine = EmbeddedEngine(options.model, tokenizer, settings, weight_version=str(counter.current))
    training = TrainingSettings(
        optimizer=OptimizerSettings(lr=1e-6), threads=options.threads, logprob_chunk_tokens=1024
    )
    backend = TorchBackend(ModelSettings(path=options.model, dtype=options.dtype), training)
    replica = Replica(engine)
    publisher = Publisher([replica])
    await engine.start()
    times = []
    try:
        for step in range(options.steps + 1):
            start, busy = time.perf_counter(), time.process_time()
            results = await replica.generate_many(_requests(ids, step))
            generated = time.perf_counter()
            batch = _batch(ids, results, step)
            await asyncio.wrap_future(backend.forward_backward("policy", batch, LossSpec("ppo_clip")))
            done = await asyncio.wrap_future(backend.optim_step("policy"))
            updated = time.perf_counter()
            await publisher.publish(backend.export_weights("policy"), counter.next())
            end = time.perf_counter()
            if not done.applied or batch.n_trained != len(ids) * MEMBERS * NEW_TOKENS:
                raise SystemExit(f"the step is not the agreed work: {done}, {batch.n_trained} trained tokens")
            times.append(
                {
                    "generation": generated - start,
                    "update": updated - generated,
                    "handover": end - updated,
                    "total": end - start,
                    "cpu": time.process_time() - busy,
                }
            )
    finally:
        await engine.close()
        backend.close()
    return times[1:]


def _requests(ids: list[tuple[int, ...]], step: int) -> list[Any]:
    from slipstream.inference.types import GenerateRequest

    return [
        GenerateRequest(
            request_id=f"{step}.{g}.{m}",
            token_ids=prompt,
            max_tokens=NEW_TOKENS,
            min_tokens=NEW_TOKENS,
            ignore_eos=True,
            seed=10_000 * step + 100 * g + m,
            group_id=f"{step}.{g}",
        )
        for g, prompt in enumerate(ids)
        for m in range(MEMBERS)
    ]


def _batch(ids: list[tuple[int, ...]], results: list[Any], step: int) -> Any:
    """Results -> trajectories -> GRPO advantages -> batch."""
    from slipstream.algorithms.advantages import compute_advantages
    from slipstream.algorithms.compile import compile_batch
    from slipstream.config.settings import AlgorithmSettings
    from slipstream.trajectory import Completed, Group, Origin, Reward, Row, SamplingSpec, Span, Trajectory, Turn

    groups = []
    for g, prompt in enumerate(ids):
        members = []
        for m, result in enumerate(results[g * MEMBERS : (g + 1) * MEMBERS]):
            sampled = Span.sampled(result.token_ids, result.logprobs, result.versions, SamplingSpec(), turn=0)
            members.append(
                Trajectory(
                    trajectory_id=f"{step}.{g}.{m}",
                    group_id=f"{step}.{g}",
                    prompt_uid=str(g),
                    sample=m,
                    attempt=0,
                    rows=(Row((Span(Origin.PROMPT, prompt), sampled)),),
                    turns=(Turn(0, result.text),),
                    rewards=(Reward(0, reward(result.token_ids)),),
                    outcome=Completed(),
                    scheduled_step=step,
                )
            )
        groups.append(Group(f"{step}.{g}", str(g), MEMBERS, tuple(members)))
    return compile_batch(groups, compute_advantages(groups, AlgorithmSettings()), "token_mean", step=step)


def run_trl(options: argparse.Namespace) -> list[dict[str, float]]:
    """TRL's GRPOTrainer; a step is timed by callbacks, generation inside it by a wrapper."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    texts = prompts(options.length, tokenizer)
    steps: list[dict[str, float]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.append({"generation": 0.0, "start": time.perf_counter(), "cpu": -time.process_time()})

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = steps[-1]
            step["total"] = time.perf_counter() - step.pop("start")
            step["update"] = step["total"] - step["generation"]
            step["cpu"] += time.process_time()

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate(*args, **kwargs)
            steps[-1]["generation"] += time.perf_counter() - start
            return out

    def score(completion_ids: Any, **_: Any) -> list[float]:
        if any(len(ids) != NEW_TOKENS for ids in completion_ids):
            raise SystemExit(f"TRL made completions of lengths {[len(ids) for ids in completion_ids]}")
        return [reward(ids) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps + 1,
        per_device_train_batch_size=MEMBERS * len(texts),
        num_generations=MEMBERS,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    Timed(
        model=options.model,
        args=config,
        reward_funcs=score,
        train_dataset=datasets.Dataset.from_dict({"prompt": texts * (options.steps + 1)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    return steps[1:]


# ---- the comparison


def make_trl_venv(folder: Path) -> Path:
    """TRL beside exactly this torch; returns its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"making {folder} (TRL {TRL_VERSION})", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"torch=={TORCH_VERSION}"], check=True)
        subprocess.run(
            [*pip, f"trl=={TRL_VERSION}", f"torch=={TORCH_VERSION}", "transformers", "accelerate", "datasets"],
            check=True,
        )
        (folder / ".ready").touch()
    return python


def measure(python: Path, side: str, dtype: str, length: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run one side in a fresh process; no times where the system killed it, as it does when memory is short."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = [str(python), __file__, "--side", side, "--dtypes", dtype, "--length", length]
        steps = options.steps if length == "short" else 1
        command += ["--model", options.model, "--steps", str(steps), "--out", str(out)]
        command += ["--threads", str(options.threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
        if done.returncode == -signal.SIGKILL:
            return []
        if done.returncode != 0:
            raise SystemExit(f"{side} {dtype} {length} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        times: list[dict[str, float]] = json.loads(out.read_text())
        return times


def gemm_gflops(dtype: str, threads: int) -> float:
    """What one large matrix product reaches here."""
    import torch

    torch.set_num_threads(threads)
    size, best = 2048, float("inf")
    a, b = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(2))
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def update_gflop(prompt_tokens: int) -> float:
    """Arithmetic of the update's matrix products (6 per weight and token), the shared prompts counted once."""
    body, head = 106.2e6, 28.3e6  # weights of SmolLM2-135M's layers and of its vocabulary projection
    tokens = prompt_tokens + 2 * MEMBERS * (NEW_TOKENS - 1)
    return 6 * (body * tokens + head * 2 * MEMBERS * NEW_TOKENS) / 1e9


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every case, alternating sides; each side's fastest time, and ratios of those.

    Medians are in the record beside them.
    """
    from slipstream.inference.embedded.pretrained import load_tokenizer, resolve

    where = {**machine(), "threads": options.threads}
    options.model = resolve(options.model)
    tokenizer = load_tokenizer(options.model)
    trl_python = make_trl_venv(options.trl_venv)
    sides = {"slipstream": Path(sys.executable), "trl": trl_python}
    peak = {dtype: gemm_gflops(dtype, options.threads) for dtype in options.dtypes}
    cases: dict[str, Any] = {}
    for length in options.lengths:
        counts = [len(tokenizer(text).input_ids) for text in prompts(length, tokenizer)]
        for dtype in options.dtypes:
            timed: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(options.rounds if length == "short" else 1):
                for side, python in sides.items():
                    timed[side] += measure(python, side, dtype, length, options)
            case: dict[str, Any] = {"prompt_tokens": counts}
            for side, steps in timed.items():
                case[side] = _summary(steps)
            bound = update_gflop(sum(counts)) / peak[dtype]
            case["update_gemm_bound_seconds"] = round(bound, 3)
            case["update_over_gemm_bound"] = round(case["slipstream"]["update"] / bound, 2)
            if all(timed.values()):
                case["ratio"] = round(case["trl"]["total"] / case["slipstream"]["total"], 2)
                medians = [statistics.median(s["total"] for s in timed[side]) for side in ("trl", "slipstream")]
                case["ratio_of_medians"] = round(medians[0] / medians[1], 2)
            cases[f"{length}/{dtype}"] = case
            print(f"{length}/{dtype}: {json.dumps(case)}", flush=True)
    return {**_ratios(cases), "cases": cases, "gemm_gflops": peak, "machine": where}


def _summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    """The fastest step whole, so that its parts add up, and the median of all totals."""
    if not steps:
        return {"failed": "killed by the system: out of memory"}
    best = min(steps, key=lambda step: step["total"])
    median = statistics.median(step["total"] for step in steps)
    return {**{key: round(value, 3) for key, value in best.items()}, "median": round(median, 3), "steps": len(steps)}


def _ratios(cases: dict[str, Any]) -> dict[str, float]:
    """``ratio_fp32``: like for like; ``ratio_best``: each side's fastest dtype."""
    out: dict[str, float] = {}
    if "ratio" in cases.get("short/float32", {}):
        out["ratio_fp32"] = cases["short/float32"]["ratio"]
    for length, key in (("short", "ratio_best"), ("long", "ratio_best_long")):
        mine = [case for name, case in cases.items() if name.startswith(f"{length}/")]
        trl, ours = ([case[side]["total"] for case in mine if "total" in case[side]] for side in ("trl", "slipstream"))
        if trl and ours:
            out[key] = round(min(trl) / min(ours), 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-venv", type=Path, default=HERE.parent / "runs" / "venv-trl")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process")
    parser.add_argument("--rounds", type=int, default=3, help="processes per side and case")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", default=["short", "long"], choices=["short", "long"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "vs_trl.json")
    parser.add_argument("--side", choices=["slipstream", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--length", choices=["short", "long"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        options.dtype = options.dtypes[0]
        result: Any = {"slipstream": run_slipstream, "trl": run_trl}[options.side](options)
    else:
        result = compare(options)
        print(json.dumps({key: value for key, value in result.items() if key.startswith("ratio")}))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
