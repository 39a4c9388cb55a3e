"""The environment checker: runs a user's class through what training will do to it, and reports what is wrong.

Owns: the probes, the checks, ``Finding``.  Refuses: judging whether a reward is *sensible*.

Finds exceptions, hangs, wrong types, non-finite or missing rewards, slow steps, episodes that never end, resources
held after ``close`` (threads, child processes, open files), state shared between instances, outcomes that change from
run to run, and rows that the environment edits.

    for finding in check_env("my_package.envs:MyEnv", rows):
        print(finding.severity, finding.message, "->", finding.mend)

Every call runs on a thread of its own with a deadline, as in training, where different turns land on different
threads.  A call that hangs is reported and ends the check; its (daemon) thread cannot be stopped and stays behind, so
check untrusted environments from a process of their own, as ``slipstream check env`` does.
"""

from __future__ import annotations

import copy
import gc
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from slipstream.envs._values import as_number, as_text, plain, same
from slipstream.envs.registration import EnvConfig, EnvSpec, load_env_creator, make, spec

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the checker found; ``check`` is a stable short name, ``mend`` says what to do."""

    severity: Severity
    check: str
    message: str
    mend: str

    def __str__(self) -> str:
        return f"{self.severity}: [{self.check}] {self.message}\n    mend: {self.mend}"


_CALL_MENDS = {
    "__init__": "the constructor gets env_config and extras (the row without its prompt, plus max_turns) by keyword",
    "init": "take the prompt (a list of chat messages) and return (messages, dict)",
    "step": "any text may come from a model: parse it defensively and give a reward instead of raising",
    "close": "release only what exists; close may be called after a failed or unfinished episode",
    "get_metrics": "return a dict of numbers",
    "aggregate_metrics": "accept a list of what get_metrics returns, and return a dict",
}
_PROBES = (
    "",
    "hello",
    "42",
    "#### 42",
    "```sql\nSELECT 1\n```",
    "<think>x</think><answer>42</answer><solution>42</solution>",
    "\x00\ud7ff\u202e\U0001f600 \\ \" ' {0} %s </s>",
    "word " * 4000,
)


@dataclass
class _Trace:
    """What one episode gave: (reward, done, observations) per step, as text where it may be of any type."""

    steps: list[tuple[str, bool, str]] = field(default_factory=list)
    metrics: Any = None


class _Abort(Exception):
    """Internal: the episode (or, after a hang, the check) cannot go on; a finding says why."""

    def __init__(self, fatal: bool = False) -> None:
        super().__init__(fatal)
        self.fatal = fatal


def example_rows(env_id: str, n: int = 4) -> list[dict[str, Any]]:
    """A few rows for a bundled environment; an empty list for any other id."""
    if env_id == "text2sql":
        from slipstream.envs.sql_questions import question_rows

        return question_rows("eval", limit=n)
    if env_id == "arithmetic":
        from slipstream.envs.arithmetic import arithmetic_rows

        return arithmetic_rows(n)
    if env_id in ("gsm8k", "gsm8k_multi_turn"):
        return [
            {
                "prompt": [{"role": "user", "content": f"Ann has {i} pens and buys {i + 1}. How many has she?"}],
                "reward_spec": {"ground_truth": str(2 * i + 1)},
            }
            for i in range(2, 2 + n)
        ]
    return []


def check_env(
    env: str | type | Callable[..., Any] | EnvSpec,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    env_config: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    max_turns: int = 4,
    deadline_seconds: float = 30.0,
    slow_seconds: float = 1.0,
    max_rows: int = 3,
) -> list[Finding]:
    """Check an environment; an empty list means that nothing was found.

    Args:
        env: a registered id, ``"module:Class"``, a class or factory, or an ``EnvSpec``.
        rows: data rows (``prompt`` and what the environment reads); bundled ids have examples of their own.
        env_config: settings that training would pass.
        actions: further model texts to try, beside the built-in probes and the row's own ground truth.
        max_turns: turn limit given to the environment.
        deadline_seconds: of one call.
        slow_seconds: a slower call is reported.
        max_rows: rows that are used.
    """
    if rows is None:
        rows = example_rows(env) if isinstance(env, str) else []
    checker = _Checker(env, env_config or {}, max_turns, deadline_seconds, slow_seconds)
    if not rows:
        checker.find("error", "rows", "there are no data rows to try", "pass rows with a prompt and what the env reads")
    try:
        for index, row in enumerate(list(rows)[:max_rows]):
            checker.check_row(index, row, actions)
        if checker.sound_row is not None:
            row, probes = checker.sound_row
            checker.check_repeatable(row, probes)
            checker.check_sharing(row, probes)
            checker.check_leaks(row, probes)
            checker.check_aggregate()
    except _Abort:
        pass  # The finding is recorded.
    checker.report_slow()
    return checker.findings()


class _Checker:
    """The state of one check."""

    def __init__(self, env: Any, config: Mapping[str, Any], turns: int, deadline: float, slow: float) -> None:
        self._spec = EnvSpec("checked", env) if callable(env) or (isinstance(env, str) and ":" in env) else env
        self._config = config
        self._turns = turns
        self._deadline = deadline
        self._slow = slow
        self._found: dict[tuple[str, str], Finding] = {}
        self._slowest: dict[str, float] = {}
        self._rewards: set[float] = set()
        self._metrics: list[Any] = []
        self.sound_row: tuple[Mapping[str, Any], list[str]] | None = None

    # -- findings -------------------------------------------------------------------------------------------------

    def find(self, severity: Severity, check: str, message: str, mend: str) -> None:
        """Record a finding once."""
        self._found.setdefault((check, message), Finding(severity, check, message, mend))

    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        order = {"error": 0, "warning": 1, "info": 2}
        return sorted(self._found.values(), key=lambda f: order[f.severity])

    def report_slow(self) -> None:
        """Turn the slowest call of each kind into a finding."""
        for name, seconds in self._slowest.items():
            if seconds > self._slow:
                self.find(
                    "warning",
                    "slow",
                    f"{name} took {seconds:.2f} s",
                    "move one-time work to module level or a cache; training runs many environments at once",
                )

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call on a fresh thread with the deadline; an exception or a hang becomes a finding and ``_Abort``."""
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box["value"] = function(*args, **kwargs)
            # Fault boundary: whatever a user's environment raises becomes a finding.
            except Exception as raised:  # noqa: BLE001
                box["error"] = raised

        thread = threading.Thread(target=work, daemon=True, name=f"check-{name}")
        started = time.monotonic()
        thread.start()
        thread.join(self._deadline)
        if thread.is_alive():
            self.find(
                "error",
                "hang",
                f"{name} did not return within {self._deadline:g} s",
                "give every wait inside the environment a timeout shorter than rollout.env_step_seconds",
            )
            raise _Abort(fatal=True)
        self._slowest[name] = max(self._slowest.get(name, 0.0), time.monotonic() - started)
        if "error" in box:
            error = box["error"]
            frames = traceback.extract_tb(error.__traceback__)
            where = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
            self.find("error", "raises", f"{name} raised {type(error).__name__}: {error}{where}", _CALL_MENDS[name])
            raise _Abort
        return box.get("value")

    def build(self, row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A new instance and the extras that it was given."""
        extras = copy.deepcopy({key: value for key, value in row.items() if key != "prompt"})
        extras["max_turns"] = self._turns
        env = self.call("__init__", make, self._spec, env_config=EnvConfig(copy.deepcopy(self._config)), extras=extras)
        return env, extras

    def start(self, env: Any, row: Mapping[str, Any]) -> None:
        """Call ``init`` and check what it returns."""
        answer = self.call("init", env.init, copy.deepcopy(list(row["prompt"])))
        if not isinstance(answer, tuple) or len(answer) != 2:
            self.find("error", "type", f"init returned {_kind(answer)}", "return (messages, metadata dict)")
            raise _Abort
        self._check_messages(answer[0], "the prompt that init returned")
        if isinstance(answer[0], list) and not answer[0]:
            self.find("error", "type", "init returned an empty prompt", "return at least one chat message")

    def step(self, env: Any, action: str) -> tuple[str, bool, str]:
        """Call ``step`` and check what it returns."""
        output = self.call("step", env.step, action)
        if not isinstance(output, Mapping):
            self.find("error", "type", f"step returned {_kind(output)}", "return a BaseTextEnvStepOutput")
            raise _Abort
        missing = [key for key in ("observations", "reward", "done") if key not in output]
        if missing:
            self.find("error", "type", f"step's output lacks {', '.join(missing)}", "fill every key of the step output")
            raise _Abort
        self._check_messages(output["observations"], "observations")
        self._check_reward(output["reward"], output.get("metadata"))
        done = plain(output["done"])
        if not isinstance(done, bool):
            self.find("error", "type", f"done is {_kind(output['done'])}", "return True or False")
            done = True  # the episode cannot be followed further
        metadata = output.get("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            self.find("error", "type", f"metadata is {_kind(metadata)}", "return a dict or leave it out")
        text = output.get("postprocessed_action")
        if text is not None and not isinstance(text, str):
            self.find("error", "type", f"postprocessed_action is {_kind(text)}", "return a string or None")
        return as_text(output["reward"]), done, as_text(output["observations"])

    def _check_messages(self, messages: Any, what: str) -> None:
        if not isinstance(messages, list):
            self.find("error", "type", f"{what}: {_kind(messages)}", "return a list of {'role', 'content'} dicts")
            return
        for message in messages:
            good = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not good or not isinstance(message.get("content"), str):
                self.find(
                    "error", "type", f"{what}: {as_text(message):.80}", "each message needs a text role and content"
                )

    def _check_reward(self, reward: Any, metadata: Any) -> None:
        if reward is None:
            self.find(
                "error", "reward", "reward is missing (None)", "return a number; 0.0 when there is nothing to pay"
            )
            return
        value = self._number(reward, "reward")
        if value is None:
            return
        if isinstance(reward, bool):
            self.find("warning", "reward", "reward is a bool", "return float(...)")
        self._rewards.add(value)
        components = metadata.get("reward_components") if isinstance(metadata, Mapping) else None
        if components is not None:
            self._check_components(components, value)

    def _check_components(self, components: Any, reward: float) -> None:
        if not isinstance(components, Mapping) or not all(isinstance(name, str) and name for name in components):
            self.find("error", "reward", f"reward_components is {_kind(components)}", "map names to numbers")
            return
        parts = [self._number(part, f"reward component {name!r}") for name, part in components.items()]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts) and not math.isclose(sum(known), reward, rel_tol=1e-6, abs_tol=1e-9):
            self.find(
                "error",
                "reward",
                f"reward_components {as_text(components):.200} do not add up to {reward}",
                "make them add up",
            )

    def _number(self, value: Any, what: str) -> float | None:
        """A reward or a part of one as training reads it; None, and a finding, when training refuses it."""
        number = as_number(value)
        if number is None:
            self.find("error", "reward", f"{what} is {_kind(value)}", "return a float")
            return None
        if not math.isfinite(number):
            self.find(
                "error", "reward", f"{what} is not finite ({as_text(value):.60})", "guard divisions and logarithms"
            )
            return None
        return number

    # -- checks ---------------------------------------------------------------------------------------------------

    def episode(self, row: Mapping[str, Any], action: str, keep: list[Any] | None = None) -> _Trace:
        """One whole episode with one repeated action; the instance is kept alive in ``keep``."""
        env, extras = self.build(row)
        before = copy.deepcopy(extras)
        if keep is not None:
            keep.append(env)
        trace = _Trace()
        try:
            self.start(env, row)
            for _ in range(self._turns):
                trace.steps.append(self.step(env, action))
                if trace.steps[-1][1]:
                    break
            else:
                self.find(
                    "warning",
                    "endless",
                    f"the episode was not done after max_turns={self._turns} steps",
                    "read extras['max_turns'] and return done=True in the last turn; training truncates otherwise",
                )
            if hasattr(env, "get_metrics"):
                trace.metrics = self.call("get_metrics", env.get_metrics)
                self._check_metrics(trace.metrics)
        except _Abort as abort:
            if not abort.fatal:
                self.call("close", env.close)
            raise
        self.call("close", env.close)
        self.call("close", env.close)
        if not same(extras, before):
            self.find("warning", "row", "the environment changed its row (extras)", "copy what you want to change")
        return trace

    def _check_metrics(self, metrics: Any) -> None:
        if not isinstance(metrics, Mapping):
            self.find("error", "type", f"get_metrics returned {_kind(metrics)}", "return a dict")
            return
        self._metrics.append(dict(metrics))
        for key, value in metrics.items():
            number = as_number(value)
            if number is not None and not math.isfinite(number):
                self.find(
                    "warning",
                    "metrics",
                    f"metric {as_text(key)} is {as_text(value):.60}, which no finite float holds",
                    "leave a metric out when it is undefined",
                )

    def check_row(self, index: int, row: Mapping[str, Any], actions: Sequence[str]) -> None:
        """All probes on one row; a row that an episode survives is used by the later checks."""
        prompt = row.get("prompt") if isinstance(row, Mapping) else None
        if not isinstance(prompt, list) or not prompt:
            self.find("error", "rows", f"row {index} has no prompt (a list of chat messages)", "add the prompt column")
            return
        reward_spec = row.get("reward_spec")
        if reward_spec is not None and not isinstance(reward_spec, Mapping):
            self.find(
                "warning",
                "rows",
                f"row {index}: reward_spec is {_kind(reward_spec)}, so no right answer could be tried",
                "by custom it is a mapping with the answer as ground_truth; give right answers as actions",
            )
            reward_spec = None
        gold = (reward_spec or {}).get("ground_truth")
        golden = [gold, f"#### {gold}", f"<think>x</think><solution>{gold}</solution>"] if isinstance(gold, str) else []
        probes = [*golden, *actions, *_PROBES]
        alive = []
        self._rewards.clear()
        for probe in probes:
            try:
                self.episode(row, probe)
                alive.append(probe)
            except _Abort as abort:
                if abort.fatal:
                    raise
        if alive and self.sound_row is None:
            self.sound_row = row, alive
        if len(self._rewards) == 1:
            self.find(
                "info",
                "constant",
                f"row {index}: every probe earned {next(iter(self._rewards))}",
                "pass actions=[...] with a right and a wrong answer to see that the reward tells them apart",
            )

    def check_repeatable(self, row: Mapping[str, Any], probes: list[str]) -> None:
        """The same row and text must give the same outcome."""
        for probe in probes:
            if self.episode(row, probe).steps != self.episode(row, probe).steps:
                self.find(
                    "warning",
                    "random",
                    f"the same row and text ({probe!r:.40}) gave different outcomes",
                    "seed randomness from the row, and keep state in the instance, not in the module or class",
                )
                return

    def check_sharing(self, row: Mapping[str, Any], probes: list[str]) -> None:
        """Two instances side by side must not notice each other."""
        alone = {probe: self.episode(row, probe).steps for probe in probes}
        for mine, others in zip(probes, [*probes[1:], probes[0]], strict=True):
            a, _ = self.build(row)
            b, _ = self.build(row)
            shared = _containers(a, b)
            own_class = _class_containers(type(a))
            self.start(a, row)
            self.start(b, row)
            got_a, got_b = self._interleave(a, mine, b, others)
            for where, value, before in [*shared, *own_class]:
                if as_text(value) != before:
                    self.find(
                        "error",
                        "shared",
                        f"{where} is one object for all instances, and an episode changed it",
                        "create it in __init__ (a mutable class attribute or default argument is shared)",
                    )
            self.call("close", a.close)
            self.call("close", b.close)
            if "random" not in {check for check, _ in self._found} and (got_a != alone[mine] or got_b != alone[others]):
                self.find(
                    "error",
                    "shared",
                    f"an instance behaves otherwise while another one runs (text {mine!r:.40})",
                    "keep state in the instance, not in the class, module, working directory or a fixed file",
                )
                return

    def _interleave(self, a: Any, mine: str, b: Any, others: str) -> tuple[list[Any], list[Any]]:
        traces: tuple[list[Any], list[Any]] = ([], [])
        open_ = [True, True]
        for _ in range(self._turns):
            for i, (env, action) in enumerate(((a, mine), (b, others))):
                if open_[i]:
                    traces[i].append(self.step(env, action))
                    open_[i] = not traces[i][-1][1]
        return traces

    def check_leaks(self, row: Mapping[str, Any], probes: list[str]) -> None:
        """Resources must be released by ``close``, while the instance itself is still alive.

        Shared pools were filled by the earlier checks; the smallest growth of three rounds counts, so that a thread of
        somebody else does not become a finding.
        """
        growth: list[dict[str, int]] = []
        for _ in range(3):
            before = _resources()
            keep: list[Any] = []
            for probe in probes:
                self.episode(row, probe, keep)
            after = _resources()
            growth.append({name: after[name] - before[name] for name in after})
        for name in growth[0]:
            least = min(g[name] for g in growth)
            if least > 0:
                self.find(
                    "error",
                    "leak",
                    f"{least} {name} left after {len(probes)} closed episodes",
                    "release everything in close(): join threads, end child processes, close files and connections",
                )

    def check_aggregate(self) -> None:
        """The class's own aggregation must accept its metrics."""
        entry = self._spec if not isinstance(self._spec, str) else spec(self._spec)
        creator: Any = getattr(entry, "entry_point", None)
        if isinstance(creator, str):
            creator = load_env_creator(creator)
        rule = getattr(creator, "aggregate_metrics", None)
        if rule is not None and self._metrics:
            answer = self.call("aggregate_metrics", rule, self._metrics)
            if not isinstance(answer, Mapping):
                self.find("error", "type", f"aggregate_metrics returned {_kind(answer)}", "return a dict")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {as_text(value):.60}"


def _resources() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "child processes": len(process.children(recursive=True)),
        "open files": process.num_fds() if hasattr(process, "num_fds") else len(process.open_files()),
    }


def _containers(a: Any, b: Any) -> list[tuple[str, Any, str]]:
    """Mutable containers that two instances hold in common: (name, object, its repr now)."""
    mine, others = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
    return [
        (f"self.{name}", value, as_text(value))
        for name, value in mine.items()
        if isinstance(value, list | dict | set | bytearray) and others.get(name) is value
    ]


def _class_containers(cls: type) -> list[tuple[str, Any, str]]:
    return [
        (f"{base.__name__}.{name}", value, as_text(value))
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, list | dict | set | bytearray) and not name.startswith("__")
    ]
