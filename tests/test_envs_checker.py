"""The environment checker finds each kind of fault, and nothing in the bundled environments."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from slipstream.envs import BaseTextEnv, BaseTextEnvStepOutput, deregister, register
from slipstream.envs.checker import check_env, example_rows

ROWS = [{"prompt": [{"role": "user", "content": "q"}], "reward_spec": {"ground_truth": "42"}, "tags": ["a"]}]


class Good(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.extras = extras or {}
        self.max_turns = self.extras["max_turns"]

    def step(self, action):
        self.turns += 1
        right = action == self.extras["reward_spec"]["ground_truth"]
        done = right or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": "again"}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(right), done=done, metadata={})

    def get_metrics(self):
        return {"turns": self.turns}


class Unreadable:
    """Not even its repr works."""

    def __repr__(self):
        raise RuntimeError("no repr")


def found(env, rows=ROWS, **kwargs):
    return {(finding.severity, finding.check) for finding in check_env(env, rows, **kwargs)}


def changed(**changes):
    """``Good`` with the last step's output changed."""

    class Changed(Good):
        def step(self, action):
            return {**super().step(action), **changes}

    return Changed


@pytest.mark.parametrize("env_id", ["arithmetic", "gsm8k", "gsm8k_multi_turn", "text2sql"])
def test_nothing_is_found_in_the_bundled_environments(env_id):
    assert [str(f) for f in check_env(env_id) if f.severity != "info"] == []
    assert example_rows(env_id)


def test_nothing_is_found_in_a_good_class():
    assert check_env(Good, ROWS) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"reward": float("nan")}, "reward"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward": "1.0"}, "reward"),
        ({"done": "no"}, "type"),
        ({"done": None}, "type"),
        ({"observations": "text"}, "type"),
        ({"observations": [{"role": "user"}]}, "type"),
        ({"metadata": [1]}, "type"),
        ({"postprocessed_action": 3}, "type"),
        ({"metadata": {"reward_components": {"a": 7.0}}}, "reward"),
        ({"reward": np.array([0.1, 0.2])}, "reward"),
        ({"reward": [0.5]}, "reward"),
        ({"reward": 1j}, "reward"),
        ({"reward": 10**400}, "reward"),
        ({"reward": 10**5000}, "reward"),
        ({"metadata": {"reward_components": [1]}}, "reward"),
        ({"metadata": {"reward_components": {1: 0.0}}}, "reward"),
        ({"metadata": {"reward_components": {"a": None}}}, "reward"),
        ({"metadata": {"reward_components": {"a": np.array([0.0, 1.0])}}}, "reward"),
        ({"metadata": {"reward_components": {"a": 10**400}}}, "reward"),
        ({"done": np.array([True, False])}, "type"),
        ({"observations": np.array([1.0, 2.0])}, "type"),
        ({"observations": [np.array([1.0, 2.0])]}, "type"),
        ({"observations": [{"role": "user", "content": ["text"]}]}, "type"),
        ({"observations": [Unreadable()]}, "type"),
    ],
)
def test_wrong_step_outputs(change, check):
    assert ("error", check) in found(changed(**change))


def test_a_missing_key_and_no_dict_at_all():
    class NoReward(Good):
        def step(self, action):
            return {"observations": [], "done": True}

    class Nothing(Good):
        def step(self, action):
            return None

    assert ("error", "type") in found(NoReward)
    assert ("error", "type") in found(Nothing)


@pytest.mark.parametrize("change", [{"reward": np.float32(0.5)}, {"reward": np.array(0.5)}, {"done": np.bool_(True)}])
def test_scalars_that_training_takes_are_no_findings(change):
    assert found(changed(**{"done": True, **change})) <= {("info", "constant")}


def test_a_bool_reward_is_a_warning():
    assert ("warning", "reward") in found(changed(reward=True, done=True))


@pytest.mark.parametrize("method", ["__init__", "init", "step", "close", "get_metrics"])
def test_an_exception_anywhere_is_reported_with_its_place(method):
    def broken(self, *args, **kwargs):
        raise RuntimeError("kaputt")

    env = type("Broken", (Good,), {method: broken})
    findings = [f for f in check_env(env, ROWS) if f.check == "raises"]
    assert findings
    assert method in findings[0].message
    assert "kaputt" in findings[0].message
    assert "test_envs_checker.py" in findings[0].message
    assert findings[0].mend


def test_an_exception_on_odd_text_only_is_found():
    class Fragile(Good):
        def step(self, action):
            if not action:
                raise IndexError("empty")
            return super().step(action)

    assert ("error", "raises") in found(Fragile)


def test_a_hang_is_reported_within_the_deadline():
    release = threading.Event()

    class Hanging(Good):
        def step(self, action):
            release.wait(60)
            return super().step(action)

    started = time.monotonic()
    assert ("error", "hang") in found(Hanging, deadline_seconds=0.3)
    assert time.monotonic() - started < 10
    release.set()


def test_a_slow_step_is_a_warning():
    class Slow(Good):
        def step(self, action):
            if action == "42":
                time.sleep(0.05)
            return super().step(action)

    assert ("warning", "slow") in found(Slow, slow_seconds=0.02)


def test_leaked_threads_files_and_processes_are_found():
    stop = threading.Event()
    files, children = [], []

    class Threads(Good):
        def init(self, prompt):
            threading.Thread(target=stop.wait, args=(60,), daemon=True).start()
            return prompt, {}

    class Files(Good):
        def init(self, prompt):
            self.file = open(os.devnull)  # noqa: SIM115 - the leak under test
            files.append(self.file)
            return prompt, {}

    class Children(Good):
        def init(self, prompt):
            self.child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
            children.append(self.child)
            return prompt, {}

    try:
        for env in (Threads, Files, Children):
            assert ("error", "leak") in found(env, max_turns=1), env
    finally:
        stop.set()
        for file in files:
            file.close()
        for child in children:
            child.kill()
            child.stdin.close()
            child.wait()


def test_what_close_releases_is_no_leak():
    class Tidy(Good):
        file = None

        def init(self, prompt):
            self.file = open(os.devnull)  # noqa: SIM115 - closed in close
            return prompt, {}

        def close(self):
            if self.file is not None:
                self.file.close()

    assert found(Tidy) == set()


def test_state_shared_through_class_default_argument_or_module_is_found():
    class ByClass(Good):
        history: list[str] = []  # noqa: RUF012 - the fault under test

        def step(self, action):
            self.history.append(action)
            return super().step(action)

    class ByDefault(Good):
        def __init__(self, env_config=None, extras=None, history=[]):  # noqa: B006 - the fault under test
            super().__init__(env_config, extras)
            self.history = history

        def step(self, action):
            self.history.append(action)
            return super().step(action)

    current = {}

    class ByModule(Good):
        def init(self, prompt):
            current["owner"] = self
            return prompt, {}

        def step(self, action):
            out = super().step(action)
            return {**out, "reward": float(current["owner"] is self)}

    for env in (ByClass, ByDefault, ByModule):
        assert ("error", "shared") in found(env), env


def test_random_outcomes_are_found():
    class Random(Good):
        def step(self, action):
            return {**super().step(action), "reward": random.random()}

    assert ("warning", "random") in found(Random)


def test_a_counter_over_all_instances_shows_as_changing_outcomes():
    counter = itertools.count()

    class Counting(Good):
        def step(self, action):
            return {**super().step(action), "reward": float(next(counter) % 7)}

    assert ("warning", "random") in found(Counting)


def test_endless_episodes_and_edited_rows_are_warnings():
    class Editing(Good):
        def step(self, action):
            self.extras["tags"].append("x")
            return super().step(action)

    assert ("warning", "endless") in found(changed(done=False))
    assert ("warning", "row") in found(Editing)


def test_rows_without_prompt_and_no_rows_are_named():
    assert ("error", "rows") in found(Good, rows=[{"reward_spec": {}}])
    assert ("error", "rows") in found(Good, rows=[])
    assert ("error", "rows") in found(Good, rows=["text"])


@pytest.mark.parametrize("env_id", ["arithmetic", "gsm8k", "gsm8k_multi_turn", "text2sql"])
def test_a_reward_spec_that_is_no_mapping_is_found(env_id):
    findings = check_env(env_id, [{**ROWS[0], "reward_spec": "4"}])
    assert any(f.check == "raises" and "reward_spec must be a mapping" in f.message for f in findings)
    assert any(f.check == "rows" and "reward_spec is str '4'" in f.message for f in findings)


def test_a_row_with_an_array_is_compared():
    row = {**ROWS[0], "embedding": np.array([1.0, 2.0])}
    assert found(Good, rows=[row]) == set()

    class Editing(Good):
        def step(self, action):
            self.extras["embedding"][0] += 1
            return super().step(action)

    assert ("warning", "row") in found(Editing, rows=[row])


def test_settings_are_not_shared_between_instances():
    class Configured(Good):
        def __init__(self, env_config=None, extras=None):
            super().__init__(env_config, extras)
            self.seen = env_config["seen"]

        def step(self, action):
            self.seen.append(action)
            return super().step(action)

    assert found(Configured, env_config={"seen": []}) == set()


def test_a_string_entry_point_and_an_unknown_id():
    assert found("slipstream.envs.arithmetic:ArithmeticEnv", rows=example_rows("arithmetic")) == set()
    assert ("error", "raises") in found("no-such-env")


class BadAggregate(Good):
    @staticmethod
    def aggregate_metrics(metrics):
        raise RuntimeError("kaputt")


class ListAggregate(Good):
    @staticmethod
    def aggregate_metrics(metrics):
        return [m["turns"] for m in metrics]


@pytest.mark.parametrize(("cls", "check"), [(BadAggregate, "raises"), (ListAggregate, "type")])
def test_aggregate_metrics_is_checked_however_the_environment_is_named(cls, check):
    path = f"{__name__}:{cls.__name__}"
    register("aggregating", path)
    try:
        for env in (cls, path, "aggregating"):
            findings = [f for f in check_env(env, ROWS) if "aggregate_metrics" in f.message]
            assert [(f.severity, f.check) for f in findings] == [("error", check)], env
    finally:
        deregister("aggregating")


def test_a_metric_that_no_float_holds_is_a_warning():
    class Huge(Good):
        def get_metrics(self):
            return {"n": 10**400, "text": "x", "more": None}

        @staticmethod
        def aggregate_metrics(metrics):
            return {}

    assert found(Huge) == {("warning", "metrics")}


def test_a_bad_init_and_bad_metrics():
    class BadInit(Good):
        def init(self, prompt):
            return prompt

    class BadMetrics(Good):
        def get_metrics(self):
            return None

    class ArrayPrompt(Good):
        def init(self, prompt):
            return np.array([1.0, 2.0]), {}

    assert ("error", "type") in found(BadInit)
    assert ("error", "type") in found(BadMetrics)
    assert ("error", "type") in found(ArrayPrompt)
