"""Scenarios, fits, calibration against published times, pictures and the command."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path

import pytest

from cli_helpers import slipstream
from ledger_synthetic import make_run
from slipstream.config.identity import dump_settings
from slipstream.config.load import load_settings
from slipstream.config.settings import RunSettings
from slipstream.errors import LedgerError, SettingsError
from slipstream.ledger.reader import LedgerReader
from slipstream.simulate import compare, load_scenario, parse_distribution, variants
from slipstream.simulate.calibrate import fit_nemo, fit_verl
from slipstream.simulate.distributions import Constant, Empirical, LogNormal
from slipstream.simulate.fit import RunFit, fit_run, measured
from slipstream.simulate.picture import COLUMNS, html_page, table_rows, text_picture
from slipstream.simulate.published import NEMO, VERL

SMALL = [
    "schedule.steps=8", "schedule.prompts_per_step=2", "work.samples_per_prompt=2", "work.turn_tokens=lognormal(50, 1)",
    "schedule.kind=fully_async", "schedule.max_staleness_steps=1", "trainer.update_seconds=2",
]  # fmt: skip


# -- distributions


@pytest.mark.parametrize("text", ["3.5", "uniform(1, 3)", "exponential(2)", "lognormal(10, 0.5)", "[1, 2, 6]"])
def test_a_distribution_is_sampled_with_its_own_mean(text: str) -> None:
    made = parse_distribution([1, 2, 6] if text.startswith("[") else text)
    rng = random.Random(0)
    mean = sum(made.sample(rng) for _ in range(20000)) / 20000
    assert mean == pytest.approx(made.average(), rel=0.02)
    assert parse_distribution(str(made)).average() == pytest.approx(made.average())


def test_a_log_normal_has_the_mean_and_spread_it_is_given() -> None:
    made = LogNormal(10, 0.5)
    rng = random.Random(1)
    values = [made.sample(rng) for _ in range(40000)]
    mean = sum(values) / len(values)
    assert mean == pytest.approx(10, rel=0.02)
    assert math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean == pytest.approx(0.5, rel=0.05)
    assert max(LogNormal(10, 2, 30).sample(rng) for _ in range(2000)) == 30


@pytest.mark.parametrize("text", ["-1", "normal(1)", "lognormal(1)", "uniform(-3, 1)", "nan", "", [], True])
def test_what_is_no_distribution_is_refused_with_the_forms_that_are(text: object) -> None:
    with pytest.raises(SettingsError, match=r"distribution|finite"):
        parse_distribution(text)


def test_measured_values_are_thinned_but_keep_their_shape() -> None:
    assert measured([2.0, 2.0]) == Constant(2.0)
    thinned = measured(float(i) for i in range(10_000))
    assert isinstance(thinned, Empirical)
    assert thinned.average() == pytest.approx(4999.5, rel=0.01)


# -- scenarios


def test_later_overrides_win_and_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("work: {turns: 3}\nengines: {replicas: 2}\n")
    scenario = load_scenario([file], ["engines.replicas=4"])
    assert (scenario.engines.replicas, scenario.work.turns) == (4, Constant(3))
    file.write_text(json.dumps(scenario.model_dump(mode="json")))
    assert load_scenario([file]) == scenario


@pytest.mark.parametrize("override", ["work.turn=3", "engines.replicas=0", "trainer.update_seconds=often"])
def test_a_wrong_scenario_is_named(override: str) -> None:
    with pytest.raises(SettingsError, match=override.split("=")[0]):
        load_scenario([], [override])


# -- published times


def test_a_published_loss_of_asynchrony_comes_out_as_a_loss() -> None:
    """Training takes most of the step there, and half of the GPUs take twice as long for it."""
    fit = fit_nemo(NEMO[-1], shares=[0.32])
    assert fit.published_ratio == pytest.approx(0.734, abs=0.001)
    assert fit.predicted_ratio == pytest.approx(fit.published_ratio, rel=0.1)


def test_a_published_win_of_asynchrony_comes_out_as_a_win() -> None:
    fit = fit_nemo(NEMO[0], shares=[0.95])
    assert fit.published_ratio == pytest.approx(1.73, abs=0.01)
    assert fit.predicted_ratio == pytest.approx(fit.published_ratio, rel=0.15)
    assert all(abs(row.residual) < 0.2 for row in fit.rows), "and so does the step on half of the GPUs"


def test_stage_times_of_another_library_give_its_gain() -> None:
    (fit,) = fit_verl([5e-5], VERL[2:])
    assert fit.rows[0].residual == pytest.approx(0.0, abs=0.05), "the synchronous step is an input"
    assert fit.predicted_ratio > 2.0


def test_documented_ratios_are_the_measured_ones() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "asynchrony.md").read_text()
    results = json.loads((root / "benchmarks" / "results" / "simulate.json").read_text())
    for case in results["cases"]:
        row = f"| {case['case']} | {case['published_ratio']:.2f} | {case['predicted_ratio']:.2f} |"
        assert row in page, f"make bench-simulate has found {row}"
        assert case["same_sign"]


# -- fitting a run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with its settings."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)
    settings = {"rollout": {"samples_per_prompt": 8}, "schedule": {"prompts_per_step": 4, "steps": 3}}
    (run / "settings.yaml").write_text(dump_settings(RunSettings.model_validate(settings)))
    return run


@pytest.fixture(scope="module")
def fit(recorded: Path) -> RunFit:
    return fit_run(recorded)


def test_a_run_is_fitted_from_its_ledger(fit: RunFit) -> None:
    assert fit.scenario.trainer.update_seconds == Constant(14.2)
    assert fit.scenario.trainer.publish_seconds == Constant(0.3)
    assert fit.scenario.work.samples_per_prompt == 8
    assert fit.scenario.work.turn_tokens.average() > 5
    assert fit.simulated == pytest.approx(fit.measured, rel=0.3)
    assert any("ms per token" in note for note in fit.notes)


def test_servers_that_others_run_count_as_replicas(recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    settings = load_settings([run / "settings.yaml"]).settings.model_dump()
    settings["inference"] |= {"engine": "http", "urls": ["http://a:1", "http://b:2", "http://c:3"], "transport": "disk"}
    (run / "settings.yaml").write_text(dump_settings(RunSettings.model_validate(settings)))
    assert fit_run(run).scenario.engines.replicas == 3


def test_refused_groups_of_a_run_are_found_by_its_dispositions(recorded: Path, fit: RunFit) -> None:
    by_group: dict[str, set[str]] = {}
    for record in LedgerReader(recorded).trajectories(phase="train"):
        if record.trajectory.votes:
            by_group.setdefault(record.trajectory.group_id, set()).add(record.disposition)
    expected = sum(fates == {"filtered:zero_variance"} for fates in by_group.values()) / len(by_group)
    assert 0 < expected < 1
    assert fit.scenario.work.refused_share == pytest.approx(expected)


def test_over_sampled_batches_become_full_batches_in_a_queue() -> None:
    scenario = load_scenario([], ["schedule.prompts_per_step=4", "schedule.generate_prompts_per_step=8"])
    by_name = dict(variants(scenario, 1))
    assert by_name["one_step_off"].schedule.generate_prompts_per_step == 8
    assert by_name["windowed S=1"].schedule.generate_prompts_per_step is None
    assert by_name["windowed S=1"].schedule.full_batch


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        fit_run(tmp_path)


# -- pictures and the command


def test_every_schedule_is_in_table_text_and_page() -> None:
    results = compare(variants(load_scenario([], SMALL), 1))
    assert [r.name for r in results] == [
        "sync", "one_step_off", "fully_async S=1", "bounded S=1, wait", "bounded S=1, drop", "bounded S=1, requeue",
        "windowed S=1",
    ]  # fmt: skip
    assert results[0].speedup == 1.0
    assert all(len(row) == len(COLUMNS) for row in table_rows(results))
    text, page = text_picture(results), html_page(results, ["a <note>"])
    for result in results:
        assert result.name in text
        assert f"<h2>{result.name}" in page
    assert "█" in text
    assert "a &lt;note&gt;" in page
    assert page.count("<svg") == 2 * len(results)
    assert not re.search(r"(src|href)=|https?://|<script", page), "it opens anywhere, without a network"


def test_the_command_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    done = slipstream("simulate", *SMALL, "--html", tmp_path / "p.html")
    assert done.exit_code == 0, done.output
    assert "windowed S=1" in done.output
    assert "lags" in done.output
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_the_command_prints_json_of_one_schedule() -> None:
    done = slipstream("simulate", *SMALL, "--only", "--json")
    (only,) = json.loads(done.output)
    assert only["schedule"] == "fully_async"
    assert sum(only["lags"].values()) == pytest.approx(1.0)


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = slipstream("simulate", "engines.gpus=3")
    assert done.exit_code == 2
    assert "engines.gpus" in done.output
