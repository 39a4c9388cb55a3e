"""A whole run: built from settings, resumable, closed in order.

Owns: the phases (evaluate -> supervised warm start -> evaluate -> RL -> evaluate -> report), whole-run
checkpoints, and the lifecycle of everything heavy.
Refuses: the order inside a step (``loop``), how anything is computed.

    result = train(settings)                    # blocking
    result = await Run(settings).run()          # the same, inside an event loop

A run directory belongs to one configuration.  Running the same command again resumes at the last checkpoint;
a finished run returns its result at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.algorithms.check import check_algorithm
from slipstream.algorithms.filters import apply_filters
from slipstream.config import Plan, check_resume, dump_settings, make_plan
from slipstream.config.settings import RunSettings
from slipstream.data.sampler import Sampler
from slipstream.errors import CheckpointError
from slipstream.ledger import Ledger, build_sinks, next_incarnation, write_report
from slipstream.ledger.records import Stage
from slipstream.schedule import build_schedule
from slipstream.trainers.callbacks import Callback, Control, StepInfo, notify
from slipstream.trainers.checkpoint import Checkpoint, CheckpointStore
from slipstream.trainers.evaluate import EvalResult, Evaluator
from slipstream.trainers.loop import Hooks, Loop, Published
from slipstream.trainers.parts import Parts, build_parts
from slipstream.trainers.sft import SftTrainer
from slipstream.trainers.update import PolicyUpdate, within
from slipstream.trajectory import Group
from slipstream.weights import VersionCounter


@dataclass
class Progress:
    """How far a run has come; part of every checkpoint."""

    sft_steps: int = 0
    rl_steps: int = 0
    sampler: dict[str, Any] | None = None
    schedule: dict[str, Any] | None = None
    update: dict[str, Any] | None = None
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_gb: float = 0.0
    data_fingerprint: str = ""
    finished: bool = False

    @property
    def name(self) -> str:
        """The checkpoint's directory name."""
        return f"rl-{self.rl_steps:06d}" if self.rl_steps else f"sft-{self.sft_steps:06d}"


@dataclass(frozen=True)
class RunResult:
    """How a run ended.  ``accuracy`` maps stages (``start``, ``sft``, ``rl``) to mean scores over ``eval_prompts``."""

    run_dir: Path
    steps: int
    finished: bool
    stop_reason: str | None
    accuracy: Mapping[str, float]
    eval_prompts: int
    seconds: float
    peak_memory_gb: float
    report: Path | None


def train(settings: RunSettings, callbacks: Sequence[Callback] = ()) -> RunResult:
    """Run to the end (or to Ctrl-C, which stops at the next step border after a checkpoint)."""
    return asyncio.run(Run(settings, callbacks).run())


def check(settings: RunSettings, notes: Sequence[Any] = ()) -> Plan:
    """The plan of a run with every contradiction that can be found before a model loads."""
    problems = check_algorithm(
        settings.algorithm,
        settings.rollout.sampling,
        samples_per_prompt=settings.rollout.samples_per_prompt,
        prompts_per_step=settings.schedule.prompts_per_step,
    )
    return make_plan(settings, notes=notes, problems=problems if settings.schedule.steps else ())


class Run:
    """One start of a run directory."""

    def __init__(self, settings: RunSettings, callbacks: Sequence[Callback] = ()) -> None:
        self.settings = settings
        self.callbacks = callbacks
        self.control = Control()
        self.run_dir = Path(settings.run_dir)
        self.store = CheckpointStore(self.run_dir / "checkpoints", settings.checkpoint.keep)
        self.progress = Progress()
        self._started = time.perf_counter()

    # -- the phases --------------------------------------------------------------------------------------------

    async def run(self) -> RunResult:
        """All phases; raises typed errors, after everything that was started has been closed."""
        check(self.settings).raise_if_refused()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        found = self._find_checkpoint()
        if found is not None and found.state["progress"]["finished"]:
            self.progress = Progress(**found.state["progress"])
            return self._result(self._report())
        incarnation = next_incarnation(self.run_dir)
        with Ledger(self.run_dir, incarnation) as self.ledger:
            self.ledger.event(
                "run_started", settings=self.settings, resumed_from=found.directory.name if found else None
            )
            self.sinks = build_sinks(
                self.settings.logging.sinks,
                self.run_dir,
                project=self.settings.logging.project,
                run_name=self.settings.logging.run_name,
                config=self.settings,
                total_steps=self.settings.schedule.steps,
                on_failure=lambda message: self.ledger.event("warning", message=message) and None,
            )
            try:
                async with self._parts(incarnation) as self.parts:
                    with _interruptible(self.control):
                        await self._resume(found)
                        await self._phases()
            except BaseException as error:
                self.ledger.event("error", message=f"{type(error).__name__}: {error}")
                raise
            finally:
                self.sinks.close()
            return self._finish()

    async def _phases(self) -> None:
        settings, progress = self.settings, self.progress
        notify(self.callbacks, "on_train_start", self._info(), self.control)
        if settings.eval.before:
            await self._evaluate_once("start", 0)
        if settings.sft.steps:
            await self._sft()
            if self.control.stop_reason is None and settings.schedule.steps and settings.eval.before:
                await self._evaluate_once("sft", 0)
        if settings.schedule.steps and self.control.stop_reason is None:
            await self._rl()
        done = progress.rl_steps >= settings.schedule.steps
        if settings.eval.after and done and self.control.stop_reason is None:
            await self._evaluate_once("rl" if settings.schedule.steps else "sft", progress.rl_steps)
        if self.control.stop_reason is None:
            await self._export()
            progress.finished = True
            self._save()
        notify(self.callbacks, "on_train_end", self._info(), self.control)

    async def _sft(self) -> None:
        settings, progress, parts = self.settings, self.progress, self.parts
        if progress.sft_steps >= settings.sft.steps:
            return
        if progress.sft_steps == 0:
            await within(
                parts.backend.reset_optimizer(settings.sft.optimizer, settings.sft.steps),
                parts.deadline,
                "phase change",
            )
        trainer = SftTrainer(
            parts.backend,
            parts.sft_rows(),
            settings.sft,
            seed=settings.seed,
            deadline=parts.deadline,
            on_step=self._sft_step,
            on_border=self._sft_border,
            callbacks=self.callbacks,
            control=self.control,
        )
        self.sinks.begin("sft", settings.sft.steps, progress.sft_steps)
        self.sinks.note(f"supervised warm start: {settings.sft.steps} steps of {settings.sft.rows_per_step} rows")
        await trainer.run(progress.sft_steps)

    def _sft_step(self, step: int, metrics: dict[str, float]) -> None:
        self.ledger.record_metrics(step, metrics, phase="sft")
        self.sinks.log(metrics, step)

    def _sft_border(self, step: int) -> None:
        self.progress.sft_steps = step
        self.parts.stale = True
        every = self.settings.checkpoint.every_steps
        if step == self.settings.sft.steps or self.control.stop_reason is not None or (every and step % every == 0):
            self._save()

    async def _rl(self) -> None:
        settings, progress, parts = self.settings, self.progress, self.parts
        if progress.rl_steps == 0 and settings.sft.steps:
            optimizer = settings.training.optimizer
            await within(
                parts.backend.reset_optimizer(optimizer, settings.schedule.steps), parts.deadline, "phase change"
            )
            if "reference" in parts.backend.handles:
                await within(parts.backend.set_reference(), parts.deadline, "phase change")
        version = await self._serving()
        schedule = build_schedule(settings.schedule, self._judge)
        if progress.schedule is not None:
            schedule.load_state_dict(progress.schedule)
        assert parts.train_data is not None
        sampler = Sampler(parts.train_data, seed=settings.seed, shuffle=settings.data.shuffle)
        if progress.sampler is not None:
            sampler.load_state_dict(progress.sampler)
        update = PolicyUpdate(parts.backend, settings.algorithm, parts.deadline)
        if progress.update is not None:
            update.load_state_dict(progress.update)
        hooks = Hooks(self._publish, self._save_rl, self._evaluate_rl, self._show, self._sampled_tokens)
        self.loop = Loop(
            settings, schedule, sampler, parts.generator, update, self.ledger, hooks,
            version=version, callbacks=self.callbacks, control=self.control,
        )  # fmt: skip
        self.sinks.begin("rl", settings.schedule.steps, progress.rl_steps)
        parts.listen(self.loop.on_rollout_event)
        progress.rl_steps = await self.loop.run(progress.rl_steps)

    def _judge(self, group: Group) -> str | None:
        """A group that the filters leave nothing of is not selected; its reason is the filters' first."""
        result = apply_filters([group], self.settings.algorithm, self.settings.rollout)
        excluded = result.excluded
        voters = [member.trajectory_id for member in group.voters]
        if voters and all(tid in excluded for tid in voters):
            return excluded[voters[0]]
        return None if voters else "no_voters"

    # -- hooks of the loop -------------------------------------------------------------------------------------

    async def _publish(self) -> Published:
        self.parts.stale = True
        return Published(await self._serving(), self.parts.receipts)

    async def _serving(self) -> str:
        """The version the engine serves, published first when the policy has changed."""
        changed = self.parts.stale
        version = await self.parts.ensure_published()
        if changed:
            self.ledger.event("publish", version=version, receipts=[r.to_json() for r in self.parts.receipts])
        return version

    def _save_rl(self, step: int) -> None:
        self.progress.rl_steps = step
        self.progress.schedule = self.loop.schedule.state_dict()
        self.progress.sampler = self.loop.sampler.state_dict()
        self.progress.update = self.loop.update.state_dict()
        self._save()

    async def _evaluate_rl(self, step: int) -> None:
        await self._evaluate("rl", step)

    async def _sampled_tokens(self) -> int:
        return int((await self.parts.engine.metrics())["generation_tokens_total"])

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sinks.log(dict(metrics), step)

    # -- evaluation --------------------------------------------------------------------------------------------

    async def _evaluate_once(self, stage: Stage, step: int) -> None:
        """Evaluate unless a checkpoint already holds this stage's score; then save, so that it is not done twice."""
        if self.progress.evals.get(stage, {}).get("step") == step:
            return
        await self._evaluate(stage, step)
        if stage != "rl":
            self._save()

    async def _evaluate(self, stage: Stage, step: int) -> EvalResult | None:
        if not self.parts.eval_rows:
            return None
        version = await self._serving()
        whose = {"start": "the untouched model", "sft": "the model after its warm start"}.get(stage, f"step {step}")
        self.sinks.note(f"evaluating {whose} on {len(self.parts.eval_rows)} held-out prompts")
        evaluator = Evaluator(
            self.parts.generator,
            self.parts.eval_rows,
            self.settings.eval,
            self.settings.rollout,
            self.ledger,
            deadline=self.settings.schedule.step_deadline_seconds,
            spec={"seed": self.settings.seed, "data": list(self.settings.data.eval)},
        )
        result = await evaluator(stage, step, version)
        self.progress.evals[stage] = {"step": step, "accuracy": result.accuracy, "scores": dict(result.scores)}
        self.sinks.log(dict(result.scores), step)
        return result

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _find_checkpoint(self) -> Checkpoint | None:
        how = self.settings.checkpoint.resume
        if how == "never":
            if self.store.names():
                raise CheckpointError(
                    f"{self.run_dir} already holds a run; choose another run_dir, or set checkpoint.resume=auto"
                )
            return None
        found = self.store.latest()
        if found is None and how == "must":
            raise CheckpointError(f"{self.run_dir}: checkpoint.resume=must, but there is no checkpoint")
        if found is not None:
            check_resume(RunSettings.model_validate(found.state["settings"]), self.settings)
        return found

    def _save(self) -> None:
        self._count_seconds()
        state = {
            "progress": asdict(self.progress),
            "settings": self.settings.model_dump(mode="json"),
            "version": self.parts.counter.state_dict(),
            "incarnation": self.ledger.incarnation,
        }

        def fill(directory: Path) -> None:
            self.parts.backend.save("policy", directory / "policy").result(self.parts.deadline)
            if self.parts.keeps_reference:
                self.parts.backend.save("reference", directory / "reference").result(self.parts.deadline)

        started = time.perf_counter()
        path = self.store.save(self.progress.name, state, fill)
        self.ledger.event(
            "checkpoint", step=self.progress.rl_steps, name=path.name, seconds=time.perf_counter() - started
        )

    async def _resume(self, found: Checkpoint | None) -> None:
        if found is None:
            self.ledger.rewind(0)
            self.progress.data_fingerprint = self.parts.fingerprint
            return
        self.progress = Progress(**found.state["progress"])
        if self.progress.data_fingerprint != self.parts.fingerprint:
            raise CheckpointError(
                f"{found.directory}: the training data has changed since this checkpoint; "
                "restore the files, or start a new run_dir"
            )
        backend = self.parts.backend
        if self.progress.sft_steps < self.settings.sft.steps:
            # A checkpoint holds moments, not settings: the phase it was written in says which optimiser goes on.
            call = backend.reset_optimizer(self.settings.sft.optimizer, self.settings.sft.steps)
            await within(call, self.parts.deadline, "phase change")
        await within(backend.load("policy", found.directory / "policy"), self.parts.deadline, "loading the policy")
        if self.parts.keeps_reference:
            call = backend.load("reference", found.directory / "reference")
            await within(call, self.parts.deadline, "loading the reference")
        # The same weights keep their number in the new incarnation, so that numbers stay aligned with steps.
        number = int(found.state["version"]["counter"])
        self.parts.counter = VersionCounter("policy", self.ledger.incarnation, max(number - 1, 0))
        lost = self.ledger.rewind(self.progress.rl_steps)
        self.sinks.note(
            f"resumed from {found.directory.name}: {self.progress.sft_steps} supervised and "
            f"{self.progress.rl_steps} RL steps are done"
            + (f"; {lost['steps']} later steps are superseded" if lost["steps"] else "")
        )

    # -- the end -----------------------------------------------------------------------------------------------

    async def _export(self) -> None:
        call = self.parts.backend.save_pretrained("policy", self.run_dir / "model")
        await within(call, self.parts.deadline, "exporting the model")

    def _info(self) -> StepInfo:
        return StepInfo("rl", self.progress.rl_steps, self.settings.schedule.steps)

    def _finish(self) -> RunResult:
        progress = self.progress
        self._count_seconds()
        self.ledger.event(
            "run_finished",
            finished=progress.finished,
            stop_reason=self.control.stop_reason,
            seconds=progress.seconds,
            peak_memory_gb=progress.peak_memory_gb,
        )
        return self._result(self._report())

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._started
        self._started = now
        self.progress.peak_memory_gb = max(self.progress.peak_memory_gb, _peak_memory_gb())

    def _report(self) -> Path | None:
        return write_report(self.run_dir) if self.settings.logging.report else None

    def _result(self, report: Path | None) -> RunResult:
        progress = self.progress
        accuracy = {stage: float(entry["accuracy"]) for stage, entry in progress.evals.items()}
        return RunResult(
            self.run_dir,
            progress.rl_steps,
            progress.finished,
            self.control.stop_reason,
            accuracy,
            max((int(e["scores"]["eval/all/num_prompts"]) for e in progress.evals.values()), default=0),
            progress.seconds,
            progress.peak_memory_gb,
            report,
        )

    @contextlib.asynccontextmanager
    async def _parts(self, incarnation: int) -> AsyncIterator[Parts]:
        (self.run_dir / "settings.yaml").write_text(dump_settings(self.settings))
        parts = await build_parts(self.settings, self.ledger, incarnation)
        self.settings = parts.settings
        try:
            yield parts
        finally:
            await parts.close()


def _peak_memory_gb() -> float:
    """Peak resident memory of this process, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


@contextlib.contextmanager
def _interruptible(control: Control) -> Any:
    """First Ctrl-C: stop at the next step border.  Second: stop now (KeyboardInterrupt)."""
    loop = asyncio.get_running_loop()
    owner = asyncio.current_task()

    def on_signal() -> None:
        if control.stop_reason is None:
            print("stopping after this step (Ctrl-C again to stop now; nothing before the last checkpoint is lost)",
                  file=sys.stderr)  # fmt: skip
            control.stop("interrupted")
        elif owner is not None:
            owner.cancel("interrupted")

    try:
        loop.add_signal_handler(signal.SIGINT, on_signal)
        loop.add_signal_handler(signal.SIGTERM, on_signal)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no signals on this platform
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
