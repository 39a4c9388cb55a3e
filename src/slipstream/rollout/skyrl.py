"""Generators written for SkyRL: their batched arrays, checked and turned into spans.

Owns: the documented shape of SkyRL's generator input and output, its checks at run time, and the conversion.
Refuses: trusting positions.  Rows are found by trajectory id (or by the order of the input where the output names
none), and every mismatch is a ``ContractError`` that names the row and the rule.

Output keys read, one entry per row: ``prompt_token_ids``, ``response_ids``, ``rewards`` (a number or one number per
response token), ``loss_masks`` (0/1 per response token), ``stop_reasons``, ``rollout_logprobs``, ``trajectory_ids``,
``is_last_step``, ``env_metrics`` (the numbers in it).  Per trajectory, in seconds: ``trajectory_generation_times`` and
``trajectory_time_splits`` (``{"llm": [...], "env": [...]}``).  ``rollout_metrics`` is accepted and not read: it holds
means over a batch, and the ledger computes its own.  Multimodal and expert-route keys are refused unless None; unknown
keys are refused.

Conversion: the prompt is a PROMPT span; each run of mask 1 is one turn, SAMPLED; each run of mask 0 is an OBSERVATION.
A reward on a token with mask 0 moves to the last sampled token before it.  Step-wise rows of one trajectory
become one row while each prompt continues the row before it, and fork where it does not.  Time splits say nothing of
turns: a trajectory's model seconds are shared out over its turns by their tokens, its environment seconds evenly.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.envs._values import as_number, as_text
from slipstream.errors import ContractError
from slipstream.rollout.renderer import common_prefix
from slipstream.trajectory import (
    Cancelled,
    Completed,
    Failed,
    Group,
    Message,
    Missing,
    Outcome,
    Reward,
    Row,
    SamplingSpec,
    Span,
    Trajectory,
    Truncated,
    Turn,
    VersionRun,
)

_REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")
_PER_ROW = (
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "is_last_step",
    "env_metrics",
)
_TIMES = ("trajectory_generation_times", "trajectory_time_splits")
_UNMEASURED = "; give seconds, or None where they were not measured"
_REFUSED = ("rollout_expert_indices", "pixel_values", "image_grid_thw")
_KNOWN = (*_REQUIRED, *_PER_ROW, *_TIMES, "rollout_metrics", *_REFUSED)


@dataclass(frozen=True)
class TrajectoryID:
    """SkyRL's id: which prompt, and which repetition of it."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """``instance_repetition``."""
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True)
class Slot:
    """One trajectory that was asked for; slots stand in the order of the generator's input."""

    group_id: str
    prompt_uid: str
    sample: int
    group_size: int
    env_class: str = ""
    prompt: tuple[Message, ...] = ()
    data_source: str = ""
    attempt: int = 0

    @property
    def trajectory_id(self) -> TrajectoryID:
        """The id that the generator's input carries for this slot."""
        return TrajectoryID(self.group_id, self.sample)


@dataclass(frozen=True)
class Conversion:
    """How arrays become trajectories.

    Attributes:
        sampling: the distribution the generator sampled from (it does not report it).
        scheduled_step: the step that asked.
        pass_index: pass over the data.
        version: the weight version that sampled everything, when the caller knows that; else versions are Missing.
        step_rewards: step-wise output with non-zero rewards before a trajectory's last step: ``last`` drops them (what
            SkyRL does), ``each`` keeps every step's own.  None refuses such output, since either choice changes it.
        decode: ids -> text for the record of turns.
    """

    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    scheduled_step: int = 0
    pass_index: int = 0
    version: str | None = None
    step_rewards: Literal["last", "each"] | None = None
    decode: Any = None


@dataclass(frozen=True)
class _Step:
    """One checked output row."""

    index: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[int, ...]
    reward: float | tuple[float, ...] | Missing
    logprobs: tuple[float, ...] | Missing
    stop_reason: str
    last: bool
    env_metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Clock:
    """Seconds of one trajectory: all, the model's, the environment's."""

    whole: float
    llm: float
    env: float


def groups_from_skyrl(output: Mapping[str, Any], slots: Sequence[Slot], how: Conversion) -> list[Group]:
    """Check a generator's output against what was asked for and convert it.

    Returns groups in the order in which they first appear in ``slots``; raises ``ContractError`` otherwise.
    """
    columns = _read_columns(output)
    steps = [_read_step(columns, i) for i in range(len(columns["response_ids"]))]
    by_slot = _assign(steps, columns.get("trajectory_ids"), "is_last_step" in columns, slots)
    members: dict[str, list[Trajectory]] = {}
    for slot, rows, clock in zip(slots, by_slot, _clocks(output, by_slot), strict=True):
        members.setdefault(slot.group_id, []).append(_trajectory(slot, rows, clock, how))
    first = {slot.group_id: slot for slot in reversed(slots)}
    return [
        Group(group_id, first[group_id].prompt_uid, first[group_id].group_size, tuple(trajectories))
        for group_id, trajectories in members.items()
    ]


# ---- checks


def _read_columns(output: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The keys that are given per row, as lists of one length."""
    if not isinstance(output, Mapping):
        raise ContractError(f"generator output: want a mapping of lists, got {type(output).__name__}")
    for key in output:
        if key not in _KNOWN:
            near = difflib.get_close_matches(str(key), _KNOWN, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ContractError(f"generator output: unknown key {key!r}{hint}")
        if key in _REFUSED and output[key] is not None:
            raise ContractError(f"generator output: {key} is not supported by this adapter; leave it out or None")
    for key in _REQUIRED:
        if output.get(key) is None:
            raise ContractError(f"generator output: {key!r} is required")
    columns = {key: _column(output[key], key) for key in (*_REQUIRED, *_PER_ROW) if output.get(key) is not None}
    count = len(columns["response_ids"])
    for key, values in columns.items():
        if len(values) != count:
            raise ContractError(f"generator output: {key} has {len(values)} rows, response_ids has {count}")
    kinds = {_items(reward) is not None for reward in columns["rewards"] if not _absent(reward)}
    if len(kinds) > 1:
        raise ContractError("generator output: rewards mixes numbers and per-token lists; use one form in all rows")
    return columns


def _read_step(columns: Mapping[str, list[Any]], i: int) -> _Step:
    prompt = _ids(columns["prompt_token_ids"][i], i, "prompt_token_ids")
    response = _ids(columns["response_ids"][i], i, "response_ids")
    if not prompt:
        raise ContractError(f"row {i}: prompt_token_ids is empty")
    values = _listed(columns["loss_masks"][i], i, "loss_masks", len(response))
    mask = tuple(_bit(value, i, f"loss_masks[{at}]", "0 or 1") for at, value in enumerate(values))
    last = _row(columns, "is_last_step", i)
    return _Step(
        index=i,
        prompt=prompt,
        response=response,
        mask=mask,
        reward=_reward(columns["rewards"][i], i, len(response)),
        logprobs=_logprobs(_row(columns, "rollout_logprobs", i), i, mask),
        stop_reason=_stop_reason(_row(columns, "stop_reasons", i), i),
        last=last is None or bool(_bit(last, i, "is_last_step", "True or False")),
        env_metrics=_env_metrics(_row(columns, "env_metrics", i), i),
    )


def _clocks(output: Mapping[str, Any], by_slot: Sequence[Sequence[_Step]]) -> list[_Clock]:
    """The seconds of each slot's trajectory; 0 where the generator gives none."""
    whole, splits = (output.get(key) for key in _TIMES)
    if splits is None:
        splits = {}
    elif not isinstance(splits, Mapping):
        raise ContractError(
            "generator output: trajectory_time_splits must be a mapping of 'llm' and 'env' to lists of seconds, or "
            f"None, got {type(splits).__name__}"
        )
    parts = {"trajectory_generation_times": whole}
    parts |= {f"trajectory_time_splits[{name!r}]": splits.get(name) for name in ("llm", "env")}
    columns = (_seconds(values, key, by_slot) for key, values in parts.items())
    return [_Clock(*times) for times in zip(*columns, strict=True)]


def _seconds(values: Any, key: str, by_slot: Sequence[Sequence[_Step]]) -> list[float]:
    """One number per trajectory; where there is one per row, each row of a trajectory repeats the trajectory's."""
    if values is None:
        return [0.0] * len(by_slot)
    listed = _column(values, key)
    rows = sum(len(steps) for steps in by_slot)
    if len(listed) not in (len(by_slot), rows):
        raise ContractError(
            f"generator output: {key} has {len(listed)} entries; give one per trajectory ({len(by_slot)}) "
            f"or per row ({rows})"
        )
    where = f"generator output: {key}"
    times = [0.0 if v is None else _finite(v, f"{where}[{i}]", _UNMEASURED) for i, v in enumerate(listed)]
    for i, time in enumerate(times):
        if time < 0:
            raise ContractError(f"{where}[{i}] is {time}, must be >= 0{_UNMEASURED}")
    return times if len(times) == len(by_slot) else [times[steps[-1].index] for steps in by_slot]


def _row(columns: Mapping[str, list[Any]], key: str, i: int) -> Any:
    return columns[key][i] if key in columns else None


def _absent(value: Any) -> bool:
    return value is None or isinstance(value, Missing)


def _items(value: Any) -> list[Any] | None:
    """The entries of a list, a tuple, or an array with at least one axis; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else None


def _column(value: Any, key: str) -> list[Any]:
    items = _items(value)
    if items is None:
        kind = type(value).__name__
        raise ContractError(f"generator output: {key} must be a list with one entry per row, got {kind}")
    return items


def _listed(value: Any, i: int, key: str, length: int) -> list[Any]:
    items = _items(value)
    if items is None:
        raise ContractError(f"row {i}: {key} must be a list, got {type(value).__name__}")
    if len(items) != length:
        raise ContractError(f"row {i}: {key} has {len(items)} entries for {length} response tokens")
    return items


def _ids(value: Any, i: int, key: str) -> tuple[int, ...]:
    ids = _items(value)
    if ids is None:
        raise ContractError(f"row {i}: {key} must be a list of token ids, got {type(value).__name__}")
    if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in ids):
        raise ContractError(f"row {i}: {key} must hold non-negative ints")
    return tuple(ids)


def _finite(value: Any, where: str, mend: str = "") -> float:
    found = as_number(value)
    if found is None or not math.isfinite(found):
        raise ContractError(f"{where} is {as_text(value):.80}, must be a finite number{mend}")
    return found


def _bit(value: Any, i: int, key: str, want: str) -> int:
    found = as_number(value)
    if found is None or found not in (0, 1):
        raise ContractError(f"row {i}: {key} is {as_text(value):.80}, must be {want}")
    return int(found)


def _stop_reason(value: Any, i: int) -> str:
    if value is not None and not isinstance(value, str):
        raise ContractError(
            f"row {i}: stop_reasons is {as_text(value):.80}, must be text such as 'stop' or 'length', or None"
        )
    return str(value) if value else "stop"


def _env_metrics(value: Any, i: int) -> dict[str, float]:
    """The numbers among an episode's metrics; other values are left out."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ContractError(
            f"row {i}: env_metrics is {as_text(value):.80}, must be a mapping of names to numbers, or None"
        )
    return {
        str(name): _finite(item, f"row {i}: env_metrics[{name!r}]", "; leave it out where it is unknown")
        for name, item in value.items()
        if as_number(item) is not None
    }


def _reward(value: Any, i: int, length: int) -> float | tuple[float, ...] | Missing:
    if isinstance(value, Missing):
        return value
    if value is None:
        return Missing("the generator returned no reward for this row")
    if _items(value) is None:
        return _finite(value, f"row {i}: rewards")
    return tuple(_finite(v, f"row {i}: rewards[{at}]") for at, v in enumerate(_listed(value, i, "rewards", length)))


def _logprobs(value: Any, i: int, mask: Sequence[int]) -> tuple[float, ...] | Missing:
    if value is None:
        return Missing("the generator returned no rollout_logprobs")
    items = _listed(value, i, "rollout_logprobs", len(mask))
    logprobs = tuple(
        _finite(item, f"row {i}: rollout_logprobs[{at}]") if m else 0.0
        for at, (item, m) in enumerate(zip(items, mask, strict=True))
    )
    for at, logprob in enumerate(logprobs):
        if logprob > 0:
            raise ContractError(f"row {i}: rollout_logprobs[{at}] is {logprob}, must be <= 0")
    return logprobs


def _id_text(value: Any, i: int) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return f"{value[0]}_{value[1]}"
    if hasattr(value, "instance_id") and hasattr(value, "repetition_id"):
        return f"{value.instance_id}_{value.repetition_id}"
    raise ContractError(f"row {i}: trajectory_ids holds {value!r}; want instance_id and repetition_id")


def _assign(steps: list[_Step], ids: list[Any] | None, stepwise: bool, slots: Sequence[Slot]) -> list[list[_Step]]:
    """The rows of each slot, in order."""
    want = [slot.trajectory_id.to_string() for slot in slots]
    if not stepwise:
        if len(steps) != len(slots):
            raise ContractError(f"generator output: {len(steps)} rows for {len(slots)} requested trajectories")
        for i, name in enumerate(want):
            if ids is not None and _id_text(ids[i], i) != name:
                raise ContractError(f"row {i}: trajectory id {_id_text(ids[i], i)!r} where the input had {name!r}")
        return [[step] for step in steps]
    if ids is None:
        raise ContractError("generator output: is_last_step needs trajectory_ids, to know whose step a row is")
    rows: dict[str, list[_Step]] = {}
    previous: str | None = None
    for step in steps:
        name = _id_text(ids[step.index], step.index)
        if name != previous and name in rows:
            raise ContractError(f"row {step.index}: the steps of {name!r} are not contiguous")
        if previous is not None and name != previous and not rows[previous][-1].last:
            raise ContractError(f"row {step.index - 1}: the last row of {previous!r} lacks is_last_step")
        if name in rows and rows[name][-1].last:
            raise ContractError(f"row {step.index}: {name!r} goes on after a row with is_last_step")
        rows.setdefault(name, []).append(step)
        previous = name
    if previous is not None and not rows[previous][-1].last:
        raise ContractError(f"row {len(steps) - 1}: the last row of {previous!r} lacks is_last_step")
    if list(rows) != want:
        strange = [name for name in rows if name not in want]
        absent = [name for name in want if name not in rows]
        raise ContractError(
            "generator output: trajectories differ from the input's, or are in another order"
            + (f"; not asked for: {strange[:3]}" if strange else "")
            + (f"; missing: {absent[:3]}" if absent else "")
        )
    return [rows[name] for name in want]


# ---- conversion


def _trajectory(slot: Slot, steps: list[_Step], clock: _Clock, how: Conversion) -> Trajectory:
    maker = _Maker(slot, how)
    for step in steps:
        maker.add(step, last=step is steps[-1])
    outcome = _outcome(steps[-1].stop_reason)
    return Trajectory(
        trajectory_id=f"{slot.group_id}/s{slot.sample}/a{slot.attempt}",
        group_id=slot.group_id,
        prompt_uid=slot.prompt_uid,
        sample=slot.sample,
        attempt=slot.attempt,
        rows=maker.rows(),
        turns=_timed(maker, clock),
        rewards=tuple(maker.rewards),
        outcome=outcome,
        scheduled_step=how.scheduled_step,
        pass_index=how.pass_index,
        env_class=slot.env_class,
        data_source=slot.data_source,
        prompt=slot.prompt,
        env_metrics=steps[-1].env_metrics,
        seconds=clock.whole,
    )


def _timed(maker: _Maker, clock: _Clock) -> tuple[Turn, ...]:
    """The turns with their shares of the trajectory's seconds."""
    tokens = sum(maker.tokens)
    return tuple(
        replace(turn, llm_seconds=clock.llm * length / tokens, env_seconds=clock.env / len(maker.turns))
        for turn, length in zip(maker.turns, maker.tokens, strict=True)
    )


def _outcome(stop_reason: str) -> Outcome:
    """SkyRL's overlong filter calls everything but ``stop`` cut; ``error*`` and ``abort`` are no results at all."""
    if stop_reason in ("stop", "complete"):
        return Completed()
    if stop_reason.startswith("error"):
        return Failed("generator_error", f"stop_reason {stop_reason!r}", retryable=True)
    if stop_reason == "abort":
        return Cancelled("the generator aborted it")
    return Truncated("turn_tokens" if stop_reason == "length" else stop_reason)


class _Maker:
    """Builds one trajectory from its step rows."""

    def __init__(self, slot: Slot, how: Conversion) -> None:
        self._slot, self._how = slot, how
        self._rows: list[Row] = []
        self._ids: list[list[int]] = []
        self._spans: list[Span] = []
        self._parent: int | None = None
        self._fork_point = 0
        self.turns: list[Turn] = []
        self.tokens: list[int] = []
        """Sampled tokens of each turn."""
        self.rewards: list[Reward] = []

    def rows(self) -> tuple[Row, ...]:
        return (*self._rows, Row(tuple(self._spans), self._parent, self._fork_point))

    def add(self, step: _Step, *, last: bool) -> None:
        self._open(step)
        ends: list[tuple[int, int]] = []  # (end of the mask-1 run in the response, its turn)
        at = 0
        for value, length in _runs(step.mask):
            ids = step.response[at : at + length]
            if value:
                turn = len(self.turns)
                self._spans.append(self._sampled(step, at, length, turn))
                text = self._how.decode(ids) if self._how.decode is not None else ""
                self.turns.append(Turn(turn, text, (), step.stop_reason))
                self.tokens.append(length)
                ends.append((at + length, turn))
            else:
                self._spans.append(Span.observation(ids, len(self.turns) - 1 if self.turns else None))
            at += length
        self._ids[-1].extend(step.response)
        self._reward(step, ends, last)

    def _open(self, step: _Step) -> None:
        """Continue the current row with this step's prompt, or fork from the row that shares most of it."""
        if not self._ids:
            self._ids.append(list(step.prompt))
            self._spans.append(Span.prompt(step.prompt))
            return
        current = self._ids[-1]
        if list(step.prompt[: len(current)]) == current:
            news = step.prompt[len(current) :]
        else:
            self._rows.append(Row(tuple(self._spans), self._parent, self._fork_point))
            shared = [common_prefix(ids, step.prompt) for ids in self._ids]
            self._parent = max(range(len(shared)), key=lambda row: shared[row])
            self._fork_point = shared[self._parent]
            self._spans = []
            self._ids.append(list(step.prompt[: self._fork_point]))
            news = step.prompt[self._fork_point :]
        if news:
            self._spans.append(Span.observation(news, len(self.turns) - 1))
            self._ids[-1].extend(news)

    def _sampled(self, step: _Step, at: int, length: int, turn: int) -> Span:
        logprobs = step.logprobs if isinstance(step.logprobs, Missing) else step.logprobs[at : at + length]
        version = self._how.version
        versions: tuple[VersionRun, ...] | Missing = (
            (VersionRun(version, 0, length),)
            if version is not None
            else Missing("the generator does not report weight versions")
        )
        return Span.sampled(step.response[at : at + length], logprobs, versions, self._how.sampling, turn)

    def _reward(self, step: _Step, ends: list[tuple[int, int]], last: bool) -> None:
        where = f"row {step.index}"
        if isinstance(step.reward, Missing):
            self.rewards.append(Reward(ends[-1][1] if ends else 0, step.reward))
            return
        values = step.reward if isinstance(step.reward, tuple) else (step.reward,)
        if not last and any(values):
            if self._how.step_rewards is None:
                raise ContractError(
                    f"{where}: a reward before the trajectory's last step; SkyRL itself ignores it: choose "
                    "step_rewards='last' (ignore) or 'each' (keep)"
                )
            if self._how.step_rewards == "last":
                return
        if not last and not any(values):
            return
        if not ends:
            # Nothing of this row is trained, so no token can carry a reward, and it must not vote as a zero.
            reason = f"{where}: loss_masks is all 0, no sampled token carries the reward"
            self.rewards.append(Reward(len(self.turns) - 1 if self.turns else 0, Missing(reason)))
            return
        if not isinstance(step.reward, tuple):
            self.rewards.append(Reward(ends[-1][1], step.reward))
            return
        self._token_rewards(step, ends)

    def _token_rewards(self, step: _Step, ends: list[tuple[int, int]]) -> None:
        assert isinstance(step.reward, tuple)
        placed: dict[tuple[int, int], float] = {}
        starts = {turn: end - _run_length(step.mask, end) for end, turn in ends}
        for at, value in enumerate(step.reward):
            if value == 0:
                continue
            owner = next(((end, turn) for end, turn in reversed(ends) if starts[turn] <= at), None)
            if owner is None:
                raise ContractError(f"row {step.index}: rewards[{at}] stands before the first sampled token")
            end, turn = owner
            key = (turn, min(at, end - 1) - starts[turn])
            placed[key] = placed.get(key, 0.0) + value
        if not placed:
            placed[(ends[-1][1], ends[-1][0] - 1 - starts[ends[-1][1]])] = 0.0
        self.rewards.extend(Reward(turn, value, position=position) for (turn, position), value in placed.items())


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """(value, length) of each run of equal values."""
    runs: list[tuple[int, int]] = []
    for value in mask:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def _run_length(mask: Sequence[int], end: int) -> int:
    """Length of the run of ones that ends before ``end``."""
    start = end
    while start and mask[start - 1]:
        start -= 1
    return end - start
