"""Simulation of a run before anyone pays for it: the library's own schedules and routers under virtual time."""

from slipstream.simulate.compare import Compared, compare, overlap_bound, variants
from slipstream.simulate.distributions import Distribution, parse_distribution
from slipstream.simulate.engine import Simulation, simulate
from slipstream.simulate.outcome import Outcome
from slipstream.simulate.scenario import EngineModel, Scenario, TrainerModel, WorkSettings, load_scenario

__all__ = [
    "Compared",
    "Distribution",
    "EngineModel",
    "Outcome",
    "Scenario",
    "Simulation",
    "TrainerModel",
    "WorkSettings",
    "compare",
    "load_scenario",
    "overlap_bound",
    "parse_distribution",
    "simulate",
    "variants",
]
