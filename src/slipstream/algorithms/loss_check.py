"""``slipstream check loss``: does a loss keep the contract?

Owns: the invariance suite that every bundled loss passes, run on a loss by name or import path, with a message that
says what is wrong and how to mend it.  Refuses: judging whether a loss is a good idea.

The suite evaluates the loss on small random batches in numpy (float64) and torch (float32 and float64):

* one finite value per unit, and a gradient that reaches the model's outputs;
* the same values and gradients for a row whatever lies beside it in its micro-batch, and in whatever order;
* no vote for tokens that an off-policy mask dropped, one by one or a row as a whole;
* finite values and gradients for log-ratios of +-100 and +-1000, in float32;
* nothing read that is not declared in ``needs``, nothing changed in place, no weights, no random numbers of its own;
* at the sampling policy, tokens with a positive advantage are made more likely.

    for finding in check_loss("my_pkg.losses:truncated_is"):
        print(finding)
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from slipstream.algorithms.batch import Batch, BatchRow, FloatArray
from slipstream.algorithms.losses import LOSSES, Loss, LossInputs, LossMetric, LossValues
from slipstream.algorithms.losses.contract import OPTIONAL
from slipstream.algorithms.objective import LossSpec, loss_inputs, run_prepass
from slipstream.algorithms.ops import Ops, numpy_ops, torch_ops
from slipstream.errors import SlipstreamError
from slipstream.trajectory import TOP_LOGPROBS, SamplingSpec

_TOP = 3
_ANCHORS = ("old_logprobs", "ref_logprobs", "teacher_logprobs")


@dataclass(frozen=True)
class Finding:
    """One broken rule: ``error`` makes the loss unusable, ``warning`` is worth a look."""

    severity: Literal["error", "warning"]
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.rule}: {self.message}"


def check_loss(name: str, settings: Mapping[str, Any] | None = None, *, seed: int = 0) -> list[Finding]:
    """Every broken rule of the loss called ``name`` (registered, or ``module:function``) under ``settings``.

    A rule that the loss breaks by raising ends the check, since nothing after it would mean anything.
    Raises ``SettingsError`` when there is no such loss, or it lacks one of the settings.
    """
    loss = LOSSES.get(name)
    trial = _Trial(loss, name, loss.settings(settings or {}), _batch(np.random.default_rng(seed)), seed)
    findings: list[Finding] = []
    for rule in (_runs, _declares, _shape, _keeps_its_word):
        findings += rule(trial)
        if findings:
            return findings
    for rule in _RULES:
        findings += rule(trial)
    return findings


def random_state() -> tuple[Any, ...]:
    """Where the process-wide random generators stand: Python's, numpy's and, where it is loaded, torch's."""
    torch = sys.modules.get("torch")
    kind, keys, *rest = np.random.get_state(legacy=True)
    return (
        random.getstate(),
        kind,
        keys.tobytes(),
        rest,
        None if torch is None else torch.get_rng_state().numpy().tobytes(),
    )


def reported_metrics(name: str) -> tuple[str, ...]:
    """Names of the metrics that the loss called ``name`` reports, found by asking it about a small batch."""
    loss = LOSSES.get(name)
    trial = _Trial(loss, name, loss.settings({}), _batch(np.random.default_rng(0)), 0)
    xp, flat = numpy_ops(), np.concatenate(trial.outputs)
    return tuple(trial.call(xp, trial.inputs(xp, trial.prepared(), trial.everything, flat)).metrics)


# ---- a batch, and one evaluation of the loss


_SIZES = (3, 5, 1, 4, 2, 6)


def _batch(rng: np.random.Generator, sizes: Sequence[int] = _SIZES) -> Batch:
    """Rows of different lengths in groups of two, with observations between the trained tokens."""
    rows = []
    for i, trained in enumerate(sizes):
        mask = np.ones(trained + 2, dtype=np.bool_)
        mask[[0, trained // 2 + 1]] = False
        n = len(mask)
        ids = np.arange(n, dtype=np.int64)
        top = np.full(n, None, dtype=object)
        for at in np.flatnonzero(mask):
            top[at] = (tuple(range(_TOP)), tuple(np.log(rng.dirichlet(np.ones(_TOP + 1))[:_TOP]).tolist()))

        def spread(values: FloatArray, mask: Any = mask) -> FloatArray:
            return np.where(mask, values, np.nan)

        rows.append(
            BatchRow(
                row_id=f"t{i}/0",
                trajectory_id=f"t{i}",
                group_id=f"g{i // 2}",
                inputs_T=ids,
                targets_T=ids + 1,
                trained_T=mask,
                weights_T=np.where(mask, 1.0 / sum(sizes), 0.0),
                advantages_T=spread(np.full(n, rng.normal())),
                behaviour_logprobs_T=spread(-np.abs(rng.normal(size=n)) - 0.1),
                sampling=SamplingSpec(),
                side_T={TOP_LOGPROBS: top},
            )
        )
    return Batch(rows)


@dataclass(frozen=True)
class _Trial:
    """A loss, its settings, a batch, and constants drawn for it; ``outputs`` are log-probs (or a critic's values)."""

    loss: Loss
    name: str
    settings: Mapping[str, Any]
    batch: Batch
    seed: int

    @property
    def outputs(self) -> list[FloatArray]:
        return self.constants(1)

    def constants(self, salt: int) -> list[FloatArray]:
        """Random negative numbers per row, keyed by the row, so that they follow it when rows move."""
        out = []
        for row in self.batch.rows:
            rng = np.random.default_rng([self.seed, salt, int(row.trajectory_id[1:])])
            out.append(-np.abs(rng.normal(size=row.n_trained)) - 0.1)
        return out

    def spec(self, needs: Sequence[str]) -> LossSpec:
        arrays = {
            name: self.constants(2 + i)
            for i, name in enumerate(("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values", "returns"))
            if name in needs
        }
        if "lags" in needs:
            arrays["lags"] = [np.round(-2 * values) for values in self.constants(9)]
        return LossSpec(self.name, self.settings, **arrays)

    def prepared(self, needs: Sequence[str] | None = None) -> LossSpec:
        """The spec with declared inputs alone, after the pre-pass."""
        spec = self.spec(self.loss.needs if needs is None else needs)
        return run_prepass(self.batch, spec, lambda: self.outputs)

    def inputs(
        self, xp: Ops, spec: LossSpec, rows: Sequence[int], flat: Any, needs: Sequence[str] | None = None
    ) -> LossInputs:
        """What the loss sees, without any optional array that is not in ``needs``."""
        allowed = self.loss.needs if needs is None else needs
        policy = self.loss.kind != "value"
        top = None
        if "top_logprobs" in allowed:
            top = flat[:, None] * xp.asarray(np.linspace(0.5, 1.0, _TOP), like=flat)[None, :] - 1.5
        given = loss_inputs(
            xp,
            self.batch,
            rows,
            spec,
            flat if policy else None,
            flat * flat if "entropy" in allowed else None,
            values=None if policy and "values" not in allowed else flat,
            top_logprobs=top,
        )
        seen = replace(self.loss, needs=tuple(allowed)).view(given)  # type: ignore[arg-type]
        return seen if "advantages" in allowed else replace(seen, advantages=None)  # type: ignore[arg-type]

    def values(self, xp: Ops, spec: LossSpec, rows: Sequence[int], outputs: Sequence[FloatArray]) -> Any:
        flat = np.concatenate([outputs[i] for i in rows])
        if xp is not numpy_ops():
            import torch

            flat = torch.as_tensor(flat)
        return self.call(xp, self.inputs(xp, spec, rows, flat)).values

    def call(self, xp: Ops, inputs: LossInputs) -> LossValues:
        return self.loss.function(xp, inputs, dict(self.settings))

    @property
    def everything(self) -> list[int]:
        return list(range(len(self.batch.rows)))


@dataclass(frozen=True)
class _Certain(_Trial):
    """The policy is certain of every token."""

    @property
    def outputs(self) -> list[FloatArray]:
        return [np.zeros(row.n_trained) for row in self.batch.rows]


def _gradient(trial: _Trial, spec: LossSpec, outputs: Sequence[FloatArray], dtype: str = "float64") -> tuple[Any, Any]:
    """``(values, gradient of their sum)`` in torch."""
    import torch

    flat = torch.tensor(np.concatenate(list(outputs)), dtype=getattr(torch, dtype), requires_grad=True)
    values = trial.call(torch_ops(), trial.inputs(torch_ops(), spec, trial.everything, flat)).values
    if not values.requires_grad:
        return values.numpy(), None
    (gradient,) = torch.autograd.grad(values.sum(), flat, allow_unused=True)
    return values.detach().numpy(), None if gradient is None else gradient.numpy()


# ---- rules that end the check


def _attempt(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    # Fault boundary: the loss under test may raise anything.
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _runs(trial: _Trial) -> Iterator[Finding]:
    """It runs on torch and on numpy, at least when every optional input is there."""
    needs = [*trial.loss.needs, *(name for name in OPTIONAL if name not in trial.loss.needs), "advantages"]
    if trial.loss.kind == "value":
        needs = [name for name in needs if name not in ("entropy", "top_logprobs")]
    for xp, library in ((torch_ops(), "torch"), (numpy_ops(), "numpy")):

        def call(xp: Ops = xp) -> None:
            import torch

            spec = trial.prepared(needs)
            flat: Any = np.concatenate(trial.outputs)
            flat = flat if xp is numpy_ops() else torch.tensor(flat, requires_grad=True)
            trial.call(xp, trial.inputs(xp, spec, trial.everything, flat, needs))

        if error := _attempt(call):
            hint = "" if library == "torch" else "; use xp and operators alone, not torch, so that it runs on both"
            if isinstance(error, SlipstreamError):
                hint = ""
            elif "in-place" in str(error) or "read-only" in str(error):
                hint = "; an input is changed in place: make a new array (x = x + 1, not x += 1)"
            yield Finding("error", "runs", f"raises {type(error).__name__} on {library}: {error}{hint}")
            return


def _declares(trial: _Trial) -> Iterator[Finding]:
    """It reads nothing that it did not declare."""

    def runs_with(needs: Sequence[str]) -> bool:
        def call() -> None:
            flat = np.concatenate(trial.outputs)
            trial.call(numpy_ops(), trial.inputs(numpy_ops(), trial.prepared(needs), trial.everything, flat, needs))

        return _attempt(call) is None

    declared = list(trial.loss.needs)
    if runs_with(declared):
        return
    everything = [*declared, *(n for n in (*OPTIONAL, "advantages") if n not in declared)]
    if trial.loss.kind == "value":
        everything = [name for name in everything if name not in ("entropy", "top_logprobs")]
    missing = [n for n in everything if n not in declared and not runs_with([m for m in everything if m != n])]
    wanted = ", ".join(repr(n) for n in [*declared, *missing])
    yield Finding(
        "error",
        "needs",
        f"reads {', '.join(missing) or 'an input'} without declaring it; register it with needs=({wanted},), so that a "
        "batch that lacks it is refused",
    )


def _shape(trial: _Trial) -> Iterator[Finding]:
    """One value per unit, and metrics of known shapes."""
    spec = trial.prepared()
    flat = np.concatenate(trial.outputs)
    inputs = trial.inputs(numpy_ops(), spec, trial.everything, flat)
    out = trial.call(numpy_ops(), inputs)
    unit, want = trial.loss.unit, inputs.units(trial.loss.unit)
    if not isinstance(out, LossValues):
        yield Finding("error", "returns", f"returns {type(out).__name__}; return LossValues(values, metrics)")
        return
    shape = tuple(getattr(out.values, "shape", ()))
    if shape == ():
        yield Finding(
            "error",
            "per-unit values",
            f"returns one number for {want} {unit}s: it takes a mean or a sum itself. Return one value per {unit} and "
            "leave the mean out; the reducer divides once, over all micro-batches and ranks",
        )
    elif shape != (want,):
        yield Finding("error", "per-unit values", f"returns shape {shape}, want ({want},): one value per {unit}")
    for name, metric in out.metrics.items():
        if not isinstance(metric, LossMetric):
            kind = type(metric).__name__
            yield Finding("error", "metrics", f"{name!r} is a {kind}; wrap it in LossMetric(reducer, values)")
        elif tuple(np.shape(metric.values)) != (inputs.units(metric.unit),):
            yield Finding(
                "error", "metrics", f"{name!r} has shape {np.shape(metric.values)}, want one per {metric.unit}"
            )


def _keeps_its_word(trial: _Trial) -> Iterator[Finding]:
    """It changes none of its inputs, and says the same when asked again: else no other rule could be judged."""
    spec = trial.prepared()
    inputs = trial.inputs(numpy_ops(), spec, trial.everything, np.concatenate(trial.outputs))
    before = {f.name: np.copy(x) for f in fields(inputs) if isinstance(x := getattr(inputs, f.name), np.ndarray)}
    numbers = random_state()
    first = np.copy(trial.call(numpy_ops(), inputs).values)
    changed = [name for name, old in before.items() if not np.array_equal(old, getattr(inputs, name), equal_nan=True)]
    if changed:
        yield Finding("error", "in place", f"changes {', '.join(changed)} in place; other terms read the same arrays")
        return
    drew = random_state() != numbers
    if drew or not np.array_equal(first, trial.call(numpy_ops(), inputs).values, equal_nan=True):
        found = "draws from a global random generator" if drew else "two calls give two values"
        yield Finding("error", "repeatable", f"{found}; draw by inputs.noise, and keep no state between calls")


# ---- rules


def _same_on_both(trial: _Trial) -> Iterator[Finding]:
    spec = trial.prepared()
    ours = trial.values(numpy_ops(), spec, trial.everything, trial.outputs)
    theirs = np.asarray(trial.values(torch_ops(), spec, trial.everything, trial.outputs))
    if not np.allclose(ours, theirs, rtol=1e-6, atol=1e-9, equal_nan=True):
        yield Finding("error", "one source", "numpy and torch give different values; use xp's functions alone")


def _has_gradient(trial: _Trial) -> Iterator[Finding]:
    _, gradient = _gradient(trial, trial.prepared(), trial.outputs)
    if gradient is None or not np.any(gradient):
        yield Finding("error", "gradient", "no gradient reaches the model's outputs; a stop_gradient covers too much")


def _values_are_finite(trial: _Trial) -> Iterator[Finding]:
    """On ordinary inputs, and on two that every run meets: fresh samples, and groups that all earned the same."""
    cases = [("on ordinary inputs", trial, trial.prepared())]
    if trial.loss.kind != "value":
        level = replace(
            trial, batch=_with(trial.batch, "advantages_T", [np.zeros(r.n_trained) for r in trial.batch.rows])
        )
        cases += [
            ("where policy and anchor agree, as they do on fresh samples", *_fresh(trial)),
            ("where an advantage is 0, as in a group whose rewards are equal", level, level.prepared()),
            ("where a token was certain (log-prob 0), which sharp policies are at most places", *_certain(trial)),
        ]
    for where, case, spec in cases:
        values, gradient = _gradient(case, spec, case.outputs)
        if not np.all(np.isfinite(values)):
            yield Finding("error", "finite", f"a value is not finite {where}")
            return
        if gradient is not None and not np.all(np.isfinite(gradient)):
            yield Finding("error", "finite", f"a gradient is not finite {where}")
            return


def _fresh(trial: _Trial) -> tuple[_Trial, LossSpec]:
    """The trial with every anchor equal to its outputs."""
    base = trial.spec(trial.loss.needs)
    anchors = {name: trial.outputs for name in _ANCHORS if getattr(base, name) is not None}
    fresh = replace(trial, batch=_with(trial.batch, "behaviour_logprobs_T", trial.outputs))
    return fresh, run_prepass(fresh.batch, replace(base, **anchors), lambda: trial.outputs)  # type: ignore[arg-type]


def _certain(trial: _Trial) -> tuple[_Trial, LossSpec]:
    """The trial with log-prob 0 everywhere, of policy, sampler and every anchor."""
    zeros = [np.zeros(row.n_trained) for row in trial.batch.rows]
    base = trial.spec(trial.loss.needs)
    anchors = {name: zeros for name in _ANCHORS if getattr(base, name) is not None}
    sure = _Certain(
        trial.loss, trial.name, trial.settings, _with(trial.batch, "behaviour_logprobs_T", zeros), trial.seed
    )
    return sure, run_prepass(sure.batch, replace(base, **anchors), lambda: zeros)  # type: ignore[arg-type]


def _with(batch: Batch, field: str, per_row: Sequence[FloatArray]) -> Batch:
    """The batch with other numbers at its trained tokens."""
    rows = []
    for row, values in zip(batch.rows, per_row, strict=True):
        whole = np.full(len(row.trained_T), np.nan)
        whole[row.trained_T] = values
        rows.append(replace(row, **{field: whole}))  # type: ignore[arg-type]
    return replace(batch, rows=rows)


def _survives_huge_ratios(trial: _Trial) -> Iterator[Finding]:
    """Log-ratios of +-20, +-100, +-1000 in float32, where exp(100) is infinite."""
    if trial.loss.kind == "value":
        return
    for gap in (20.0, -20.0, 100.0, -100.0, 1000.0, -1000.0):
        anchor = [np.full(row.n_trained, -1001.0) for row in trial.batch.rows]
        far = replace(trial, batch=_with(trial.batch, "behaviour_logprobs_T", anchor))
        base = trial.spec(trial.loss.needs)
        anchors = {name: anchor for name in _ANCHORS if getattr(base, name) is not None}
        outputs = [np.full(row.n_trained, -1001.0 + gap) for row in trial.batch.rows]
        spec = run_prepass(far.batch, replace(base, **anchors), lambda outputs=outputs: outputs)  # type: ignore[misc]
        values, gradient = _gradient(far, spec, outputs, "float32")
        if not np.all(np.isfinite(values)):
            yield Finding(
                "error",
                "exponential",
                f"a value is {values[~np.isfinite(values)][0]} at a log-ratio of {gap:g}: an exponential overflows, or "
                "an infinite one met a mask of 0. Clamp the log-ratio before the exponential: "
                "xp.exp(log_ratio(xp, a, b))",
            )
            return
        if gradient is not None and not np.all(np.isfinite(gradient)):
            yield Finding(
                "error",
                "exponential before mask",
                f"the value is finite at a log-ratio of {gap:g} but its gradient is not: an exponential is taken "
                "before its mask, so 'where' hides the infinity and the gradient is 0 * inf. Clamp or mask the "
                "log-ratio first: xp.exp(log_ratio(xp, a, b))",
            )
            return


def _by_row(
    trial: _Trial, spec: LossSpec, rows: Sequence[int] | None = None, outputs: Sequence[FloatArray] | None = None
) -> dict[str, FloatArray]:
    """``(2, n_trained)`` for each row by id: its values and its gradient.

    The gradient is of the values weighed by numbers that belong to the row, and by 0 where a token was dropped, so that
    neither a cancellation hides anything nor a token's own place counts as a vote for others.
    """
    import torch

    rows = trial.everything if rows is None else rows
    outputs = trial.outputs if outputs is None else outputs
    flat = torch.tensor(np.concatenate([outputs[i] for i in rows]), requires_grad=True)
    inputs = trial.inputs(torch_ops(), spec, rows, flat)
    values = inputs.per_token(trial.call(torch_ops(), inputs).values, trial.loss.unit)
    weights = torch.as_tensor(np.concatenate([trial.constants(20)[i] for i in rows]))
    weights = weights if inputs.live is None else weights * inputs.live
    gradient = None
    if values.requires_grad:
        (gradient,) = torch.autograd.grad((values * weights).sum(), flat, allow_unused=True)
    both = np.stack([values.detach().numpy(), np.zeros(len(flat)) if gradient is None else gradient.numpy()])
    edges = np.cumsum([trial.batch.rows[i].n_trained for i in rows])[:-1]
    return {trial.batch.rows[i].row_id: part for i, part in zip(rows, np.split(both, edges, axis=1), strict=True)}


def _what_differs(here: Mapping[str, FloatArray], there: Mapping[str, FloatArray]) -> str | None:
    """``values`` or ``gradients``, of the rows in both; None where they are the same."""
    for i, what in enumerate(("values", "gradients")):
        if any(not np.allclose(here[n][i], there[n][i], rtol=1e-9, atol=1e-12) for n in here.keys() & there.keys()):
            return what
    return None


def _rows_stand_alone(trial: _Trial) -> Iterator[Finding]:
    """Micro-batches of whole groups give every row the values and gradients that it has in the whole batch."""
    spec = trial.prepared()
    whole = _by_row(trial, spec)
    cuts = [[0, 1], [2, 3], [4, 5]] if trial.loss.unit == "group" else [[0], [1, 2], [3, 4, 5]]
    for part in cuts:
        if what := _what_differs(_by_row(trial, spec, part), whole):
            yield Finding(
                "error",
                "split",
                f"a row's {what} change with the rows beside it in its micro-batch: something is summed, averaged or "
                "ranked over the batch. Use inputs.mean(xp, x, 'row') for a row's own statistics, and a pre-pass "
                "(register_loss(prepass=...)) for those of the whole step",
            )
            return


def _size_does_not_matter(trial: _Trial) -> Iterator[Finding]:
    """Rows keep what they say in a batch of some thousand tokens, in which a threshold on its size would show."""
    many = _SIZES + 8 * (200, 300)
    whole = replace(trial, batch=_batch(np.random.default_rng(trial.seed), many))
    spec = whole.prepared()
    if what := _what_differs(_by_row(whole, spec, range(len(_SIZES))), _by_row(whole, spec)):
        yield Finding(
            "error",
            "size",
            f"a row's {what} change when its micro-batch grows from {sum(_SIZES)} to {sum(many)} tokens; a loss knows "
            "nothing of a batch's size, the reducer divides",
        )


def _dropped_tokens_have_no_vote(trial: _Trial) -> Iterator[Finding]:
    """What an off-policy mask dropped, a token here and there or a row as a whole, says nothing about what is left."""
    masks = [row.trained_T & (np.cumsum(row.trained_T) == 2) for row in trial.batch.rows]
    masks[3] = trial.batch.rows[3].trained_T
    rows = [replace(row, dropped_T=mask) for row, mask in zip(trial.batch.rows, masks, strict=True)]
    masked = replace(trial, batch=replace(trial.batch, rows=rows))
    gone = [mask[row.trained_T] for row, mask in zip(rows, masks, strict=True)]

    def said(outputs: Sequence[FloatArray]) -> dict[str, FloatArray]:
        spec = run_prepass(masked.batch, masked.spec(trial.loss.needs), lambda: outputs)
        return _by_row(masked, spec, outputs=outputs)

    here = said(trial.outputs)
    there = said([np.where(mask, own - 2.0, own) for mask, own in zip(gone, trial.outputs, strict=True)])
    if not all(np.all(np.isfinite(both)) for both in here.values()):
        yield Finding(
            "error",
            "masked tokens",
            "a value or gradient is not finite where an off-policy mask dropped a whole row, probably a division by "
            "its number of tokens; inputs.mean(xp, x, 'row') is 0 there",
        )
        return
    live = {row.row_id: ~mask for row, mask in zip(rows, gone, strict=True)}
    what = _what_differs(*({name: both[:, live[name]] for name, both in which.items()} for which in (here, there)))
    if what is None and any(np.any(both[1, ~live[name]]) for name, both in here.items()):
        what = "gradients"
    if what is not None:
        yield Finding(
            "error",
            "masked tokens",
            f"a token that an off-policy mask dropped still changes the {what} of others: leave it out of their "
            "statistics. inputs.mean(xp, x, 'row') and inputs.sum do, xp.segment_mean does not; a pre-pass goes by "
            "inputs.live",
        )


def _order_does_not_matter(trial: _Trial) -> Iterator[Finding]:
    order = [1, 0, 5, 4, 3, 2]
    moved = replace(trial, batch=replace(trial.batch, rows=[trial.batch.rows[i] for i in order]))
    if what := _what_differs(_by_row(trial, trial.prepared()), _by_row(moved, moved.prepared())):
        yield Finding(
            "error",
            "order",
            f"a row's {what} change when the rows are put in another order; random choices must go by inputs.noise, "
            "which belongs to the token",
        )


def _leaves_weights_alone(trial: _Trial) -> Iterator[Finding]:
    spec = trial.prepared()
    heavy = [replace(row, weights_T=-3.0 * row.weights_T) for row in trial.batch.rows]
    scaled = replace(trial, batch=replace(trial.batch, rows=heavy))
    if _what_differs(_by_row(trial, spec), _by_row(scaled, spec)):
        yield Finding("error", "weights", "reads inputs.weights; the reducer multiplies by them, so they count twice")


def _points_the_right_way(trial: _Trial) -> Iterator[Finding]:
    """At the sampling policy a good token becomes more likely, a bad one less."""
    if trial.loss.kind != "policy":
        return
    sampler = [row.behaviour_logprobs_T[row.trained_T] for row in trial.batch.rows]
    spec = trial.spec(trial.loss.needs)
    if spec.old_logprobs is not None:
        spec = replace(spec, old_logprobs=sampler)
    spec = run_prepass(trial.batch, spec, lambda: sampler)
    _, gradient = _gradient(trial, spec, sampler)
    advantages = np.concatenate([row.advantages_T[row.trained_T] for row in trial.batch.rows])
    if gradient is None or not np.any(gradient):
        return
    wrong = gradient * advantages > 1e-12
    if wrong.all():
        yield Finding("error", "direction", "makes tokens with a positive advantage less likely; a minus is missing")
    elif wrong.any():
        yield Finding(
            "warning",
            "direction",
            f"at the sampling policy {int(wrong.sum())} of {len(wrong)} tokens are pushed against their advantage",
        )


_RULES: tuple[Callable[[_Trial], Iterator[Finding]], ...] = (
    _values_are_finite,
    _same_on_both,
    _has_gradient,
    _survives_huge_ratios,
    _rows_stand_alone,
    _size_does_not_matter,
    _dropped_tokens_have_no_vote,
    _order_does_not_matter,
    _leaves_weights_alone,
    _points_the_right_way,
)
