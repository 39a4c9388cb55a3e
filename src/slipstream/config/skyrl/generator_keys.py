"""SkyRL's ``generator`` and ``environment`` keys and what becomes of each.

Owns: the verdicts.  Refuses: launching engines; whatever an engine process would be started with.
"""

from __future__ import annotations

from typing import Any

from slipstream.config.skyrl.rules import Idle, Mapped, Met, Refused, Rule, Unsupported, View, one_of, only, same, whole
from slipstream.config.skyrl.shared_keys import DROP, under
from slipstream.config.skyrl.trainer_keys import sampled_total

ENGINE = "generator.inference_engine"
ONE_WORKER = "an engine that is started here is one worker"
ELSEWHERE = (
    "start servers with inference.replicas or inference.engine=vllm, or name running ones in inference.urls "
    "(inference.engine=http)"
)


def _stop(value: Any, view: View) -> Any:
    return [] if value is None else value


def _eval_turn(value: Any, view: View) -> Any:
    return view.skyrl.get("generator.eval_sampling_params.max_generate_length", value)


def _eval_stop(value: Any, view: View) -> Any:
    return _stop(view.skyrl.get("generator.eval_sampling_params.stop", value), view)


def _total(value: Any, view: View) -> Any:
    return {} if value is None else sampled_total(value, view)


def _batched(value: Any, view: View) -> None:
    turns = view.skyrl.get("generator.max_turns", view.native.get("rollout.max_turns", 1))
    if value is not False and turns != 1:
        raise Unsupported("one batch for the whole run of a conversation plays one turn only", "set it to false")


def _reported(value: Any, view: View) -> None:
    if value is not None and whole(value, "logprobs") > 1:
        raise Unsupported("only the sampled token's log-prob is kept", "use 1, 0 or null")


def _template_source(value: Any, view: View) -> None:
    if value not in ("name", "file"):
        raise Unsupported(f"{value!r} is neither 'name' nor 'file'", "use file")


def _template(value: Any, view: View) -> Any:
    if value is not None and view.get("generator.chat_template.source") != "file":
        raise Unsupported(
            f"there is no built-in chat template {value!r}",
            "save it to a file (source=file), or set model.chat_template_kwargs such as enable_thinking",
        )
    return value


def _workers(value: Any, view: View) -> int:
    return max(whole(value, "environment.skyrl_gym.max_env_workers"), 1)


def _urls(value: Any, view: View) -> Any:
    urls = [value] if isinstance(value, str) else value
    if not urls:
        return {}
    return {"inference.urls": urls, "inference.engine": "http"}


def _proxy(value: Any, view: View) -> Any:
    if value is not None and view.skyrl.get(f"{ENGINE}.external_server_urls"):
        raise Unsupported(
            "a proxy in front of servers would be two routes to one engine",
            "name the servers (external_server_urls) or the proxy, not both",
        )
    return _urls(value, view)


def _router(value: Any, view: View) -> dict[str, Any]:
    if not value:
        return {}
    if not isinstance(value, dict) or set(value) != {"policy"}:
        raise Unsupported(
            "of the router's options only its policy is a setting; the pool sets the others",
            "set inference.router.policy, and leave the others out",
        )
    return {"inference.router.policy": value["policy"]}


def _local(value: Any, view: View) -> None:
    external = view.skyrl.get(f"{ENGINE}.external_server_urls") or view.skyrl.get(f"{ENGINE}.external_proxy_url")
    if value is not True and not external and view.native.get("inference.engine") != "http":
        raise Unsupported("no address of an engine was given", ELSEWHERE)


def _shared_directory(value: Any, view: View) -> Any:
    if isinstance(value, str) and "://" in value:
        raise Unsupported("packets lie in a directory that trainer and engines see", "give a path, not an object store")
    return {} if value is None else value


def _environment(value: Any, view: View) -> dict[str, Any]:
    """``environment.skyrl_gym.NAME.OPTION`` becomes ``env.kwargs.OPTION``, if NAME is the run's environment."""
    name, _, option = view.key.removeprefix("environment.skyrl_gym.").partition(".")
    chosen = view.skyrl.get("environment.env_class", view.native.get("env.id"))
    if not option:
        raise Unsupported("an environment's options form a section", f"write {view.key}.OPTION")
    if name != chosen:
        if view.key in view.defaults and same(value, view.defaults[view.key]):
            return {}
        raise Unsupported(
            f"options are passed to the run's own environment, which is {chosen or 'not set'}",
            f"set environment.env_class={name}, or leave the option out",
        )
    nested: Any = value
    for part in reversed(option.split(".")):
        nested = {part: nested}
    return {"env.kwargs": nested}


def _sampling(prefix: str, native: str, defaults: dict[str, Any], *, training: bool) -> list[Rule]:
    implied: dict[str, Any] = {}
    stop_implied: dict[str, Any] = {}
    if training:
        implied = {"rollout.max_total_tokens": sampled_total, "eval.sampling.max_tokens_per_turn": _eval_turn}
        stop_implied = {"eval.sampling.stop": _eval_stop}
    return [
        Rule(
            f"{prefix}.max_generate_length",
            defaults["max_generate_length"],
            Mapped(f"{native}.max_tokens_per_turn", implied=implied),
        ),
        Rule(f"{prefix}.temperature", defaults["temperature"], Mapped(f"{native}.temperature")),
        Rule(f"{prefix}.top_p", 1.0, Mapped(f"{native}.top_p")),
        Rule(f"{prefix}.min_p", 0.0, Mapped(f"{native}.min_p")),
        Rule(f"{prefix}.top_k", -1, Mapped(f"{native}.top_k")),
        Rule(f"{prefix}.repetition_penalty", 1.0, Mapped(f"{native}.repetition_penalty")),
        Rule(f"{prefix}.stop", None, Mapped(f"{native}.stop", _stop, implied=stop_implied)),
        Rule(f"{prefix}.logprobs", 1, Met("the sampled token's log-prob is always recorded", _reported)),
        Rule(
            f"{prefix}.additional_kwargs",
            None,
            Refused("sampling options that the scorer does not know cannot be trained on", DROP, off=({},)),
        ),
    ]


_TURNS = [
    Rule("generator.n_samples_per_prompt", 5, Mapped("rollout.samples_per_prompt")),
    Rule("generator.batched", False, Met("requests of one turn are batched by the engine anyway", _batched)),
    Rule("generator.max_turns", 1, Mapped("rollout.max_turns")),
    Rule(
        "generator.max_input_length",
        None,
        Mapped(
            "rollout.max_total_tokens",
            _total,
            "max_input_length + max_generate_length: SkyRL starts a turn at up to the first and adds the second",
        ),
    ),
    Rule(
        "generator.use_conversation_multi_turn",
        True,
        Met(
            "sampled tokens stay as sampled and observations are appended as chat turns",
            only(
                True,
                reason="one assistant message over all turns cannot be rendered append-only",
                suggestion="leave it true",
            ),
        ),
    ),
    Rule(
        "generator.append_eos_token_after_stop_str_in_multi_turn",
        True,
        Met(
            "a turn cut by a stop string is closed by a synthetic, untrained end-of-turn token",
            only(True, reason="a turn must be closed before the next one", suggestion="leave it true"),
        ),
    ),
    Rule("generator.chat_template.source", "name", Met("read with name_or_path", _template_source)),
    Rule("generator.chat_template.name_or_path", None, Mapped("model.chat_template", _template, "source=file")),
    Rule("generator.chat_template_kwargs", {}, Mapped("model.chat_template_kwargs")),
    *_sampling(
        "generator.sampling_params",
        "rollout.sampling",
        {"max_generate_length": 1024, "temperature": 1.0},
        training=True,
    ),
    *_sampling(
        "generator.eval_sampling_params",
        "eval.sampling",
        {"max_generate_length": 1024, "temperature": 0.0},
        training=False,
    ),
    Rule("generator.eval_n_samples_per_prompt", 1, Mapped("eval.samples_per_prompt")),
    Rule("generator.zero_reward_on_non_stop", False, Mapped("algorithm.zero_reward_on_non_stop")),
    Rule("generator.apply_overlong_filtering", False, Mapped("algorithm.drop_truncated")),
    Rule("generator.use_cache_salt", True, Mapped("inference.use_cache_salt")),
    Rule(
        "generator.step_wise_trajectories",
        False,
        Met(
            "each sampled token is trained once, in the context that it was sampled in, also when history is rewritten"
        ),
    ),
    Rule(
        "generator.merge_stepwise_output",
        False,
        Met("turns share a row as long as each extends the last, and fork one where history was rewritten"),
    ),
    Rule(
        "generator.vision_language_generator",
        False,
        Refused("images are not in this release", "use a text-only causal LM"),
    ),
    *under(
        "generator.rate_limit",
        {"enabled": False},
        Refused("rollouts are not rate-limited in this release", "bound them with rollout.concurrency"),
    ),
    *under(
        "generator.rate_limit",
        {"trajectories_per_second": None, "max_concurrency": None},
        Idle("generator.rate_limit.enabled=true"),
    ),
]

_ENGINES = [
    Rule(
        f"{ENGINE}.backend",
        "vllm",
        Met(
            "the embedded engine answers vLLM's HTTP contract; engine=vllm starts vLLM, http reaches a server",
            only("vllm", reason="the only contract is vLLM's", suggestion="use vllm"),
        ),
    ),
    Rule(f"{ENGINE}.run_engines_locally", True, Met("engines are started here, or reached where the URLs say", _local)),
    Rule(f"{ENGINE}.num_engines", 1, Mapped("inference.replicas")),
    *under(
        ENGINE,
        {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "data_parallel_size": 1,
        },
        Refused(ONE_WORKER, "leave it at 1; vLLM's own flags go into inference.launch.args"),
    ),
    Rule(
        f"{ENGINE}.model_dtype",
        "bfloat16",
        Mapped(
            "inference.dtype",
            one_of(
                {"bfloat16": "bfloat16", "float32": "float32"},
                "the engine has no such dtype",
                "use bfloat16 or float32",
            ),
        ),
    ),
    Rule(f"{ENGINE}.max_num_seqs", 1024, Mapped("inference.max_batch_size")),
    Rule(f"{ENGINE}.enable_prefix_caching", True, Mapped("inference.prefix_caching")),
    Rule(
        f"{ENGINE}.gpu_memory_utilization",
        0.8,
        Refused("the KV cache is sized in tokens, not as a share of a GPU", "set inference.kv_cache_tokens"),
    ),
    Rule(
        f"{ENGINE}.max_num_batched_tokens",
        8192,
        Refused("the engine chooses its own prefill chunks", "leave it out; inference.max_batch_size bounds the batch"),
    ),
    *under(
        ENGINE,
        {"enforce_eager": False, "enable_chunked_prefill": True, "vllm_v1_disable_multiproc": True},
        Met("it tunes how a vLLM process is run; the distribution that is sampled is the same"),
    ),
    Rule(f"{ENGINE}.distributed_executor_backend", "ray", Idle(f"{ENGINE}.tensor_parallel_size > 1")),
    Rule(
        f"{ENGINE}.served_model_name",
        None,
        Refused("an engine is asked for its own model name", "leave it out"),
    ),
    Rule(f"{ENGINE}.language_model_only", False, Met("only the language model of a checkpoint is loaded")),
    Rule(f"{ENGINE}.enable_return_routed_experts", False, Mapped("training.routing_replay")),
    Rule(f"{ENGINE}.fully_sharded_loras", False, Refused(ONE_WORKER, "leave it false")),
    Rule(f"{ENGINE}.enable_ray_prometheus_stats", True, Met("there is no Ray; the engine's metrics are in the ledger")),
    Rule(
        f"{ENGINE}.speculative_config",
        None,
        Refused("speculative decoding is not in this release", "leave it null", off=({},)),
    ),
    Rule(f"{ENGINE}.use_expandable_segments", False, Met("it only tunes the CUDA allocator; results are the same")),
    Rule(
        f"{ENGINE}.offload_kv_for_weight_sync",
        False,
        Refused("the KV cache is never offloaded in this release", "leave it false"),
    ),
    Rule(
        f"{ENGINE}.engine_init_kwargs",
        {},
        Refused(
            "a vLLM that is started here takes options as they stand on its command line",
            "set inference.engine=vllm and inference.launch.args",
        ),
    ),
    Rule(
        f"{ENGINE}.weight_sync_backend",
        "nccl",
        Mapped(
            "inference.transport",
            one_of({"nccl": {}, "delta": "delta"}, "there is no such transport", "set inference.transport"),
            "nccl leaves the default, which is memory on one machine",
        ),
    ),
    Rule(
        f"{ENGINE}.weight_transfer_threshold_cuda_ipc_GB",
        1.0,
        Met("vLLM's own CUDA IPC (inference.transport=ipc) sizes its batches itself; the weights are the same"),
    ),
    Rule(
        f"{ENGINE}.delta_weight_sync",
        None,
        Refused("it is a section", "set its keys, such as delta_weight_sync.sync_dir", off=({},)),
    ),
    Rule(
        f"{ENGINE}.delta_weight_sync.sync_dir",
        None,
        Mapped("inference.transfer_dir", _shared_directory, gate=(f"{ENGINE}.weight_sync_backend", "delta")),
    ),
    *under(
        f"{ENGINE}.delta_weight_sync",
        {"local_checkpoint_dir": None, "publish_staging_dir": None},
        Met("packets are written where they are read, and an engine keeps what they lead to in memory"),
    ),
    *under(
        f"{ENGINE}.delta_weight_sync",
        {
            "max_file_size_in_gb": 1.0,
            "cloud_download_workers": 4,
            "publish_num_workers": None,
            "checkpoint_load_format": "vllm_multi_thread_safetensors",
            "multi_thread_safetensors_max_workers": 8,
        },
        Met("it tunes how files are written and read; the weights are the same"),
    ),
    Rule(
        f"{ENGINE}.external_server_urls",
        None,
        Mapped("inference.urls inference.engine", _urls, "engine=http; to train, inference.transport too"),
    ),
    Rule(
        f"{ENGINE}.external_proxy_url",
        None,
        Mapped("inference.urls inference.engine", _proxy, "engine=http; a proxy serves evaluation only"),
    ),
    Rule(
        f"{ENGINE}.enable_pd",
        False,
        Refused("prefill and decode are not split over engines in this release", "leave it false"),
    ),
    Rule(f"{ENGINE}.num_prefill", 0, Idle(f"{ENGINE}.enable_pd=true")),
    Rule(f"{ENGINE}.router_init_kwargs", {}, Mapped("inference.router.policy", _router)),
    Rule(
        f"{ENGINE}.async_engine",
        True,
        Refused("SkyRL removed it: engines are always asynchronous", "leave it out"),
    ),
    Rule(f"{ENGINE}.enable_http_endpoint", None, Refused("SkyRL removed it", "use 'slipstream serve'")),
    Rule(f"{ENGINE}.remote_urls", None, Refused("SkyRL removed it", "use external_server_urls, or inference.urls")),
]

_ENVIRONMENT = [
    Rule("environment.env_class", "gsm8k", Mapped("env.id", note="a row's own env_class goes first")),
    Rule(
        "environment.skyrl_gym.max_env_workers",
        32,
        Mapped("rollout.env_workers", _workers, "0 (inline) becomes 1: one environment call at a time"),
    ),
    *under(
        "environment.skyrl_gym",
        {
            "text2sql.db_path": None,
            "llm_as_a_judge.model": "gpt-4o-mini",
            "llm_as_a_judge.base_url": None,
            "search.log_requests": False,
            "search.search_url": "http://127.0.0.1:8000/retrieve",
            "search.topk": 3,
            "search.timeout": 30,
        },
        Mapped("env.kwargs", _environment, "when it is the run's environment; SkyRL's default is left alone otherwise"),
    ),
    Rule("environment.skyrl_gym.*", None, Mapped("env.kwargs", _environment, "options of an environment of your own")),
]

GENERATOR = [*_TURNS, *_ENGINES, *_ENVIRONMENT]
