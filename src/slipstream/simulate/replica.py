"""A decoding engine without a model: batches, queues, prefixes.

Owns: the time that a request takes on one replica, given what else runs there, and the replica's prefix cache.
Refuses: who sends requests and where they go.

All running sequences get a token per decode step, so each has received the same *service* (tokens) since any moment,
and a sequence that needs ``k`` more ends when the replica has served ``k`` more.  The time of a step depends on how
many run: ``step_seconds + step_seconds_per_sequence * n``.  A request first computes those of its tokens that are not
cached; meanwhile nothing is decoded (``prefill_seconds_per_token``).  Requests beyond ``max_batch`` queue, first come
first served.  A pause freezes everything.

Lifecycle: ``advance(now)`` before anything else at a moment; then ``start``, ``pause``, ``resume``, ``finished``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from slipstream.simulate.scenario import EngineModel


@dataclass
class Request:
    """One turn on a replica.  ``done`` counts tokens by the weight version that sampled them."""

    session: str
    group: str
    context: float
    """Tokens before the answer: prompt, earlier turns, observations."""
    prompt: float
    tokens: float
    arrived: float
    done: dict[int, float] = field(default_factory=dict)
    mark: float = 0.0
    """The replica's service when ``done`` was last brought up to date."""
    ends: float = 0.0
    cancelled: bool = False
    owner: Any = None
    """Whoever asked; the replica does not look at it."""

    @property
    def sampled(self) -> float:
        """Tokens so far."""
        return sum(self.done.values())


class Replica:
    """See the module's docstring; ``url`` is its name for the router."""

    def __init__(self, url: str, model: EngineModel) -> None:
        self.url = url
        self.model = model
        self.version = 0
        self.paused = False
        self.now = 0.0
        self.service = 0.0
        self.prefill = 0.0
        """Seconds of prefill that are due."""
        self.heap: list[tuple[float, int, Request]] = []
        self.queue: deque[Request] = deque()
        self.epoch = 0
        """Changes with every event, so that a planned completion can tell that it is out of date."""
        self.running = 0
        self.busy_seconds = 0.0
        self.paused_seconds = 0.0
        self.batch_seconds = 0.0
        self.cached_tokens = 0.0
        self.computed_tokens = 0.0
        self._cache: OrderedDict[str, float] = OrderedDict()
        self._held = 0.0
        self._count = 0

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Serve until ``now``; completions in between must have been taken (``next_completion``)."""
        seconds = now - self.now
        self.now = now
        if self.paused:
            self.paused_seconds += seconds
            return
        if not self.running or seconds <= 0:
            return
        self.busy_seconds += seconds
        self.batch_seconds += seconds * self.running
        spent = min(self.prefill, seconds)
        self.prefill -= spent
        self.service += (seconds - spent) / self.model.seconds_per_token(self.running)

    def next_completion(self) -> float | None:
        """When the next sequence ends if nothing else happens."""
        self._drop_cancelled()
        if self.paused or not self.heap:
            return None
        left = max(self.heap[0][0] - self.service, 0.0)
        return self.now + self.prefill + left * self.model.seconds_per_token(self.running)

    def finished(self) -> list[Request]:
        """Take the sequences that have ended by now, and start those that waited for a place."""
        done = []
        self._drop_cancelled()
        while self.heap and self.heap[0][0] <= self.service + 1e-9:
            request = heapq.heappop(self.heap)[2]
            if not request.cancelled:
                self._account(request)
                self.running -= 1
                self._remember(request)
                done.append(request)
        self._fill()
        return done

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return self.running + len(self.queue)

    def start(self, request: Request) -> None:
        """A request arrives."""
        self.queue.append(request)
        self._fill()

    def cancel(self, request: Request) -> None:
        """A request is taken back."""
        if request.cancelled:
            return
        request.cancelled = True
        if request in self.queue:
            self.queue.remove(request)
        else:
            self._account(request)
            self.running -= 1
        self._fill()

    def _fill(self) -> None:
        self.epoch += 1
        while self.queue and self.running < self.model.max_batch and not self.paused:
            request = self.queue.popleft()
            known = min(max(self._cached(request.session), min(self._cached(request.group), request.prompt)),
                        request.context)  # fmt: skip
            new = request.context - known + request.sampled
            self.cached_tokens += known
            self.computed_tokens += new
            self.prefill += new * self.model.prefill_seconds_per_token
            request.mark = self.service
            request.ends = self.service + request.tokens - request.sampled
            self._keep(request.group, request.prompt)
            heapq.heappush(self.heap, (request.ends, self._count, request))
            self._count += 1
            self.running += 1

    def _account(self, request: Request) -> None:
        """Credit the tokens served since the last mark to the current version."""
        tokens = min(self.service, request.ends) - request.mark
        if tokens > 0:
            request.done[self.version] = request.done.get(self.version, 0.0) + tokens
        request.mark = self.service

    def _drop_cancelled(self) -> None:
        while self.heap and self.heap[0][2].cancelled:
            heapq.heappop(self.heap)

    # -- publishes -----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Freeze."""
        self.paused = True
        self.epoch += 1

    def resume(self, version: int, *, anew: bool) -> None:
        """Go on under new weights; ``anew`` recomputes what running sequences have in the cache (pause ``abort``)."""
        for _, _, request in self.heap:
            if not request.cancelled:
                self._account(request)
                if anew:
                    again = request.context + request.sampled
                    self.computed_tokens += again
                    self.prefill += again * self.model.prefill_seconds_per_token
        self.version, self.paused = version, False
        if not self.model.keep_cache:
            self._cache.clear()
            self._held = 0.0
        self._fill()

    # -- the prefix cache ----------------------------------------------------------------------------------------

    def _cached(self, key: str) -> float:
        if key not in self._cache:
            return 0.0
        self._cache.move_to_end(key)
        return self._cache[key]

    def _remember(self, request: Request) -> None:
        self._keep(request.session, request.context + request.tokens)

    def _keep(self, key: str, tokens: float) -> None:
        before = self._cache.get(key, 0.0)
        self._cache[key] = max(tokens, before)
        self._cache.move_to_end(key)
        self._held += self._cache[key] - before
        while self._cache and self._held > self.model.cache_tokens:
            self._held -= self._cache.popitem(last=False)[1]
