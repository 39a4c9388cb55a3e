"""One environment, driven: construction, init, step, metrics, close.

Owns: the contract between the turn loop and an environment object (that of skyrl-gym's generator): the list that
``init`` returns is the chat history and is changed in place; ``step`` gets text and returns ``observations, reward,
done`` and optionally ``metadata`` and ``postprocessed_action``; calls run on pool threads under a deadline.
Refuses: believing an environment.  Whatever it returns is checked, and every fault has a type and a short name.

Lifecycle: ``await EnvSession.open(...)`` -> ``init`` -> ``step``... -> ``metrics`` -> ``close`` (exactly once).
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.envs._values import as_number, as_text, plain
from slipstream.errors import DeadlineError, EnvironmentFault
from slipstream.rollout.envpool import EnvPool
from slipstream.trajectory import Message, Missing

EnvFactory = Callable[[str, dict[str, Any]], Any]
"""``(env_class, extras) -> environment``; extras are a private copy."""


class EnvFault(EnvironmentFault):
    """An environment broke its contract: ``fault`` is a stable short name (see ``trajectory.Failed``)."""

    def __init__(self, fault: str, reason: str, retryable: bool) -> None:
        super().__init__(fault, reason, retryable)
        self.fault, self.reason, self.retryable = fault, reason, retryable

    def __str__(self) -> str:
        return f"{self.fault}: {self.reason}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """A checked step output.  ``components`` add up to the step's reward; a Missing stands alone."""

    observations: tuple[Message, ...]
    components: Mapping[str, float | Missing]
    done: bool
    postprocessed_action: str | None = None


@dataclass
class EnvCounters:
    """What a pool of sessions did; ``open`` is 0 when no episode runs."""

    opened: int = 0
    closed: int = 0
    close_failed: int = 0
    timeouts: int = 0

    @property
    def open(self) -> int:
        """Environments that are constructed and not yet closed."""
        return self.opened - self.closed


def check_messages(value: Any, where: str) -> list[Message]:
    """``value`` itself if it is a list of chat messages; raises ``EnvFault('env_type')`` otherwise."""
    if not isinstance(value, list):
        raise EnvFault("env_type", f"{where} must be a list of chat messages, got {type(value).__name__}", False)
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EnvFault(
                "env_type", f"{where}[{i}] must be a dict with 'role' and 'content', got {as_text(message)}", False
            )
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise EnvFault("env_type", f"{where}[{i}]['content'] must be text, got {kind}", False)
    return value


def _number(value: Any, where: str) -> float:
    found = as_number(value)
    if found is None:
        kind = type(value).__name__
        raise EnvFault("env_type", f"{where} must be a number (or None or Missing), got {kind}", False)
    if not math.isfinite(found):
        raise EnvFault(
            "reward_not_finite", f"{where} is {found} as a float; return Missing(reason) if it is unknown", False
        )
    return found


def read_rewards(reward: Any, components: Any) -> dict[str, float | Missing]:
    """The step's reward by component.

    ``components`` (``metadata["reward_components"]``) are kept by name; what they leave of ``reward`` goes to the
    component ``reward``.  None and ``Missing`` mean that there is no score, which is not a score of 0.
    """
    if isinstance(reward, Missing):
        return {"reward": reward}
    if reward is None:
        return {"reward": Missing("the environment returned None as reward")}
    total = _number(reward, "reward")
    if components is None:
        return {"reward": total}
    if not isinstance(components, Mapping) or not all(isinstance(name, str) and name for name in components):
        raise EnvFault("env_type", "metadata['reward_components'] must map names to numbers", False)
    named: dict[str, float | Missing] = {
        name: _number(value, f"reward component {name!r}") for name, value in components.items()
    }
    rest = total - sum(float(v) for v in named.values() if not isinstance(v, Missing))
    if abs(rest) > 1e-9 * max(1.0, abs(total)) or not named:
        rest += float(_number(components["reward"], "reward")) if "reward" in components else 0.0
        named["reward"] = _number(rest, "what metadata['reward_components'] leave of the reward")
    return named


def read_step(output: Any) -> StepResult:
    """Check what ``step`` returned; raises ``EnvFault`` naming the key that is wrong."""
    if not isinstance(output, Mapping):
        raise EnvFault("env_type", f"step must return a mapping, got {type(output).__name__}", False)
    missing = [key for key in ("observations", "reward", "done") if key not in output]
    if missing:
        raise EnvFault("env_type", f"the step output lacks {', '.join(missing)}", False)
    observations = output["observations"]
    messages = check_messages(list(observations) if isinstance(observations, tuple) else observations, "observations")
    done = plain(output["done"])
    if not isinstance(done, bool):
        raise EnvFault("env_type", f"done must be True or False, got {as_text(done)}", False)
    action = output.get("postprocessed_action")
    if action is not None and not isinstance(action, str):
        raise EnvFault("env_type", f"postprocessed_action must be text, got {type(action).__name__}", False)
    metadata = output.get("metadata")
    components = metadata.get("reward_components") if isinstance(metadata, Mapping) else None
    rewards = read_rewards(output["reward"], components)
    return StepResult(tuple(dict(m) for m in messages), rewards, done, action)


@dataclass
class EnvSession:
    """One open environment; see the module's docstring."""

    env: Any
    pool: EnvPool
    seconds: float
    counters: EnvCounters
    env_seconds: float = 0.0
    _closed: bool = False
    _running: asyncio.Task[Any] | None = field(default=None, repr=False)

    @classmethod
    async def open(
        cls,
        pool: EnvPool,
        factory: EnvFactory,
        env_class: str,
        extras: Mapping[str, Any],
        seconds: float,
        counters: EnvCounters,
    ) -> EnvSession:
        """Construct the environment on a pool thread; its extras are a deep copy, so instances share nothing."""
        started = time.perf_counter()

        def build() -> Any:
            return factory(env_class, copy.deepcopy(dict(extras)))

        try:
            env = await pool.call(build, seconds=seconds, late=lambda env: env.close())
        except DeadlineError as error:
            counters.timeouts += 1
            raise EnvFault("env_timeout", f"constructing {env_class!r}: {error}", True) from error
        except Exception as error:  # fault boundary: user code on a pool thread
            raise EnvFault("env_raised", f"constructing {env_class!r}: {_describe(error)}", True) from error
        counters.opened += 1
        return cls(env, pool, seconds, counters, time.perf_counter() - started)

    async def init(self, prompt: Sequence[Message]) -> list[Message]:
        """``env.init`` on a deep copy of the prompt; returns the list that is the chat history from now on."""
        messages = copy.deepcopy(list(prompt))
        output = await self._call("init", lambda: self.env.init(messages))
        if not isinstance(output, tuple) or len(output) != 2:
            raise EnvFault("env_type", f"init must return (messages, info), got {type(output).__name__}", False)
        return check_messages(output[0], "init's messages")

    async def step(self, action: str, generation: Mapping[str, Any]) -> StepResult:
        """``env.step(action)``, checked.

        An environment that defines ``on_generation(info)`` is told first how the turn ended (``finish_reason``,
        ``stop_reason``, ``tokens``), so that a cut answer need not be scored as a wrong one.
        """

        def call() -> Any:
            tell = getattr(self.env, "on_generation", None)
            if callable(tell):
                tell(dict(generation))
            return self.env.step(action)

        return read_step(await self._call("step", call))

    async def snapshot(self) -> Any:
        """``env.snapshot()`` when it has one: its whole state as JSON; None when it has none."""
        take = getattr(self.env, "snapshot", None)
        if not callable(take):
            return None
        state = await self._call("snapshot", take)
        try:
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise EnvFault("env_type", f"snapshot must return JSON: {error}", False) from error

    @property
    def restores(self) -> bool:
        """Whether the environment can be brought back from a snapshot."""
        return callable(getattr(self.env, "restore", None))

    async def restore(self, state: Any) -> None:
        """``env.restore(state)``, on an environment that was just initialised with the same prompt."""
        await self._call("restore", lambda: self.env.restore(state))

    async def metrics(self) -> dict[str, float]:
        """Numbers of ``env.get_metrics()``; other values are left out, as are those that no finite float holds.

        A fault here is not a fault of the episode: it is reported as the metric ``env_metrics_failed``.
        """
        get = getattr(self.env, "get_metrics", None)
        if not callable(get):
            return {}
        try:
            values = await self._call("get_metrics", get)
        except EnvFault:
            return {"env_metrics_failed": 1.0}
        if not isinstance(values, Mapping):
            return {"env_metrics_failed": 1.0}
        measured = {str(name): as_number(value) for name, value in values.items()}
        return {name: value for name, value in measured.items() if value is not None and math.isfinite(value)}

    @property
    def revision(self) -> str:
        """``env.env_revision`` when it has one: what data and code the reward came from."""
        return str(getattr(self.env, "env_revision", "") or "")

    async def close(self) -> None:
        """``env.close()``, exactly once, also while this task is being cancelled; never raises."""
        if self._closed:
            return
        self._closed = True
        task = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=2 * self.seconds)
            raise

    async def _close(self) -> None:
        running = self._running
        if running is not None and not running.done():  # cancelled in mid-call: let it end first, within its deadline
            await asyncio.wait({running}, timeout=self.seconds)
        try:
            close = getattr(self.env, "close", None)
            if callable(close):
                await self.pool.call(close, seconds=self.seconds)
        except Exception:  # noqa: BLE001 - fault boundary: counted; the episode's result stands
            self.counters.close_failed += 1
        finally:
            self.counters.closed += 1

    async def _call(self, name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        what = f"{type(self.env).__name__}.{name}"
        self._running = asyncio.ensure_future(self.pool.call(function, seconds=self.seconds))
        # Nobody may be left to read it when this task is cancelled.
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(self._running)
        except DeadlineError as error:
            self.counters.timeouts += 1
            raise EnvFault("env_timeout", f"{what}: {error}", True) from error
        except Exception as error:  # fault boundary: user code on a pool thread
            raise EnvFault("env_raised", f"{what} raised {_describe(error)}", True) from error
        finally:
            self.env_seconds += time.perf_counter() - started


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else text[:497] + "..."
