"""Environment threads: bounds, deadlines, abandonment, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from slipstream.errors import DeadlineError
from slipstream.rollout.envpool import EnvPool, EscapeError, PoolClosedError


async def test_results_and_errors_come_back() -> None:
    pool = EnvPool(2)
    assert await pool.call(lambda: 41 + 1, seconds=5) == 42

    def boom() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await pool.call(boom, seconds=5)
    pool.close()


@pytest.mark.parametrize("escape", [SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
async def test_a_call_cannot_end_the_program_or_the_task(escape: BaseException) -> None:
    pool = EnvPool(1)

    def leave() -> None:
        raise escape

    with pytest.raises(EscapeError, match=type(escape).__name__):
        await pool.call(leave, seconds=5)
    assert await pool.call(lambda: 1, seconds=5) == 1
    pool.close()


async def test_never_more_calls_at_once_than_workers_and_threads_are_reused() -> None:
    pool = EnvPool(3)
    now = most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1

    await asyncio.gather(*(pool.call(work, seconds=5) for _ in range(20)))
    assert most == 3
    assert pool.threads == 3
    pool.close()


async def test_a_hanging_call_is_abandoned_and_the_pool_stays_usable() -> None:
    pool = EnvPool(1)
    release = threading.Event()
    late: list[str] = []

    def hang() -> str:
        release.wait(30)
        return "late"

    with pytest.raises(DeadlineError, match=r"has not returned after 0.05 s"):
        await pool.call(hang, seconds=0.05, late=late.append)
    assert (pool.abandoned, pool.leaked, pool.threads) == (1, 1, 0)
    assert await pool.call(lambda: "next", seconds=5) == "next"
    release.set()
    for _ in range(200):
        if late:
            break
        await asyncio.sleep(0.01)
    assert late == ["late"]
    assert pool.leaked == 0
    pool.close()


async def test_waiting_for_a_thread_does_not_count_against_the_deadline() -> None:
    pool = EnvPool(1)
    results = await asyncio.gather(*(pool.call(lambda: time.sleep(0.06), seconds=0.15) for _ in range(5)))
    assert results == [None] * 5
    assert pool.abandoned == 0
    pool.close()


async def test_a_cancelled_callers_result_goes_to_late_and_the_thread_is_used_again() -> None:
    pool = EnvPool(1)
    started, release = threading.Event(), threading.Event()
    late: list[int] = []

    def slow() -> int:
        started.set()
        release.wait(30)
        return 7

    task = asyncio.ensure_future(pool.call(slow, seconds=30, late=late.append))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await pool.call(lambda: 1, seconds=5) == 1
    assert late == [7]
    assert (pool.abandoned, pool.threads) == (0, 1)
    pool.close()


async def test_a_cancelled_hanging_call_gives_its_place_back_at_its_deadline() -> None:
    pool = EnvPool(1)
    started, release = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(30)

    task = asyncio.ensure_future(pool.call(hang, seconds=0.2))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    async with asyncio.timeout(5):
        assert await pool.call(lambda: 1, seconds=5) == 1
    assert pool.leaked == 1
    release.set()
    pool.close()


async def test_close_ends_threads_and_refuses_calls() -> None:
    pool = EnvPool(2)
    before = threading.active_count()
    await asyncio.gather(*(pool.call(lambda: time.sleep(0.01), seconds=5) for _ in range(4)))
    pool.close()
    assert pool.threads == 0
    assert threading.active_count() == before
    with pytest.raises(PoolClosedError):
        await pool.call(lambda: 1, seconds=5)


def test_a_pool_serves_several_event_loops() -> None:
    pool = EnvPool(1)

    async def busy() -> list[int]:
        return list(await asyncio.gather(*(pool.call(lambda: 1, seconds=5) for _ in range(3))))

    assert asyncio.run(busy()) == asyncio.run(busy()) == [1, 1, 1]
    pool.close()
