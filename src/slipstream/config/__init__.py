"""Typed, strict settings: loading, SkyRL's keys, the plan, ``explain``.

Owns: the settings tree and everything that can be said before a model loads.
Refuses: torch, Ray, any engine.

>>> loaded = load_settings([], ["schedule.steps=3", "data.train=builtin:arithmetic"])
>>> make_plan(loaded.settings).schedule.steps
3
"""

from slipstream.config.explain import Explanation, explain, render_explanation
from slipstream.config.facts import ModelFacts, read_facts
from slipstream.config.identity import Change, check_resume, diff_settings, dump_settings, settings_hash
from slipstream.config.load import Loaded, load_settings
from slipstream.config.plan import Plan, evaluation_points, make_plan
from slipstream.config.problems import Problem
from slipstream.config.render import plan_text, render_plan
from slipstream.config.resolve import resolve_settings
from slipstream.config.settings import RunSettings
from slipstream.config.skyrl import Note, environment_notes

__all__ = [
    "Change",
    "Explanation",
    "Loaded",
    "ModelFacts",
    "Note",
    "Plan",
    "Problem",
    "RunSettings",
    "check_resume",
    "diff_settings",
    "dump_settings",
    "environment_notes",
    "evaluation_points",
    "explain",
    "load_settings",
    "make_plan",
    "plan_text",
    "read_facts",
    "render_explanation",
    "render_plan",
    "resolve_settings",
    "settings_hash",
]
