"""Commands of engine servers: this package's own, and vLLM.

Owns: turning ``inference`` settings into a command line and an environment.  Refuses: running it (``process``),
choosing ports and restarting (``inference.pool``).

Both speak the same API, so that one client serves both.  vLLM may live in another virtual environment: it is named by
its interpreter, reached only by HTTP and by the weight transports.

>>> spec = vllm_server("engine-0", "some/model", InferenceSettings(engine="vllm"), log_dir=Path("logs"))
>>> spec.command(8000)[1:3]
['-m', 'vllm.entrypoints.openai.api_server']
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slipstream.config.settings import InferenceSettings
from slipstream.inference.transfer.vllm_plugin import BACKEND, FLAGS

SERVED_MODEL = "policy"
"""What every replica calls the model that is trained."""

ADAPTER = "policy-adapter"
"""What a vLLM with adapters calls the one that is trained; requests name it as their model."""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""

Returned = Literal["kept_sets", "routed_experts"]
"""What a trainer has to replay; a server returns it only when started to."""

RETURN_FLAGS: Mapping[Returned, str] = {
    "kept_sets": "--return-sampling-mask",
    "routed_experts": "--enable-return-routed-experts",
}


@dataclass(frozen=True)
class ServerSpec:
    """One server that can be started, any number of times.

    ``command`` takes the port; ``env`` is added to this process's environment (an empty value removes a variable).
    """

    name: str
    command: Callable[[int], Sequence[str]]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_seconds: float = 300.0
    model: str = SERVED_MODEL


def embedded_server(
    name: str,
    model: str,
    settings: InferenceSettings,
    *,
    log_dir: Path,
    weight_version: str = "policy/0/0",
    transfer_dir: Path | None = None,
    returns: Collection[Returned] = (),
) -> ServerSpec:
    """``slipstream serve`` of this interpreter, under the given settings."""
    # The whole section travels, so that no setting is lost on the way; where the server runs is not its business.
    section = settings.model_dump(mode="json", exclude={"engine", "urls", "replicas", "router", "launch"})
    launch = settings.launch

    def command(port: int) -> list[str]:
        program = [launch.python or sys.executable, "-m", "slipstream.cli", "serve", "--model", model]
        program += ["--port", str(port), "--name", SERVED_MODEL, "--weight-version", weight_version]
        program += ["--settings", json.dumps(section)]
        if transfer_dir is not None:
            program += ["--transfer-dir", str(transfer_dir)]
        return [*program, *(RETURN_FLAGS[what] for what in sorted(returns)), *launch.args]

    threads = {"OMP_NUM_THREADS": str(settings.threads)} if settings.threads else {}
    return ServerSpec(name, command, log_dir / f"{name}.log", {**threads, **launch.env}, launch.ready_seconds)


def vllm_server(
    name: str,
    model: str,
    settings: InferenceSettings,
    *,
    log_dir: Path,
    weight_transfer: Literal["slipstream", "nccl", "ipc"] | None = None,
    returns: Collection[Returned] = (),
    adapter_rank: int | None = None,
) -> ServerSpec:
    """Serve with vLLM, under the given settings.

    Args:
        name: of the replica.
        model: local directory or hub id.
        settings: ``launch.python`` is the interpreter of vLLM's environment; None takes this one.
        log_dir: where the log goes.
        weight_transfer: ``slipstream`` takes weights by this package's plug-in (which must be installed in vLLM's
            environment); ``nccl`` and ``ipc`` are vLLM's own ways; None takes none.
        returns: what it returns with the tokens.  With ``kept_sets`` vLLM refuses a request without top_k or at
            temperature 0.
        adapter_rank: rank of the LoRA adapter that requests run with; None serves the model itself.
    """
    launch = settings.launch
    python = launch.python or sys.executable
    flags = [
        *("--dtype", settings.dtype),
        *("--served-model-name", SERVED_MODEL),
        *("--max-num-seqs", str(settings.max_batch_size)),
        # The distribution really sampled: vLLM's default reports it before temperature and truncation.
        *("--logprobs-mode", "processed_logprobs"),
        # Candidates by id: a token's text need not be one token.
        "--return-tokens-as-token-ids",
        # A model's generation_config must not change sampling behind the settings' back.
        *("--generation-config", "vllm"),
        # Without it the token endpoint answers 403.
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        *(RETURN_FLAGS[what] for what in sorted(returns)),
    ]
    if adapter_rank is not None:
        largest = next((rank for rank in _LORA_RANKS if rank >= adapter_rank), adapter_rank)
        flags += ["--enable-lora", "--max-lora-rank", str(largest)]
    if settings.max_model_len is not None:
        flags += ["--max-model-len", str(settings.max_model_len)]
    if weight_transfer == BACKEND:
        flags += FLAGS
    elif weight_transfer is not None:
        flags += ["--weight-transfer-config", json.dumps({"backend": weight_transfer})]

    def command(port: int) -> list[str]:
        program = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        return [*program, "--host", "127.0.0.1", "--port", str(port), *flags, *launch.args]

    env = {
        "VLLM_SERVER_DEV_MODE": "1",  # the control plane
        "VLLM_NO_USAGE_STATS": "1",
        # Its front end gives up on its own engine earlier than that, otherwise.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(launch.ready_seconds)),
        "PYTHONPATH": "",
    }
    if returns:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that returns either; it needs Triton
    if adapter_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if weight_transfer == "ipc":
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA's handles travel pickled
    if settings.threads:
        env |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # On a CPU, Intel's OpenMP as vLLM's documentation advises; its console script would set it.
    openmp = sorted((Path(python).parent.parent / "lib").glob("libiomp5.so"))
    if openmp:
        env["LD_PRELOAD"] = str(openmp[0])
    return ServerSpec(name, command, log_dir / f"{name}.log", {**env, **launch.env}, launch.ready_seconds)
