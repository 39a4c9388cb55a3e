"""A real ``vllm-router`` in front of tiny servers that say who they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import httpx
from aiohttp import web

from slipstream.inference.launch.process import free_port
from slipstream.inference.launch.router import RouterProcess
from slipstream.inference.routing import ReplicaView


class Echoes:
    """Servers whose token endpoint answers with their own URL, at once or when released."""

    def __init__(self, count: int) -> None:
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
        self.running: Counter[str] = Counter()
        self._release = asyncio.Event()
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Echoes:
        for url in self.urls:
            app = web.Application()
            app.router.add_get("/health", self._health)
            app.router.add_post("/inference/v1/generate", self._answer(url))
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", int(url.rsplit(":", 1)[1])).start()
            self._runners.append(runner)
        return self

    async def __aexit__(self, *_) -> None:
        self._release.set()
        for runner in self._runners:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _answer(self, url):
        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            self.running[url] += 1
            if body.get("hold"):
                await self._release.wait()
            self.running[url] -= 1
            return web.json_response({"url": url})

        return answer

    async def release(self) -> None:
        """Let every held request end."""
        self._release.set()
        await asyncio.sleep(0)
        self._release = asyncio.Event()


class Routed:
    """One router over the echoes, and the views that a policy needs to predict it."""

    def __init__(self, echoes: Echoes, router: RouterProcess, http: httpx.AsyncClient) -> None:
        self.echoes, self.router, self.http = echoes, router, http
        self.held: list[asyncio.Task[str]] = []

    async def views(self) -> list[ReplicaView]:
        """The router's own order and loads (it counts a request down a moment after it has answered)."""
        workers = (await self.http.get("/workers")).json()["workers"]
        return [ReplicaView(worker["url"], worker["load"]) for worker in workers]

    async def ask(self, session: str | None, ids: list[int], hold: bool = False) -> str:
        """Who answered; for a held request, who has it."""
        headers = {"X-Session-ID": session} if session else {}
        body = {"token_ids": ids, "hold": hold}
        if not hold:
            return (await self.http.post("/inference/v1/generate", json=body, headers=headers)).json()["url"]
        before = Counter(self.echoes.running)
        task = asyncio.create_task(self.ask_body(body, headers))
        self.held.append(task)
        async with asyncio.timeout(20):
            while not (more := self.echoes.running - before):
                await asyncio.sleep(0.002)
        return next(iter(more))

    async def ask_body(self, body, headers) -> str:
        return (await self.http.post("/inference/v1/generate", json=body, headers=headers)).json()["url"]

    async def release(self) -> None:
        await self.echoes.release()
        await asyncio.gather(*self.held)
        self.held.clear()


@contextlib.asynccontextmanager
async def routed(policy: str, count: int, log):
    async with Echoes(count) as echoes:
        router = RouterProcess(policy, log)
        await router.start(echoes.urls)
        try:
            async with httpx.AsyncClient(base_url=router.url, timeout=30) as http:
                yield Routed(echoes, router, http)
        finally:
            await router.stop()
