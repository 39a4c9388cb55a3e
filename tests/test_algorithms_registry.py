"""Components by name and by import path."""

from __future__ import annotations

import textwrap

import pytest

from algorithm_builders import batch_row, group
from slipstream.algorithms import compute_advantages, register_advantage
from slipstream.algorithms.advantages import ADVANTAGES, Estimator
from slipstream.algorithms.reduce import ReductionSpec, token_weights
from slipstream.algorithms.registry import Registry
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import SettingsError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module of a user's, importable for the length of a test."""

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_an_estimator_of_ones_own_by_import_path(package):
    package(
        "plain_estimator",
        """
        def halves(groups, settings):
            return {tid: score / 2 for group in groups for tid, score in group.scores().items()}
        """,
    )
    got = compute_advantages([group("g", [1, 0])], AlgorithmSettings(advantage="plain_estimator:halves"))
    assert got == {"g-0": 0.5, "g-1": 0.0}
    assert not ADVANTAGES.get("plain_estimator:halves").group_relative
    assert "plain_estimator:halves" not in ADVANTAGES.names()


def test_a_registered_function_is_found_with_what_it_declares(package):
    package(
        "registered_estimator",
        """
        from slipstream.algorithms import register_advantage

        @register_advantage("thirds", defaults={"share": 3.0})
        def thirds(groups, settings):
            return {tid: s / settings["share"] for g in groups for tid, s in g.scores().items()}
        """,
    )
    try:
        case = AlgorithmSettings(advantage="registered_estimator:thirds", advantage_settings={"share": 4.0})
        assert compute_advantages([group("g", [1, 0])], case)["g-0"] == 0.25
        assert ADVANTAGES.get("registered_estimator:thirds").name == "thirds"
    finally:
        ADVANTAGES.remove("thirds")


def test_a_reduction_of_ones_own_by_import_path(package):
    package(
        "plain_reduction",
        """
        import numpy as np

        def tenth(rows, settings):
            return np.full(len(rows), 0.1)
        """,
    )
    rows = [batch_row("a", [1]), batch_row("b", [1, 1])]
    assert token_weights(rows, ReductionSpec("plain_reduction:tenth")).tolist() == [0.1, 0.1]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("no_such_module_at_all:f", "cannot be imported (ModuleNotFoundError"),
        ("math:flor", "Did you mean 'floor'"),
        ("math:pi", "has no function 'pi'"),
        ("broken_module:f", "ZeroDivisionError"),
    ],
)
def test_a_path_that_leads_nowhere_says_where_it_ends(package, path, part):
    package("broken_module", "1 / 0")
    with pytest.raises(SettingsError) as caught:
        ADVANTAGES.get(path)
    assert part in str(caught.value)


def test_a_kind_without_functions_takes_names_only():
    with pytest.raises(SettingsError, match="registered names only"):
        Registry[int]("shape").get("math:floor")


def test_a_name_is_registered_once():
    taken = ADVANTAGES.get("grpo")
    assert isinstance(taken, Estimator)
    with pytest.raises(SettingsError, match="registered already"):
        register_advantage("grpo")(lambda groups, settings: {})
    assert ADVANTAGES.get("grpo") is taken
