"""Rollouts: renderers, the turn loop, generators, retry and drop policy, the adapter for SkyRL's generators.

Owns: how a prompt becomes a group of trajectories.  Refuses: optimisers.  Imports without torch.
"""

from slipstream.rollout.environment import EnvFactory
from slipstream.rollout.failures import FailureLedger
from slipstream.rollout.generator import TurnGenerator, make_env_factory
from slipstream.rollout.renderer import Renderer, TemplateError, TemplateReport
from slipstream.rollout.rows import RowBuilder
from slipstream.rollout.skyrl import Conversion, Slot, TrajectoryID, groups_from_skyrl
from slipstream.rollout.skyrl_generator import SkyRLGenerator
from slipstream.rollout.types import (
    AttemptCancelled,
    AttemptSuperseded,
    Generator,
    GroupFinished,
    GroupTask,
    RolloutEvent,
    sampling_spec,
)
from slipstream.rollout.waves import WaveGate

__all__ = [
    "AttemptCancelled",
    "AttemptSuperseded",
    "Conversion",
    "EnvFactory",
    "FailureLedger",
    "Generator",
    "GroupFinished",
    "GroupTask",
    "Renderer",
    "RolloutEvent",
    "RowBuilder",
    "SkyRLGenerator",
    "Slot",
    "TemplateError",
    "TemplateReport",
    "TrajectoryID",
    "TurnGenerator",
    "WaveGate",
    "groups_from_skyrl",
    "make_env_factory",
    "sampling_spec",
]
