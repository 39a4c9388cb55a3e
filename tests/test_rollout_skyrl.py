"""SkyRL's batched generator output: every check, and the conversion to spans."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import numpy as np
import pytest

from fakes import user
from slipstream.config.settings import FailureBudget, RolloutSettings, SamplingSettings
from slipstream.errors import BudgetExceededError, ContractError
from slipstream.rollout import AttemptSuperseded, Conversion, GroupTask, SkyRLGenerator, Slot, groups_from_skyrl
from slipstream.trajectory import Completed, Failed, Missing, Origin, SamplingSpec, Trajectory, Truncated, VersionRun

PROMPT = [1, 2, 3]


def slots(*samples: int) -> list[Slot]:
    return [Slot("g", "p", sample, len(samples)) for sample in samples]


def output(**changes: Any) -> dict[str, Any]:
    """Two rows; row 1 is a two-turn answer with an observation in the middle."""
    return {
        "prompt_token_ids": [PROMPT, PROMPT],
        "response_ids": [[4, 5], [6, 7, 8, 9]],
        "rewards": [1.0, 0.5],
        "loss_masks": [[1, 1], [1, 0, 0, 1]],
        "stop_reasons": ["stop", "length"],
        "rollout_logprobs": [[-0.1, -0.2], [-0.3, 0.0, 0.0, -0.4]],
        "trajectory_ids": None,
        "rollout_metrics": {"generate/avg": 1.0},
        **changes,
    }


def convert(changes: dict[str, Any] | None = None, **how: Any) -> tuple[Trajectory, ...]:
    (group,) = groups_from_skyrl(output(**(changes or {})), slots(0, 1), Conversion(**how))
    return group.members


def test_masks_become_spans() -> None:
    one, two = convert(version="policy/0/4", sampling=SamplingSpec(temperature=0.7))
    assert [s.origin for s in two.rows[0].spans] == [
        Origin.PROMPT,
        Origin.SAMPLED,
        Origin.OBSERVATION,
        Origin.SAMPLED,
    ]
    assert [s.token_ids for s in two.rows[0].spans] == [(1, 2, 3), (6,), (7, 8), (9,)]
    assert [s.logprobs for s in two.sampled_spans()] == [(-0.3,), (-0.4,)]
    assert [s.turn for s in two.sampled_spans()] == [0, 1]
    span = next(one.sampled_spans())
    assert span.versions == (VersionRun("policy/0/4", 0, 2),)
    assert span.sampling == SamplingSpec(temperature=0.7)
    assert two.turn_rewards() == {1: 0.5}
    assert (one.outcome, two.outcome) == (Completed(), Truncated("turn_tokens"))
    assert one.votes
    assert two.votes


def test_round_trip_of_masks_and_ids() -> None:
    for trajectory, response, mask in zip(convert(), output()["response_ids"], output()["loss_masks"], strict=True):
        spans = trajectory.rows[0].spans[1:]
        assert [t for s in spans for t in s.token_ids] == response
        assert [int(s.trained) for s in spans for _ in s.token_ids] == mask


def test_what_is_not_reported_is_missing_with_its_reason() -> None:
    (one, _) = convert({"rollout_logprobs": None})
    span = next(one.sampled_spans())
    assert span.logprobs == Missing("the generator returned no rollout_logprobs")
    assert span.versions == Missing("the generator does not report weight versions")


def test_token_rewards_keep_their_place_and_those_on_observations_move_to_the_token_before() -> None:
    _, two = convert({"rewards": [[0.0, 1.0], [0.0, 0.25, 0.0, 0.5]]})
    assert [(r.turn, r.position, r.value) for r in two.rewards] == [(0, 0, 0.25), (1, 0, 0.5)]
    one, _ = convert({"rewards": [[0.5, 0.5], [0.0] * 4]})
    assert [(r.turn, r.position, r.value) for r in one.rewards] == [(0, 0, 0.5), (0, 1, 0.5)]


def test_all_zero_token_rewards_are_a_score_of_zero_and_vote() -> None:
    one, _ = convert({"rewards": [[0.0, 0.0], [0.0] * 4]})
    assert one.total_reward == 0.0
    assert one.votes


def test_numpy_arrays_are_accepted() -> None:
    one, _ = convert(
        {
            "response_ids": [np.array([4, 5]), np.array([6, 7, 8, 9])],
            "loss_masks": [np.array([1, 1]), np.array([1, 0, 0, 1])],
            "rewards": np.array([1.0, 0.5]),
        }
    )
    assert next(one.sampled_spans()).token_ids == (4, 5)


@pytest.mark.parametrize(("reward", "reason"), [(None, "no reward"), (Missing("judge down"), "judge down")])
def test_absent_reward_does_not_vote(reward: Any, reason: str) -> None:
    one, two = convert({"rewards": [reward, 0.5]})
    assert not one.votes
    assert reason in (one.unscored or "")
    assert two.votes


def test_wholly_masked_and_empty_rows_are_absent_and_never_a_zero() -> None:
    masked, empty = convert(
        {"response_ids": [[4, 5], []], "loss_masks": [[0, 0], []], "rollout_logprobs": [[0.0, 0.0], []]}
    )
    for member in (masked, empty):
        assert member.sampled_tokens == 0
        assert not member.votes


@pytest.mark.parametrize(
    ("reason", "kind"), [("error_runtime", "failed"), ("abort", "cancelled"), ("context_length", "truncated")]
)
def test_other_stop_reasons_are_typed(reason: str, kind: str) -> None:
    one, _ = convert({"stop_reasons": [reason, "stop"]})
    assert one.outcome.kind == kind


PER_ROW = (
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "is_last_step",
    "env_metrics",
)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"response_ids": [[4, 5]]}, "prompt_token_ids has 2 rows, response_ids has 1"),
        ({"rewards": [1.0]}, "rewards has 1 rows"),
        ({"rewards": [1.0, [0.0] * 4]}, "mixes numbers and per-token lists"),
        ({"rewards": [math.nan, 0.0]}, "row 0: rewards is nan"),
        ({"rewards": [[0.0], [0.0] * 4]}, r"row 0: rewards has 1 entries for 2 response tokens"),
        ({"rewards": [[0.0, math.inf], [0.0] * 4]}, r"row 0: rewards\[1\] is inf"),
        ({"rewards": ["1", {}]}, r"mixes|row \d: rewards"),
        ({"loss_masks": [[1, 1], [1, 0, 0]]}, "row 1: loss_masks has 3 entries for 4"),
        ({"loss_masks": [[1, 2], [1, 0, 0, 1]]}, r"row 0: loss_masks\[1\] is 2, must be 0 or 1"),
        ({"loss_masks": None}, "'loss_masks' is required"),
        ({"rollout_logprobs": [[-0.1], [-0.3, 0.0, 0.0, -0.4]]}, "row 0: rollout_logprobs has 1 entries"),
        ({"rollout_logprobs": [[-0.1, math.nan], [-1.0] * 4]}, r"row 0: rollout_logprobs\[1\] is nan"),
        ({"rollout_logprobs": [[-0.1, 0.3], [-1.0] * 4]}, "must be <= 0"),
        ({"prompt_token_ids": [[], PROMPT]}, "row 0: prompt_token_ids is empty"),
        ({"response_ids": [[4, "5"], [6, 7, 8, 9]]}, "row 0: response_ids must hold non-negative ints"),
        ({"reponse_ids": []}, "unknown key 'reponse_ids'; did you mean 'response_ids'"),
        ({"pixel_values": [1, 2]}, "pixel_values is not supported"),
        ({"trajectory_ids": ["g_1", "g_0"]}, "row 0: trajectory id 'g_1' where the input had 'g_0'"),
        ({"trajectory_ids": [3, 4]}, "row 0: trajectory_ids holds 3"),
        ({"is_last_step": [True, True]}, "is_last_step needs trajectory_ids"),
        *(({key: 5}, f"{key} must be a list .*got int") for key in PER_ROW),
        *(({key: {0: 1, 1: 2}}, f"{key} must be a list .*got dict") for key in PER_ROW),
        ({"response_ids": "ab"}, "response_ids must be a list .*got str"),
        ({"rewards": np.array(5.0)}, "rewards must be a list .*got ndarray"),
        ({"rewards": ["1", "2"]}, "row 0: rewards is '1', must be a finite number"),
        ({"rewards": [10**400, 0.0]}, "row 0: rewards is 1000.*, must be a finite number"),
        ({"rewards": [[0.0, [1.0]], [0.0] * 4]}, r"row 0: rewards\[1\] is \[1.0\], must be a finite number"),
        ({"loss_masks": [[1, np.array([1, 1])], [1, 0, 0, 1]]}, r"row 0: loss_masks\[1\] is array"),
        ({"is_last_step": [np.array([1, 1]), True]}, "row 0: is_last_step is array.*must be True or False"),
        ({"rollout_logprobs": [[-0.1, "x"], [-1.0] * 4]}, r"row 0: rollout_logprobs\[1\] is 'x'"),
        ({"stop_reasons": ["stop", 3]}, "row 1: stop_reasons is 3, must be text"),
        ({"env_metrics": [[1], [2]]}, r"row 0: env_metrics is \[1\], must be a mapping .*or None"),
        ({"env_metrics": [{}, {"n": math.nan}]}, r"row 1: env_metrics\['n'\] is nan.*leave it out"),
        ({"env_metrics": [{"n": 10**400}, None]}, r"row 0: env_metrics\['n'\] is 1000.*leave it out"),
        ({"trajectory_generation_times": 3.0}, "trajectory_generation_times must be a list .*got float"),
        ({"trajectory_generation_times": ["x", 1.0]}, r"trajectory_generation_times\[0\] is 'x'.*give seconds"),
        ({"trajectory_generation_times": [1.0, math.nan]}, r"trajectory_generation_times\[1\] is nan.*give seconds"),
        ({"trajectory_generation_times": [1.0, -2]}, r"trajectory_generation_times\[1\] is -2.0, must be >= 0"),
        ({"trajectory_generation_times": [1.0]}, "has 1 entries; give one per trajectory"),
        ({"trajectory_time_splits": [1.0, 2.0]}, "trajectory_time_splits must be a mapping of 'llm' and 'env'"),
        ({"trajectory_time_splits": {"llm": [1.0, "x"]}}, r"trajectory_time_splits\['llm'\]\[1\] is 'x'"),
        ({"trajectory_time_splits": {"env": 3}}, r"trajectory_time_splits\['env'\] must be a list"),
    ],
)
def test_broken_output_names_the_row_and_the_rule(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        convert(changes)


def test_times_of_a_trajectory_are_shared_out_over_its_turns() -> None:
    mask = {"response_ids": [[4, 5], [6, 7, 8, 9]], "loss_masks": [[1, 1], [1, 0, 1, 1]]}
    splits = {"llm": [2.0, 6.0], "env": np.array([0.5, 1.0]), "queue": "whatever"}
    one, two = convert({**mask, "trajectory_generation_times": [3.0, None], "trajectory_time_splits": splits})
    assert (one.seconds, two.seconds) == (3.0, 0.0)
    assert [(turn.llm_seconds, turn.env_seconds) for turn in one.turns] == [(2.0, 0.5)]
    assert [(turn.llm_seconds, turn.env_seconds) for turn in two.turns] == [(2.0, 0.5), (4.0, 0.5)]


def test_numbers_of_env_metrics_are_kept_and_the_rest_is_left_out() -> None:
    one, two = convert({"env_metrics": [{"n": 1, "x": np.float32(0.5), "text": "a", "more": {"b": 1}}, None]})
    assert one.env_metrics == {"n": 1.0, "x": 0.5}
    assert two.env_metrics == {}


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ContractError, match="2 rows for 3 requested"):
        groups_from_skyrl(output(), slots(0, 1, 2), Conversion())


def test_reward_before_any_sampled_token_is_refused() -> None:
    with pytest.raises(ContractError, match="stands before the first sampled token"):
        convert({"loss_masks": [[0, 1], [1, 0, 0, 1]], "rewards": [[1.0, 0.0], [0.0] * 4]})


def test_groups_are_found_by_id_whatever_their_size() -> None:
    mixed = [Slot("a", "pa", 0, 1), Slot("b", "pb", 0, 1)]
    groups = groups_from_skyrl(output(trajectory_ids=["a_0", "b_0"]), mixed, Conversion())
    assert [(g.group_id, g.prompt_uid, len(g.members)) for g in groups] == [("a", "pa", 1), ("b", "pb", 1)]


# ---- step-wise


def stepwise(**changes: Any) -> dict[str, Any]:
    """Sample 0 in two steps (the second continues the first), sample 1 in one."""
    return {
        "prompt_token_ids": [PROMPT, [*PROMPT, 4, 5, 90, 91], PROMPT],
        "response_ids": [[4, 5], [6], [7]],
        "rewards": [0.0, 1.0, 0.0],
        "loss_masks": [[1, 1], [1], [1]],
        "rollout_logprobs": [[-0.1, -0.2], [-0.3], [-0.4]],
        "trajectory_ids": ["g_0", "g_0", "g_1"],
        "is_last_step": [False, True, True],
        **changes,
    }


def test_steps_that_continue_each_other_are_one_row() -> None:
    (group,) = groups_from_skyrl(stepwise(), slots(0, 1), Conversion())
    first = group.members[0]
    assert len(first.rows) == 1
    assert first.row_tokens(0) == [*PROMPT, 4, 5, 90, 91, 6]
    assert [s.origin for s in first.rows[0].spans][2:] == [Origin.OBSERVATION, Origin.SAMPLED]
    assert first.turn_rewards() == {1: 1.0}
    assert len(group.voters) == 2


def test_steps_with_a_rewritten_prompt_fork_and_train_each_token_once() -> None:
    changed = stepwise(prompt_token_ids=[PROMPT, [1, 2, 77, 91], PROMPT])
    (group,) = groups_from_skyrl(changed, slots(0, 1), Conversion())
    first = group.members[0]
    assert [(row.parent, row.fork_point) for row in first.rows] == [(None, 0), (0, 2)]
    assert first.row_tokens(1) == [1, 2, 77, 91, 6]
    assert first.sampled_tokens == 3
    assert len(group.voters) == 2


@pytest.mark.parametrize("times", [[3.0, 4.0], [3.0, 3.0, 4.0]], ids=["per trajectory", "repeated in each row"])
def test_times_of_step_wise_output_are_those_of_its_trajectories(times: list[float]) -> None:
    changed = stepwise(trajectory_generation_times=times, trajectory_time_splits={"llm": times})
    (group,) = groups_from_skyrl(changed, slots(0, 1), Conversion())
    assert [member.seconds for member in group.members] == [3.0, 4.0]
    assert [[turn.llm_seconds for turn in member.turns] for member in group.members] == [[2.0, 1.0], [4.0]]


def test_a_reward_before_the_last_step_needs_a_choice() -> None:
    early = stepwise(rewards=[0.5, 1.0, 0.0])
    with pytest.raises(ContractError, match="row 0: a reward before the trajectory's last step"):
        groups_from_skyrl(early, slots(0, 1), Conversion())
    (last,) = groups_from_skyrl(early, slots(0, 1), Conversion(step_rewards="last"))
    (each,) = groups_from_skyrl(early, slots(0, 1), Conversion(step_rewards="each"))
    assert last.members[0].turn_rewards() == {1: 1.0}
    assert each.members[0].turn_rewards() == {0: 0.5, 1: 1.0}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"trajectory_ids": ["g_0", "g_1", "g_0"], "is_last_step": [True] * 3}, "not contiguous"),
        ({"is_last_step": [False, False, True]}, "row 1: the last row of 'g_0' lacks is_last_step"),
        ({"is_last_step": [True, True, True]}, "goes on after a row with is_last_step"),
        ({"is_last_step": [False, True, False]}, "row 2: the last row of 'g_1' lacks"),
        ({"trajectory_ids": ["g_0", "g_0", "g_7"]}, r"not asked for: \['g_7'\]; missing: \['g_1'\]"),
    ],
)
def test_broken_steps_name_the_row_and_the_rule(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        groups_from_skyrl(stepwise(**changes), slots(0, 1), Conversion())


# ---- a user's generator object


class Mine:
    """A generator as SkyRL documents it."""

    def __init__(self, fail_first: bool = False) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.fail_first = fail_first

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        self.inputs.append(input_batch)
        if self.fail_first and len(self.inputs) == 1:
            raise ConnectionError("server restarted")
        n = len(input_batch["prompts"])
        return {
            "prompt_token_ids": [PROMPT] * n,
            "response_ids": [[4, 5]] * n,
            "rewards": [float(i) for i in range(n)],
            "loss_masks": [[1, 1]] * n,
            "stop_reasons": ["stop"] * n,
            "rollout_logprobs": [[-0.1, -0.2]] * n,
            "trajectory_ids": input_batch["trajectory_ids"],
        }


TASK = GroupTask("g", "p", (user("hi"),), "gsm8k", {"answer": 1}, n=3, scheduled_step=7)


def test_a_users_generator_gets_the_documented_input_and_gives_a_group() -> None:
    mine = Mine()
    settings = RolloutSettings(sampling=SamplingSettings(temperature=0.8, max_tokens_per_turn=9, stop=("x",)))
    group = asyncio.run(SkyRLGenerator(mine, settings, version=lambda: "policy/0/1").generate_group(TASK))
    (given,) = mine.inputs
    assert given["prompts"] == [[user("hi")]] * 3
    assert given["env_classes"] == ["gsm8k"] * 3
    assert given["env_extras"] == [{"answer": 1}] * 3
    assert [i.to_string() for i in given["trajectory_ids"]] == ["g_0", "g_1", "g_2"]
    assert (given["batch_metadata"].global_step, given["batch_metadata"].training_phase) == (7, "train")
    assert given["sampling_params"]["temperature"] == 0.8
    assert given["sampling_params"]["stop"] == ["x"]
    assert [m.total_reward for m in group.members] == [0.0, 1.0, 2.0]
    assert {m.scheduled_step for m in group.members} == {7}
    assert group.members[0].versions() == {"policy/0/1": 2}


def test_a_raising_generator_is_retried_and_superseded() -> None:
    mine, events = Mine(fail_first=True), []
    generator = SkyRLGenerator(mine, RolloutSettings(), on_event=events.append)
    group = asyncio.run(generator.generate_group(TASK))
    assert len(group.voters) == 3
    assert {m.attempt for m in group.members} == {1}
    superseded = [e.trajectory.outcome for e in events if isinstance(e, AttemptSuperseded)]
    assert len(superseded) == 3
    assert all(isinstance(o, Failed) and "server restarted" in o.reason for o in superseded)


def test_a_generator_that_always_raises_spends_the_budget() -> None:
    class Broken:
        async def generate(self, input_batch: dict[str, Any]) -> Any:
            raise ValueError("no")

    generator = SkyRLGenerator(Broken(), RolloutSettings(failures=FailureBudget(attempts=2)))
    with pytest.raises(BudgetExceededError, match=re.escape("generator_raised (first: ValueError: no)")):
        asyncio.run(generator.generate_group(TASK))


def test_a_generator_that_hangs_meets_its_deadline() -> None:
    class Hanging:
        async def generate(self, input_batch: dict[str, Any]) -> Any:
            await asyncio.Event().wait()

    settings = RolloutSettings(failures=FailureBudget(attempts=1))
    with pytest.raises(BudgetExceededError, match="generator_timeout"):
        asyncio.run(SkyRLGenerator(Hanging(), settings, seconds=0.05).generate_group(TASK))


def test_a_broken_output_stops_the_run_at_once() -> None:
    class Short(Mine):
        async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
            return {**await super().generate(input_batch), "loss_masks": [[1, 1]]}

    with pytest.raises(ContractError, match="loss_masks has 1 rows"):
        asyncio.run(SkyRLGenerator(Short(), RolloutSettings()).generate_group(TASK))
