"""The stub engine: its cache finds what it should, keeps to its room, and takes the time it says."""

import random

import pytest

from slipstream.inference.stub import BlockCache, StubEngine, StubTimes


def finish(engine):
    seconds, results = 0.0, {}
    while engine.busy:
        took, done = engine.step()
        seconds += took
        results.update({result.request_id: result for result in done})
    return seconds, results


def test_a_second_turn_finds_the_first_in_the_cache():
    engine = StubEngine(StubTimes(), "r")
    engine.submit("t0", tuple(range(160)), 40)
    _, first = finish(engine)
    prompt = (*range(160), *first["t0"].token_ids, *range(900, 950))
    engine.submit("t1", prompt, 1)
    _, second = finish(engine)
    assert second["t1"].cached_tokens == 192
    assert (engine.prompt_tokens, engine.cached_tokens) == (160 + 250, 192)


def test_another_prompt_finds_nothing_and_a_repeated_one_all_but_its_last_block():
    engine = StubEngine(StubTimes(), "r")
    for name, prompt in (("a", range(64)), ("b", range(1, 65)), ("c", range(64))):
        engine.submit(name, tuple(prompt), 1)
        _, done = finish(engine)
        assert done[name].cached_tokens == {"a": 0, "b": 0, "c": 48}[name]


def test_least_recently_used_prefixes_go_first():
    engine = StubEngine(StubTimes(cache_tokens=320), "r")
    for base in (0, 1000, 2000):
        engine.submit(f"fill{base}", tuple(range(base, base + 128)), 1)
        finish(engine)
    keys = [engine.cache.chain(tuple(range(base, base + 128))) for base in (0, 1000, 2000)]
    # 20 blocks, one of them of the last output: of the oldest prompt only the beginning is left.
    assert [engine.cache.found(chain) for chain in keys] == [3, 8, 8]


def test_requests_wait_for_room_and_all_finish():
    engine = StubEngine(StubTimes(cache_tokens=256, max_running=8), "r")
    for i in range(6):
        engine.submit(f"r{i}", tuple(range(1000 * i, 1000 * i + 100)), 20)
    engine.step()
    assert len(engine._running) == 2
    assert len(finish(engine)[1]) == 6


def test_what_never_fits_is_refused():
    with pytest.raises(ValueError, match="never fit"):
        StubEngine(StubTimes(cache_tokens=64), "r").submit("a", tuple(range(60)), 5)


def test_time_is_steps_plus_prefill():
    times = StubTimes(step_seconds=1.0, sequence_seconds=0.0, prefill_tokens_per_second=100.0, step_tokens=50)
    engine = StubEngine(times, "r")
    engine.submit("a", tuple(range(100)), 3)
    # Two steps of 50 prompt tokens, the second of which makes the first token; two more tokens.
    assert finish(engine)[0] == pytest.approx(4 * 1.0 + 100 / 100)


def test_a_batch_shares_its_steps():
    alone = StubEngine(StubTimes(), "r")
    alone.submit("a", (1,) * 32, 50)
    together = StubEngine(StubTimes(), "r")
    for i in range(16):
        together.submit(f"r{i}", (i,) * 32, 50)
    assert finish(together)[0] < 2 * finish(alone)[0]


def test_cache_never_exceeds_its_room():
    rng = random.Random(0)
    cache = BlockCache(40, 4)
    held = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            keys, blocks, whole = held.pop(rng.randrange(len(held)))
            cache.release(keys, blocks, whole)
        else:
            start = rng.randrange(6)
            ids = tuple(range(start, start + rng.randrange(1, 60)))
            keys, whole = cache.chain(ids), cache.chain((*ids, *range(500, 500 + rng.randrange(8))))
            blocks = -(-len(ids) // 4) + 2
            if cache.reserve(keys, blocks):
                held.append((keys, blocks, whole))
        assert len(cache._idle) + cache._used_pinned() <= 40
        assert cache._extra >= 0
    for keys, blocks, whole in held:
        cache.release(keys, blocks, whole)
    assert not cache._pinned
    assert cache._extra == 0
