"""Rollouts: renderers, the turn loop, generators, retry and drop policy, the adapter for SkyRL's generators.

Owns: how a prompt becomes a group of trajectories.  Refuses: optimisers.  Imports without torch.
"""

from slipstream.rollout.environment import EnvFactory
from slipstream.rollout.failures import FailureLedger
from slipstream.rollout.generator import TurnGenerator, make_env_factory
from slipstream.rollout.meter import TokenMeter
from slipstream.rollout.progress import GroupProgress, MemberProgress, TurnRecord
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
    MemberFinished,
    Metered,
    RolloutEvent,
    TurnCompleted,
    TurnRecovered,
    sampling_spec,
)
from slipstream.rollout.waves import WaveGate, WaveLog

__all__ = [
    "AttemptCancelled",
    "AttemptSuperseded",
    "Conversion",
    "EnvFactory",
    "FailureLedger",
    "Generator",
    "GroupFinished",
    "GroupProgress",
    "GroupTask",
    "MemberFinished",
    "MemberProgress",
    "Metered",
    "Renderer",
    "RolloutEvent",
    "RowBuilder",
    "SkyRLGenerator",
    "Slot",
    "TemplateError",
    "TemplateReport",
    "TokenMeter",
    "TrajectoryID",
    "TurnCompleted",
    "TurnGenerator",
    "TurnRecord",
    "TurnRecovered",
    "WaveGate",
    "WaveLog",
    "groups_from_skyrl",
    "make_env_factory",
    "sampling_spec",
]
