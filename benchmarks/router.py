"""Routing policies over stub engines: multi-turn sessions, live behind the real ``vllm-router`` and simulated.

A stub engine (``slipstream.inference.stub``) has the timing of a real one (continuous batching, a prefix cache with
finite room) and no arithmetic.  The same engines, the same sessions and the same seeds are run twice:

* live: each engine behind its own port, the real router in front, real waiting;
* simulated: a virtual clock, the Python policies of ``slipstream.inference.routing``.

Sessions come in groups that share a prompt (the samples of one question); their lengths, numbers of turns and waits for
the environment are drawn from long-tailed distributions.  So many are in flight at once; as one ends the next begins.
What counts: finished turns per second until the last session has ended, and the 90th percentile of a turn's latency.

    python benchmarks/router.py                 # writes benchmarks/results/router.json
    python benchmarks/router.py --only simulated --seeds 20
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import machine

from slipstream.inference.routing import ReplicaView, RouteRequest, build_policy
from slipstream.inference.stub import StubEngine, StubResult, StubTimes

HERE = Path(__file__).resolve().parent
POLICIES = ("sticky_least_loaded", "consistent_hash", "cache_aware", "round_robin")
BASE_PORT = 19200


# ---- the work


@dataclass(frozen=True)
class Turn:
    """One request of a session: what comes before it, how much is sampled, how long the environment then takes."""

    observation: tuple[int, ...]
    tokens: int
    wait: float


@dataclass(frozen=True)
class Session:
    name: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """Of what kind the sessions are; lengths in tokens, waits in seconds."""

    groups: int
    samples: int
    in_flight: int
    replicas: int
    question: int = 600
    turns: float = 4.0
    answer: float = 120.0
    observation: float = 180.0
    wait: float = 0.4
    tail: float = 0.8
    """Standard deviation of the logarithm of lengths and waits."""

    def sessions(self, seed: int) -> list[Session]:
        """All sessions, in the order in which they begin."""
        rng = random.Random(seed)

        def drawn(mean: float, most: float) -> float:
            return min(rng.lognormvariate(0, self.tail) * mean / (2.718281828 ** (self.tail**2 / 2)), most)

        made = []
        for group in range(self.groups):
            question = tuple(rng.randrange(50000) for _ in range(self.question))
            for sample in range(self.samples):
                turns = []
                for i in range(max(1, round(drawn(self.turns, 4 * self.turns)))):
                    seen = tuple(rng.randrange(50000) for _ in range(1 + round(drawn(self.observation, 1500))))
                    answer = 1 + round(drawn(self.answer, 1000))
                    turns.append(Turn(seen if i else question, answer, drawn(self.wait, 20 * self.wait)))
                made.append(Session(f"g{seed}-{group}/s{sample}/a0", tuple(turns)))
        return made


@dataclass
class Measured:
    """One run."""

    latencies: list[float]
    sessions: list[float]
    makespan: float
    hit_rate: float
    share: dict[str, int]

    def summary(self) -> dict[str, float]:
        nines = statistics.quantiles(self.latencies, n=10)
        turns = sorted(self.share.values())
        return {
            "turns_per_s": len(self.latencies) / self.makespan,
            "p50_s": statistics.median(self.latencies),
            "p90_s": nines[-1],
            "session_p90_s": statistics.quantiles(self.sessions, n=10)[-1],
            "prefix_hit_rate": self.hit_rate,
            "busiest_over_mean": turns[-1] * len(turns) / sum(turns),
        }


# ---- simulated


def simulate(load: Load, times: StubTimes, policy_name: str, seed: int) -> Measured:
    """A virtual clock; every event is a function to call at its time."""
    urls = [f"http://127.0.0.1:{BASE_PORT + i}" for i in range(load.replicas)]
    engines = {url: StubEngine(times, url) for url in urls}
    policy = build_policy(policy_name)
    order = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    stepping: dict[str, bool] = dict.fromkeys(urls, False)
    answered: dict[str, Callable[[float, StubResult], None]] = {}
    out = Measured([], [], 0.0, 0.0, dict.fromkeys(urls, 0))
    todo: Iterator[Session] = iter(load.sessions(seed))

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def step(url: str, now: float) -> None:
        engine = engines[url]
        if stepping[url] or not engine.busy:
            return
        stepping[url] = True
        seconds, done = engine.step()

        def end(then: float) -> None:
            stepping[url] = False
            for result in done:
                answered.pop(result.request_id)(then, result)
            step(url, then)

        at(now + seconds, end)

    def begin(now: float) -> None:
        session = next(todo, None)
        if session is None:
            out.makespan = max(out.makespan, now)
            return
        began = now

        def turn(index: int, context: tuple[int, ...], now: float) -> None:
            this = session.turns[index]
            prompt = (*context, *this.observation)
            views = [ReplicaView(url, engines[url].load) for url in urls]
            url = policy.choose(RouteRequest(session.name, prompt), views, now)
            out.share[url] += 1
            name, asked = f"{session.name}/t{index}", now

            def done(then: float, result: StubResult) -> None:
                out.latencies.append(then - asked)
                if index + 1 < len(session.turns):
                    after = (*prompt, *result.token_ids)
                    at(then + this.wait, lambda later: turn(index + 1, after, later))
                else:
                    out.sessions.append(then - began)
                    policy.finish_session(session.name)
                    begin(then)

            answered[name] = done
            engines[url].submit(name, prompt, this.tokens)
            step(url, now)

        turn(0, (), now)

    for _ in range(load.in_flight):
        at(0.0, begin)
    while events:
        now, _, what = heapq.heappop(events)
        what(now)
    prompt = sum(engine.prompt_tokens for engine in engines.values())
    out.hit_rate = sum(engine.cached_tokens for engine in engines.values()) / prompt
    return out


# ---- live


class Served:
    """A stub engine behind a port: its steps take as long as they say."""

    def __init__(self, times: StubTimes, port: int) -> None:
        self.engine = StubEngine(times, str(port))
        self.port = port
        self._work = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[StubResult]] = {}
        self._task: asyncio.Task[None] | None = None
        self._runner: Any = None

    async def start(self) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self._health)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._runner.cleanup()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            due = time.perf_counter()
            while self.engine.busy:
                seconds, done = self.engine.step()
                due += seconds
                # Lateness of one sleep is taken off the next, so that a busy machine does not slow the engine down.
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due = max(due, time.perf_counter() - 0.05)
                for result in done:
                    self._waiting.pop(result.request_id).set_result(result)
            self._work.clear()

    async def _health(self, request: Any) -> Any:
        from aiohttp import web

        return web.Response(text="ok")

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        name = body["request_id"]
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self.engine.submit(name, tuple(body["token_ids"]), body["sampling_params"]["max_tokens"])
        self._work.set()
        result = await self._waiting[name]
        return web.json_response({"token_ids": list(result.token_ids), "port": self.port})


def slower(times: StubTimes, factor: float) -> StubTimes:
    """The same engine in slow motion."""
    return replace(
        times,
        step_seconds=times.step_seconds * factor,
        sequence_seconds=times.sequence_seconds * factor,
        prefill_tokens_per_second=times.prefill_tokens_per_second / factor,
    )


async def live(load: Load, times: StubTimes, policy: str, seed: int, factor: float) -> Measured:
    """Real waiting, the real router.

    All engines share this process, so everything may be slowed down by ``factor`` (and its times divided by it): the
    router and Python then have that much longer for their part.
    """
    times = slower(times, factor)
    import aiohttp

    from slipstream.inference.launch.router import RouterProcess

    served = [Served(times, BASE_PORT + i) for i in range(load.replicas)]
    for one in served:
        await one.start()
    out = Measured([], [], 0.0, 0.0, {str(one.port): 0 for one in served})
    todo = iter(load.sessions(seed))
    with tempfile.TemporaryDirectory() as logs:
        router = RouterProcess(policy, Path(logs) / "router.log")
        await router.start([f"http://127.0.0.1:{one.port}" for one in served])
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(router.url, connector=connector) as http:

                async def play(session: Session) -> None:
                    began, context = time.perf_counter(), ()
                    for index, turn in enumerate(session.turns):
                        context = (*context, *turn.observation)
                        body = {
                            "token_ids": context,
                            "request_id": f"{session.name}/t{index}",
                            "sampling_params": {"max_tokens": turn.tokens},
                        }
                        asked = time.perf_counter()
                        headers = {"X-Session-ID": session.name}
                        async with http.post("/inference/v1/generate", json=body, headers=headers) as response:
                            if response.status != 200:
                                raise SystemExit(f"the router answered {response.status}: {await response.text()}")
                            answer = await response.json()
                        out.latencies.append(time.perf_counter() - asked)
                        out.share[str(answer["port"])] += 1
                        context = (*context, *answer["token_ids"])
                        if index + 1 < len(session.turns):
                            await asyncio.sleep(turn.wait * factor)
                    out.sessions.append(time.perf_counter() - began)
                    async with http.post("/finish_session", params={"session_id": session.name}) as response:
                        await response.read()

                async def worker() -> None:
                    for session in todo:
                        await play(session)

                began = time.perf_counter()
                await asyncio.gather(*(worker() for _ in range(load.in_flight)))
                out.makespan = time.perf_counter() - began
        finally:
            await router.stop()
            for one in served:
                await one.stop()
    out.latencies, out.sessions = ([x / factor for x in each] for each in (out.latencies, out.sessions))
    out.makespan /= factor
    prompt = sum(one.engine.prompt_tokens for one in served)
    out.hit_rate = sum(one.engine.cached_tokens for one in served) / prompt
    return out


# ---- the comparison


def ratios(by_policy: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """``sticky_least_loaded`` against each other policy; above 1 is better for it in both."""
    best = by_policy["sticky_least_loaded"]
    return {
        other: {
            "throughput": round(best["turns_per_s"] / got["turns_per_s"], 3),
            "p90": round(got["p90_s"] / best["p90_s"], 3),
        }
        for other, got in by_policy.items()
        if other != "sticky_least_loaded"
    }


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the seeds."""
    return {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]}


def agree(a: dict[str, dict[str, float]], b: dict[str, dict[str, float]], band: float) -> dict[str, dict[str, bool]]:
    """Whether both say better, or both say worse; a ratio within ``band`` of 1 says neither."""

    def sign(x: float) -> int:
        return 0 if abs(x - 1) <= band else (1 if x > 1 else -1)

    return {other: {key: sign(a[other][key]) * sign(b[other][key]) >= 0 for key in a[other]} for other in a}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    where = machine()
    # As many sessions as all replicas together can run, and caches that hold little more than what runs.
    times = StubTimes(max_running=8, cache_tokens=16384, sequence_seconds=0.001)
    load = Load(options.groups, options.samples, options.in_flight, options.replicas)
    sides = {"simulated": lambda p, s: simulate(load, times, p, s)}
    if options.only != "simulated":
        sides["live"] = lambda p, s: asyncio.run(live(load, times, p, s, options.slow_down))
    if options.only == "live":
        del sides["simulated"]
    result: dict[str, Any] = {}
    per_seed: dict[str, dict[str, list[dict[str, float]]]] = {}
    for side, run in sides.items():
        runs: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        # Policies alternate within a seed, so that a busy minute hits all of them.
        for seed in range(options.seeds):
            for policy in POLICIES:
                summary = run(policy, seed).summary()
                runs[policy].append(summary)
                shown = ", ".join(f"{key} {value:.3g}" for key, value in summary.items())
                print(f"{side} seed {seed} {policy}: {shown}", flush=True)
        result[side] = {policy: middle(each) for policy, each in runs.items()}
        per_seed[side] = runs
        result[f"{side}_ratio"] = ratios(result[side])
    if len(sides) == 2:
        result["agree_in_sign"] = agree(result["live_ratio"], result["simulated_ratio"], options.band)
    return {
        **result,
        "seeds": options.seeds,
        "band": options.band,
        "slow_down": options.slow_down,
        "load": asdict(load),
        "engine": asdict(times),
        "machine": where,
        "runs": {
            side: {policy: [{k: round(v, 4) for k, v in run.items()} for run in each] for policy, each in runs.items()}
            for side, runs in per_seed.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--band", type=float, default=0.02, help="a ratio this near to 1 has no sign")
    parser.add_argument("--slow-down", type=float, default=2.0, help="factor on all times of the live runs")
    parser.add_argument("--only", choices=["simulated", "live"])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "router.json")
    options = parser.parse_args()
    result = compare(options)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    if options.only is None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
