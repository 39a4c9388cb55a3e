"""On-policy distillation: teachers agree with each other, the KL to the teacher falls, and misfits are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replay_kit import groups, requests
from run_kit import tiny_settings
from slipstream.algorithms.batch import Batch
from slipstream.algorithms.compile import compile_batch
from slipstream.config.algorithm import TeacherSettings
from slipstream.config.settings import AlgorithmSettings, InferenceSettings, ModelSettings, TrainingSettings
from slipstream.errors import ContractError, InferenceError, SettingsError
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.inference.embedded.pretrained import load_tokenizer
from slipstream.inference.embedded.tiny import tiny_model, tiny_model_dir
from slipstream.inference.fake import FakeEngine
from slipstream.inference.server import bind, build_app
from slipstream.ledger import LedgerReader
from slipstream.trainers.distill import BackendTeacher, EngineTeacher, ServerTeacher, check_teacher
from slipstream.trainers.run import train
from slipstream.training.torch_backend import TorchBackend
from slipstream.trajectory import SamplingSpec


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "teacher", seed=7)


async def samples(spec: SamplingSpec = SamplingSpec()) -> Batch:  # noqa: B008 - frozen
    engine = FakeEngine(300, eos_token_ids=(299,), scale=2.0)
    await engine.start()
    asked = requests(2, 3, spec, kept_sets=True)
    return compile_batch(groups(asked, await engine.generate_many(asked)), None, "token_mean")


async def test_a_teacher_scores_the_same_behind_the_backend_and_behind_the_contract(teacher_dir: Path) -> None:
    batch = await samples()
    teacher = TeacherSettings(path=str(teacher_dir), dtype="float32")
    with TorchBackend(
        ModelSettings(path=str(teacher_dir), dtype="float32"),
        TrainingSettings(threads=1),
        handles=("policy", "teacher"),
        teacher=teacher,
    ) as backend:
        local = await BackendTeacher(backend, 60).score(batch)
    engines = [EmbeddedEngine(str(teacher_dir), None, InferenceSettings(dtype="float32", threads=1)) for _ in range(2)]
    for engine in engines:
        await engine.start()
    try:
        remote = await EngineTeacher(engines, 60).score(batch)
    finally:
        for engine in engines:
            await engine.close()
    for row, a, b in zip(batch.rows, local, remote, strict=True):
        assert len(a) == row.n_trained
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("spec", [SamplingSpec(temperature=0.7), SamplingSpec(top_k=5)], ids=str)
async def test_a_teacher_behind_a_server_refuses_what_it_cannot_score(spec: SamplingSpec) -> None:
    batch = await samples(spec)
    with pytest.raises(ContractError, match="temperature 1 over the whole vocabulary"):
        await EngineTeacher([FakeEngine(300)], 60).score(batch)


async def test_a_teacher_that_does_not_answer_meets_its_deadline() -> None:
    class Deaf(FakeEngine):
        async def generate(self, request: Any) -> Any:
            import asyncio

            await asyncio.wrap_future(Future())

    with pytest.raises(InferenceError, match="did not score 6 rows"):
        await EngineTeacher([Deaf(300)], 0.05).score(await samples())


def test_the_kl_to_a_local_teacher_falls(tiny_dir: Path, tmp_path: Path) -> None:
    # A teacher in the student's neighbourhood: its weights, half of each matrix's spread away.
    model, tokenizer = tiny_model(0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter += torch.randn(parameter.shape, generator=noise) * parameter.std() * 0.5
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "teacher")
    settings = tiny_settings(
        tiny_dir, tmp_path / "r", "algorithm.preset=distill", f"algorithm.teacher.path={tmp_path / 'teacher'}",
        "algorithm.teacher.dtype=float32", "schedule.steps=15", "training.optimizer.lr=0.005", "data.eval=[]",
        "rollout.max_turns=1", "rollout.samples_per_prompt=8", "rollout.sampling.max_tokens_per_turn=12",
        "checkpoint.every_steps=0", "algorithm.minibatches_per_step=2",
    )  # fmt: skip
    train(settings)
    gaps = [m.values["policy/teacher_kl"] for m in LedgerReader(tmp_path / "r").metrics("train")]
    assert float(np.mean(gaps[-3:])) < 0.85 * float(np.mean(gaps[:3])), gaps


@pytest.fixture
def served(teacher_dir: Path) -> Iterator[str]:
    """The teacher behind a real socket."""
    import uvicorn

    engine = EmbeddedEngine(str(teacher_dir), None, InferenceSettings(dtype="float32", threads=1))
    app = build_app(engine, load_tokenizer(str(teacher_dir)), own_engine=True)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(20)
    sock.close()
    assert not thread.is_alive()


async def test_a_served_teacher_is_checked_and_scores(served: str, teacher_dir: Path) -> None:
    settings = AlgorithmSettings(teacher=TeacherSettings(urls=(served,)))
    tokenizer = load_tokenizer(str(teacher_dir))
    await check_teacher(settings, tokenizer, 60)
    batch = await samples()
    scores = await ServerTeacher([served], 60).score(batch)
    assert [len(s) for s in scores] == [row.n_trained for row in batch.rows]
    assert all(np.isfinite(s).all() and (s <= 0).all() for s in scores)

    class Shifted:
        def encode(self, text: str, **options: Any) -> list[int]:
            return [i + 1 for i in tokenizer.encode(text, **options)]

    with pytest.raises(SettingsError, match="tokenises a probe differently"):
        await check_teacher(settings, Shifted(), 60)


async def test_a_local_teacher_needs_the_students_vocabulary(teacher_dir: Path) -> None:
    settings = AlgorithmSettings(teacher=TeacherSettings(path=str(teacher_dir)))
    tokenizer = load_tokenizer(str(teacher_dir))
    await check_teacher(settings, tokenizer, 60)

    class Other:
        def get_vocab(self) -> dict[str, int]:
            vocab = dict(tokenizer.get_vocab())
            vocab["extra"] = len(vocab)
            return vocab

    with pytest.raises(SettingsError, match=r"differs from the student's in 1 tokens \(for example 'extra'\)"):
        await check_teacher(settings, Other(), 60)


def test_a_run_learns_from_a_served_teacher_as_from_a_local_one(
    served: str, teacher_dir: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    def gaps(name: str, *teacher: str) -> list[float]:
        settings = tiny_settings(
            tiny_dir, tmp_path / name, "algorithm.preset=distill", *teacher, "schedule.steps=2", "data.eval=[]",
            "rollout.max_turns=1", "rollout.sampling.max_tokens_per_turn=6", "training.optimizer.lr=0.005",
            "checkpoint.every_steps=0",
        )  # fmt: skip
        assert train(settings).finished
        rows = LedgerReader(tmp_path / name).metrics("train")
        assert all(row.values["policy/optimizer_steps"] == 1 for row in rows)
        return [row.values["policy/teacher_kl"] for row in rows]

    remote = gaps("remote", f"algorithm.teacher.urls=[{served}]")
    local = gaps("local", f"algorithm.teacher.path={teacher_dir}", "algorithm.teacher.dtype=float32")
    assert len(remote) == 2
    assert remote == pytest.approx(local, abs=1e-3)
