"""The engine's heart, single-threaded: admission, packing, one forward pass per step, finishing.

Owns: the queue, the prefix tree, the rows, the weights' version, pausing and updating.
Refuses: threads, asyncio, HTTP (``engine.py`` gives it a thread and an async face).

A step: (1) admit waiting requests while there is room, which turns the unseen parts of their prompts into pending
blocks, equal parts once; (2) decide which blocks are read together and which are copied to rows; (3) one packed
forward pass over the pending blocks and one token of every decoding sequence; (4) sample, accept, finish.

Room is reserved when a request is admitted (its new prompt tokens and the longest possible row), so nothing is ever
preempted: a token's version is that of the weights that really computed it.
"""

from __future__ import annotations

import bisect
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from slipstream.config.settings import InferenceSettings
from slipstream.errors import InferenceError, RequestError
from slipstream.inference.checksum import tensor_checksum
from slipstream.inference.embedded.attention import DecodeBatch, ForwardPlan, RowIndex, RowStore, Segment
from slipstream.inference.embedded.prefix import Node, PrefixTree, Scope
from slipstream.inference.embedded.runner import ModelRunner, check_chunk
from slipstream.inference.embedded.sampling import sample, target_logprobs
from slipstream.inference.embedded.sequence import Sequence
from slipstream.inference.embedded.sharing import row_starts
from slipstream.inference.types import GenerateRequest, GenerateResult, PauseMode

PREFILL_TOKENS = 2048
"""New prompt tokens that one step takes on, unless a single prompt is longer: bounds activations and latency."""
_PROJECT_ROWS = 256
_RATE_SECONDS = 10.0


class EngineCore:
    """See the module's contract.  Every method must be called from one thread."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        settings: InferenceSettings,
        *,
        eos: frozenset[int],
        max_model_len: int,
        weight_version: str,
        exact: bool,
    ) -> None:
        self.runner, self.tokenizer, self.settings = runner, tokenizer, settings
        self.eos, self.max_model_len, self.exact = eos, max_model_len, exact
        self.version = weight_version
        self.tree = PrefixTree()
        self.rows = RowStore(runner.layers, runner.kv_heads, runner.head_dim, runner.dtype, runner.device)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.decoding: list[Sequence] = []
        """The running sequences that have a row, in row order."""
        self.paused: PauseMode | None = None
        self.stops: deque[int] = deque()
        """Steps beyond which not to go before an update has come, update by update (a recorded run is repeated)."""
        self.updating: set[str] | None = None
        """Names written by the open update."""
        self._shared: list[tuple[Node, RowIndex]] = []
        self._replan, self._splits = True, 0
        self._arrivals = self._batches = 0
        self.totals: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()

    # ---- requests

    def check(self, request: GenerateRequest) -> int:
        """The most tokens this request may get; raises ``RequestError`` when it can never run."""
        name, n = f"request {request.request_id}", len(request.token_ids)
        if not all(0 <= token < self.runner.vocab_size for token in request.token_ids):
            raise RequestError(f"{name}: token ids must lie in [0, {self.runner.vocab_size})")
        if not all(0 <= token < self.runner.vocab_size for token in request.stop_token_ids):
            raise RequestError(f"{name}: stop_token_ids must lie in [0, {self.runner.vocab_size})")
        if n >= self.max_model_len:
            raise RequestError(f"{name}: {n} prompt tokens leave no room in a context of {self.max_model_len}")
        limit = min(request.max_tokens, self.max_model_len - n)
        if n + limit > self.settings.kv_cache_tokens:
            raise RequestError(
                f"{name}: {n} prompt tokens and up to {limit} new ones can never fit into a KV cache of "
                f"{self.settings.kv_cache_tokens} tokens; raise inference.kv_cache_tokens or lower max_tokens"
            )
        if request.routed_experts and not self.runner.routers:
            raise RequestError(f"{name}: routed_experts asked for, but this model has no expert routers that report")
        in_flight = (s.request.request_id for s in (*self.waiting, *self.running))
        if request.request_id in in_flight:
            raise RequestError(f"{name} is already in flight; ids must be unique")
        return limit

    def submit(
        self, requests: Seq[GenerateRequest], listener: Callable[[GenerateResult], None] | None = None
    ) -> list[Sequence]:
        """Queue requests as one batch, all or none."""
        if len({r.request_id for r in requests}) != len(requests):
            raise RequestError("generate_many: request ids must be unique")
        limits = [self.check(request) for request in requests]
        self._batches += 1
        added = []
        for request, limit in zip(requests, limits, strict=True):
            self._arrivals += 1
            seed = request.seed
            if seed is None:
                seed = self._arrivals if self.exact else secrets.randbits(63)
            added.append(
                Sequence(
                    request,
                    order=self._arrivals,
                    batch=self._batches,
                    seed=seed,
                    limit=limit,
                    eos=self.eos,
                    tokenizer=self.tokenizer,
                    listener=listener,
                )
            )
        for sequence in added:
            # Lower priority numbers go first, as in vLLM; exact mode keeps to the order of the calls.
            bisect.insort(self.waiting, sequence, key=lambda s: (0 if self.exact else s.request.priority, s.order))
        return added

    def abort(self, names: set[str] | None) -> None:
        """End these requests (None: all) with the tokens they have."""
        for sequence in [s for s in self.waiting if names is None or s.request.request_id in names]:
            self.waiting.remove(sequence)
            sequence.finish("abort", None)
        for sequence in [s for s in self.running if names is None or s.request.request_id in names]:
            self._finish(sequence, "abort", None)

    def fail_all(self, error: BaseException) -> None:
        """Give every caller an error (the engine is closing or has died)."""
        for sequence in (*self.waiting, *self.running):
            sequence.fail(error)
        self.waiting, self.running, self.decoding = [], [], []

    # ---- pausing and updating

    @property
    def runnable(self) -> bool:
        """Whether a step would do anything."""
        if self.paused is not None:
            return self.paused == "wait" and bool(self.running)
        if self.stops and self.totals["steps_total"] >= self.stops[0]:
            return False
        return bool(self.running or self.waiting)

    def pause(self, mode: PauseMode) -> None:
        """Stop admitting; ``wait`` goes on decoding until nothing runs (see ``runnable``)."""
        self.paused = mode
        if mode == "abort":
            self.abort({s.request.request_id for s in self.running})

    def resume(self) -> None:
        """Go on; refused while an update is open, since half-written weights must not answer."""
        if self.updating is not None:
            raise InferenceError("a weight update is open; call finish_weight_update before resume")
        self.paused = None

    def start_update(self) -> None:
        """Open an update (or start an open one afresh)."""
        if self.paused is None or self.runnable:
            raise InferenceError("start_weight_update needs a paused engine; call pause first")
        self.updating = set()

    def update(self, chunk: Mapping[str, Any]) -> None:
        """Write a chunk; a wrong name, shape or type is refused before anything of it is written."""
        if self.updating is None:
            raise InferenceError("update_weights needs an open update; call start_weight_update first")
        check_chunk(self.runner, chunk)
        with torch.inference_mode():
            for name, value in chunk.items():
                self.runner.write(name, value)
                self.updating.add(name)

    def finish_update(self, version: str) -> None:
        """Commit under ``version``; without any chunk only the name changes.  Cached blocks are forgotten."""
        if self.updating is None:
            raise InferenceError("no weight update is open; call start_weight_update first")
        if not version:
            raise InferenceError("finish_weight_update needs a version name")
        missing = sorted(self.runner.required() - self.updating) if self.updating else []
        if missing:
            raise InferenceError(
                f"weight update {version}: {len(missing)} parameter(s) were not sent, for example {missing[:3]}; send "
                "them and finish again"
            )
        with torch.inference_mode():
            self.runner.commit()
        self.updating = None
        self.totals["weight_update_step"] = self.totals["steps_total"]
        if self.stops:
            self.stops.popleft()
        self.set_version(version)

    def set_version(self, version: str) -> None:
        """Later tokens carry this version; no block crosses versions."""
        self.version = version
        self.tree.clear()

    def checksum(self) -> dict[str, str]:
        """Content hash of every parameter, read back from what the kernels hold."""
        # One after the other, while it is in the cache: with hashing threads beside the unpacking a third slower.
        return {name: tensor_checksum(tensor) for name, tensor in self.runner.held()}

    def metrics(self) -> dict[str, float]:
        """Gauges and counters under vLLM's names, and the recent throughput."""
        held = self.tree.tokens + sum(s.row_length for s in self.decoding)
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - _RATE_SECONDS:
            self._recent.popleft()
        names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total")
        return {
            "num_requests_running": float(len(self.running)),
            "num_requests_waiting": float(len(self.waiting)),
            "kv_cache_usage_perc": held / self.settings.kv_cache_tokens,
            "num_preemptions_total": 0.0,
            "prefix_cache_hits_total": float(self.totals["prefix_cache_hits_total"]),
            "prefill_tokens_total": float(self.totals["prefill_tokens_total"]),
            "steps_total": float(self.totals["steps_total"]),
            "weight_update_step": float(self.totals["weight_update_step"]),
            "generation_tokens_per_second": sum(n for _, n in self._recent) / _RATE_SECONDS,
            **{name: float(self.totals[name]) for name in names},
        }

    # ---- one step

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        """Admit, run, sample, finish."""
        self._drop_cancelled()
        fresh = self._admit() if self.paused is None else []
        if not self.running:
            return
        self._place_rows()
        plan, features_of = self._pack(fresh)
        features: torch.Tensor | None = None
        if features_of:  # else every prompt is cached to its end, and nothing decodes yet
            wanted = torch.tensor([row for _, row in features_of], device=self.runner.device)
            features = self.runner.forward(plan, wanted)
            self._note_routes(plan)
        for i, (owner, _) in enumerate(features_of):
            if owner is not None and features is not None:
                owner.features = features[i : i + 1].clone()
        if features is not None:
            scored = sum(len(s.prompt) - 1 for s in fresh if s.request.prompt_logprobs)
            self._score_prompts(fresh, features[len(features) - scored :])
        self._sample(features, fresh)
        self.totals["steps_total"] += 1
        self.totals["prefill_tokens_total"] += sum(s.end - s.begin for s in plan.segments)

    def _note_routes(self, plan: ForwardPlan) -> None:
        """Experts stay with the block, or the row, whose keys were computed through them."""
        if plan.routes is None:
            return
        for segment in plan.segments:
            if not segment.reread:
                segment.node.routes = plan.routes[segment.begin : segment.end]
        if plan.decode is not None:
            for i, sequence in enumerate(self.decoding):
                at = plan.decode.begin + i
                sequence.routes.append(plan.routes[at : at + 1])

    def _drop_cancelled(self) -> None:
        self.waiting = [s for s in self.waiting if not s.future.cancelled()]
        for sequence in [s for s in self.running if s.future.cancelled()]:
            self._finish(sequence, "abort", None)

    def _scope(self, sequence: Sequence) -> tuple[Scope, bool]:
        """Which blocks the sequence may use, and whether its own stay when it ends."""
        request = sequence.request
        base = (self.version, request.cache_salt)
        if request.prompt_logprobs:
            return (*base, "scored", sequence.order), False  # every prompt token has to be computed
        if self.settings.prefix_caching:
            return base, True
        if request.session_id is not None:
            return (*base, "session", request.session_id), True
        if request.group_id is not None:
            return (*base, "group", request.group_id), False
        return (*base, "request", sequence.order), False

    def _fits(self, new_tokens: int, rows: int, width: int) -> bool:
        """Whether so much more fits, after evicting idle blocks if need be."""
        over = self.tree.tokens + new_tokens + rows * width - self.settings.kv_cache_tokens
        return over <= 0 or self.tree.evict(over) >= over

    def _admit(self) -> list[Sequence]:
        """Move requests from the queue to the batch; returns those that still need their first token."""
        admitted: list[Sequence] = []
        new_tokens = 0
        while self.waiting and len(self.running) < self.settings.max_batch_size:
            sequence = self.waiting[0]
            if self.exact and self.running and self.running[0].batch != sequence.batch:
                break  # composition depends on the calls alone: one batch at a time
            scope, kept = self._scope(sequence)
            node, matched = self.tree.match(scope, sequence.prompt, kept=kept)
            missing = len(sequence.prompt) - matched
            width = max([sequence.limit, *(s.row_need for s in self.running)])
            self.tree.acquire(node)
            room = self._fits(missing, len(self.running) + 1, width)
            if not room or (new_tokens and new_tokens + missing > PREFILL_TOKENS):
                self.tree.release(node)
                break
            leaf = self.tree.extend(node, sequence.prompt[matched:]) if missing else node
            self.tree.acquire(leaf)
            self.tree.release(node)
            new_tokens += missing
            self.waiting.pop(0)
            sequence.leaf = leaf
            self.running.append(sequence)
            admitted.append(sequence)
            # A block without features predicts nothing: its last token is read again.
            reread = not missing and leaf.kv is not None and leaf.features is None
            sequence.cached = matched - reread
            self.totals["prompt_tokens_total"] += len(sequence.prompt)
            self.totals["prefix_cache_queries_total"] += len(sequence.prompt)
            self.totals["prefix_cache_hits_total"] += sequence.cached
        return admitted

    def _place_rows(self) -> None:
        """Give every decoding sequence its row, beginning where the blocks read together end."""
        if not self.decoding:
            self._shared = []
            return
        if self._replan or self._splits != self.tree.splits:
            self._splits = self.tree.splits  # a newcomer may have cut a block that others read in place
            starts, lift = self._choose_starts()
            # Both the old and the new extent of each row have to fit while it is moved.
            extents = (
                len(s.prompt) + len(s.output) - min(start, s.row_start)
                for s, start in zip(self.decoding, starts, strict=True)
            )
            self.rows.reserve(len(starts), max(extents), len(starts))
            for sequence, start in zip(self.decoding, starts, strict=True):
                assert sequence.leaf is not None
                path = sequence.leaf.path()
                if start != sequence.row_start:
                    self.rows.rebase(sequence.row, sequence.row_length, sequence.row_start, start, path)
                    sequence.row_start = start
                if lift and start < sequence.leaf.end:
                    self._lift(sequence, next((n for n in reversed(path) if n.end <= start), None))
            if lift:
                self._fits(0, len(starts), self._width(starts))
            self._shared = self._shared_blocks()
            self._replan = False
        longest = max(s.row_length for s in self.decoding) + 1
        self.rows.reserve(len(self.decoding), longest, len(self.decoding))

    def _width(self, starts: Seq[int]) -> int:
        return max(len(s.prompt) + s.limit - start for s, start in zip(self.decoding, starts, strict=True))

    def _choose_starts(self) -> tuple[list[int], bool]:
        """Where each row begins, and whether blocks that are copied to rows have to be given up for room."""
        leaves = [s.leaf for s in self.decoding if s.leaf is not None]
        starts = row_starts(leaves)
        width = self._width(starts)
        if self._fits(0, len(starts), width):
            return starts, False
        read_in_place = {
            id(node): len(node.tokens)
            for leaf, start in zip(leaves, starts, strict=True)
            for node in leaf.path()
            if node.end <= start
        }
        if sum(read_in_place.values()) + len(starts) * width <= self.settings.kv_cache_tokens:
            return starts, True
        return [leaf.end for leaf in leaves], False  # no room for copies: read every block where it is

    def _lift(self, sequence: Sequence, anchor: Node | None) -> None:
        """Let go of blocks whose content the sequence's row holds too; they may then be evicted."""
        leaf = sequence.leaf
        assert leaf is not None
        if anchor is None:
            anchor = leaf
            while anchor.parent is not None:
                anchor = anchor.parent
        self.tree.acquire(anchor)
        self.tree.release(leaf)
        sequence.leaf = anchor

    def _shared_blocks(self) -> list[tuple[Node, RowIndex]]:
        users: dict[int, list[int]] = {}
        nodes: dict[int, Node] = {}
        for sequence in self.decoding:
            assert sequence.leaf is not None
            for node in sequence.leaf.path():
                if node.end <= sequence.row_start:
                    nodes[id(node)] = node
                    users.setdefault(id(node), []).append(sequence.row)
        return [(node, self._rows_of(users[key])) for key, node in nodes.items()]

    def _rows_of(self, rows: Seq[int]) -> RowIndex:
        """Rows as a slice where they are neighbours (groups are, until members leave): views instead of copies."""
        if len(rows) == len(self.decoding):
            return None
        if rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self.runner.device)

    def _pack(self, fresh: Seq[Sequence]) -> tuple[ForwardPlan, list[tuple[Node | None, int]]]:
        """The packed batch, and which packed rows have to be projected (for which block, if for one)."""
        segments: list[Segment] = []
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        at = 0
        ends: dict[int, int] = {}
        for node, reread in self._segments(fresh):
            tokens = node.tokens[-1:] if reread else node.tokens
            if not reread:
                node.kv = self.rows.block(len(tokens))
            ids.append(tokens)
            positions.append(np.arange(node.end - len(tokens), node.end))
            segments.append(Segment(node, at, at + len(tokens), node.path()[:-1], reread))
            at += len(tokens)
            ends[id(node)] = at - 1
        decode = self._decode_batch(at)
        wanted: list[tuple[Node | None, int]] = []
        if decode is not None:
            ids.append(np.array([s.output[-1] for s in self.decoding], np.int64))
            positions.append(np.array([len(s.prompt) + len(s.output) - 1 for s in self.decoding], np.int64))
            wanted += [(None, at + i) for i in range(decode.n)]
        leaves = {id(s.leaf): s.leaf for s in fresh if s.leaf is not None}
        wanted += [(leaf, ends[key]) for key, leaf in leaves.items() if key in ends]
        for sequence in fresh:
            if sequence.request.prompt_logprobs:
                end = ends[id(sequence.leaf)]
                wanted += [(None, row) for row in range(end - len(sequence.prompt) + 1, end)]
        device = self.runner.device
        empty = np.empty(0, np.int64)
        plan = ForwardPlan(
            torch.from_numpy(np.concatenate(ids or [empty])).to(device),
            torch.from_numpy(np.concatenate(positions or [empty])).to(device),
            segments,
            decode,
            self.rows,
        )
        return plan, wanted

    def _segments(self, fresh: Seq[Sequence]) -> list[tuple[Node, bool]]:
        """Blocks to compute, ancestors first, each once; and blocks whose last token is read again."""
        pending: dict[int, Node] = {}
        reread: dict[int, Node] = {}
        for sequence in fresh:
            assert sequence.leaf is not None
            for node in sequence.leaf.path():
                if node.kv is None:
                    pending[id(node)] = node
            if sequence.leaf.kv is not None and sequence.leaf.features is None:
                reread[id(sequence.leaf)] = sequence.leaf
        ordered = sorted(pending.values(), key=lambda n: n.start)
        return [(n, False) for n in ordered] + [(n, True) for n in reread.values()]

    def _decode_batch(self, begin: int) -> DecodeBatch | None:
        if not self.decoding:
            return None
        batch = DecodeBatch(
            begin=begin,
            n=len(self.decoding),
            lengths=[s.row_length for s in self.decoding],
            starts=[s.row_start for s in self.decoding],
            paths=[s.leaf.path() if s.leaf is not None else [] for s in self.decoding],
            shared=self._shared,
        )
        self.rows.prepare(batch, self.exact)
        return batch

    def _score_prompts(self, fresh: Seq[Sequence], features: torch.Tensor) -> None:
        at = 0
        for sequence in fresh:
            if not sequence.request.prompt_logprobs:
                continue
            count = len(sequence.prompt) - 1
            targets = torch.from_numpy(sequence.prompt[1:]).to(self.runner.device)
            values: list[float] = []
            for low in range(0, count, _PROJECT_ROWS):
                high = min(low + _PROJECT_ROWS, count)
                values += target_logprobs(self.runner.logits(features[at + low : at + high]), targets[low:high])
            sequence.prompt_logprobs = (None, *values)
            at += count

    def _sample(self, features: torch.Tensor | None, fresh: Seq[Sequence]) -> None:
        leaves = {id(s.leaf): s.leaf for s in fresh}
        ready = [leaf.features for leaf in leaves.values() if leaf is not None and leaf.features is not None]
        rows = torch.cat(([] if features is None else [features[: len(self.decoding)]]) + ready)
        logits = self.runner.logits(rows)
        sequences = [*self.decoding, *fresh]
        if len(leaves) < len(fresh):
            # A group's first tokens come from one row of logits.
            place = {key: len(self.decoding) + i for i, key in enumerate(leaves)}
            index = [*range(len(self.decoding)), *(place[id(s.leaf)] for s in fresh)]
            logits = logits[torch.tensor(index, device=logits.device)]
        drawn = sample(logits, [s.draw() for s in sequences])
        self.totals["generation_tokens_total"] += len(drawn)
        self._recent.append((time.monotonic(), len(drawn)))
        ended = []
        for sequence, one in zip(sequences, drawn, strict=True):
            reasons = sequence.accept(one, self.version)
            if reasons is None:
                sequence.report()
            else:
                ended.append((sequence, reasons))
        for sequence in fresh:
            assert sequence.leaf is not None
            sequence.row, sequence.row_start = len(self.decoding), sequence.leaf.end
            sequence.routes = [n.routes for n in sequence.leaf.path() if n.routes is not None]
            self.decoding.append(sequence)
            self._replan = True
        for sequence, (reason, stop_reason) in ended:
            self._finish(sequence, reason, stop_reason)

    # ---- finishing

    def _finish(self, sequence: Sequence, reason: Any, stop_reason: int | str | None) -> None:
        self.running.remove(sequence)
        if sequence.row >= 0:
            self._keep(sequence)
            last = self.decoding.pop()
            if last is not sequence:
                self.rows.move(last.row, sequence.row, last.row_length)
                last.row = sequence.row
                self.decoding[last.row] = last
            sequence.row = -1
        if sequence.leaf is not None:
            self.tree.release(sequence.leaf)
            sequence.leaf = None
        self._replan = True
        if not self.running and self.rows.rows * self.rows.capacity > self.settings.kv_cache_tokens:
            self.rows.shrink()
        sequence.finish(reason, stop_reason)

    def _keep(self, sequence: Sequence) -> None:
        """Leave what was generated in the tree, so that the session's next turn finds it."""
        leaf = sequence.leaf
        assert leaf is not None
        if not leaf.kept:
            return  # its scope was forgotten: after an update, this row mixes versions
        tokens = np.concatenate([sequence.prompt, np.array(sequence.output[:-1], np.int64)])[leaf.end :]
        node, matched = self.tree.descend(leaf, tokens)
        rest = tokens[matched:]
        width = max(s.row_need for s in (sequence, *self.running))
        self.tree.acquire(node)  # what is evicted for room must not be what the rest hangs from
        room = len(rest) and self._fits(len(rest), len(self.running), width)
        self.tree.release(node)
        if not room:
            return
        begin = leaf.end + matched - sequence.row_start
        block = self.rows.buffer[:, :, sequence.row, :, begin : begin + len(rest)].clone()
        self.tree.extend(node, rest, block).routes = sequence.routes_from(leaf.end + matched)
