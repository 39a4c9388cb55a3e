"""A whole run: built from settings, resumable, closed in order.

Owns: the phases (evaluate -> supervised warm start -> evaluate -> RL -> evaluate -> report), what the loop's hooks do,
and the lifecycle of everything heavy.
Refuses: the order inside a step (``loop``), what a checkpoint looks like (``saving``), how anything is computed.

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
from pathlib import Path
from typing import Any

from slipstream.algorithms.check import algorithm_problems
from slipstream.algorithms.component_check import refuse_broken
from slipstream.algorithms.filters import apply_filters
from slipstream.config import Plan, dump_settings, make_plan
from slipstream.config.settings import RunSettings
from slipstream.data.sampler import Sampler
from slipstream.envs.registration import import_modules
from slipstream.errors import SettingsError
from slipstream.inference.embedded.engine import EmbeddedEngine
from slipstream.ledger import Ledger, build_sinks, next_incarnation, write_report
from slipstream.ledger.lock import only_writer
from slipstream.ledger.records import Stage
from slipstream.rollout.types import AttemptCancelled, GroupTask, RolloutEvent, TurnRecovered
from slipstream.rollout.waves import WaveLog
from slipstream.schedule import Schedule, build_schedule
from slipstream.trainers.account import TokenBooks
from slipstream.trainers.callbacks import Callback, Control, StepInfo, notify
from slipstream.trainers.checkpoint import Checkpoint
from slipstream.trainers.evaluate import EvalResult, Evaluator
from slipstream.trainers.loop import Hooks, Loop, Published
from slipstream.trainers.parts import CustomGenerator, Parts, build_parts
from slipstream.trainers.progress import Progress, RunResult
from slipstream.trainers.recording import RecordedSchedule, Recorder, Recording
from slipstream.trainers.rollouts import Rollouts
from slipstream.trainers.rules import RuleKeeper
from slipstream.trainers.saving import Saver, keeps_rollouts
from slipstream.trainers.sft import SftTrainer
from slipstream.trainers.time_limit import TimeLimit
from slipstream.trainers.update import PolicyUpdate
from slipstream.trainers.waiting import within
from slipstream.trajectory import Group


def train(
    settings: RunSettings, callbacks: Sequence[Callback] = (), generator: CustomGenerator | None = None
) -> RunResult:
    """Run to the end (or to Ctrl-C, which stops at the next step border after a checkpoint).

    ``generator`` replaces the default one: an object with ``generate_group`` or with SkyRL's ``generate``, or a
    function that builds one from the run's ``Parts`` (``rollout.generator`` is the same by import path).

    A run that goes back to an earlier checkpoint (``Control.roll_back``, a rule) starts from there at once, as a resume
    does, ``checkpoint.rollbacks`` times; the next time it ends there.
    """
    while True:
        run = Run(settings, callbacks, generator=generator)
        result = asyncio.run(run.run())
        if not run.goes_back:
            return result
        # What it goes on from is its own checkpoint, also where the first start was to find none.
        settings = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"resume": "auto"})})


def check(settings: RunSettings, notes: Sequence[Any] = ()) -> Plan:
    """The plan of a run with every contradiction that can be found before a model loads."""
    return make_plan(settings, notes=notes, problems=algorithm_problems(settings))


class Run:
    """One start of a run directory; ``recording`` makes it repeat the schedule of another run."""

    def __init__(
        self,
        settings: RunSettings,
        callbacks: Sequence[Callback] = (),
        *,
        generator: CustomGenerator | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.settings = settings
        self.control = Control()
        self.run_dir = Path(settings.run_dir)
        self.saver = Saver(self.run_dir, settings)
        self.progress = Progress()
        self.goes_back = False
        """Once it has ended: the run was taken back to an earlier checkpoint and may go on from there."""
        self._user_callbacks = tuple(callbacks)
        self._generator = generator
        self._recording = recording
        self._recorder: Recorder | None = None
        self._published = 0
        self._started = time.perf_counter()

    # -- the phases --------------------------------------------------------------------------------------------

    async def run(self) -> RunResult:
        """All phases; raises typed errors, after everything that was started has been closed."""
        import_modules(self.settings.env.modules)  # names that they register are looked up from here on
        check(self.settings).raise_if_refused()
        if self.settings.schedule.steps:
            refuse_broken(self.settings.algorithm)  # the user's own loss, estimator, reduction and filters
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"run_dir={self.run_dir} cannot be made ({error.strerror}); choose another") from error
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(only_writer(self.run_dir))
            found = self.saver.find()
            if found is not None and found.state["progress"]["finished"] and not self._goes_on(found):
                self.progress = Progress(**found.state["progress"])
                return self._result(self._report())
            incarnation = next_incarnation(self.run_dir)
            self.ledger = stack.enter_context(Ledger(self.run_dir, incarnation))
            self.ledger.event(
                "run_started", settings=self.settings, resumed_from=found.directory.name if found else None
            )
            self.callbacks = (
                *self._user_callbacks,
                RuleKeeper(self.settings.rules, self.ledger, self.saver.store),
                TimeLimit(self.settings.schedule.time_limit_minutes, self._elapsed, self._last_evaluation_seconds),
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
            stack.callback(self.sinks.close)
            if self.settings.training.determinism == "exact":
                self._recorder = Recorder(self.run_dir, incarnation)
                stack.callback(self._recorder.close)
            stack.callback(self.saver.close)
            try:
                async with self._parts(incarnation) as self.parts:
                    self.parts.listen(self._on_recovered)
                    with _interruptible(self.control):
                        self.progress = await self.saver.resume(found, self.parts, self.ledger, self.sinks.note)
                        self._take_up(found)
                        await self._phases()
            except BaseException as error:
                self.ledger.event("error", message=f"{type(error).__name__}: {error}")
                raise
            return self._finish()

    def _goes_on(self, found: Checkpoint) -> bool:
        """Whether a finished run is asked for more steps, or time, than it was given."""
        asked, had = self.settings.schedule, RunSettings.model_validate(found.state["settings"]).schedule
        if asked.epochs != had.epochs:
            return True  # how many steps that is, the data say
        done = int(found.state["progress"]["rl_steps"])
        if found.state["progress"]["ended_by"] is not None:
            limit = asked.time_limit_minutes
            if had.time_limit_minutes is not None and (limit is None or limit > had.time_limit_minutes):
                return True
            done = had.steps
        return asked.epochs is None and asked.steps > done

    def _take_up(self, found: Checkpoint | None) -> None:
        """A run that had made its last step when it was stopped makes no other one, unless it is asked to."""
        ended_by, self.progress.ended_by = self.progress.ended_by, None
        if found is not None and ended_by is not None and not self._goes_on(found):
            self.control.finish(ended_by)

    async def _phases(self) -> None:
        settings, progress = self.settings, self.progress
        progress.finished = False
        notify(self.callbacks, "on_train_start", self._info(), self.control)
        untouched = progress.sft_steps == progress.rl_steps == 0
        if settings.eval.before and untouched:
            await self._evaluate_once("start", 0)
        if settings.sft.steps and self.control.stop_reason is None:
            await self._sft()
            warm = progress.rl_steps == 0 and settings.schedule.steps and settings.eval.before
            if self.control.stop_reason is None and warm:
                await self._evaluate_once("sft", 0)
        if settings.schedule.steps and self.control.stop_reason is None:
            await self._rl()
        if self.control.finish_reason is not None:
            self.sinks.note(f"RL ended by {self.control.finish_reason}")
        done = progress.rl_steps >= settings.schedule.steps or self.control.finish_reason is not None
        if settings.eval.after and done and self.control.stop_reason is None:
            await self._evaluate_once("rl" if settings.schedule.steps else "sft", progress.rl_steps)
        if self.control.stop_reason is None:
            await self._export()
            progress.finished = True
            await self._save()
        if self.control.rollback_to is not None:
            self._go_back(self.control.rollback_to)
        notify(self.callbacks, "on_train_end", self._info(), self.control)

    def _go_back(self, name: str) -> None:
        """Put an earlier checkpoint in charge; this start of the run is over."""
        times = len(self.ledger.reader.events("rollback"))
        self.goes_back = times < self.settings.checkpoint.rollbacks
        self.saver.store.point_to(name)
        reason = self.control.stop_reason
        self.ledger.event("rollback", step=self.progress.rl_steps, name=name, reason=reason, goes_on=self.goes_back)

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

    async def _sft_border(self, step: int) -> None:
        self.progress.sft_steps = step
        self.parts.stale = True
        if self.control.evaluate_requested:
            self.control.evaluate_requested = False
            await self._evaluate("sft", step)
        every, last = self.settings.checkpoint.every_steps, step == self.settings.sft.steps
        asked = self.control.save_requested or self.control.stop_reason is not None
        if last or asked or (every and step % every == 0):
            self.control.save_requested = False
            await self._save()

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
        if self._evaluation_is_due(progress.rl_steps) and not await self._evaluate_rl(progress.rl_steps):
            return  # it was interrupted again
        self.loop = await self._build_loop(version)
        self.sinks.begin("rl", settings.schedule.steps, progress.rl_steps)
        parts.listen(self._on_rollout_event)
        progress.rl_steps = await self.loop.run(progress.rl_steps)

    async def _build_loop(self, version: str) -> Loop:
        settings, progress, parts = self.settings, self.progress, self.parts
        schedule: Schedule = build_schedule(settings.schedule, self._judge, dynamic=settings.algorithm.dynamic_sampling)
        if self._recording is not None:
            schedule = RecordedSchedule(self._recording.steps)
        if progress.schedule is not None:
            schedule.load_state_dict(progress.schedule, self.saver.buffered)
        assert parts.train_data is not None
        sampler = Sampler(parts.train_data, seed=settings.seed, shuffle=settings.data.shuffle)
        if progress.sampler is not None:
            sampler.load_state_dict(progress.sampler)
        rollouts = Rollouts(
            settings, schedule, sampler, parts.generator, recovered=self.saver.recovered,
            on_start=self._on_start,
        )  # fmt: skip
        rollouts.load_state_dict(progress.rollouts or {})
        if keeps_rollouts(settings):
            self.saver.open_journal(progress)
        update = PolicyUpdate(parts.backend, settings.algorithm, parts.deadline)
        if progress.update is not None:
            update.load_state_dict(progress.update)
        hooks = Hooks(self._publish, self._save_rl, self._evaluate_rl, self._show, self._sampled_tokens)
        return Loop(
            settings, schedule, rollouts, update, self.ledger, hooks, version=version,
            books=TokenBooks(parts.generator, await self._sampled_tokens()), callbacks=self.callbacks,
            control=self.control, watch=self._recorder,
        )  # fmt: skip

    def _on_start(self, task: GroupTask) -> None:
        if self._recorder is not None:
            self._recorder.admitted(task)
        if self.saver.journal is not None:
            self.saver.journal.started(task)

    def _on_recovered(self, event: RolloutEvent) -> None:
        """In training and in evaluations, also in those before the first step."""
        if isinstance(event, TurnRecovered):
            where = {"trajectory": event.trajectory_id, "turn": event.turn}
            self.ledger.event("recovered", **where, fault=event.fault, reason=event.reason)

    def _on_rollout_event(self, event: RolloutEvent) -> None:
        if isinstance(event, TurnRecovered):
            return
        stale = (
            isinstance(event, AttemptCancelled) and self.loop.rollouts.why(event.task.group_id) == "stale"
        )  # the journal keeps groups that are taken back because the run ends
        self.loop.on_rollout_event(event)
        if self.saver.journal is not None:
            if stale:
                self.saver.journal.gone(event.task.group_id)
            else:
                self.saver.journal.on_event(event)
        if stale and self._recorder is not None:
            self._recorder.taken_back(event.task.group_id)

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
        if changed and self._recording is not None:
            await self._reach_recorded_publish(self._recording)
        version = await self.parts.ensure_published()
        if changed:
            self.ledger.event("publish", version=version)
            if self._recorder is not None and self._in_process():
                engine_step = (await self.parts.engine.metrics())["weight_update_step"]
                self._recorder.published(version, int(engine_step))
        return version

    async def _reach_recorded_publish(self, recording: Recording) -> None:
        """Let the engine go as far as it had when the recorded run published, and not beyond."""
        engine = self.parts.embedded
        if self._published == 0:
            await engine.hold_at(recording.publishes)
        await asyncio.wait_for(engine.reach(recording.publishes[self._published]), self.parts.deadline)
        self._published += 1

    async def _save_rl(self, step: int) -> None:
        self.progress.rl_steps = step
        await self._save()

    async def _evaluate_rl(self, step: int) -> Mapping[str, float]:
        result = await self._evaluate("rl", step)
        return result.scores if result is not None else {}

    async def _sampled_tokens(self) -> int | None:
        """The engine's own count, where it is a witness: others may ask a server, and a probe does."""
        if not self._in_process():
            return None
        return int((await self.parts.engine.metrics())["generation_tokens_total"])

    def _in_process(self) -> bool:
        return isinstance(self.parts.embedded, EmbeddedEngine)

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        self.sinks.log(dict(metrics), step)

    # -- evaluation --------------------------------------------------------------------------------------------

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether an evaluation between steps was interrupted, or killed after its checkpoint."""
        every = self.settings.eval.every_steps
        if not (every and step and step % every == 0 and self.parts.eval_rows):
            return False
        return step < self.settings.schedule.steps and self.progress.evals.get("rl", {}).get("step") != step

    async def _evaluate_once(self, stage: Stage, step: int) -> None:
        """Evaluate unless a checkpoint already holds this stage's score; then save, so that it is not done twice."""
        if self.progress.evals.get(stage, {}).get("step") == step:
            return
        if await self._evaluate(stage, step) is not None and stage != "rl":
            await self._save()

    async def _evaluate(self, stage: Stage, step: int) -> EvalResult | None:
        """Evaluate; None when there is nothing to evaluate on, or when the run was told to stop meanwhile."""
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
            spec=_what_is_evaluated(self.settings),
        )
        began = time.perf_counter()
        result = await self.control.unless_stopped(evaluator(stage, step, version))
        if result is None:
            self.sinks.note("the evaluation was stopped; the resumed run does it again")
            return None
        self.progress.evals[stage] = {"step": step, "accuracy": result.accuracy, "scores": dict(result.scores)}
        self.progress.evaluation_seconds = time.perf_counter() - began
        self.sinks.log(dict(result.scores), step)
        return result

    # -- the end -----------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        self._count_seconds()
        self.progress.ended_by = self.control.finish_reason
        await self.saver.save(self.progress, self.parts, self.ledger, getattr(self, "loop", None))

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
            stop_reason=self._why(),
            seconds=progress.seconds,
            peak_memory_gb=progress.peak_memory_gb,
        )
        return self._result(self._report())

    def _elapsed(self) -> float:
        """Seconds of the run so far, those of earlier starts up to their last checkpoint."""
        return self.progress.seconds + time.perf_counter() - self._started

    def _last_evaluation_seconds(self) -> float:
        return self.progress.evaluation_seconds if self.settings.eval.after and self.parts.eval_rows else 0.0

    def _count_seconds(self) -> None:
        self.progress.seconds, self._started = self._elapsed(), time.perf_counter()
        self.progress.peak_memory_gb = max(self.progress.peak_memory_gb, _peak_memory_gb())

    def _report(self) -> Path | None:
        return write_report(self.run_dir) if self.settings.logging.report else None

    def _why(self) -> str | None:
        return self.control.stop_reason or self.control.finish_reason or self.progress.ended_by

    def _result(self, report: Path | None) -> RunResult:
        progress = self.progress
        accuracy = {stage: float(entry["accuracy"]) for stage, entry in progress.evals.items()}
        return RunResult(
            self.run_dir,
            progress.rl_steps,
            progress.finished,
            self._why(),
            accuracy,
            max((int(e["scores"]["eval/all/num_prompts"]) for e in progress.evals.values()), default=0),
            progress.seconds,
            progress.peak_memory_gb,
            report,
        )

    @contextlib.asynccontextmanager
    async def _parts(self, incarnation: int) -> AsyncIterator[Parts]:
        (self.run_dir / "settings.yaml").write_text(dump_settings(self.settings))
        waves = WaveLog(
            on_wave=None if self._recorder is None else self._recorder.wave,
            script=None if self._recording is None else iter(self._recording.waves),
        )
        parts = await build_parts(
            self.settings, self.ledger, incarnation, generator=self._generator, waves=waves,
            record_turns=keeps_rollouts(self.settings),
        )  # fmt: skip
        self.settings = self.saver.settings = parts.settings
        try:
            yield parts
        finally:
            await parts.close()


def _what_is_evaluated(settings: RunSettings) -> dict[str, Any]:
    """What a score depends on besides weights, prompts and sampling."""
    model = settings.model
    return {
        "seed": settings.seed,
        "data": list(settings.data.eval),
        "env": settings.env.model_dump(mode="json"),
        "model": model.path,
        "chat_template": model.chat_template,
        "chat_template_kwargs": dict(model.chat_template_kwargs),
        "dtype": settings.inference.dtype,
    }


def _peak_memory_gb() -> float:
    """Peak resident memory of this process, in units of 1e9 bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


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
