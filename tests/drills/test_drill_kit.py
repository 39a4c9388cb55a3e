"""What the drills themselves say of an injected death."""

from __future__ import annotations

from drill_kit import Kill, fates

from slipstream.ledger import Event

DOWN = "replica {0} is down {0} ended by signal 9; the end of /x/{0}.log:\nwords"
ERROR = "InferenceError: no replica came back within 9 s: engine-0 is down (engine-0 ended by signal 9)"


def event(time: float, kind: str, message: str) -> Event:
    return Event(0, kind, None, {"message": message}, {"time": time})


def test_each_death_is_told_of_between_it_and_the_next_of_its_name() -> None:
    kills = [Kill(1, "engine-0"), Kill(2, "engine-1"), Kill(5, "engine-0")]
    events = [event(1.1, "warning", DOWN.format("engine-0")), event(2.1, "warning", DOWN.format("engine-1"))]
    assert [fate for _, fate in fates(kills, events)] == ["told", "told", ""]
    later = event(5.1, "warning", DOWN.format("engine-0"))
    assert [fate for _, fate in fates(kills, [*events, later])] == ["told"] * 3
    assert [fate for _, fate in fates(kills, [later])] == ["", "", "told"], "one telling does for one death"


def test_the_end_of_a_start_excuses_one_death_of_each_name() -> None:
    kills = [Kill(1, "engine-0"), Kill(1.5, "engine-1"), Kill(4, "engine-0"), Kill(6, "engine-0")]
    events = [event(2, "error", ERROR), event(6.5, "warning", DOWN.format("engine-0"))]
    stopped = "stopped (InferenceError: no replica came back within N s: engine-N is down (engine-N ended by signal N))"
    assert [fate for _, fate in fates(kills, events)] == [stopped, stopped, "", "told"]


def test_the_router_is_told_of_in_its_own_words() -> None:
    told = event(1.1, "warning", "the router is down: router ended by signal 9; the end of /x/router.log:\nwords")
    assert [fate for _, fate in fates([Kill(1, "router")], [told])] == ["told"]
