"""The environment contract: ``Env``, ``BaseTextEnv`` and their step outputs.

Owns: the shape of an environment.  Refuses: tokens, models, rewards' meaning.

The names, constructor behaviour and hooks are those of skyrl-gym, so a class written for it runs when its
import line is changed::

    from slipstream.envs import BaseTextEnv, BaseTextEnvStepOutput

    class Echo(BaseTextEnv):
        def __init__(self, env_config=None, extras={}):
            super().__init__()
            self.answer = extras["reward_spec"]["ground_truth"]

        def step(self, action):
            return BaseTextEnvStepOutput(
                observations=[], reward=float(action == self.answer), done=True, metadata={}
            )

Lifecycle: construct -> ``init(prompt)`` once -> ``step(text)`` until ``done`` -> ``get_metrics()`` -> ``close()``.
``init``, ``step`` and ``close`` may run on different threads of a pool, never two at once for one instance.  The
list that ``init`` returns *is* the chat history: the harness appends to that very object, and an environment may
edit it in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, NotRequired, Self, SupportsFloat, TypedDict, TypeVar

from slipstream.envs.metrics import default_aggregate_metrics

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")

MessageType = dict[str, str]
"""One chat message: ``{"role": ..., "content": ...}``."""
ConversationType = list[MessageType]
"""A chat history."""


class EnvStepOutput(TypedDict, Generic[ObsType]):
    """What ``Env.step`` returns."""

    observations: ObsType
    reward: SupportsFloat
    done: bool
    metadata: NotRequired[dict[str, Any] | None]


class BaseTextEnvStepOutput(TypedDict):
    """What ``BaseTextEnv.step`` returns.

    ``observations`` are chat messages appended after the model's turn; they are never trained on.
    ``metadata`` may hold ``reward_components`` (name to value; they must add up to ``reward``), which the
    ledger then records one by one.  ``postprocessed_action`` replaces the turn's text in the history.
    """

    observations: ConversationType
    reward: float
    done: bool
    metadata: NotRequired[dict[str, Any]]
    postprocessed_action: NotRequired[str | None]


class Env(Generic[ObsType, ActType]):
    """Base of every environment: ``init``, ``step``, ``close``; also a context manager that closes."""

    spec: Any = None
    """The ``EnvSpec`` it was made from; set by ``make``."""

    def step(self, action: ActType) -> Mapping[str, Any]:
        """Apply one action; returns an ``EnvStepOutput``: observations, reward, whether the episode is over."""
        raise NotImplementedError(f"{type(self).__name__}.step is not implemented")

    def init(self, *args: Any) -> tuple[ObsType, dict[str, Any]]:
        """Start the episode; returns the first observations and optional metadata."""
        raise NotImplementedError(f"{type(self).__name__}.init is not implemented")

    def close(self) -> None:
        """Release what the environment holds; closing twice has no effect."""

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> Literal[False]:
        self.close()
        return False


class BaseTextEnv(Env[ConversationType, str]):
    """Base of text environments: chat messages in, text out, with optional tool groups.

    The constructor takes nothing and sets ``turns`` (0), ``max_turns`` (1), ``tool_groups`` and
    ``tool_to_toolgroup``.  Subclasses take ``(env_config, extras)``: the settings of their id, and all columns of
    the data row but the prompt, plus ``max_turns``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[Any] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init_tool_groups(self, tool_groups: list[Any] | None = None) -> None:
        """Take the episode's tool groups and index their tools by name."""
        self.tool_groups = [] if tool_groups is None else tool_groups
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup.update(group.get_tool_to_group_mapping())

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        """Run a tool of a group; ``tool_input`` (list or tuple) becomes its positional arguments."""
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"ToolGroup '{tool_group_name}' not found.")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Returns the prompt that the model sees (the same list object is kept as history) and metadata."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Apply the model's text."""
        raise NotImplementedError(f"{type(self).__name__}.step is not implemented")

    def get_metrics(self) -> dict[str, Any]:
        """Metrics of the finished episode; empty by default."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Combine the metrics of many episodes; by default the mean of every numeric key."""
        return default_aggregate_metrics(metrics)
