"""On-policy distillation: a teacher scores the student's own samples, token by token.

Owns: the teachers (a local model behind the training backend, or running servers behind the inference contract), and
the check that student and teacher mean the same ids.  Refuses: the objective, which is an estimator or a loss.

The student samples, the teacher says how likely it finds each sampled token, and the estimator ``distill`` rewards
``log teacher - log student`` per token: the sampled estimate of the reverse KL (arXiv 2306.13649, 2306.08543).

    teacher = build_teacher(settings.algorithm, backend, deadline)
    logprobs = await teacher.score(batch)         # per row, over its trained tokens

A local teacher is scored under each row's own temperature and kept sets.  Servers report log-probs of a prompt at
temperature 1 over the whole vocabulary, so the student has to sample like that too; other rows are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from slipstream.algorithms.batch import Batch, BatchRow, FloatArray
from slipstream.config.settings import AlgorithmSettings
from slipstream.errors import ContractError, InferenceError, SettingsError
from slipstream.inference.types import Engine, GenerateRequest
from slipstream.trainers.waiting import within
from slipstream.training.protocol import TrainingBackend
from slipstream.trajectory import SamplingSpec

_IN_FLIGHT = 32  # requests per server; more would only wait in its queue
_PROBE = "def f(x):\n    return x * 2  # naïve 東京 \U0001f600 <|im_end|>"


class Teacher(Protocol):
    """Whatever can score a batch."""

    async def score(self, batch: Batch) -> Sequence[FloatArray]:
        """Log-probs of each row's trained tokens, ``(n_trained,)`` per row, in row order."""
        ...


class BackendTeacher:
    """The handle ``teacher`` of a training backend; ``deadline`` in seconds."""

    def __init__(self, backend: TrainingBackend, deadline: float) -> None:
        self._backend, self._deadline = backend, deadline

    async def score(self, batch: Batch) -> Sequence[FloatArray]:
        """See ``Teacher``."""
        result = await within(self._backend.forward("teacher", batch), self._deadline, "the teacher's scores")
        return result.logprobs


class EngineTeacher:
    """Engines that score prompts (``prompt_logprobs``); rows are spread over them.

    The engines belong to the caller.  ``deadline`` bounds one whole call of ``score``, in seconds.
    """

    def __init__(self, engines: Sequence[Engine], deadline: float) -> None:
        self._engines, self._deadline = list(engines), deadline

    async def score(self, batch: Batch) -> Sequence[FloatArray]:
        """See ``Teacher``; raises ``ContractError`` for rows sampled at another temperature than 1, or truncated."""
        for row in batch.rows:
            if row.sampling != SamplingSpec():
                raise ContractError(
                    f"row {row.row_id} was sampled with {row.sampling}: a teacher behind a server scores at "
                    "temperature 1 over the whole vocabulary; sample like that, or use a local teacher "
                    "(algorithm.teacher.path)"
                )
        slots = [asyncio.Semaphore(_IN_FLIGHT) for _ in self._engines]
        tasks = [
            asyncio.ensure_future(self._row(row, i % len(self._engines), slots, batch.step))
            for i, row in enumerate(batch.rows)
        ]
        try:
            async with asyncio.timeout(self._deadline):
                return list(await asyncio.gather(*tasks))
        except TimeoutError as error:
            raise InferenceError(f"the teacher did not score {len(tasks)} rows in {self._deadline:.0f} s") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _row(self, row: BatchRow, which: int, slots: Sequence[asyncio.Semaphore], step: int) -> FloatArray:
        ids = (*row.inputs_T.tolist(), int(row.targets_T[-1]))
        async with slots[which]:
            result = await self._engines[which].generate(
                GenerateRequest(f"teacher/{step}/{row.row_id}", ids, max_tokens=1, prompt_logprobs=True)
            )
        scores = result.prompt_logprobs
        if scores is None or len(scores) != len(ids):
            raise InferenceError(f"the teacher returned no log-probs for the {len(ids)} tokens of row {row.row_id}")
        # Token i + 1 is target i; the first token, which nothing predicts, is no target.
        return np.array(scores[1:], dtype=np.float64)[row.trained_T]


class ServerTeacher:
    """``EngineTeacher`` over base URLs; connections live for one call of ``score``, so nothing has to be closed."""

    def __init__(self, urls: Sequence[str], deadline: float) -> None:
        self._urls, self._deadline = tuple(urls), deadline

    async def score(self, batch: Batch) -> Sequence[FloatArray]:
        """See ``Teacher``."""
        async with contextlib.AsyncExitStack() as stack:
            engines = [await _connect(stack, url, self._deadline) for url in self._urls]
            return await EngineTeacher(engines, self._deadline).score(batch)


async def _connect(stack: contextlib.AsyncExitStack, url: str, seconds: float) -> Any:
    from slipstream.inference.client import HttpEngine

    asking = HttpEngine(url, timeout_seconds=seconds)
    stack.push_async_callback(asking.close)
    engine = HttpEngine(url, model=(await asking.info()).model, timeout_seconds=seconds)
    stack.push_async_callback(engine.close)
    await engine.start()
    return engine


def build_teacher(settings: AlgorithmSettings, backend: TrainingBackend, deadline: float) -> Teacher | None:
    """The teacher that the settings name, or None."""
    if settings.teacher.path is not None:
        return BackendTeacher(backend, deadline)
    return ServerTeacher(settings.teacher.urls, deadline) if settings.teacher.urls else None


async def check_teacher(settings: AlgorithmSettings, tokenizer: Any, deadline: float) -> None:
    """Raise ``SettingsError`` when the teacher's ids do not mean what the student's do.

    A local teacher's whole vocabulary is compared; a server is asked to tokenise a probe.
    """
    teacher = settings.teacher
    if teacher.path is not None:
        from slipstream.inference.embedded.pretrained import load_tokenizer

        ours, theirs = tokenizer.get_vocab(), load_tokenizer(teacher.path).get_vocab()
        if different := sorted(t for t in {*ours, *theirs} if ours.get(t) != theirs.get(t)):
            raise SettingsError(
                f"algorithm.teacher.path={teacher.path}: its vocabulary differs from the student's in "
                f"{len(different)} tokens (for example {different[0]!r}); on-policy distillation scores the student's "
                "own ids, so both need one tokenizer"
            )
    for url in teacher.urls:
        want = list(tokenizer.encode(_PROBE, add_special_tokens=False))
        async with contextlib.AsyncExitStack() as stack:
            engine = await _connect(stack, url, deadline)
            answer = await engine.call("POST", "/tokenize", {"prompt": _PROBE, "add_special_tokens": False})
        if answer.get("tokens") != want:
            raise SettingsError(
                f"algorithm.teacher.urls: {url} tokenises a probe differently from the student; both need one tokenizer"
            )
