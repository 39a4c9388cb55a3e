"""Key groups that SkyRL repeats under several sections: FSDP, Megatron, profiler, LoRA, optimiser.

Owns: one function per group that returns its rules under a prefix.  Refuses: keys that occur once.

>>> [rule.key for rule in lora("trainer.policy.model.lora")][:2]
['trainer.policy.model.lora.rank', 'trainer.policy.model.lora.alpha']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.config.skyrl.rules import Idle, Mapped, Met, Refused, Rule, Verdict, View, one_of, only

ONE_PROCESS = "this release trains in one process (world size 1)"
DROP = "leave the key out"


def engine_processes(view: View) -> bool:
    """Whether engines are processes of their own (started here, or reached by URL), and not part of the trainer's."""
    engine = "generator.inference_engine"
    replicas = view.native.get("inference.replicas", view.skyrl.get(f"{engine}.num_engines", 1))
    return (
        bool(view.skyrl.get(f"{engine}.external_server_urls") or view.skyrl.get(f"{engine}.external_proxy_url"))
        or view.native.get("inference.engine") in ("http", "vllm")
        or (isinstance(replicas, int) and replicas > 1)
    )


def under(prefix: str, keys: Mapping[str, Any], verdict: Verdict) -> Iterable[Rule]:
    """The same verdict for several keys, given with their defaults."""
    return [Rule(f"{prefix}.{key}", default, verdict) for key, default in keys.items()]


def fsdp(prefix: str) -> list[Rule]:
    """Sharding of one rank is the identity."""
    why = "one rank holds the whole model, so there is nothing to shard or gather"
    precision = "the trainer keeps float32 masters and computes in one dtype"
    return [
        *under(prefix, {"reshard_after_forward": True, "fsdp_size": -1, "wrap_policy": {}}, Met(why)),
        Rule(f"{prefix}.cpu_offload", False, Refused("there is no offloading in this release", DROP)),
        Rule(
            f"{prefix}.mixed_precision",
            None,
            Refused(precision, "set model.dtype (or trainer.bf16) instead", off=({},)),
        ),
        *under(
            f"{prefix}.mixed_precision",
            {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            Refused(precision, "set model.dtype (or trainer.bf16) instead"),
        ),
    ]


def megatron(prefix: str, gate: str) -> list[Rule]:
    """Understood, and read only with Megatron, which this release refuses."""
    plain: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_router_score_function": None,
        "moe_router_enable_expert_bias": None,
        "moe_enable_routing_replay": False,
        "moe_per_layer_logging": False,
        "moe_router_dtype": "fp32",
        "ddp_config.grad_reduce_in_fp32": True,
        "ddp_config.overlap_grad_reduce": False,
        "ddp_config.overlap_param_gather": False,
        "ddp_config.average_in_collective": True,
        "hf_export_config.distributed_save": False,
        "hf_export_config.save_every_n_ranks": 1,
        "lora_config.lora_type": "lora",
        "lora_config.merge_lora": True,
        "optimizer_config_kwargs": {},
        "transformer_config_kwargs": {},
        "model_config_kwargs": {},
        "empty_cuda_cache": True,
        "dist_ckpt_optim_fully_reshardable": False,
        "freeze_moe_router": False,
        "mtp_num_layers": None,
        "mtp_loss_weight": 0.1,
        "mtp_loss_chunk_size": 1024,
        "mtp_loss_topk": None,
        "async_dist_ckpt_save": False,
        "async_dist_ckpt_strategy": "mcore",
        "async_save_prestage_to_cpu": False,
    }
    return list(under(prefix, plain, Idle(gate)))


def profiler(prefix: str) -> list[Rule]:
    """``torch.profiler`` windows are not built in."""
    details: dict[str, Any] = {
        "ranks": [0],
        "save_path": None,
        "skip_first": 10,
        "wait": 0,
        "warmup": 1,
        "active": 1,
        "repeat": 1,
        "activities": ["cpu", "cuda"],
        "record_shapes": True,
        "profile_memory": False,
        "with_stack": True,
        "with_flops": False,
        "with_modules": False,
        "export_type": "chrome_trace",
    }
    return [
        Rule(
            f"{prefix}.enable",
            False,
            Refused("the trainer has no profiler switch", "run the command under torch.profiler or py-spy"),
        ),
        *under(prefix, details, Idle(f"{prefix}.enable=true")),
    ]


def lora(prefix: str) -> list[Rule]:
    """Adapters through peft."""
    single = "one adapter is trained and served at a time"
    return [
        Rule(f"{prefix}.rank", 0, Mapped("training.lora.rank")),
        Rule(f"{prefix}.alpha", 16, Mapped("training.lora.alpha")),
        Rule(f"{prefix}.dropout", 0.0, Mapped("training.lora.dropout")),
        Rule(f"{prefix}.target_modules", "all-linear", Mapped("training.lora.target_modules")),
        Rule(
            f"{prefix}.exclude_modules",
            None,
            Refused("modules cannot be excluded", "list the wanted ones in training.lora.target_modules"),
        ),
        Rule(
            f"{prefix}.init_method",
            "kaiming",
            Met(
                "adapters start with peft's own (Kaiming) initialisation",
                only(
                    "kaiming",
                    reason="other initialisations of adapters are not in this release",
                    suggestion="use kaiming",
                ),
            ),
        ),
        Rule(f"{prefix}.max_loras", 1, Refused(single, "leave it at 1")),
        Rule(f"{prefix}.max_cpu_loras", None, Refused(single, "leave it out", off=(1,))),
        Rule(
            f"{prefix}.lora_sync_path",
            "/tmp/skyrl_lora_sync",
            Met("inference.transport says how weights travel; adapter files (adapter) lie in inference.transfer_dir"),
        ),
    ]


def int4(prefix: str) -> list[Rule]:
    """Fake INT4 training."""
    details = {"group_size": 32, "symmetric": True, "scale_divisor": 7.5, "q_min": -8.0, "bf16_base_path": None}
    return [
        Rule(
            f"{prefix}.enabled",
            False,
            Refused("quantisation-aware training is not in this release", "train in bfloat16 or float32"),
        ),
        *under(prefix, details, Idle(f"{prefix}.enabled=true")),
    ]


def optimizer(prefix: str, native: str) -> list[Rule]:
    """AdamW and its schedule, under ``native``."""
    schedules = one_of(
        {"constant_with_warmup": "constant", "constant": "constant", "linear": "linear", "cosine": "cosine"},
        "this learning-rate schedule is not in this release",
        f"choose one of them, or set {native}.scheduler and {native}.min_lr_ratio",
    )
    return [
        Rule(f"{prefix}.lr", 1e-6, Mapped(f"{native}.lr")),
        Rule(f"{prefix}.adam_betas", [0.9, 0.999], Mapped(f"{native}.betas")),
        Rule(f"{prefix}.weight_decay", 0.01, Mapped(f"{native}.weight_decay")),
        Rule(f"{prefix}.max_grad_norm", 1.0, Mapped(f"{native}.max_grad_norm")),
        Rule(f"{prefix}.num_warmup_steps", 0, Mapped(f"{native}.warmup_steps")),
        Rule(f"{prefix}.scheduler", "constant_with_warmup", Mapped(f"{native}.scheduler", schedules)),
        Rule(
            f"{prefix}.offload_after_step",
            True,
            Met("the optimiser's state stays where it is between steps; results do not depend on it"),
        ),
    ]


def parallel(prefix: str) -> list[Rule]:
    """Switches of one worker that only make sense with several ranks or a compiler."""
    return [
        Rule(f"{prefix}.sequence_parallel_size", 1, Refused(ONE_PROCESS, "leave it at 1")),
        Rule(
            f"{prefix}.model_config_kwargs",
            {},
            Refused("the model's config is used as it is saved", "edit config.json in a copy of the model directory"),
        ),
    ]


def compile_switches(prefix: str) -> list[Rule]:
    """``torch.compile`` and memory snapshots."""
    return [
        Rule(f"{prefix}use_torch_compile", False, Refused("the trainer is not compiled in this release", DROP)),
        Rule(
            f"{prefix}record_memory",
            False,
            Refused("memory snapshots are a CUDA feature", "read the peak memory in the run's summary"),
        ),
    ]


def sinks(value: Any, view: View) -> list[str]:
    """One tracker name or several; the console and the run's own record are always kept."""
    choices = one_of(
        {name: name for name in ("console", "tensorboard", "wandb", "mlflow")},
        f"there is no sink {value!r}",
        "choose among console, tensorboard, wandb, mlflow and trackio (logging.sinks)",
    )
    names = [choices(name, view) for name in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(["console", "jsonl", *names]))
