"""The simulator against what can be worked out by hand, and the library's schedules and routers inside it."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import BudgetExceededError
from slipstream.simulate import Outcome, Scenario, load_scenario, overlap_bound, simulate
from slipstream.simulate.replica import Replica, Request
from slipstream.simulate.scenario import EngineModel


def scenario(**given: Any) -> Scenario:
    """Eight sequences of 100 tokens, one decode step of 10 ms whatever the batch: a step generates for 1 s."""
    base = {
        "work.samples_per_prompt": 2, "work.turn_tokens": 100, "work.prompt_tokens": 0,
        "engines.step_seconds": 0.01, "engines.step_seconds_per_sequence": 0,
        "trainer.update_seconds": 0.4, "trainer.publish_seconds": 0.1,
        "schedule.prompts_per_step": 4, "schedule.steps": 12,
    }  # fmt: skip
    values = {**base, **{key.replace("__", "."): value for key, value in given.items()}}
    return load_scenario([], [f"{key}={value}" for key, value in values.items()])


def run(**given: Any) -> Outcome:
    return simulate(scenario(**given))


def turn(name: str, tokens: float, context: float = 0.0, group: str = "g", prompt: float = 0.0) -> Request:
    return Request(name, group, context, prompt, tokens, 0.0)


def completions(replica: Replica, requests: list[Request]) -> dict[str, float]:
    for request in requests:
        replica.start(request)
    out = {}
    while (at := replica.next_completion()) is not None:
        replica.advance(at)
        out.update({request.session: at for request in replica.finished()})
    return out


# -- one replica


def test_sequences_share_decode_steps_and_the_last_ones_are_faster() -> None:
    """Ten and thirty tokens at 1 s + 1 s per sequence: 10 steps of 3 s, then 20 of 2 s."""
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=1))
    assert completions(replica, [turn("a", 10), turn("b", 30)]) == pytest.approx({"a": 30.0, "b": 70.0})
    assert replica.busy_seconds == pytest.approx(70.0)
    assert replica.batch_seconds == pytest.approx(2 * 30 + 40)


def test_requests_beyond_the_batch_wait_their_turn() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=0, max_batch=1))
    assert completions(replica, [turn("a", 5), turn("b", 5)]) == pytest.approx({"a": 5.0, "b": 10.0})


def test_only_tokens_that_are_not_cached_are_computed_and_a_publish_empties_the_cache() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=0, prefill_seconds_per_token=1))
    assert completions(replica, [turn("a", 5, context=20)])["a"] == pytest.approx(25.0)
    assert completions(replica, [turn("a", 5, context=30)])["a"] == pytest.approx(25.0 + 5 + 5)
    replica.pause()
    replica.resume(1, anew=False)
    assert completions(replica, [turn("a", 5, context=40)])["a"] == pytest.approx(35.0 + 40 + 5)


def test_a_group_shares_its_prompt() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=0, prefill_seconds_per_token=1))
    completions(replica, [turn("a", 1, context=50, prompt=50), turn("b", 1, context=50, prompt=50)])
    assert replica.computed_tokens == 50.0
    assert replica.cached_tokens == 50.0


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, prefill_seconds_per_token=1, cache_tokens=25))
    for name in ("a", "b"):
        completions(replica, [turn(name, 10, context=10, group=f"g{name}")])
    completions(replica, [turn("a", 1, context=20, group="ga")])
    assert replica.cached_tokens == 0.0


def test_a_pause_freezes_and_tokens_are_credited_to_the_version_that_sampled_them() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=0))
    request = turn("a", 10)
    replica.start(request)
    replica.advance(4.0)
    replica.pause()
    replica.advance(6.0)
    replica.resume(1, anew=False)
    assert replica.next_completion() == pytest.approx(12.0)
    replica.advance(12.0)
    assert replica.finished() == [request]
    assert request.done == pytest.approx({0: 4.0, 1: 6.0})
    assert replica.paused_seconds == pytest.approx(2.0)


def test_an_aborted_request_is_computed_anew() -> None:
    replica = Replica("r", EngineModel(step_seconds=1, step_seconds_per_sequence=0, prefill_seconds_per_token=1))
    replica.start(turn("a", 10, context=7))
    replica.advance(7.0 + 4.0)
    replica.pause()
    replica.resume(1, anew=True)
    assert replica.next_completion() == pytest.approx(11.0 + (7 + 4) + 6)


# -- schedules


def test_a_synchronous_step_is_the_sum_of_its_phases() -> None:
    outcome = run()
    assert outcome.seconds_per_step == pytest.approx(1.0 + 0.4 + 0.1)
    assert outcome.lags == {0: 1.0}
    assert outcome.trainer_idle == pytest.approx(1.0 / 1.5)
    assert outcome.engine_idle == pytest.approx(0.4 / 1.5)
    assert outcome.tokens_per_second == pytest.approx(800 / 1.5)


@pytest.mark.parametrize(("update", "expected"), [(0.4, 1.1), (3.0, 3.1)])
def test_one_step_off_takes_the_longer_of_the_two_phases(update: float, expected: float) -> None:
    outcome = run(schedule__kind="one_step_off", trainer__update_seconds=update)
    assert outcome.seconds_per_step == pytest.approx(expected)
    assert outcome.lags == {1: 1.0}
    assert outcome.token_lags == {1: 1.0}, "no token of a batch is of another version"
    assert outcome.mixed_share == 0.0


@pytest.mark.parametrize("kind", ["fully_async", "windowed", "bounded"])
def test_a_trainer_that_is_slower_than_the_engines_is_never_idle(kind: str) -> None:
    given = scenario(schedule__kind=kind, schedule__max_staleness_steps=1, trainer__update_seconds=3.0)
    outcome = simulate(given)
    assert outcome.seconds_per_step == pytest.approx(3.1)
    assert outcome.seconds_per_step >= overlap_bound(outcome, given) - 1e-9


def test_no_schedule_beats_the_overlap_bound_and_asynchrony_comes_near_it() -> None:
    given = scenario(work__turn_tokens='"lognormal(100, 1.5)"', engines__step_seconds_per_sequence=0.002,
                     engines__max_batch=16, schedule__steps=40)  # fmt: skip
    sync = simulate(given)
    deep = simulate(given.under(kind="fully_async", max_staleness_steps=8))
    bound = overlap_bound(deep, given)
    assert bound <= deep.seconds_per_step < 1.25 * bound
    assert sync.seconds_per_step > 1.5 * bound


@pytest.mark.parametrize("on_stale", ["wait", "drop", "requeue"])
def test_the_hard_bound_holds_in_time(on_stale: str) -> None:
    outcome = run(schedule__kind="bounded", schedule__max_staleness_steps=1, schedule__on_stale=on_stale,
                  work__turn_tokens='"lognormal(100, 2.0)"', schedule__steps=30)  # fmt: skip
    assert max(outcome.lags) <= 1
    assert (outcome.evicted_share > 0) == (on_stale != "wait")
    assert (outcome.length_bias < -0.005) == (on_stale != "wait")


def test_long_groups_lag_more_than_the_budget_under_the_capacity_rule() -> None:
    outcome = run(schedule__kind="fully_async", schedule__max_staleness_steps=1,
                  work__turn_tokens='"lognormal(100, 2.0)"', schedule__steps=30)  # fmt: skip
    assert max(outcome.lags) > 1
    assert outcome.mixed_share > 0
    assert outcome.length_bias == pytest.approx(0.0)


def test_lengths_do_not_depend_on_the_schedule_and_a_seed_repeats_everything() -> None:
    given = scenario(work__turn_tokens='"lognormal(100, 1.0)"')
    sync = simulate(given)
    assert simulate(given).figures() == sync.figures()
    assert simulate(given.model_copy(update={"seed": 1})).figures() != sync.figures()
    other = simulate(given.under(kind="fully_async", max_staleness_steps=2))
    assert sum(s.tokens for s in other.steps) == pytest.approx(sum(s.tokens for s in sync.steps))


def test_every_trained_token_has_a_version_and_none_is_from_the_future() -> None:
    outcome = run(schedule__kind="fully_async", schedule__max_staleness_steps=3, work__turns=3,
                  work__env_seconds='"exponential(0.3)"')  # fmt: skip
    for step in outcome.steps:
        assert sum(step.token_lags.values()) == pytest.approx(step.tokens)
        assert min(step.token_lags) >= 0


@pytest.mark.parametrize(("pause", "mixed"), [("keep", True), ("abort", True), ("wait", False)])
def test_pause_modes(pause: str, mixed: bool) -> None:
    """Requests of 1 s, publishes in their middle: frozen or aborted they see two versions, awaited they do not."""
    outcome = run(schedule__kind="fully_async", schedule__max_staleness_steps=1, trainer__pause=pause)
    assert (outcome.mixed_share > 0) == mixed


def test_refused_and_failed_groups_are_replaced_or_make_steps_short() -> None:
    filled = run(schedule__kind="fully_async", schedule__max_staleness_steps=1, schedule__full_batch="true",
                 work__refused_share=0.3, work__failed_share=0.1)  # fmt: skip
    assert {step.groups for step in filled.steps} == {4}
    assert filled.left_out["refused"] > 0
    assert filled.left_out["no_voters"] > 0
    assert min(step.groups for step in run(work__refused_share=0.5).steps) < 4


def test_a_run_that_a_schedule_ends_ends_in_the_simulator_too() -> None:
    with pytest.raises(BudgetExceededError, match="no_voters"):
        run(schedule__kind="fully_async", work__failed_share=0.999)


# -- routers


def test_sticky_routing_keeps_prefixes_and_round_robin_loses_them() -> None:
    """The published direction: session affinity raises the hit share, and with costly prefills the throughput."""
    given: dict[str, Any] = {
        "work__turns": 6, "work__turn_tokens": 60, "work__observation_tokens": 200, "work__prompt_tokens": 500,
        "work__env_seconds": '"exponential(0.5)"', "engines__replicas": 4, "schedule__prompts_per_step": 12,
        "engines__prefill_seconds_per_token": 0.0002, "engines__step_seconds_per_sequence": 0.005,
    }  # fmt: skip
    sticky = run(**given)
    spread = run(**given, engines__router="round_robin")
    hashed = run(**given, engines__router="consistent_hash")
    assert sticky.cache_hits > spread.cache_hits + 0.1
    assert sticky.tokens_per_second > 1.1 * spread.tokens_per_second
    assert hashed.cache_hits == pytest.approx(sticky.cache_hits, abs=0.05)
    assert sticky.tokens_per_second > hashed.tokens_per_second
