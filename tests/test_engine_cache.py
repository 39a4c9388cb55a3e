"""The prefix tree and the KV budget: what is reused, what never is, what goes first."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engine_kit import gap, model_and_tokenizer, prompt, request, running, weights
from slipstream.errors import RequestError
from slipstream.inference.embedded.attention import DecodeBatch, RowStore
from slipstream.inference.embedded.prefix import MIN_SPLIT, PrefixTree
from slipstream.inference.embedded.sharing import row_starts


def array(*ids):
    return np.array(ids, np.int64)


def block(tokens):
    return torch.arange(tokens, dtype=torch.float32).view(1, 1, 1, tokens, 1)


def filled(tree, scope, ids):
    node, matched = tree.match(scope, ids)
    child = tree.extend(node, ids[matched:])
    child.kv = block(len(ids) - matched)
    return child


# ---- the tree


def test_a_split_keeps_both_parts_and_the_identity_of_the_back():
    tree = PrefixTree()
    long = filled(tree, ("v",), np.arange(40))
    tree.acquire(long)
    front, matched = tree.match(("v",), np.concatenate([np.arange(25), array(99)]))
    assert (matched, front.end, long.start, long.end, tree.tokens) == (25, 25, 25, 40, 40)
    assert long.path() == [front, long]
    assert front.kv.flatten().tolist() == list(range(25))
    assert long.kv.flatten().tolist() == list(range(25, 40))


def test_a_short_common_run_is_not_split_off():
    tree = PrefixTree()
    filled(tree, ("v",), np.arange(40))
    other = np.concatenate([np.arange(MIN_SPLIT - 1), array(99, 98)])
    assert tree.match(("v",), other)[1] == 0
    filled(tree, ("v",), other)
    assert tree.match(("v",), other)[1] == len(other)
    assert tree.match(("v",), np.arange(40))[1] == 40


def test_scopes_never_meet():
    tree = PrefixTree()
    filled(tree, ("v0", "a"), np.arange(20))
    for scope in (("v1", "a"), ("v0", "b"), ("v0", None)):
        assert tree.match(scope, np.arange(20))[1] == 0


def test_eviction_takes_the_oldest_idle_leaf_and_spares_what_is_referenced():
    tree = PrefixTree()
    first = filled(tree, ("v",), np.arange(100, 120))
    second = filled(tree, ("v",), np.arange(200, 220))
    third = filled(tree, ("v",), np.arange(300, 320))
    tree.acquire(first)
    tree.match(("v",), np.arange(200, 220))  # used again: now younger than the third
    assert tree.evict(5) == 20
    assert third.kv is None
    assert second.kv is not None
    assert tree.evict(1000) == 20
    assert first.kv is not None
    assert tree.tokens == 20


def test_eviction_climbs_to_parents_that_became_leaves():
    tree = PrefixTree()
    filled(tree, ("v",), np.arange(20))
    filled(tree, ("v",), np.arange(50))
    assert tree.evict(50) == 50
    assert tree.tokens == 0


def test_clear_hides_every_block_and_frees_it_with_its_last_user():
    tree = PrefixTree()
    held, idle = filled(tree, ("v",), np.arange(20)), filled(tree, ("v",), np.arange(100, 130))
    tree.acquire(held)
    tree.clear()
    assert idle.kv is None
    assert tree.match(("v",), np.arange(20))[1] == 0
    assert held.kv is not None
    tree.release(held)
    assert held.kv is None
    assert tree.tokens == 0


def test_blocks_of_an_unkept_scope_go_with_their_last_user():
    tree = PrefixTree()
    node, _ = tree.match(("once",), np.arange(20), kept=False)
    child = tree.extend(node, np.arange(20))
    child.kv = block(20)
    tree.acquire(child)
    tree.acquire(child)
    tree.release(child)
    assert tree.match(("once",), np.arange(20), kept=False)[1] == 20
    tree.release(child)
    assert tree.tokens == 0


# ---- what is read together


def leaves(tree, *ids):
    return [filled(tree, ("v",), np.array(i, np.int64)) for i in ids]


def test_long_shared_prefixes_are_read_together_and_short_ones_copied():
    tree = PrefixTree()
    common = list(range(600))
    a, b = leaves(tree, [*common, *range(1000, 1050)], [*common, *range(2000, 2050)])
    assert row_starts([a, a, a, b], cost=1024) == [600] * 4
    assert row_starts([a, b], cost=1024) == [0, 0]


def test_a_short_root_is_shared_for_the_sake_of_its_children():
    tree = PrefixTree()
    a, b = leaves(tree, [*range(10), *range(1000, 2000)], [*range(10), *range(3000, 4000)])
    assert row_starts([a, a, a, b, b, b], cost=100) == [1010] * 6
    assert row_starts([a, a, a, b], cost=100) == [1010, 1010, 1010, 10]


# ---- through the engine


async def test_a_groups_prompt_is_computed_once():
    ids = prompt(50)
    async with running() as engine:
        results = await engine.generate_many([request(ids, seed=n, max_tokens=3, group_id="g") for n in range(8)])
        metrics = await engine.metrics()
    assert metrics["prefill_tokens_total"] == 50
    assert [r.cached_tokens for r in results] == [0] + [50] * 7


async def test_a_common_template_is_computed_once_in_the_same_step():
    template = prompt(40, 7)
    async with running() as engine:
        await engine.generate_many([request(template + prompt(6, n), max_tokens=1) for n in range(5)])
        assert (await engine.metrics())["prefill_tokens_total"] == 40 + 5 * 6


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_the_next_turn_of_a_session_computes_only_its_tail(prefix_caching):
    model, _ = model_and_tokenizer()
    ids = prompt(30)
    async with running(prefix_caching=prefix_caching) as engine:
        for turn in range(3):
            ask = request(ids, session_id="s", max_tokens=10, seed=turn)
            before = (await engine.metrics())["prefill_tokens_total"]
            got = await engine.generate(ask)
            spent = (await engine.metrics())["prefill_tokens_total"] - before
            # The newest sampled token has never been fed, so it is part of the tail.
            assert spent == (30 if turn == 0 else 1 + 5)
            assert got.cached_tokens == len(ids) - spent
            assert gap(model, ask, got) < 2e-4
            ids = ids + got.token_ids + prompt(5, turn)


async def test_without_prefix_caching_nothing_crosses_requests():
    async with running(prefix_caching=False) as engine:
        await engine.generate(request(prompt(30)))
        assert (await engine.generate(request(prompt(30)))).cached_tokens == 0
        group = [request(prompt(30), group_id="g", seed=n) for n in range(3)]
        assert [r.cached_tokens for r in await engine.generate_many(group)] == [0, 30, 30]
        assert (await engine.metrics())["kv_cache_usage_perc"] == 0


async def test_a_prompt_that_ends_inside_a_block_reads_its_last_token_again():
    model, _ = model_and_tokenizer()
    async with running() as engine:
        await engine.generate(request(prompt(40), max_tokens=1))
        ask = request(prompt(40)[:25], max_tokens=6)
        got = await engine.generate(ask)
        assert got.cached_tokens == 24
        assert gap(model, ask, got) < 2e-4


async def test_salts_separate_caches():
    async with running() as engine:
        await engine.generate(request(prompt(30), cache_salt="a"))
        assert (await engine.generate(request(prompt(30), cache_salt="b"))).cached_tokens == 0
        assert (await engine.generate(request(prompt(30), cache_salt="a"))).cached_tokens == 30


async def test_no_block_crosses_a_weight_update_not_even_back_to_the_same_name():
    model, _ = model_and_tokenizer()
    other, _ = model_and_tokenizer(seed=1)
    async with running() as engine:
        await engine.generate(request(prompt(30)))
        for version, source in (("policy/0/1", other), ("policy/0/0", model)):
            await engine.pause("abort")
            await engine.start_weight_update()
            await engine.update_weights(weights(source))
            await engine.finish_weight_update(version)
            await engine.resume()
            ask = request(prompt(30), max_tokens=12)
            got = await engine.generate(ask)
            assert got.cached_tokens == 0
            assert gap(source, ask, got) < 2e-4


async def test_a_row_that_spans_an_update_is_never_cached():
    other, _ = model_and_tokenizer(seed=1)
    async with running() as engine:
        task = asyncio.create_task(engine.generate(request(prompt(30), max_tokens=300)))
        while (await engine.metrics())["generation_tokens_total"] < 20:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        await engine.start_weight_update()
        await engine.update_weights(weights(other))
        await engine.finish_weight_update("policy/0/1")
        await engine.resume()
        first = await task
        assert [v.version for v in first.versions] == ["policy/0/0", "policy/0/1"]
        ask = request((*prompt(30), *first.token_ids[:100]), max_tokens=5)
        again = await engine.generate(ask)
        assert again.cached_tokens == 0
        assert gap(other, ask, again) < 2e-4


async def test_reset_forgets_everything():
    async with running() as engine:
        await engine.generate(request(prompt(30)))
        await engine.reset_prefix_cache()
        assert (await engine.metrics())["kv_cache_usage_perc"] == 0
        assert (await engine.generate(request(prompt(30)))).cached_tokens == 0


async def test_idle_blocks_are_evicted_for_new_requests():
    model, _ = model_and_tokenizer()
    async with running(kv_cache_tokens=200) as engine:
        for n in range(12):
            ask = request(prompt(80, n), max_tokens=10, seed=n)
            assert gap(model, ask, await engine.generate(ask)) < 2e-4
            assert (await engine.metrics())["kv_cache_usage_perc"] <= 1
        assert (await engine.generate(request(prompt(80, 0)))).cached_tokens == 0


async def test_blocks_that_rows_hold_too_are_given_up_for_room():
    """Distinct prompts whose blocks and copies do not fit together: the copies stay, decoding reads one buffer."""
    model, _ = model_and_tokenizer()
    asked = [request(prompt(60, n), max_tokens=40, seed=n) for n in range(4)]
    async with running(kv_cache_tokens=4 * (60 + 40) + 20) as engine:
        task = asyncio.gather(*(engine.generate(ask) for ask in asked))
        copied = 0
        while not task.done():
            blocks = await engine._call(lambda core: (len(core.decoding), len(core._shared), core.tree.tokens))
            copied = max(copied, blocks[0] if blocks[1] == 0 else 0)
            await asyncio.sleep(0)
        for ask, got in zip(asked, await task, strict=True):
            assert gap(model, ask, got) < 2e-4
    assert copied == 4


async def test_requests_wait_for_room_and_all_finish():
    model, _ = model_and_tokenizer()
    asked = [request(prompt(40, n), max_tokens=20, seed=n) for n in range(10)]
    async with running(kv_cache_tokens=160) as engine:
        task = asyncio.gather(*(engine.generate(ask) for ask in asked))
        seen = []
        while not task.done():
            metrics = await engine.metrics()
            seen.append(metrics["num_requests_running"])
            assert metrics["kv_cache_usage_perc"] <= 1
            await asyncio.sleep(0)
        for ask, got in zip(asked, await task, strict=True):
            assert gap(model, ask, got) < 2e-4
    assert 1 <= max(seen) <= 2


async def test_a_request_that_can_never_fit_is_refused_with_the_mend():
    async with running(kv_cache_tokens=64) as engine:
        with pytest.raises(RequestError, match="kv_cache_tokens"):
            await engine.generate(request(prompt(60), max_tokens=10))
        assert len((await engine.generate(request(prompt(50), max_tokens=10))).token_ids) == 10


@pytest.mark.parametrize("exact", [True, False])
def test_how_much_of_the_rows_is_read_tells_nothing_of_earlier_batches_in_exact_mode(exact):
    def width(before):
        rows = RowStore(1, 1, 2, torch.float32, torch.device("cpu"))
        for longest in (*before, 20):
            rows.reserve(2, longest, 0)
        batch = DecodeBatch(begin=0, n=2, lengths=[3, 19], starts=[0, 0], paths=[[], []])
        rows.prepare(batch, exact)
        return batch.width

    assert width([]) == 32
    assert (width([44]) == 32) is exact


async def test_what_ran_before_changes_no_bit_in_exact_mode():
    """A long answer makes the rows wide; the next short ones are those of a fresh engine."""

    async def last_of(lengths):
        async with running(determinism="exact") as engine:
            for length in lengths:
                asked = [request(prompt(3, i), max_tokens=length, seed=i) for i in range(3)]
                found = await engine.generate_many(asked)
        return [(r.token_ids, r.logprobs) for r in found]

    assert await last_of([44, 12]) == await last_of([12])
