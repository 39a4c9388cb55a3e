"""A real engine over a fake model: the contract without torch, for tests, dry runs and examples.

Owns: ``FakeEngine``, a bigram model in numpy behind the whole ``Engine`` contract (sampling specs, seeds, stops,
versions, pause modes, in-place updates, prefix-cache accounting), and scripted replies.
Refuses: speed, text-to-ids, transformers.

The logits after token ``t`` are ``embed.weight[t] @ head.weight.T + head.bias``.  With ``scale=0`` (default) they
are uniform: every token has log-probability ``-log(vocab)``.  The parameters are real, so that an update changes
what is sampled, and ``checksum`` reads back what the model holds.

>>> import asyncio
>>> async def one() -> tuple[int, ...]:
...     engine = FakeEngine(vocab=300, eos_token_ids=(299,), reply=lambda request: [72, 105])
...     return (await engine.generate(GenerateRequest("r0", (1, 2), max_tokens=8))).token_ids
>>> asyncio.run(one())
(72, 105, 299)

A reply script returns the ids to emit (an end-of-sequence id is added unless it ends with one), or None to let
the model sample; what it raises, the caller of ``generate`` gets.  Scripted tokens carry the log-probability that
the untruncated model gives them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import InferenceError, RequestError
from slipstream.inference.checksum import tensor_checksum
from slipstream.inference.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    TopLogprobs,
)
from slipstream.trajectory import SamplingSpec, VersionRun

Float64Array = npt.NDArray[np.float64]
Reply = Callable[[GenerateRequest], Sequence[int] | None]
Decode = Callable[[Sequence[int]], str]


def processed_logprobs(
    logits_V: Float64Array, spec: SamplingSpec, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Float64Array:
    """Log-probabilities (V,) of the distribution that ``spec`` samples from; -inf outside its support.

    Order as in vLLM: penalties, temperature, min-p, top-k, top-p.  At temperature 0 this is the plain
    log-softmax (the token is its argmax).
    """
    logits = logits_V.astype(np.float64).copy()
    if spec.repetition_penalty != 1:
        seen = np.unique(np.asarray([*prompt, *output], np.int64))
        chosen = logits[seen]
        logits[seen] = np.where(chosen > 0, chosen / spec.repetition_penalty, chosen * spec.repetition_penalty)
    for token, count in Counter(output).items():
        logits[token] -= spec.frequency_penalty * count + spec.presence_penalty
    if not spec.greedy:
        logits /= spec.temperature
        logits[logits < logits.max() + np.log(spec.min_p or 1e-300)] = -np.inf
        if 0 < spec.top_k < len(logits):
            logits[logits < np.partition(logits, -spec.top_k)[-spec.top_k]] = -np.inf
        if spec.top_p < 1:
            order = np.argsort(-logits, kind="stable")
            probs = np.exp(logits[order] - logits.max())
            probs /= probs.sum()
            logits[order[np.cumsum(probs) - probs >= spec.top_p]] = -np.inf
    peak = logits.max()
    return np.asarray(logits - peak - np.log(np.exp(logits - peak).sum()), np.float64)


def _uniform(seed: int, position: int) -> float:
    """Counter-based noise in [0, 1): token ``position`` of a request with this seed, whatever else is running."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def bytes_text(ids: Sequence[int]) -> str:
    """Default decoding: ids below 256 are bytes, others are special and dropped."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


@dataclass
class _Run:
    """One request in flight."""

    request: GenerateRequest
    script: list[int] | None
    seed: int
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[npt.NDArray[np.int32]] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


class FakeEngine:
    """``Engine`` over a bigram model; see the module's docstring.

    Args:
        vocab: number of token ids.
        reply: scripted replies, or None to sample.
        tokenizer: anything with ``decode(ids, skip_special_tokens=True)``; default ``bytes_text``.
        eos_token_ids: default: the last id.
        scale: standard deviation of the initial logits; 0 is uniform.
        seed: of the initial weights and of the noise of requests without a seed.
        step_seconds: time one token takes (the event loop runs meanwhile).
    """

    def __init__(
        self,
        vocab: int,
        *,
        reply: Reply | None = None,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] | None = None,
        weight_version: str = "policy/0/0",
        model: str = "policy",
        max_model_len: int = 4096,
        scale: float = 0.0,
        rank: int = 8,
        seed: int = 0,
        step_seconds: float = 0.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        root = float(np.sqrt(scale) / rank**0.25)
        self.weights: dict[str, npt.NDArray[np.float32]] = {
            "embed.weight": (root * rng.standard_normal((vocab, rank))).astype(np.float32),
            "head.weight": (root * rng.standard_normal((vocab, rank))).astype(np.float32),
            "head.bias": np.zeros(vocab, np.float32),
        }
        self.requests: list[GenerateRequest] = []
        """Every request seen, in order of arrival."""
        self._reply = reply
        self._decode: Decode = (
            bytes_text if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
        )
        self._eos = tuple(eos_token_ids) if eos_token_ids is not None else (vocab - 1,)
        self._info = EngineInfo(model, max_model_len, self._eos, {"engine": "fake", "vocab": vocab})
        self._version = weight_version
        self._seed = seed
        self._step_seconds = step_seconds
        self._changed = asyncio.Condition()
        self._running: dict[str, _Run] = {}
        self._waiting: dict[str, _Run] = {}
        self._admit = self._decoding = True
        self._updating = self._closed = False
        # What prompts were computed under which (version, salt): the accounting of a prefix cache.
        self._cache: deque[tuple[str, str | None, tuple[int, ...]]] = deque(maxlen=256)
        self._totals: Counter[str] = Counter()

    # ---- lifecycle

    async def start(self) -> None:
        """Nothing to start; refuses a closed engine."""
        self._check_open()

    async def close(self) -> None:
        """Requests in flight raise ``InferenceError``."""
        self._closed = True
        await self._notify()

    def _check_open(self) -> None:
        if self._closed:
            raise InferenceError("the engine is closed; build a new one")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``; close ends the wait with an error, so it has an owner."""
        if not ready() and not self._closed:
            async with self._changed:
                await self._changed.wait_for(lambda: ready() or self._closed)
        self._check_open()

    async def info(self) -> EngineInfo:
        return self._info

    async def health(self) -> bool:
        return not self._closed

    # ---- data plane

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        run = self._enter(request)
        async for _ in self._tokens(run):
            pass
        return self._result(run)

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        runs: list[_Run] = []
        try:
            for request in requests:
                runs.append(self._enter(request))
        except BaseException:
            for run in runs:
                self._waiting.pop(run.request.request_id, None)
            raise

        async def finish(run: _Run) -> GenerateResult:
            async for _ in self._tokens(run):
                pass
            return self._result(run)

        return list(await asyncio.gather(*(finish(run) for run in runs)))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        run = self._enter(request)
        shown = ""
        sent = 0
        async for _ in self._tokens(run):
            if self._finish(run) is None:
                text = self._decode(run.ids)
                # Text that may still turn into a stop string, or into another character, waits.
                safe = self._safe_length(text, run.request)
                piece = text[len(shown) : safe]
                shown += piece
                new, logs = tuple(run.ids[sent:]), tuple(run.logprobs[sent:])
                sent = len(run.ids)
                yield GenerateResult(request.request_id, new, logs, "length", None, (), piece, finished=False)
        whole = self._result(run)
        yield GenerateResult(
            request.request_id,
            whole.token_ids[sent:],
            whole.logprobs[sent:],
            whole.finish_reason,
            whole.stop_reason,
            whole.versions,
            whole.text[len(shown) :],
            whole.cached_tokens,
            whole.prompt_logprobs,
        )

    @staticmethod
    def _safe_length(text: str, request: GenerateRequest) -> int:
        held = len(text) - len(text.rstrip("\ufffd"))
        for stop in request.stop:
            held = max([held] + [n for n in range(1, len(stop)) if text.endswith(stop[:n])])
        return len(text) - held

    def _enter(self, request: GenerateRequest) -> _Run:
        self._check_open()
        self.requests.append(request)
        vocab = len(self.weights["head.bias"])
        if request.request_id in self._running or request.request_id in self._waiting:
            raise RequestError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        if any(not 0 <= token < vocab for token in request.token_ids):
            raise RequestError(f"request {request.request_id}: token ids must lie in [0, {vocab})")
        if len(request.token_ids) >= self._info.max_model_len:
            raise RequestError(
                f"request {request.request_id}: {len(request.token_ids)} prompt tokens leave no room in a context of "
                f"{self._info.max_model_len}"
            )
        script = self._reply(request) if self._reply is not None else None
        if script is not None:
            script = list(script)
            if not script or script[-1] not in self._eos:
                script.append(self._eos[0])
        seed = request.seed if request.seed is not None else hash((self._seed, len(self.requests)))
        run = _Run(request, script, seed)
        self._waiting[request.request_id] = run
        return run

    async def _tokens(self, run: _Run) -> AsyncIterator[int]:
        """Decode one request; ends when it is finished or aborted."""
        request = run.request
        try:
            await self._until(lambda: self._admit or run.aborted)
            self._waiting.pop(request.request_id, None)
            self._running[request.request_id] = run
            if not run.aborted:
                self._prefill(run)
            while self._finish(run) is None:
                await asyncio.sleep(self._step_seconds)
                await self._until(lambda: self._decoding or run.aborted)
                if run.aborted:
                    break
                self._step(run)
                yield run.ids[-1]
        finally:
            self._waiting.pop(request.request_id, None)
            self._running.pop(request.request_id, None)
            await self._notify()

    def _prefill(self, run: _Run) -> None:
        request, key = run.request, (self._version, run.request.cache_salt)
        for version, salt, ids in self._cache:
            if (version, salt) == key:
                same = next((i for i, (a, b) in enumerate(zip(ids, request.token_ids, strict=False)) if a != b), None)
                shared = min(len(ids), len(request.token_ids)) if same is None else same
                # The last prompt token is always computed: its logits are what the first token is drawn from.
                run.cached = max(run.cached, min(shared, len(request.token_ids) - 1))
        self._cache.append((*key, request.token_ids))
        self._totals["prompt_tokens_total"] += len(request.token_ids)
        self._totals["prefix_cache_queries_total"] += len(request.token_ids)
        self._totals["prefix_cache_hits_total"] += run.cached

    def _logits(self, token: int) -> Float64Array:
        w = self.weights
        return np.asarray(w["head.weight"] @ w["embed.weight"][token] + w["head.bias"], np.float64)

    def _step(self, run: _Run) -> None:
        request = run.request
        spec, n = request.sampling, len(run.ids)
        logits = self._logits(run.ids[-1] if run.ids else request.token_ids[-1])
        if run.script is not None:
            token = run.script[n]
            logprobs = processed_logprobs(logits, SamplingSpec(temperature=spec.temperature))
        else:
            if n < request.min_tokens:
                logits[[*self._eos, *request.stop_token_ids]] = -np.inf
            logprobs = processed_logprobs(logits, spec, request.token_ids, run.ids)
            if spec.greedy:
                token = int(np.argmax(logprobs))
            else:
                cumulative = np.cumsum(np.exp(logprobs))
                target = _uniform(run.seed, n) * cumulative[-1]
                token = int(np.searchsorted(cumulative, target, side="right"))
        if request.kept_sets and spec.truncated and not spec.greedy:
            run.kept.append(np.flatnonzero(np.isfinite(logprobs)).astype(np.int32))
        if request.top_logprobs:
            best = np.argsort(-logprobs, kind="stable")[: request.top_logprobs]
            best = best[np.isfinite(logprobs[best])]
            run.top.append((best.astype(np.int32), np.minimum(logprobs[best], 0.0).astype(np.float32)))
        run.ids.append(token)
        run.logprobs.append(min(float(logprobs[token]), 0.0))
        run.versions.append(self._version)
        self._totals["generation_tokens_total"] += 1

    def _finish(self, run: _Run) -> tuple[FinishReason, int | str | None] | None:
        request, n = run.request, len(run.ids)
        if run.aborted:
            return "abort", None
        if n > request.min_tokens or (n and run.script is not None):
            if run.ids[-1] in request.stop_token_ids:
                return "stop", run.ids[-1]
            if run.ids[-1] in self._eos and not request.ignore_eos:
                return "stop", None
            found = self._stop_string(run)
            if found is not None:
                return "stop", found
        if run.script is not None and n == len(run.script):
            return "stop", None
        if n >= request.max_tokens or len(request.token_ids) + n >= self._info.max_model_len:
            return "length", None
        return None

    def _stop_string(self, run: _Run) -> str | None:
        text = self._decode(run.ids) if run.request.stop else ""
        hits = [(text.find(stop), stop) for stop in run.request.stop if stop in text]
        return min(hits)[1] if hits else None

    def _result(self, run: _Run) -> GenerateResult:
        reason, stop = self._finish(run) or ("abort", None)
        text = self._decode(run.ids)
        if isinstance(stop, str):
            text = text[: text.find(stop)]
        runs: list[VersionRun] = []
        for i, version in enumerate(run.versions):
            if runs and runs[-1].version == version:
                runs[-1] = VersionRun(version, runs[-1].start, i + 1)
            else:
                runs.append(VersionRun(version, i, i + 1))
        return GenerateResult(
            run.request.request_id,
            tuple(run.ids),
            tuple(run.logprobs),
            reason,
            stop,
            tuple(runs),
            text,
            run.cached,
            self._prompt_logprobs(run.request) if run.request.prompt_logprobs else None,
            kept_sets=tuple(run.kept) or None,
            top_logprobs=tuple(run.top) if run.request.top_logprobs else None,
        )

    def _prompt_logprobs(self, request: GenerateRequest) -> tuple[float | None, ...]:
        plain = SamplingSpec()
        pairs = zip(request.token_ids, request.token_ids[1:], strict=False)
        return (None, *(float(processed_logprobs(self._logits(a), plain)[b]) for a, b in pairs))

    # ---- control plane

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        in_flight = {**self._waiting, **self._running}
        for name in in_flight if request_ids is None else request_ids:
            if name in in_flight:
                in_flight[name].aborted = True
        await self._notify()

    async def pause(self, mode: PauseMode = "abort") -> None:
        self._check_open()
        self._admit = False
        if mode == "abort":
            await self.abort(list(self._running))
        if mode in ("abort", "wait"):
            await self._until(lambda: not self._running)
        self._decoding = False

    async def resume(self) -> None:
        self._check_open()
        if self._updating:
            raise InferenceError("a weight update is open; finish it before resuming")
        self._admit = self._decoding = True
        await self._notify()

    async def is_paused(self) -> bool:
        return not self._admit

    async def start_weight_update(self) -> None:
        self._check_open()
        if self._admit or self._decoding:
            raise InferenceError("start_weight_update needs a paused engine; call pause first")
        self._updating = True

    async def update_weights(self, chunk: Mapping[str, Any]) -> None:
        self._check_open()
        if not self._updating:
            raise InferenceError("update_weights needs an open update; call start_weight_update first")
        for name, tensor in chunk.items():
            held = self.weights.get(name)
            if held is None:
                raise InferenceError(f"the model has no parameter {name!r}; it has {', '.join(self.weights)}")
            new = np.asarray(tensor, np.float32)
            if new.shape != held.shape:
                raise InferenceError(f"{name}: shape {new.shape} was sent, the model holds {held.shape}")
            held[...] = new

    async def finish_weight_update(self, weight_version: str) -> None:
        self._check_open()
        if not self._updating:
            raise InferenceError("no weight update is open; call start_weight_update first")
        self._updating = False
        self._version = weight_version

    async def weight_version(self) -> str:
        return self._version

    async def checksum(self) -> Mapping[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in self.weights.items()}

    async def reset_prefix_cache(self) -> None:
        self._cache.clear()

    async def metrics(self) -> Mapping[str, float]:
        return {
            "num_requests_running": float(len(self._running)),
            "num_requests_waiting": float(len(self._waiting)),
            "kv_cache_usage_perc": 0.0,
            **{
                name: float(self._totals[name])
                for name in (
                    "prompt_tokens_total",
                    "generation_tokens_total",
                    "prefix_cache_queries_total",
                    "prefix_cache_hits_total",
                )
            },
        }
