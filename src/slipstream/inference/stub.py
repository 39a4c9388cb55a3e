"""``StubEngine``: the timing of an engine without its arithmetic: continuous batching over a real prefix cache.

Owns: which request waits, runs and finishes at which step, what is found in the cache, and how long a step takes.
Refuses: clocks and models.  ``step`` says how many seconds it takes; the caller lets them pass, really (a server for
benchmarks) or not (a simulation), so that both do the same.

The cache works as vLLM's: full blocks, found by the chain of everything before them, kept when a request is done, and
dropped least recently used first when room is needed.  Running requests hold their blocks; one that finds no room
waits.  A step computes new prompt tokens up to a budget, and one token of every running sequence whose prompt is done.

>>> engine = StubEngine(StubTimes(), "replica-0")
>>> engine.submit("a", tuple(range(100)), 2)
>>> while engine.busy:
...     seconds, done = engine.step()
>>> engine.submit("b", tuple(range(100)) + (7,) * 20, 1)
>>> engine.step()[1][0].cached_tokens
96
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StubTimes:
    """How fast an engine is.  The defaults are of the order of an 8B model on one recent GPU."""

    step_seconds: float = 0.012
    """One pass over the weights, whatever the batch."""
    sequence_seconds: float = 0.0002
    """Added for each running sequence (attention over its context, sampling)."""
    prefill_tokens_per_second: float = 12000.0
    step_tokens: int = 2048
    """New prompt tokens that one step takes on."""
    max_running: int = 64
    cache_tokens: int = 65536
    """Capacity of the KV cache, running sequences included."""
    block_tokens: int = 16


@dataclass(frozen=True)
class StubResult:
    """One finished request."""

    request_id: str
    token_ids: tuple[int, ...]
    cached_tokens: int


class BlockCache:
    """Prefix blocks: pinned while a request runs, least recently used ones dropped when room is needed."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._capacity, self._block = blocks, block_tokens
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pinned: dict[int, int] = {}
        self._extra = 0  # blocks of outputs and half-filled ones, which have no key yet

    def chain(self, ids: tuple[int, ...]) -> list[int]:
        """Keys of the full blocks of ``ids``, each hashing all that stands before it."""
        keys, key = [], 0
        for at in range(0, len(ids) - self._block + 1, self._block):
            key = hash((key, ids[at : at + self._block]))
            keys.append(key)
        return keys

    def found(self, keys: list[int]) -> int:
        """Leading blocks that are there."""
        count = 0
        for key in keys:
            if key not in self._idle and key not in self._pinned:
                break
            count += 1
        return count

    def reserve(self, keys: list[int], blocks: int) -> bool:
        """Pin ``keys`` and room for ``blocks`` in all; False (and nothing changed) when there is not enough."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self._pinned]
        need = blocks - (len(set(keys)) - len(fresh))
        if self._used_pinned() + need > self._capacity:
            return False
        for key in fresh:
            self._idle.pop(key, None)
        for key in keys:
            self._pinned[key] = self._pinned.get(key, 0) + 1
        self._extra += blocks - len(keys)
        while len(self._idle) + self._used_pinned() > self._capacity:
            self._idle.popitem(last=False)
        return True

    def release(self, keys: list[int], blocks: int, whole: list[int]) -> None:
        """Unpin; the blocks of ``whole`` (prompt and output) stay for later requests, the first longest."""
        self._extra -= blocks - len(keys)
        for key in keys:
            self._pinned[key] -= 1
            if not self._pinned[key]:
                del self._pinned[key]
        for key in reversed(whole):
            if key not in self._pinned:
                self._idle[key] = None
                self._idle.move_to_end(key)
        while len(self._idle) + self._used_pinned() > self._capacity:
            self._idle.popitem(last=False)

    def _used_pinned(self) -> int:
        return len(self._pinned) + self._extra


@dataclass
class _Running:
    request_id: str
    prompt: tuple[int, ...]
    wanted: int
    keys: list[int]
    blocks: int
    cached: int
    to_prefill: int
    output: list[int] = field(default_factory=list)


class StubEngine:
    """See the module."""

    def __init__(self, times: StubTimes, name: str) -> None:
        self.times, self.name = times, name
        self.cache = BlockCache(times.cache_tokens // times.block_tokens, times.block_tokens)
        self.prompt_tokens = self.cached_tokens = 0
        self._waiting: deque[tuple[str, tuple[int, ...], int]] = deque()
        self._running: list[_Running] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def submit(self, request_id: str, prompt: tuple[int, ...], tokens: int) -> None:
        """Ask for ``tokens`` new tokens after ``prompt``.

        Raises:
            ValueError: it could never fit into the cache.
        """
        if len(prompt) + tokens > self.times.cache_tokens:
            raise ValueError(f"{request_id}: {len(prompt)} + {tokens} tokens never fit into {self.times.cache_tokens}")
        self._waiting.append((request_id, prompt, tokens))

    def _admit(self) -> None:
        block = self.times.block_tokens
        while self._waiting and len(self._running) < self.times.max_running:
            request_id, prompt, tokens = self._waiting[0]
            keys = self.cache.chain(prompt)
            # The last prompt token is always computed: its logits are what the first token is drawn from.
            cached = min(self.cache.found(keys) * block, (len(prompt) - 1) // block * block)
            blocks = -(-(len(prompt) + tokens) // block)
            if not self.cache.reserve(keys, blocks):
                return
            self._waiting.popleft()
            self.prompt_tokens += len(prompt)
            self.cached_tokens += cached
            self._running.append(_Running(request_id, prompt, tokens, keys, blocks, cached, len(prompt) - cached))

    def step(self) -> tuple[float, list[StubResult]]:
        """Do one step; returns how long it takes, and what is finished at its end."""
        self._admit()
        budget, prefilled = self.times.step_tokens, 0
        done = []
        for run in self._running:
            if run.to_prefill:
                took = min(run.to_prefill, budget - prefilled)
                prefilled += took
                run.to_prefill -= took
                if run.to_prefill:
                    continue
            run.output.append(self._token(run))
            if len(run.output) == run.wanted:
                done.append(run)
        seconds = self.times.step_seconds + self.times.sequence_seconds * len(self._running)
        seconds += prefilled / self.times.prefill_tokens_per_second
        for run in done:
            self._running.remove(run)
            self.cache.release(run.keys, run.blocks, self.cache.chain((*run.prompt, *run.output)))
        return seconds, [StubResult(run.request_id, tuple(run.output), run.cached) for run in done]

    @staticmethod
    def _token(run: _Running) -> int:
        """Told by the request, so that a turn is the same on every replica."""
        text = f"{run.request_id}:{len(run.output)}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % 50000
