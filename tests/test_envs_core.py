"""The environment contract and the registry, also with classes of another gym."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

import slipstream.envs as envs
from slipstream.envs import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Env,
    EnvConfig,
    EnvSpec,
    ToolGroup,
    aggregate_for_environment,
    default_aggregate_metrics,
    deregister,
    error,
    make,
    pprint_registry,
    register,
    registry,
    spec,
    tool,
)
from slipstream.errors import SlipstreamError


class Adder(ToolGroup):
    def __init__(self, offset: int) -> None:
        self.offset = offset
        super().__init__(name="Adder")

    @tool
    def add(self, a: int, b: int) -> int:
        return a + b + self.offset


class MultiplyEnv(BaseTextEnv):
    """Written as for skyrl-gym; only the import line differs."""

    def __init__(self, env_config, extras={}):  # noqa: B006 - this is how such classes are written
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 5)
        self.bonus = env_config.bonus if hasattr(env_config, "bonus") else 0.0
        self.init_tool_groups([Adder(1)])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = action == self.ground_truth or self.turns >= self.max_turns
        reward = 1.0 + self.bonus if action == self.ground_truth else 0.0
        if done:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed": action})
        observation = {"role": "user", "content": str(self._execute_tool("Adder", "add", (1, self.turns)))}
        return BaseTextEnvStepOutput(observations=[observation], reward=reward, done=False, metadata={})

    def get_metrics(self):
        return {"turns": self.turns, "name": "x"}


@pytest.fixture
def clean_registry():
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def test_base_constructor_takes_nothing_and_sets_the_documented_attributes():
    env = BaseTextEnv()
    assert (env.turns, env.max_turns, env.tool_groups, env.tool_to_toolgroup) == (0, 1, [], {})


def test_init_returns_the_very_list_it_was_given():
    prompt: ConversationType = [{"role": "user", "content": "q"}]
    history, info = BaseTextEnv().init(prompt)
    assert history is prompt
    assert info == {}


def test_a_class_written_for_skyrl_gym_runs_with_its_import_changed(clean_registry):
    register(id="multiply", entry_point=MultiplyEnv)
    env = make("multiply", env_config=EnvConfig(bonus=0.5), extras={"reward_spec": {"ground_truth": "6"}})
    first = env.step("5")
    assert first["observations"] == [{"role": "user", "content": "3"}]
    assert env.step("6")["reward"] == 1.5
    assert env.spec.id == "multiply"
    assert aggregate_for_environment("multiply", [{"turns": 2, "name": "x"}, {"turns": 4}]) == {"turns": 3.0}


def test_unknown_tool_and_group_are_value_errors():
    env = BaseTextEnv()
    env.init_tool_groups([Adder(0)])
    assert env.tool_to_toolgroup == {"add": "Adder"}
    assert env._execute_tool("Adder", "add", [1, 2]) == 3
    with pytest.raises(ValueError, match="ToolGroup 'Nope' not found"):
        env._execute_tool("Nope", "add", [1, 2])
    with pytest.raises(ValueError, match="Tool 'mul' not found"):
        env._execute_tool("Adder", "mul", [1, 2])


def test_tools_of_two_groups_of_one_class_do_not_share_state():
    first, second = Adder(0), Adder(10)
    assert (first.execute_tool("add", 1, 1), second.execute_tool("add", 1, 1)) == (2, 12)
    assert isinstance(Adder.add, tool)


def test_context_manager_closes_and_lets_exceptions_out():
    closed = []

    class Closing(BaseTextEnv):
        def close(self):
            closed.append(True)

    with pytest.raises(KeyError), Closing():
        raise KeyError("x")
    assert closed == [True]
    assert str(Closing()) == "Env(Closing)"


def test_duplicate_id_is_refused(clean_registry):
    register("twice", MultiplyEnv)
    with pytest.raises(error.RegistrationError, match="twice"):
        register("twice", MultiplyEnv)


def test_unknown_ids_are_refused_by_name(clean_registry):
    with pytest.raises(error.Error, match="nope"):
        make("nope")
    with pytest.raises(error.Error, match="nope"):
        spec("nope")
    with pytest.raises(error.Error, match="nope"):
        deregister("nope")
    with pytest.raises(ValueError, match="nope"):
        aggregate_for_environment("nope", [])
    assert issubclass(error.Error, SlipstreamError)


def test_call_arguments_overlay_registered_ones_and_leave_them_alone(clean_registry):
    seen = []

    class Recorder(BaseTextEnv):
        def __init__(self, a, b):
            super().__init__()
            a.append(1)
            seen.append((list(a), b))

    register("recorder", Recorder, kwargs={"a": [], "b": 1})
    make("recorder", b=2)
    make("recorder")
    assert seen == [([1], 2), ([1], 1)]
    assert spec("recorder").kwargs == {"a": [], "b": 1}


def test_constructor_type_error_names_the_environment(clean_registry):
    register("multiply", MultiplyEnv)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'wrong'.*multiply"):
        make("multiply", wrong=1)


def test_make_refuses_what_is_not_an_environment(clean_registry):
    register("thing", lambda: object())
    with pytest.raises(TypeError, match="must inherit"):
        make("thing")


def test_entry_point_string_is_imported_on_make(clean_registry, monkeypatch):
    module = types.ModuleType("user_pkg_envs")
    module.MyEnv = MultiplyEnv  # type: ignore[attr-defined]
    register("by-name", "user_pkg_envs:MyEnv")
    monkeypatch.setitem(sys.modules, "user_pkg_envs", module)
    assert isinstance(make("by-name", env_config={}, extras={"reward_spec": {"ground_truth": "1"}}), MultiplyEnv)
    register("broken", "user_pkg_envs:Missing")
    with pytest.raises(error.Error, match="no 'Missing'"):
        make("broken")


def test_spec_round_trips_through_json_and_refuses_callables():
    one = EnvSpec("x", "a.b:C", {"k": 1})
    assert EnvSpec.from_json(one.to_json()) == one
    with pytest.raises(ValueError, match="Callable"):
        EnvSpec("x", MultiplyEnv).to_json()
    with pytest.raises(ValueError, match="not an EnvSpec"):
        EnvSpec.from_json('{"bogus": 1}')


def test_pprint_registry_lists_the_bundled_environments():
    text = pprint_registry(disable_print=True)
    assert text is not None
    assert {"text2sql", "gsm8k", "gsm8k_multi_turn", "arithmetic"} <= set(text.split())


def test_default_aggregation_is_the_mean_of_numbers_over_episodes_that_have_them():
    assert default_aggregate_metrics([]) == {}
    assert default_aggregate_metrics([{"a": 1, "b": True, "c": "x"}, {"a": 2, "b": False}, {"d": 5}]) == {
        "a": 1.5,
        "b": 0.5,
        "d": 5.0,
    }


def test_env_config_reads_both_ways_and_survives_pickling():
    config = pickle.loads(pickle.dumps(EnvConfig(db_path="x")))
    assert config.db_path == config["db_path"] == "x"
    assert getattr(config, "missing", "default") == "default"


def test_base_methods_that_must_be_overridden_say_so():
    with pytest.raises(NotImplementedError, match=r"BaseTextEnv\.step"):
        BaseTextEnv().step("x")
    with pytest.raises(NotImplementedError):
        Env().init([])


def test_importing_the_room_imports_no_heavy_package(tmp_path):
    import subprocess

    code = (
        "import sys, slipstream.envs, slipstream.envs.checker, slipstream.envs.text2sql;"
        "bad = {'torch', 'transformers', 'skyrl_gym', 'pandas'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- unchanged classes, when skyrl-gym is installed ---------------------------------------------------------------


def test_an_environment_registered_with_skyrl_gym_runs_unchanged():
    skyrl = pytest.importorskip("skyrl_gym")
    from skyrl_gym.envs.base_text_env import BaseTextEnv as TheirBase
    from skyrl_gym.envs.registration import deregister as their_deregister

    class Theirs(TheirBase):
        def __init__(self, env_config, extras):
            super().__init__()
            self.answer = extras["answer"]

        def step(self, action):
            return {"observations": [], "reward": float(action == self.answer), "done": True, "metadata": {}}

        @staticmethod
        def aggregate_metrics(metrics):
            return {"n": len(metrics)}

    skyrl.register("only-there", entry_point=Theirs)
    try:
        env = make("only-there", env_config={}, extras={"answer": "a"})
        assert isinstance(env, Theirs)
        assert env.step("a")["reward"] == 1.0
        assert aggregate_for_environment("only-there", [{}, {}]) == {"n": 2}
        # Its class may also be registered here.
        register("theirs-here", Theirs)
        assert isinstance(make("theirs-here", env_config={}, extras={"answer": "a"}), Theirs)
    finally:
        their_deregister("only-there")
        registry.pop("theirs-here", None)


@pytest.mark.parametrize(
    "text",
    ["#### 42", "so #### 1,234.", "#### -7", "####42", "#### $42", "none", "#### 1 #### 2", "x\n#### 42.\n", "#### ,"],
)
@pytest.mark.parametrize("truth", ["42", "1234.", "-7", "1", "42.", ""])
def test_gsm8k_rewards_equal_skyrl_gyms(text, truth):
    skyrl = pytest.importorskip("skyrl_gym")
    for name in ("gsm8k", "gsm8k_multi_turn"):
        extras = {"reward_spec": {"ground_truth": truth}, "max_turns": 2}
        ours = envs.make(name, env_config={}, extras=dict(extras))
        theirs = skyrl.make(name, env_config={}, extras=dict(extras))
        mine, reference = ours.step(text), theirs.step(text)
        assert mine["reward"] == pytest.approx(reference["reward"])
        assert mine["done"] == reference["done"]
        assert mine["observations"] == reference["observations"]
