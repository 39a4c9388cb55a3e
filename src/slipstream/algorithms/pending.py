"""Settings that exist and that nothing honours yet: refused at planning, never ignored.

Owns: the list.  Refuses: anything else; a line goes away together with what it waits for.

>>> from slipstream.config.settings import AlgorithmSettings
>>> check_pending(AlgorithmSettings())
[]
"""

from __future__ import annotations

from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.config.algorithm import AlgorithmSettings
from slipstream.config.problems import Problem

_PENDING: dict[str, tuple[str, ...]] = {
    "critic": (
        "path",
        "backbone",
        "optimizer",
        "value_clip",
        "value_coef",
        "minibatches_per_step",
        "epochs_per_step",
        "warmup_steps",
    ),
    "teacher": ("path", "dtype", "urls"),
}
"""Names of settings by section below ``algorithm``."""


def check_pending(settings: AlgorithmSettings) -> list[Problem]:
    """One error per such setting that differs from its default."""
    plain = AlgorithmSettings()
    found: list[Problem] = []
    for section, names in _PENDING.items():
        given, default = (getattr(s, section) if section else s for s in (settings, plain))
        for name in names:
            if getattr(given, name) != getattr(default, name):
                key = ".".join(part for part in ("algorithm", section, name) if part)
                found.append(Problem((key,), "is not honoured yet", "leave it at its default"))
    if "values" in ADVANTAGES.get(settings.advantage).needs:
        found.append(Problem(("algorithm.advantage",), "no critic is trained yet", "use grpo, rloo or reinforce_pp"))
    return found
