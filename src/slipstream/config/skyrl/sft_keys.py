"""The top-level keys of SkyRL's SFT configuration and what becomes of each.

Owns: the verdicts.  Refuses: keys that mean the same natively (``seed``, ``model.path``): they are native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.config.skyrl.rules import (
    Idle,
    Mapped,
    Met,
    Refused,
    Rule,
    Unsupported,
    View,
    off_is_zero,
    one_of,
    only,
    positive,
)
from slipstream.config.skyrl.shared_keys import (
    ONE_PROCESS,
    compile_switches,
    fsdp,
    int4,
    lora,
    megatron,
    optimizer,
    parallel,
    profiler,
    sinks,
)
from slipstream.config.skyrl.trainer_keys import KEEP_ALL, ONE_DIRECTORY

NO_SFT_EVAL = "the SFT phase is not evaluated by its own loss in this release; the run's evaluation scores the model"
TOKENS_AT_LOAD = "rows are rendered and tokenised at load; nothing is cached on disk"


def _sources(names_key: str, splits_key: str) -> Callable[[Any, View], Any]:
    """Names and their splits, given apart, as ``name:split``."""

    def convert(value: Any, view: View) -> Any:
        names, splits = (_listed(view.skyrl.get(key)) for key in (names_key, splits_key))
        if not names:
            if splits:
                raise Unsupported("splits need the datasets that they are of", f"set {names_key} too")
            return {}
        if splits and len(splits) != len(names):
            raise Unsupported(f"{len(splits)} splits for {len(names)} datasets", "give one split per dataset")
        return {"data.sft": [f"{name}:{split}" for name, split in zip(names, splits, strict=True)] if splits else names}

    return convert


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or [])


def _some(value: Any, view: View) -> Any:
    return {} if value in (None, "") else value


def _budget(value: Any, view: View) -> Any:
    return {} if value is None or value == -1 else value


def _keep(value: Any, view: View) -> int:
    return KEEP_ALL if value == -1 else positive(value, "max_ckpts_to_keep")


_DATASETS = _sources("train_datasets", "train_dataset_splits")
_DATASET = _sources("dataset_name", "dataset_split")

_WHERE = [
    *lora("model.lora"),
    *int4("model.fake_int4_qat"),
    *optimizer("optimizer_config", "sft.optimizer"),
    Rule("placement.num_nodes", 1, Refused(ONE_PROCESS, "set it to 1 or leave it out")),
    Rule("placement.num_gpus_per_node", 4, Refused(ONE_PROCESS, "set it to 1 or leave it out", off=(1,))),
    *megatron("megatron_config", "strategy=megatron"),
    *fsdp("fsdp_config"),
    Rule("sequence_parallel_size", 1, Refused(ONE_PROCESS, "leave it at 1")),
    *[Rule(rule.key.removeprefix("x."), rule.default, rule.verdict) for rule in parallel("x")[1:]],
    *compile_switches(""),
    *profiler("torch_profiler_config"),
    Rule(
        "strategy",
        "megatron",
        Met(
            "one process holds the whole model, which is what FSDP is at world size 1",
            only("fsdp", "fsdp2", reason="Megatron is not in this release", suggestion="use fsdp"),
        ),
    ),
]

_DATA = [
    Rule("train_datasets", ["yahma/alpaca-cleaned"], Mapped("data.sft", _DATASETS, "with its split: name:split")),
    Rule("train_dataset_splits", ["train[:100]"], Mapped("data.sft", _DATASETS, "joined to its dataset: name:split")),
    Rule("dataset_name", None, Mapped("data.sft", _DATASET, "deprecated in SkyRL")),
    Rule("dataset_split", None, Mapped("data.sft", _DATASET, "deprecated in SkyRL")),
    Rule(
        "train_dataset_weights",
        None,
        Refused("datasets are not weighted in this release", "repeat rows in a file", off=([],)),
    ),
    Rule(
        "pretokenized_dataset_paths",
        None,
        Refused("rows are chat messages, so that spans and masks can be derived", "give the text", off=([],)),
    ),
    *(
        Rule(
            f"{column}_key",
            column,
            Refused("columns are read by their usual name", f"rename the column to {column!r}"),
        )
        for column in ("messages", "tools", "system")
    ),
    *(
        Rule(key, None, Refused(NO_SFT_EVAL, "leave it out; set data.eval", off=([],)))
        for key in (
            "eval_datasets",
            "eval_dataset_splits",
            "eval_dataset_names",
            "eval_dataset_name",
            "eval_dataset_split",
            "eval_pretokenized_dataset_paths",
        )
    ),
    Rule("eval_interval", 0, Refused(NO_SFT_EVAL, "leave it out; set data.eval", off=(-1,))),
    Rule("eval_before_train", False, Refused(NO_SFT_EVAL, "leave it out; set data.eval and eval.before")),
    Rule(
        "max_length",
        None,
        Refused(
            "rows are learnt whole, never cut; those longer than rollout.max_total_tokens are left out and counted",
            "set rollout.max_total_tokens",
        ),
    ),
    *(
        Rule(key, default, Met("rows are tokenised and batched in the process; results do not depend on workers"))
        for key, default in {
            "num_workers": 8,
            "async_batch_collation": True,
            "dataloader_num_workers": 0,
            "dataloader_persistent_workers": False,
        }.items()
    ),
    Rule(
        "sampler",
        "random",
        Met(
            "rows are shuffled in every pass",
            only(
                "random",
                reason="other samplers are not in this release",
                suggestion="leave it out",
            ),
        ),
    ),
    Rule("sampler_class_path", None, Idle("sampler=custom")),
    Rule("sampler_kwargs", {}, Idle("sampler=custom")),
    *(
        Rule(key, default, Met(TOKENS_AT_LOAD))
        for key, default in {
            "cache_dir": "~/.cache/skyrl/tokenized_datasets",
            "force_recache": False,
            "disable_cache": False,
        }.items()
    ),
    Rule("train_on_what", "last_assistant_message", Mapped("sft.train_on")),
]

_LENGTH = [
    Rule("num_steps", None, Mapped("sft.steps", _some)),
    Rule(
        "num_epochs",
        1,
        Refused(
            "the SFT phase is counted in optimiser steps", "set sft.steps to rows x epochs / rows_per_step", (None,)
        ),
    ),
    Rule("max_training_steps", None, Refused("the SFT phase has one length", "set num_steps (or sft.steps)")),
    Rule("batch_size", 4, Mapped("sft.rows_per_step")),
    Rule(
        "micro_train_batch_size_per_gpu",
        2,
        Met("micro-batches are formed by training.max_tokens_per_microbatch; results do not depend on it"),
    ),
    Rule(
        "remove_microbatch_padding",
        True,
        Met(
            "micro-batches are packed and never padded",
            only(True, reason="micro-batches are always packed", suggestion="use a text-only causal LM"),
        ),
    ),
    Rule("use_sequence_packing", False, Met("micro-batches are always packed, without changing any row's context")),
    Rule("max_tokens_per_microbatch", None, Mapped("training.max_tokens_per_microbatch", _budget)),
    Rule(
        "dummy_run_full_ctx",
        False,
        Refused("there is no dummy benchmark mode", "see the scripts in benchmarks/"),
    ),
    Rule("dummy_run_max_steps", 5, Idle("dummy_run_full_ctx=true")),
]

_RECORD = [
    Rule("logger", "console", Mapped("logging.sinks", sinks)),
    Rule("project_name", "skyrl_sft", Mapped("logging.project")),
    Rule("run_name", "skyrl_sft_run", Mapped("logging.run_name")),
    Rule("tags", None, Refused("trackers get no tags in this release", "put them into run_name", off=([],))),
    Rule("ckpt_path", "", Mapped("run_dir", _some, "checkpoints and everything else lie beneath it")),
    Rule("ckpt_interval", 0, Mapped("checkpoint.every_steps", off_is_zero)),
    Rule("max_ckpts_to_keep", -1, Mapped("checkpoint.keep", _keep)),
    Rule(
        "resume_from",
        "",
        Mapped(
            "checkpoint.resume",
            one_of(
                {"": "never", None: "never", "latest": "auto"},
                "a run resumes in its own directory only",
                "set run_dir to the run to go on with, and checkpoint.resume=must",
            ),
        ),
    ),
    Rule(
        "hf_save_interval",
        0,
        Refused(
            "there is no export every N steps in this release",
            "checkpoints hold safetensors: export one of them",
            (-1,),
        ),
    ),
    Rule("export_path", "", Refused(ONE_DIRECTORY, "leave it out; set run_dir (or ckpt_path)", off=(None,))),
    Rule("enable_ray_gpu_monitor", True, Met("there is no Ray cluster to watch in this release")),
]

SFT = [*_WHERE, *_DATA, *_LENGTH, *_RECORD]
