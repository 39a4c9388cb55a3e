"""What ``slipstream simulate`` does.

Owns: telling scenario files from overrides, and which schedules are shown.  Refuses: simulating and drawing
(``slipstream.simulate``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.cli.inputs import split_items
from slipstream.errors import DataError
from slipstream.simulate import Compared, Scenario, compare, load_scenario, variants
from slipstream.simulate.fit import fit_run
from slipstream.simulate.picture import SHORT_COLUMNS, html_page, short_rows, text_picture


@dataclass(frozen=True)
class Simulated:
    """Results, and what to say about where the scenario came from."""

    results: Sequence[Compared]
    notes: Sequence[str]

    @property
    def columns(self) -> tuple[str, ...]:
        """Headings of ``rows``."""
        return SHORT_COLUMNS

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """One per schedule."""
        return short_rows(self.results)

    @property
    def picture(self) -> str:
        """Time lines as text."""
        return text_picture(self.results)

    def as_json(self) -> str:
        """Every figure of every schedule."""
        return json.dumps([{"name": r.name, "speedup": r.speedup, **r.outcome.figures()} for r in self.results])

    def write(self, path: Path) -> None:
        """The page."""
        try:
            path.write_text(html_page(self.results, self.notes), encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror})") from None


def run(items: Sequence[str], from_run: Path | None, only: bool) -> Simulated:
    """Simulate a scenario, given or fitted from a run; all schedules unless ``only`` its own is asked for."""
    notes: list[str] = []
    base: Scenario | None = None
    if from_run is not None:
        fit = fit_run(from_run)
        base = fit.scenario
        gap = fit.simulated / fit.measured - 1
        notes = [*fit.notes, f"a step took {fit.measured:.2f} s; simulated {fit.simulated:.2f} s ({gap:+.0%})"]
    scenario = load_scenario(*split_items(items), base)
    own = (scenario.schedule.kind, scenario)
    named = [own] if only else variants(scenario, scenario.schedule.max_staleness_steps)
    return Simulated(compare(named), notes)
