"""The differential run against TRL and verl: its record is complete, as expected, and what the page shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from compare_peers import distance, run_ours, table, verdict  # noqa: E402
from peer_cases import CASES, draw  # noqa: E402


def record() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())


def test_the_record_holds_every_case_and_nothing_unexpected():
    saved = record()
    assert saved["unexpected"] == []
    assert [(c["case"], c["peer"], c["expected"]) for c in saved["cases"]] == [
        (c.name, c.peer, c.expect) for c in CASES
    ]


def test_the_page_shows_the_record():
    assert table(record()["cases"]) in (ROOT / "docs" / "algorithms.md").read_text()


def test_a_difference_has_a_reason():
    assert [c.name for c in CASES if c.expect != "agree" and not c.note] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.peer}-{case.name}")
def test_our_side_of_every_case_is_finite(case):
    for values in run_ours(case.ours, draw(0, case.scale)).values():
        assert np.all(np.isfinite(values))


def test_verdicts_need_both_value_and_gradient():
    case = CASES[0]
    assert verdict(case, {"value": 1e-9, "gradient": 1e-9}) == "agree"
    assert verdict(case, {"value": 0.5, "gradient": 1e-9}) == "gradient"
    assert verdict(case, {"value": 1e-9, "gradient": 0.5}) == "differ"
    assert verdict(case, {"value": 0.5}) == "differ"
    assert distance(np.array([1.0, np.nan]), np.array([1.0, 2.0])) == np.inf
    assert distance(np.array([1.0, 2.0]), np.array([1.0, 2.2])) == pytest.approx(0.2 / 2.2)
