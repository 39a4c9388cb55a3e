"""One request in flight: its tokens, when it stops, and what the caller gets.

Owns: ``Sequence``, stop conditions, text and its cut at a stop string, version runs, what is replayed, partial results.
Refuses: the model, the cache's policy.

Stops are checked in this order: stop token ids, end-of-sequence ids, stop strings, length.  The token that completed
a stop stays in ``token_ids``; only the text is cut.  Before ``min_tokens`` tokens, stop ids are banned from the
distribution and stop strings are not looked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers.decoders import DecodeStream

from slipstream.errors import RequestError
from slipstream.inference.embedded.prefix import Node, Tokens
from slipstream.inference.embedded.sampling import Draw, KeptSet, Sampled
from slipstream.inference.types import FinishReason, GenerateRequest, GenerateResult, TopLogprobs
from slipstream.trajectory import VersionRun

Tokens16: TypeAlias = npt.NDArray[np.int16]


class TextStream:
    """Text as it grows, token by token; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=True) if self._backend is not None else None
        self._ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> str:
        """The new text, possibly empty."""
        if self._stream is not None and self._backend is not None:
            new = self._stream.step(self._backend, token) or ""
        else:  # a tokenizer written in Python: decode everything, hold back an unfinished character
            self._ids.append(token)
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True).rstrip("\ufffd")
            new = whole[len(self.text) :]
        self.text += new
        return new


class Sequence:
    """A request and its progress.  Only the engine's thread touches it."""

    def __init__(
        self,
        request: GenerateRequest,
        *,
        order: int,
        batch: int,
        seed: int,
        limit: int,
        eos: frozenset[int],
        tokenizer: Any,
        listener: Callable[[GenerateResult], None] | None = None,
    ) -> None:
        if request.stop and tokenizer is None:
            raise RequestError(f"request {request.request_id}: stop strings need an engine with a tokenizer")
        self.request, self.order, self.batch, self.seed = request, order, batch, seed
        self.prompt: Tokens = np.array(request.token_ids, np.int64)
        self.limit = limit
        self.future: Future[GenerateResult] = Future()
        self._tokenizer, self._listener = tokenizer, listener
        self._eos = frozenset() if request.ignore_eos else eos
        self._stops = frozenset(request.stop_token_ids)
        self._banned = tuple(sorted(eos | self._stops)) if request.min_tokens else ()
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: tuple[float | None, ...] | None = None
        self.kept: list[KeptSet | None] = []
        self.top: list[TopLogprobs] = []
        self.routes: list[Tokens16] = []
        """Experts of the tokens fed so far, (n, layers, top-k) each: the prompt first, then token by token."""
        self._runs: list[tuple[str, int]] = []
        self._stream = TextStream(tokenizer) if request.stop or (listener and tokenizer is not None) else None
        self._cut: int | None = None
        self._sent_tokens = self._sent_text = 0
        self.cached = 0
        # Where the keys and values are: blocks up to ``leaf``, and a private row from position ``row_start``.
        self.leaf: Node | None = None
        self.row = -1
        self.row_start = 0

    @property
    def row_length(self) -> int:
        """Tokens whose keys are in the row: all from ``row_start`` but the newest, which has not been fed yet."""
        return len(self.prompt) + len(self.output) - 1 - self.row_start

    @property
    def row_need(self) -> int:
        """Tokens that the row must be able to hold: all that its blocks do not."""
        return len(self.prompt) + self.limit - (self.leaf.end if self.leaf is not None else 0)

    def draw(self) -> Draw:
        """How to sample the next token."""
        position = len(self.output)
        banned = self._banned if position < self.request.min_tokens else ()
        request = self.request
        return Draw(
            request.sampling,
            self.seed,
            position,
            self.prompt,
            self.output,
            banned,
            request.kept_sets,
            request.top_logprobs,
        )

    def accept(self, drawn: Sampled, version: str) -> tuple[FinishReason, int | str | None] | None:
        """Append a sampled token; the finish reason and stop reason if it is the last."""
        token = drawn.token
        self.kept.append(drawn.kept)
        if drawn.top is not None:
            self.top.append(drawn.top)
        if not self._runs or self._runs[-1][0] != version:
            self._runs.append((version, len(self.output)))
        self.output.append(token)
        self.logprobs.append(drawn.logprob)
        if token in self._stops:
            return "stop", token
        if token in self._eos:
            return "stop", None
        if self._stream is not None:
            matched = self._match_stop(self._stream, token)
            if matched is not None:
                return "stop", matched
        return ("length", None) if len(self.output) >= self.limit else None

    def _match_stop(self, stream: TextStream, token: int) -> str | None:
        before = len(stream.text)
        new = stream.add(token)
        if not new or len(self.output) <= self.request.min_tokens:
            return None
        hits = []
        for stop in self.request.stop:
            # A match that ends in the new text may begin in the old.
            at = stream.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                hits.append((at, stop))
        if not hits:
            return None
        self._cut, matched = min(hits)
        return matched

    def _versions(self) -> tuple[VersionRun, ...]:
        if not self.output:  # ended while it waited
            return ()
        ends = [start for _, start in self._runs[1:]] + [len(self.output)]
        return tuple(VersionRun(v, start, end) for (v, start), end in zip(self._runs, ends, strict=True))

    def _text(self) -> str:
        if self._cut is not None and self._stream is not None:
            return self._stream.text[: self._cut]
        if self._tokenizer is None or not self.output:
            return ""
        return str(self._tokenizer.decode(self.output, skip_special_tokens=True))

    def _kept_sets(self, start: int) -> tuple[KeptSet, ...] | None:
        found = tuple(kept for kept in self.kept[start:] if kept is not None)
        return found if found and len(found) == len(self.kept) - start else None

    def _heads(self, start: int) -> tuple[TopLogprobs, ...] | None:
        return tuple(self.top[start:]) if self.request.top_logprobs else None

    def routes_from(self, position: int) -> Tokens16 | None:
        """Experts of the fed tokens from this position on; None when the model has no routers."""
        return np.concatenate(self.routes)[position:] if self.routes else None

    def result(self, reason: FinishReason, stop_reason: int | str | None) -> GenerateResult:
        """The whole answer."""
        return GenerateResult(
            self.request.request_id,
            tuple(self.output),
            tuple(self.logprobs),
            reason,
            stop_reason,
            self._versions(),
            self._text(),
            self.cached,
            self.prompt_logprobs,
            kept_sets=self._kept_sets(0),
            top_logprobs=self._heads(0),
            routed_experts=self.routes_from(0) if self.request.routed_experts else None,
        )

    def report(self) -> None:
        """Hand the tokens since the last report to the listener; text that may become a stop string waits."""
        if self._listener is None:
            return
        text = self._stream.text if self._stream is not None else ""
        held = max((n for stop in self.request.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        safe = max(self._sent_text, len(text) - held)
        done, self._sent_tokens = self._sent_tokens, len(self.output)
        piece, self._sent_text = text[self._sent_text : safe], safe
        self._listener(
            GenerateResult(
                self.request.request_id,
                tuple(self.output[done:]),
                tuple(self.logprobs[done:]),
                "length",
                None,
                (),
                piece,
                finished=False,
                kept_sets=self._kept_sets(done),
                top_logprobs=self._heads(done),
            )
        )

    def last_part(self, whole: GenerateResult) -> GenerateResult:
        """What of the whole answer has not been reported yet."""
        return GenerateResult(
            whole.request_id,
            whole.token_ids[self._sent_tokens :],
            whole.logprobs[self._sent_tokens :],
            whole.finish_reason,
            whole.stop_reason,
            whole.versions,
            whole.text[self._sent_text :],
            whole.cached_tokens,
            whole.prompt_logprobs,
            kept_sets=self._kept_sets(self._sent_tokens),
            top_logprobs=self._heads(self._sent_tokens),
            routed_experts=whole.routed_experts,
        )

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Answer the caller; a caller that went away is no error."""
        if self.future.set_running_or_notify_cancel():
            whole = self.result(reason, stop_reason)
            if self._listener is not None:
                self._listener(self.last_part(whole))
            self.future.set_result(whole)

    def fail(self, error: BaseException) -> None:
        """Give the caller an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
