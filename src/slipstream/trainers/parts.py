"""The heavy parts of a run, built in an order that fails early and closed in reverse.

Owns: construction from settings.  Refuses: driving any of them.

Cheap checks come first (data rows, renderer), then the engine and the backend, which both load the model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.algorithms.advantages import ADVANTAGES
from slipstream.algorithms.check import reported_tokens
from slipstream.algorithms.losses import LOSSES
from slipstream.algorithms.registry import import_function
from slipstream.config import resolve_settings
from slipstream.config.schedule_checks import samples_ahead
from slipstream.config.settings import RunSettings
from slipstream.data.prompts import PromptDataset, PromptRow
from slipstream.data.sft import SftDataset
from slipstream.errors import SettingsError
from slipstream.inference.types import Engine
from slipstream.ledger import Ledger
from slipstream.memory import give_back
from slipstream.rollout.generator import TurnGenerator, make_env_factory
from slipstream.rollout.renderer import Renderer
from slipstream.rollout.skyrl_generator import SkyRLGenerator
from slipstream.rollout.types import Generator, OnEvent, RolloutEvent
from slipstream.rollout.waves import WaveLog
from slipstream.trainers.distill import check_teacher
from slipstream.trainers.probe import build_probe
from slipstream.trainers.serving import Serving, open_serving
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import Trajectory
from slipstream.weights import Publisher, Receipt, VersionCounter


@dataclass
class Parts:
    """What a run is made of; ``engine`` is the gated replica, so nothing unverified ever answers."""

    settings: RunSettings
    tokenizer: Any
    renderer: Renderer
    train_data: PromptDataset | None
    eval_rows: Sequence[PromptRow]
    serving: Serving
    backend: TorchBackend
    counter: VersionCounter
    fingerprint: str
    deadline: float
    generator: Generator = field(init=False)
    receipts: Sequence[Receipt] = ()
    stale: bool = True
    """The policy's weights are not (known to be) those that the engine serves."""
    closing: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _listeners: list[OnEvent] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        """What rollouts talk to."""
        return self.serving.engine

    @property
    def publisher(self) -> Publisher:
        """The publisher over every replica."""
        return self.serving.publisher

    @property
    def embedded(self) -> Any:
        """The embedded engine itself, for what only it can do (repeating a recorded run)."""
        return getattr(self.engine, "engine", self.engine)

    def sft_rows(self) -> list[Trajectory]:
        """Chat rows of ``data.sft`` as trajectories with TARGET spans."""
        data = SftDataset.load(
            self.settings.data.sft,
            self.renderer,
            train_on=self.settings.sft.train_on,
            max_tokens=self.settings.rollout.max_total_tokens,
        )
        return [row.trajectory for row in data.rows]

    def listen(self, on_event: OnEvent) -> None:
        """Tell ``on_event`` of superseded attempts and finished groups."""
        self._listeners.append(on_event)

    def tell(self, event: RolloutEvent) -> None:
        """Pass a rollout event on."""
        for listener in self._listeners:
            listener(event)

    async def publish(self) -> Sequence[Receipt]:
        """Publish the policy's present weights under the next version; raises ``PublishError``."""
        version = self.counter.next()
        inference = self.settings.inference
        probe = None
        if inference.engine != "embedded":  # whose checksums are ours
            dtypes = (self.settings.model.dtype, inference.dtype)
            probe = await build_probe(self.backend, len(self.tokenizer), dtypes, self.deadline)
        self.receipts = await self.serving.publish(
            lambda: self.backend.export_weights(self.serving.exported), version, probe=probe
        )
        self.stale = False
        give_back(self.settings.training.heap_growth)  # the weights before, and what staging and packing left
        return self.receipts

    async def ensure_published(self) -> str:
        """The version that the engine serves, after a publish if the policy has changed since the last one."""
        if self.stale:
            await self.publish()
        return str(self.counter.current)

    async def close(self) -> None:
        """Close everything, last built first."""
        await self.closing.aclose()


def handles_of(settings: RunSettings) -> tuple[str, ...]:
    """Every owner of weights in the trainer, by its handle: the policy, and what the algorithm needs beside it."""
    algorithm = settings.algorithm
    needs = {*ADVANTAGES.get(algorithm.advantage).needs, *LOSSES.get(algorithm.loss).needs}
    wanted = {
        "policy": True,
        "reference": algorithm.kl_coef > 0 or "ref_logprobs" in needs,
        "critic": "values" in needs,
        "teacher": algorithm.teacher.path is not None,
    }
    return tuple(handle for handle, wants in wanted.items() if wants)


def build_backend(settings: RunSettings) -> TorchBackend:
    """The training backend with the handles that the settings need; raises ``ModelError`` or ``SettingsError``."""
    return TorchBackend(
        settings.model,
        settings.training,
        handles=handles_of(settings),
        seed=settings.seed,
        critic=settings.algorithm.critic,
        teacher=settings.algorithm.teacher,
    )


CustomGenerator = Generator | Callable[[Parts], Any] | Any
"""A generator object (``generate_group``, or SkyRL's ``generate``), or a function that builds one from the parts."""


async def build_parts(
    settings: RunSettings,
    ledger: Ledger,
    incarnation: int,
    *,
    generator: CustomGenerator | None = None,
    waves: WaveLog | None = None,
    record_turns: bool = False,
) -> Parts:
    """Build everything; on an error what was built is closed again before it propagates.

    ``generator`` replaces the default one; ``waves`` and ``record_turns`` are the default one's.

    Raises ``ModelError``, ``DataError``, ``SettingsError`` naming what cannot be used.
    """
    from slipstream.inference.embedded.pretrained import load_tokenizer

    tokenizer = load_tokenizer(settings.model.path, settings.model.chat_template)
    renderer = Renderer(tokenizer, settings.model.chat_template_kwargs)
    train = _prompts(settings, settings.data.train, renderer, ledger, "train") if settings.schedule.steps else None
    wants_eval = settings.data.eval and (settings.eval.before or settings.eval.after or settings.eval.every_steps)
    held_out = _prompts(settings, settings.data.eval, renderer, ledger, "eval") if wants_eval else None
    settings = divide_cores(resolve_settings(settings, len(train) if train is not None else None))
    async with contextlib.AsyncExitStack() as stack:
        serving = await stack.enter_async_context(
            open_serving(
                settings,
                tokenizer,
                incarnation,
                lambda text: ledger.event("warning", message=text),
                lambda receipt: ledger.event("receipt", receipt=receipt.to_json()),
            )
        )
        await check_teacher(settings.algorithm, tokenizer, settings.inference.request_timeout_seconds)
        backend = build_backend(settings)
        stack.callback(backend.close)
        parts = Parts(
            settings=settings,
            tokenizer=tokenizer,
            renderer=renderer,
            train_data=train,
            eval_rows=held_out.rows if held_out is not None else (),
            serving=serving,
            backend=backend,
            counter=VersionCounter("policy", incarnation),
            fingerprint=train.fingerprint if train is not None else "",
            deadline=settings.schedule.step_deadline_seconds,
        )
        own = generator if generator is not None else _imported(settings.rollout.generator)
        parts.generator = _adapted(own, parts) if own is not None else _default_generator(parts, waves, record_turns)
        if (close := getattr(parts.generator, "aclose", None)) is not None:
            stack.push_async_callback(close)
        ledger.store_token_texts(_token_texts(tokenizer))
        parts.closing = stack.pop_all()
        return parts


def _default_generator(parts: Parts, waves: WaveLog | None, record_turns: bool) -> TurnGenerator:
    settings = parts.settings
    exact = settings.training.determinism == "exact"
    return TurnGenerator(
        parts.engine,
        parts.renderer,
        make_env_factory(settings.env),
        settings.rollout,
        settings.seed,
        determinism=settings.training.determinism,
        engine_seconds=settings.inference.request_timeout_seconds,
        # The embedded engine forgets its cache at an update by itself.  A salt would be that of the moment in which a
        # group starts, which in exact mode must not matter.
        use_cache_salt=settings.inference.use_cache_salt and not exact,
        on_event=parts.tell,
        samples_per_step=settings.schedule.prompts_per_step * settings.rollout.samples_per_prompt,
        waves=waves,
        record_turns=record_turns,
        routed_experts=settings.training.routing_replay,
        top_logprobs=reported_tokens(settings.algorithm),
        published=lambda: parts.publisher.last_good,
    )


def _imported(path: str | None) -> Any:
    """What ``rollout.generator`` names."""
    if path is None:
        return None
    return import_function(path, "rollout.generator")


def _adapted(own: Any, parts: Parts) -> Generator:
    """A generator of the user's, as the loop knows them."""
    made = own
    if not (hasattr(own, "generate_group") or hasattr(own, "generate")) or isinstance(own, type):
        if not callable(own):
            raise SettingsError(f"a generator needs generate_group or generate; {own!r} has neither and builds none")
        made = own(parts)
    if callable(getattr(made, "generate_group", None)):
        generator: Generator = made
        return generator
    if not callable(getattr(made, "generate", None)):
        raise SettingsError(f"{made!r} is no generator: it has neither generate_group nor generate")
    asynchronous = parts.settings.schedule.kind != "sync"
    return SkyRLGenerator(
        made,
        parts.settings.rollout,
        seconds=parts.settings.schedule.step_deadline_seconds,
        # With updates in flight the version may change inside a batch, and only the engine could say where.
        version=None if asynchronous else lambda: str(parts.counter.current),
        decode=parts.tokenizer.decode,
        on_event=parts.tell,
    )


def divide_cores(settings: RunSettings, cores: int | None = None) -> RunSettings:
    """Thread counts that were left open, for a trainer and an embedded engine that work at the same time.

    Each gets half of the cores; in turn, each may have them all, which is torch's own choice.
    """
    together = samples_ahead(settings.schedule) and settings.inference.engine == "embedded"
    if not together or settings.training.threads is not None or settings.inference.threads is not None:
        return settings
    half = max(1, (cores or os.cpu_count() or 2) // 2)
    return settings.model_copy(
        update={
            "training": settings.training.model_copy(update={"threads": half}),
            "inference": settings.inference.model_copy(update={"threads": half}),
        }
    )


def _prompts(
    settings: RunSettings, sources: Sequence[str], renderer: Renderer, ledger: Ledger, what: str
) -> PromptDataset:
    data = PromptDataset.load(
        sources,
        env_class=settings.env.id,
        length_fn=renderer.prompt_length,
        max_prompt_tokens=settings.rollout.max_prompt_tokens,
        limit=settings.data.eval_limit if what == "eval" else None,
    )
    ledger.event("note", message=f"data.{what}: {data.report}", fingerprint=data.fingerprint)
    return data


def _token_texts(tokenizer: Any) -> dict[int, str]:
    """Text of every token id, for readers without the tokenizer."""
    return {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
