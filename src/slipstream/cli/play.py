"""Prompts through an engine, without training: what ``eval`` and ``generate`` share.

Owns: an engine and a generator built from settings, and their end.  Refuses: weights that change.

    async with stage(settings, "eval") as on:
        groups = [await on.generator.generate_group(task) for task in tasks]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import DataError, LedgerError, SettingsError

if TYPE_CHECKING:
    from slipstream.config import RunSettings
    from slipstream.data import PromptRow
    from slipstream.inference.types import Engine
    from slipstream.ledger import TrajectoryRecord
    from slipstream.rollout import GroupTask, Renderer, TurnGenerator
    from slipstream.trainers.evaluate import EvalResult

Split = Literal["train", "eval"]


@dataclass
class Stage:
    """What is needed to play prompts."""

    generator: TurnGenerator
    engine: Engine
    renderer: Renderer
    rows: Sequence[PromptRow]


@contextlib.asynccontextmanager
async def stage(settings: RunSettings, split: Split, limit: int | None = None) -> AsyncIterator[Stage]:
    """Prompts, then tokenizer, engine and generator; all are closed at the end.

    Raises ``DataError``, ``ModelError``, ``SettingsError`` or ``InferenceError`` naming what cannot be used.
    """
    from slipstream.data import PromptDataset
    from slipstream.inference.embedded.pretrained import load_tokenizer
    from slipstream.rollout import Renderer, TurnGenerator, make_env_factory

    sources = getattr(settings.data, split)
    if not sources:
        raise DataError(f"data.{split} is empty; set it to a file, a hub name or builtin:NAME")
    tokenizer = load_tokenizer(settings.model.path, settings.model.chat_template)
    renderer = Renderer(tokenizer, settings.model.chat_template_kwargs)
    data = PromptDataset.load(
        sources,
        env_class=settings.env.id,
        length_fn=renderer.prompt_length,
        max_prompt_tokens=settings.rollout.max_prompt_tokens,
        limit=limit,
    )
    print(f"data.{split}: {data.report}", file=sys.stderr)
    logs = Path(tempfile.gettempdir()) / f"slipstream-engines-{os.getpid()}"
    async with contextlib.AsyncExitStack() as closing:
        closing.push(_removing(logs))
        engine = await _engine(settings, tokenizer, logs)
        closing.push_async_callback(engine.close)
        await engine.start()
        generator = TurnGenerator(
            engine,
            renderer,
            make_env_factory(settings.env),
            settings.rollout,
            settings.seed,
            determinism=settings.training.determinism,
            engine_seconds=settings.inference.request_timeout_seconds,
        )
        closing.push_async_callback(generator.aclose)
        yield Stage(generator, engine, renderer, data.rows)


def _removing(folder: Path) -> Callable[[type[BaseException] | None, Any, Any], None]:
    """The last of an exit stack: removes ``folder``, but not after an error, whose message may name it."""

    def leave(kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None or not issubclass(kind, Exception):  # an interruption is no error
            shutil.rmtree(folder, ignore_errors=True)

    return leave


async def _engine(settings: RunSettings, tokenizer: Any, logs: Path) -> Engine:
    from slipstream.inference.embedded.pretrained import resolve
    from slipstream.inference.pool.build import build_pool, needs_pool

    if not needs_pool(settings.inference):
        from slipstream.inference.embedded.engine import EmbeddedEngine

        engine: Engine = EmbeddedEngine(
            settings.model.path, tokenizer, settings.inference, determinism=settings.training.determinism
        )
        return engine
    pool = build_pool(settings.inference, resolve(settings.model.path), log_dir=logs)
    await pool.start()
    return pool.engine


async def evaluate(settings: RunSettings, folder: Path) -> tuple[EvalResult, dict[str, Any]]:
    """Evaluate on ``data.eval`` into a ledger in ``folder``; returns the result and what ``scores.json`` holds."""
    from slipstream.ledger import Ledger, next_incarnation
    from slipstream.trainers.evaluate import Evaluator

    async with stage(settings, "eval", settings.data.eval_limit) as on:
        with Ledger(folder, next_incarnation(folder)) as ledger:
            ledger.event("run_started", settings=settings, resumed_from=None)
            evaluator = Evaluator(
                on.generator,
                on.rows,
                settings.eval,
                settings.rollout,
                ledger,
                deadline=settings.schedule.step_deadline_seconds,
                spec={"seed": settings.seed, "data": list(settings.data.eval), "model": settings.model.path},
            )
            version = await on.engine.weight_version()
            result = await evaluator("start", 0, version)
            ledger.store_token_texts(token_texts(on.renderer.tokenizer))
    scores = {"accuracy": result.accuracy, "scores": dict(result.scores), "seconds": result.seconds}
    record = {"spec": evaluator.spec, "weight_version": version, **scores}
    try:
        (folder / "scores.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise LedgerError(
            f"{folder / 'scores.json'} cannot be written ({error}); free space, or choose --out"
        ) from error
    return result, record


def token_texts(tokenizer: Any) -> dict[int, str]:
    """Text of every token id, for readers without the tokenizer."""
    return {i: tokenizer.decode([i]) for i in range(len(tokenizer))}


async def generate(settings: RunSettings, split: Split, output: Path, limit: int | None) -> list[TrajectoryRecord]:
    """Roll out the prompts and write every trajectory, as its group finishes.

    An interruption or an error leaves what was finished in ``output``.
    """
    from slipstream.ledger.records import TrajectoryRecord

    if output.suffix not in (".jsonl", ".parquet"):
        raise SettingsError(f"--output {output}: the name must end in .jsonl or .parquet")
    records: list[TrajectoryRecord] = []
    async with stage(settings, split, limit) as on:
        tasks = [_task(settings, split, i, row) for i, row in enumerate(on.rows)]
        # The writer opens here: the model and the data can be used, so an older file is replaced for a reason.
        with _Writer(output) as writer:
            async with asyncio.TaskGroup() as owner:
                running = [owner.create_task(on.generator.generate_group(task), name=task.group_id) for task in tasks]
                for number, finished in enumerate(asyncio.as_completed(running), 1):
                    group = await finished
                    made = [
                        TrajectoryRecord(member, 0, "generate", "filtered:not_trained", None, group.size, 0)
                        for member in group.members
                    ]
                    writer.add(made)
                    records += made
                    print(f"\r{number}/{len(tasks)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return records


def _task(settings: RunSettings, split: Split, index: int, row: PromptRow) -> GroupTask:
    from slipstream.rollout import GroupTask

    held_out = split == "eval"
    return GroupTask(
        group_id=f"{split}/{index}",
        prompt_uid=row.uid,
        messages=tuple(row.messages),
        env_class=row.env_class,
        extras=row.extras,
        n=settings.eval.samples_per_prompt if held_out else settings.rollout.samples_per_prompt,
        eval=held_out,
        sampling=settings.eval.sampling if held_out else None,
    )


class _Writer:
    """JSON lines as they come, or one Parquet file at the end; either in the ledger's columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[TrajectoryRecord] = []
        self._file: Any = None

    def __enter__(self) -> _Writer:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be written ({error}); choose another --output") from error
        return self

    def add(self, records: Sequence[TrajectoryRecord]) -> None:
        """Write (or keep) one group's records."""
        from slipstream.ledger.codec import encode

        if self.path.suffix == ".parquet":
            self._kept += records
            return
        lines = (json.dumps(encode(record), ensure_ascii=False, allow_nan=False) for record in records)
        self._write("".join(f"{line}\n" for line in lines).encode())

    def __exit__(self, *_: object) -> None:
        from slipstream.ledger.codec import to_parquet

        try:
            if self.path.suffix == ".parquet":
                self._write(to_parquet(self._kept))
        finally:
            self._file.close()

    def _write(self, body: bytes) -> None:
        try:
            self._file.write(body)
            self._file.flush()
        except OSError as error:
            raise LedgerError(f"{self.path}: {error.strerror}; free disk space, or choose another --output") from error
