"""Publishing under faults: a verification that answers late, and deltas that are duplicated, dropped or reordered."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from drill_kit import ASYNC, ENDLESS, MOMENTS, cause, drilling, sound, versions_are_known
from test_drill_environment import STARTS, Until

from run_kit import tiny_settings
from slipstream.config.settings import InferenceSettings
from slipstream.errors import InferenceError, PublishError, SlipstreamError
from slipstream.inference.client import HttpEngine
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.launch.engines import embedded_server
from slipstream.inference.launch.process import Child, free_port
from slipstream.ledger import LedgerReader
from slipstream.trainers import serving
from slipstream.trainers.run import Run
from slipstream.weights import Deadlines, DeltaTransport, Publisher
from slipstream.weights.transport import Staged

pytestmark = pytest.mark.proof


async def run_until(settings: Any, enough: Callable[[], bool]) -> Counter[str]:
    """Start a run again and again until enough has been injected; why it stopped in between."""
    stopped: Counter[str] = Counter()
    for _ in range(STARTS):
        try:
            await Run(settings, [Until(enough)]).run()
        except PublishError as error:
            stopped[cause(error)] += 1
            continue
        return stopped
    raise AssertionError(f"not done after {STARTS} starts: {stopped}")


def receipts(run_dir: Path) -> list[dict[str, Any]]:
    """What every publish of the run did to every replica."""
    return [event.data["receipt"] for event in LedgerReader(run_dir).events("receipt")]


# ---- a verification that is late

DEADLINE = 2.0


async def test_a_slow_verification(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    injected = "the checksums of a publish come late, half of the time after their deadline"
    with drilling("slow a verifier: weights", injected) as drill:
        late: Counter[str] = Counter()
        told = EmbeddedEngine.checksum

        async def slow(self: EmbeddedEngine) -> Mapping[str, str]:
            if drill.rng.random() < 0.4:
                after = drill.rng.random() < 0.5
                late["after the deadline" if after else "in time"] += 1
                await asyncio.sleep(DEADLINE * (1.5 if after else 0.25 * drill.rng.random()))
            return await told(self)

        monkeypatch.setattr(EmbeddedEngine, "checksum", slow)
        monkeypatch.setattr(serving, "Publisher", partial(Publisher, deadlines=Deadlines(verify=DEADLINE)))
        with drill.nothing_left():
            settings = tiny_settings(tiny_dir, tmp_path / "r", *ASYNC, *ENDLESS)
            stopped = await run_until(settings, lambda: late.total() >= MOMENTS)
        sound(tmp_path / "r")
        versions_are_known(tmp_path / "r")
        for why, times in stopped.items():
            assert "not done within" in why, why
            drill.happened(f"stopped, naming it ({why}); resumed", times)
        repeated = [r for r in receipts(tmp_path / "r") if r["attempts"] > 1]
        assert all(r["verification"]["verdict"] == "ok" for r in receipts(tmp_path / "r") if r["result"] == "published")
        drill.happened("published at another attempt, the fault in the receipt", len(repeated))
        drill.happened("waited for it", late.total() - drill.moments)
        drill.notes["late"] = dict(late)


# ---- deltas


class BadLine:
    """The way of announcements to engines, which loses, repeats and swaps them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.injected: Counter[str] = Counter()
        self._before: dict[str, Mapping[str, Any]] = {}
        self._kept: dict[str, Mapping[str, Any]] = {}
        self.send = HttpEngine.transfer

    async def transfer(self, engine: HttpEngine, info: Mapping[str, Any]) -> None:
        """In place of ``HttpEngine.transfer``."""
        if info.get("kind") != "delta":
            await self.send(engine, info)
            return
        where = engine.base_url
        before, kept = self._before.get(where), self._kept.pop(where, None)
        self._before[where] = info
        if kept is not None:
            await self._stray(engine, kept)  # what was overtaken arrives after all
        fault = self.rng.choice(FAULTS) if self.rng.random() < 0.5 else None
        packets = list(info["packets"])
        if fault is None or (fault in OF_PACKETS and len(packets) < 2) or (fault == "stale" and before is None):
            await self.send(engine, info)
            return
        self.injected[fault] += 1
        await self._deliver(engine, info, before, packets, fault)

    async def _deliver(
        self, engine: HttpEngine, info: Mapping[str, Any], before: Mapping[str, Any] | None, packets: list[str],
        fault: str,
    ) -> None:  # fmt: skip
        if fault == "dropped":
            return  # and the sender believes that it arrived
        if fault == "lost":
            raise InferenceError("the connection broke before the announcement was sent")
        if fault == "overtaken":
            self._kept[engine.base_url] = info
            return
        if fault == "stale":
            assert before is not None
            await self.send(engine, before)  # an older one arrives in its place
            return
        if fault == "packet dropped":
            del packets[self.rng.randrange(len(packets))]
        elif fault == "packets reordered":
            packets.reverse()
        elif fault == "packets duplicated":
            packets = [packet for packet in packets for _ in range(2)]
        elif fault == "packet torn":
            packets[-1] = str(self._torn(Path(packets[-1])))
        await self.send(engine, {**info, "packets": packets})
        if fault == "duplicated":
            await self._stray(engine, info)

    async def _stray(self, engine: HttpEngine, info: Mapping[str, Any]) -> None:
        """A message whose answer nobody waits for."""
        with contextlib.suppress(SlipstreamError):
            await self.send(engine, info)

    def _torn(self, packet: Path) -> Path:
        body = bytearray(packet.read_bytes())
        body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        torn = packet.with_suffix(".torn")
        torn.write_bytes(bytes(body))
        return torn


OF_PACKETS = ["packet dropped", "packets reordered", "packets duplicated"]
FAULTS = ["duplicated", "dropped", "lost", "overtaken", "stale", "packet torn", *OF_PACKETS]


@contextlib.asynccontextmanager
async def engines(model: Path, folder: Path, count: int) -> AsyncIterator[list[str]]:
    """Engine servers as processes; their URLs."""
    settings = InferenceSettings(dtype="float32", threads=1)
    urls, children = [], []
    try:
        for i in range(count):
            spec = embedded_server(f"engine-{i}", str(model), settings, log_dir=folder, transfer_dir=folder)
            port = free_port()
            child = Child(spec.name, spec.command(port), {**spec.env, "OMP_NUM_THREADS": "1"}, log=spec.log)
            await child.start()
            children.append(child)
            urls.append(f"http://127.0.0.1:{port}")
        for child, url in zip(children, urls, strict=True):
            line = HttpEngine(url)
            await child.ready(line.health, 600)
            await line.close()
        yield urls
    finally:
        for child in children:
            await child.stop()


async def test_deltas_on_a_bad_line(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    injected = "announcements and packets duplicated, dropped, lost, overtaken, stale, reordered, torn"
    with drilling("duplicate, drop and reorder deltas", injected) as drill, drill.nothing_left() as ports:
        line = BadLine(drill.rng)

        async def transfer(self: HttpEngine, info: Mapping[str, Any]) -> None:
            await line.transfer(self, info)

        monkeypatch.setattr(HttpEngine, "transfer", transfer)
        sent: dict[str, Mapping[str, str]] = {}
        stage = DeltaTransport.stage

        def noted(self: DeltaTransport, version: str, export: Any) -> Staged:
            staged = stage(self, version, export)
            sent[staged.version] = staged.checksums
            return staged

        monkeypatch.setattr(DeltaTransport, "stage", noted)
        run_dir = tmp_path / "r"
        async with engines(tiny_dir, tmp_path, 2) as urls:
            ports.update(int(url.rpartition(":")[2]) for url in urls)
            more = [
                *ASYNC, *ENDLESS, "inference.engine=http", f"inference.urls=[{','.join(urls)}]",
                "inference.transport=delta", f"inference.transfer_dir={tmp_path / 'transfer'}",
                "inference.router.process=client", "inference.launch.health_seconds=1",
                "inference.launch.ready_seconds=30", "rollout.failures.attempts=6",
            ]  # fmt: skip
            settings = tiny_settings(tiny_dir, run_dir, *more)
            stopped = await run_until(settings, lambda: line.injected.total() >= MOMENTS)
            last = LedgerReader(run_dir).events("publish")[-1]
            held = [await held_by(url) for url in urls]
        sound(run_dir)
        versions_are_known(run_dir)
        # A replica that took it late has two receipts of it.
        final = {r["replica"]: r for r in receipts(run_dir) if r["version"] == last.data["version"]}
        serving_now = [r for r in final.values() if r["result"] == "published"]
        assert serving_now
        for receipt in serving_now:
            sums, version = held[int(receipt["replica"].rpartition("-")[2])]
            assert version == last.data["version"]
            assert {name: sums[name] for name in sent[version]} == sent[version], f"{receipt['replica']} holds others"
        for why, times in stopped.items():
            drill.happened(f"stopped ({why}); resumed", times)
        drill.happened("the run went on, every replica that served verified", line.injected.total() - drill.moments)
        results = Counter((r["result"], r["attempts"]) for r in receipts(run_dir))
        drill.notes["faults"] = dict(line.injected)
        drill.notes["receipts"] = {f"{result} at attempt {n}": count for (result, n), count in sorted(results.items())}


async def held_by(url: str) -> tuple[Mapping[str, str], str]:
    """Checksums of everything that a server's model holds, and the version that it names."""
    async with HttpEngine(url) as engine:
        return await engine.checksum(), await engine.weight_version()
