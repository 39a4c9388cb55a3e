"""Slipstream's losses, corrections and estimators against TRL's and verl's own functions, on random batches.

Both peers' published packages are called, unchanged: TRL's ``GRPOTrainer._compute_loss`` on a trainer whose model call
is replaced by given log-probs, verl's functions of ``core_algos`` and ``rollout_corr_helper``.  They live in a virtual
environment of their own, made here on first use.  Everything is float64; values *and* gradients are compared, as the
largest difference relative to the largest number, over ``--seeds`` batches of eight rows in two groups, of unequal
lengths, with observations in their middle.

A case says what is expected: ``agree`` (difference below 1e-6), ``gradient`` (gradients agree, values are another
surrogate of the same gradient) or ``differ``, with the reason.  A case that turns out otherwise makes the exit code 1.

    python benchmarks/compare_peers.py          # writes benchmarks/results/peers.json
    python benchmarks/compare_peers.py --table  # prints the results as the Markdown of docs/algorithms.md
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peer_cases import CASES, LENGTH, ROWS, Case, draw, halves

HERE = Path(__file__).resolve().parent
TRL, VERL, TORCH = "1.16.0", "0.9.1", "2.13.0"
VERL_NEEDS = ("ray", "hydra-core", "codetiming", "pandas", "dill", "orjson", "cloudpickle", "importlib_metadata")
"""What verl's arithmetic imports; its own list pins another transformers than TRL's."""
TOLERANCE = 1e-6
ESS = "off_policy/ess_token"
OVERLONG = (12, 5)
"""The limit and the buffer before it, in tokens."""


# ---- Slipstream


def run_ours(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``value`` and, where there is one, ``gradient`` of the model's output."""
    what = case["what"]
    if what in ("loss", "value"):
        return _our_loss(case, data)
    if what == "kl":
        return _our_kl(case, data)
    if what == "entropy":
        return _our_entropy(case, data)
    if what == "controller":
        return _our_controller(data)
    if what in ("tis", "mask", "ess"):
        return _our_correction(case, data)
    if what == "overlong":
        return _our_overlong(data)
    return _our_advantage(case, data)


def _our_batch(data: dict[str, np.ndarray], case: dict[str, Any]) -> Any:
    from slipstream.algorithms import Batch, BatchRow, ReductionSpec, reweigh
    from slipstream.trajectory import SamplingSpec

    rows = []
    for i in range(ROWS):
        trained = data["mask"][i].astype(bool)
        ids = np.arange(LENGTH, dtype=np.int64)
        rows.append(
            BatchRow(
                f"r{i}",
                f"t{i}",
                f"g{data['group'][i]}",
                ids,
                ids,
                trained,
                np.zeros(LENGTH),
                np.full(LENGTH, data["advantage"][i]),
                data["old"][i],
                SamplingSpec(),
            )
        )
    name = case.get("reduction", "token_mean")
    return Batch(reweigh(rows, ReductionSpec(name, {"reduction_tokens": LENGTH} if "norm" in name else {})))


def _our_loss(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    from slipstream.algorithms import LossSpec, loss_inputs, objective, run_prepass, torch_ops

    mask = data["mask"].astype(bool)
    batch = _our_batch(data, case)

    def rows(name: str) -> list[np.ndarray]:
        return [data[name][i][mask[i]] for i in range(ROWS)]

    if case["what"] == "value":
        spec = LossSpec("value_clip", {"clip": case["clip"]}, old_values=rows("old_values"), returns=rows("returns"))
    else:
        settings = {k: v for k, v in case["settings"].items() if k != "behaviour"}
        spec = LossSpec(case["loss"], settings, old_logprobs=rows("old"))
        if case.get("kl"):
            spec = LossSpec(
                case["loss"], settings, kl_coef=case["kl"], old_logprobs=rows("old"), ref_logprobs=rows("ref")
            )
    output = "values" if case["what"] == "value" else "logprobs"
    leaf, xp, total = torch.tensor(data[output], requires_grad=True), torch_ops(), 0.0
    spec = run_prepass(batch, spec, lambda: rows("logprobs"))
    for part in halves(case):
        chosen = list(range(ROWS))[part]
        flat = torch.cat([leaf[i][torch.tensor(mask[i])] for i in chosen])
        given = {"values": flat} if output == "values" else {}
        inputs = loss_inputs(xp, batch, chosen, spec, None if given else flat, **given)
        loss, _ = objective(xp, inputs, spec)
        loss.backward()
        total += loss.item()
    return {"value": np.asarray(total), "gradient": leaf.grad.numpy()}


def _our_kl(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    from slipstream.algorithms import kl_values, torch_ops

    leaf = torch.tensor(data["logprobs"], requires_grad=True)
    values = kl_values(torch_ops(), leaf, torch.tensor(data["ref"]), case["k"])
    values.sum().backward()
    return {"value": values.detach().numpy(), "gradient": leaf.grad.numpy()}


def _logits(case: dict[str, Any], data: dict[str, np.ndarray]) -> np.ndarray:
    logits = data["logits"].copy()
    if case.get("masked"):
        logits[:, 2] = -np.inf
    return logits


def _our_entropy(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    from slipstream.algorithms import entropy_from_logits, torch_ops

    leaf = torch.tensor(_logits(case, data), requires_grad=True)
    values = entropy_from_logits(torch_ops(), leaf)
    values.sum().backward()
    return {"value": values.detach().numpy(), "gradient": leaf.grad.numpy()}


def _our_controller(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from slipstream.algorithms.kl import AdaptiveKl

    controller, seen = AdaptiveKl(0.1, target=0.5, horizon=100), []
    for kl in data["kl"]:
        controller.update(float(kl), trajectories=16)
        seen.append(controller.coef)
    return {"value": np.asarray(seen)}


def _our_correction(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from slipstream.algorithms.corrections import correct
    from slipstream.config.algorithm import OffPolicySettings

    # The sampler's log-probs are ``old`` here, the policy before the update is ``logprobs``.
    batch, mask = _our_batch(data, {}), data["mask"].astype(bool)
    policy = [data["logprobs"][i][mask[i]] for i in range(ROWS)]
    if case["what"] == "ess":
        found = correct(batch, policy, OffPolicySettings(), "token_mean").metrics[ESS]
        return {"value": np.asarray(found.value / found.weight)}
    if case["what"] == "tis":
        result = correct(batch, policy, OffPolicySettings(tis=case["level"]), "token_mean")
        out = np.zeros((ROWS, LENGTH))
        for i, values in enumerate(result.coefficients):
            out[i][mask[i]] = values
        return {"value": out}
    result = correct(batch, policy, OffPolicySettings(**{k: v for k, v in case.items() if k != "what"}), "token_mean")
    return {"value": np.asarray([(row.weights_T > 0).astype(float) for row in result.batch.rows])}


def _our_overlong(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from slipstream.algorithms.filters import overlong_penalty
    from slipstream.config.algorithm import OverlongSettings

    settings = OverlongSettings(factor=1.0, max_tokens=OVERLONG[0], buffer_tokens=OVERLONG[1])
    lengths = data["mask"].sum(1).astype(int).tolist()
    return {"value": np.asarray([-overlong_penalty(n, OVERLONG[0], settings) for n in lengths])}


def _trajectories(data: dict[str, np.ndarray]) -> list[Any]:
    """The same rewards as groups of trajectories; each reward sits on its row's last sampled token."""
    from slipstream.trajectory import Completed, Group, Reward, Row, SamplingSpec, Span, Trajectory, Turn, VersionRun

    groups = []
    for name in dict.fromkeys(data["group"].tolist()):
        members = []
        for i in np.flatnonzero(data["group"] == name):
            n = int(data["mask"][i].sum())
            span = Span.sampled(range(10, 10 + n), [-1.0] * n, [VersionRun("policy/0/1", 0, n)], SamplingSpec(), turn=0)
            reward = Reward(0, float(data["rewards"][i].sum()))
            members.append(
                Trajectory(
                    f"t{i}",
                    f"g{name}",
                    "p",
                    int(i),
                    0,
                    (Row((Span.prompt([1]), span)),),
                    (Turn(0, ""),),
                    (reward,),
                    Completed(),
                    scheduled_step=0,
                )
            )
        groups.append(Group(f"g{name}", "p", len(members), tuple(members)))
    return groups


def _our_advantage(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from slipstream.algorithms import compute_advantages, gae_compacted
    from slipstream.config.settings import AlgorithmSettings

    if case["what"] == "gae":
        mask, out = data["mask"], np.zeros((ROWS, LENGTH))
        for i in range(ROWS):
            out[i] = gae_compacted(data["rewards"][i], data["values"][i], mask[i], 0.9, 0.8) + data["values"][i]
        return {"value": out * mask}
    settings = AlgorithmSettings(**{k: v for k, v in case.items() if k != "what"})
    mask = data["mask"].astype(bool)
    values = {f"t{i}": data["values"][i][mask[i]] for i in range(ROWS)}
    advantages = compute_advantages(_trajectories(data), settings, arrays={"values": values})
    out = np.zeros((ROWS, LENGTH))
    for i in range(ROWS):
        out[i][data["mask"][i].astype(bool)] = advantages[f"t{i}"]
    return {"value": out}


# ---- the peers' sides; these functions run in their virtual environment


def run_theirs(peer: str, case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if case["what"] == "overlong":
        return _trl_overlong(data)
    return _trl_loss(case, data) if peer == "trl" else _verl(case, data)


def _trl_overlong(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from trl.rewards import get_soft_overlong_punishment

    ids = [[1] * int(n) for n in data["mask"].sum(1)]
    return {"value": np.asarray(get_soft_overlong_punishment(*OVERLONG)(ids))}


def _trl_loss(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``GRPOTrainer._compute_loss`` on given log-probs."""
    from collections import defaultdict
    from types import SimpleNamespace

    import torch
    from trl import GRPOTrainer

    leaf = torch.tensor(data["logprobs"], requires_grad=True)
    parts, total = halves(case), 0.0
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__.update(
        loss_type=case["loss"], importance_sampling_level=case.get("level", "token"), beta=case.get("beta", 0.0),
        epsilon_low=0.2, epsilon_high=case.get("high", 0.28), top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=False, aux_loss_enabled=False, _entropy_bonus_enabled=False, max_completion_length=LENGTH,
        current_gradient_accumulation_steps=len(parts), _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
            steps_per_generation=len(parts),
        ),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction=None: x, gather_for_metrics=lambda x: x
        ),
    )  # fmt: skip
    for part in parts:
        own = leaf[part]
        trainer._get_per_token_logps_and_entropies = lambda *a, own=own, **k: (own, torch.zeros_like(own), None)
        ids = torch.zeros(own.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": torch.tensor(data["mask"][part]),
            "advantages": torch.tensor(data["advantage"][part]),
            "old_per_token_logps": torch.tensor(data["old"][part]),
            "ref_per_token_logps": torch.tensor(data["ref"][part]),
            "num_items_in_batch": torch.tensor(data["mask"].sum()),
        }
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return {"value": np.asarray(total), "gradient": leaf.grad.numpy()}


def _verl(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils import torch_functional

    tensor = {name: torch.tensor(values) for name, values in data.items()}
    what = case["what"]
    if what == "loss":
        return _verl_loss(case, data)
    if what == "controller":
        controller, seen = core_algos.AdaptiveKLController(0.1, 0.5, 100), []
        for kl in data["kl"]:
            controller.update(float(kl), 16)
            seen.append(float(controller.value))
        return {"value": np.asarray(seen)}
    if what in ("tis", "mask", "ess"):
        gap, mask = tensor["logprobs"] - tensor["old"], tensor["mask"]
        if what == "ess":
            _, metrics = rollout_corr_helper.compute_rollout_correction_weights(gap, mask, "token", 1e9)
            return {"value": np.asarray(metrics["rollout_is_eff_sample_size"])}
        if what == "tis":
            cap = 2.0 if case["level"] == "token" else 5.0
            weights, _ = rollout_corr_helper.compute_rollout_correction_weights(gap, mask, case["level"], cap)
            return {"value": weights.numpy()}
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(gap, mask, case["option"], case["bounds"])
        return {"value": kept.numpy()}
    if what == "advantage":
        return _verl_advantage(case, data)
    if what == "value":
        leaf = torch.tensor(data["values"], requires_grad=True)
        value, _ = core_algos.compute_value_loss(
            leaf, tensor["returns"], tensor["old_values"], tensor["mask"], case["clip"]
        )
    elif what == "kl":
        leaf = torch.tensor(data["logprobs"], requires_grad=True)
        value = core_algos.kl_penalty(leaf, tensor["ref"], case["k"])
    else:
        leaf = torch.tensor(_logits(case, data), requires_grad=True)
        value = torch_functional.entropy_from_logits(leaf)
    value.sum().backward()
    return {"value": value.detach().numpy(), "gradient": leaf.grad.numpy()}


def _verl_loss(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig

    config = case["config"]
    policy = PolicyLossConfig(
        loss_mode=case["loss"], kl_cov_ratio=config.get("ratio", 0.0002), ppo_kl_coef=1.0,
        clip_cov_ratio=config.get("ratio", 0.0002), clip_cov_lb=config.get("lb", 1.0), clip_cov_ub=5.0,
        **({"dro_beta": config["dro_beta"]} if "dro_beta" in config else {}),
    )  # fmt: skip
    actor = ActorConfig(
        strategy="fsdp", clip_ratio_low=config["low"], clip_ratio_high=config["high"], policy_loss=policy,
        rollout_n=1, use_dynamic_bsz=True, clip_ratio_c=20.0 if "dppo" in case["loss"] else 3.0,
    )  # fmt: skip
    actor.global_batch_info.update(batch_num_tokens=data["mask"].sum(), global_batch_size=ROWS, dp_size=1)
    function = core_algos.get_policy_loss_fn(case["loss"])
    leaf, total = torch.tensor(data["logprobs"], requires_grad=True), 0.0
    for part in halves(case):
        mask = torch.tensor(data["mask"][part])
        advantages = torch.tensor(data["advantage"][part])[:, None].expand(mask.shape).clone()
        loss, _ = function(torch.tensor(data["old"][part]), leaf[part], advantages, mask, case["mode"], actor, None)
        loss.backward()
        total += loss.item()
    return {"value": np.asarray(total), "gradient": leaf.grad.numpy()}


def _verl_advantage(case: dict[str, Any], data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch
    from verl.trainer.ppo import core_algos

    rewards, mask = torch.tensor(data["rewards"]), torch.tensor(data["mask"])
    # From a deviation with n - 1 to one with n.
    factor = math.sqrt(data["mask"].sum() / (data["mask"].sum() - 1)) if case.get("by_n") else 1.0
    if case["name"] == "gae":
        out, returns = core_algos.compute_gae_advantage_return(rewards, torch.tensor(data["values"]), mask, 0.9, 0.8)
        return {"value": ((returns if case.get("take") else out * factor) * mask).numpy()}
    if case["name"] == "reinforce_plus_plus_baseline":
        out, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, data["group"])
        return {"value": (out * factor * mask).numpy()}
    if case["name"] == "reinforce_plus_plus":
        from types import SimpleNamespace

        config = SimpleNamespace(gamma=0.9)
        out, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
        return {"value": out.numpy()}
    if case["name"] == "rloo":
        out, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, data["group"])
    else:
        std = case.get("std", True)
        out, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, data["group"], norm_adv_by_std_in_grpo=std)
    return {"value": out.numpy()}


# ---- the comparison


def make_venv(folder: Path) -> Path:
    """Both peers beside exactly this torch."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        print(f"making {folder} (TRL {TRL}, verl {VERL})", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = f"torch=={TORCH}"
        subprocess.run([*pip, torch], check=True)
        subprocess.run([*pip, torch, f"trl=={TRL}", "transformers", "accelerate", "datasets"], check=True)
        subprocess.run([*pip, torch, *VERL_NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", f"verl=={VERL}", "tensordict==0.10.0", "pyvers"], check=True)
        (folder / ".ready").touch()
    return python


def side(peer: str, seeds: int, out: Path) -> None:
    """Compute one peer's answers for every case and seed; runs in the peers' environment."""
    import torch

    torch.set_default_dtype(torch.float64)
    answers: dict[str, np.ndarray] = {}
    for index, case in enumerate(CASES):
        if case.peer != peer:
            continue
        for seed in range(seeds):
            for name, values in run_theirs(peer, case.theirs, draw(seed, case.scale)).items():
                answers[f"{index}/{seed}/{name}"] = values
    np.savez(out, **answers)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference relative to the largest number of either; infinite when only one side is finite."""
    if not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else math.inf
    scale = max(float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0)), 1e-12)
    return float(np.abs(a - b).max(initial=0.0)) / scale


def verdict(case: Case, worst: dict[str, float]) -> str:
    """What was found: ``agree``, ``gradient`` (only it agrees) or ``differ``."""
    value, gradient = worst["value"], worst.get("gradient", worst["value"])
    if value < TOLERANCE and gradient < TOLERANCE:
        return "agree"
    return "gradient" if "gradient" in worst and gradient < TOLERANCE else "differ"


def compare(python: Path, seeds: int) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        answers: dict[str, np.ndarray] = {}
        for peer in ("verl", "trl"):
            out = Path(folder) / f"{peer}.npz"
            command = [
                str(python),
                str(Path(__file__).resolve()),
                "--side",
                peer,
                "--seeds",
                str(seeds),
                "--out",
                str(out),
            ]
            subprocess.run(command, check=True, env={**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"}, timeout=1800)
            answers |= dict(np.load(out))
    for index, case in enumerate(CASES):
        worst: dict[str, float] = {}
        for seed in range(seeds):
            for name, values in run_ours(case.ours, draw(seed, case.scale)).items():
                there = answers[f"{index}/{seed}/{name}"]
                if not np.all(np.isfinite(values)):
                    raise SystemExit(f"{case.name}: Slipstream's {name} is not finite")
                worst[name] = max(worst.get(name, 0.0), distance(values, there))
        found = verdict(case, worst)
        results.append(
            {
                "case": case.name,
                "peer": case.peer,
                "peer_version": TRL if case.peer == "trl" else VERL,
                "slipstream": describe(case.ours),
                "expected": case.expect,
                "found": found,
                "note": case.note,
                **{f"{name}_difference": None if math.isinf(x) else x for name, x in worst.items()},
            }
        )
        print(f"{'ok ' if found == case.expect else 'BAD'} {case.peer:4} {case.name:42} {found:9} {worst}", flush=True)
    return results


def describe(ours: dict[str, Any]) -> str:
    """What of this library the case is about."""
    what = ours["what"]
    if what == "loss":
        extra = f", kl_coef={ours['kl']}" if ours.get("kl") else ""
        return f"loss={ours['loss']}, reduction={ours['reduction']}{extra}"
    if what == "advantage":
        return ", ".join(f"{k}={v}" for k, v in ours.items() if k != "what")
    names = {
        "value": "loss=value_clip",
        "kl": f"kl_estimator={ours.get('k')}",
        "entropy": "entropy_from_logits",
        "controller": "kl_controller.kind=adaptive",
        "tis": f"off_policy.tis={ours.get('level')}",
        "gae": "gae_compacted",
        "ess": ESS,
        "overlong": "overlong.factor=1",
    }
    bounds = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in ours.items() if k != "what"}
    masks = ", ".join(f"off_policy.{k}={v}" for k, v in bounds.items())
    return names.get(what, masks)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown for the documentation."""
    lines = ["| method | peer | here | found | which definition, and why |", "|---|---|---|---|---|"]
    words = {"agree": "agree", "gradient": "same gradient", "differ": "**differ**"}
    for r in results:
        peer = {"trl": "TRL", "verl": "verl"}[r["peer"]]
        lines.append(f"| {r['case']} | {peer} | `{r['slipstream']}` | {words[r['found']]} | {r['note']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "peers.json")
    parser.add_argument("--venv", type=Path, default=HERE.parent / "runs" / "venv-peers")
    parser.add_argument("--table", action="store_true", help="print the saved results as Markdown")
    parser.add_argument("--side", choices=["trl", "verl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side(options.side, options.seeds, options.out)
        return
    if options.table:
        print(table(json.loads(options.out.read_text())["cases"]))
        return
    results = compare(make_venv(options.venv), options.seeds)
    wrong = [r["case"] for r in results if r["expected"] != r["found"]]
    summary = {kind: sum(r["found"] == kind for r in results) for kind in ("agree", "gradient", "differ")}
    record = {
        "trl": TRL, "verl": VERL, "torch": TORCH, "seeds": options.seeds, "tolerance": TOLERANCE, "dtype": "float64",
        "summary": summary, "unexpected": wrong, "cases": results,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{summary} in {len(results)} cases; written to {options.out}")
    if wrong:
        raise SystemExit(f"not as expected: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
