"""The trajectory contract: spans, rows, turns, outcomes, groups, versions.

RL, SFT, distillation, service requests and captured traffic all become these spans; masks, groups and
denominators are derived from them.  This room imports nothing but the standard library.
"""

from slipstream.trajectory.ids import SampleKey, WeightVersion
from slipstream.trajectory.outcome import Cancelled, Completed, Failed, Missing, Outcome, Truncated
from slipstream.trajectory.spans import (
    KEPT_SETS,
    ROUTED_EXPERTS,
    TEACHER_LOGPROBS,
    TOP_LOGPROBS,
    Origin,
    SamplingSpec,
    SideChannel,
    Span,
    VersionRun,
)
from slipstream.trajectory.trajectory import Group, Message, Reward, Row, Trajectory, Turn

__all__ = [
    "KEPT_SETS",
    "ROUTED_EXPERTS",
    "TEACHER_LOGPROBS",
    "TOP_LOGPROBS",
    "Cancelled",
    "Completed",
    "Failed",
    "Group",
    "Message",
    "Missing",
    "Origin",
    "Outcome",
    "Reward",
    "Row",
    "SampleKey",
    "SamplingSpec",
    "SideChannel",
    "Span",
    "Trajectory",
    "Truncated",
    "Turn",
    "VersionRun",
    "WeightVersion",
]
