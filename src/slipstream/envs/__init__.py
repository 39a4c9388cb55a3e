"""Environments: what the model acts in, and how its acts are rewarded.

The public names have the shape of skyrl-gym's, so a class written for it runs when its import line is changed; ids
that are unknown here are looked up in skyrl-gym's registry when that package is installed.  Bundled ids: ``text2sql``,
``gsm8k``, ``gsm8k_multi_turn``, ``arithmetic``.

    from slipstream.envs import BaseTextEnv, BaseTextEnvStepOutput, make, register

    register("my-env", "my_package.my_module:MyEnv")
    env = make("my-env", env_config={}, extras={"reward_spec": {"ground_truth": "42"}, "max_turns": 3})
"""

from slipstream.envs import error
from slipstream.envs.core import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Env,
    EnvStepOutput,
    MessageType,
)
from slipstream.envs.metrics import aggregate_for_environment, default_aggregate_metrics
from slipstream.envs.python_tool import PythonCodeExecutorToolGroup
from slipstream.envs.registration import (
    EnvConfig,
    EnvSpec,
    deregister,
    load_env_creator,
    make,
    pprint_registry,
    register,
    registry,
    spec,
)
from slipstream.envs.search import SearchToolGroup
from slipstream.envs.tools import SQLCodeExecutorToolGroup, ToolGroup, tool

register("text2sql", "slipstream.envs.text2sql:text2sql")
register("gsm8k", "slipstream.envs.gsm8k:GSM8kEnv")
register("gsm8k_multi_turn", "slipstream.envs.gsm8k:GSM8kMultiTurnEnv")
register("arithmetic", "slipstream.envs.arithmetic:ArithmeticEnv")

__all__ = [
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ConversationType",
    "Env",
    "EnvConfig",
    "EnvSpec",
    "EnvStepOutput",
    "MessageType",
    "PythonCodeExecutorToolGroup",
    "SQLCodeExecutorToolGroup",
    "SearchToolGroup",
    "ToolGroup",
    "aggregate_for_environment",
    "default_aggregate_metrics",
    "deregister",
    "error",
    "load_env_creator",
    "make",
    "pprint_registry",
    "register",
    "registry",
    "spec",
    "tool",
]
