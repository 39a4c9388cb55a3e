"""Published step times of asynchronous training, and the scenarios that stand for them.

Owns: the numbers as their authors published them, with their source, and what has to be assumed beside them.
Refuses: fitting (``calibrate``).

Sources: NVIDIA NeMo-RL, docs/about/performance-summary.md (NeMo RL v0.6) and the recipes that it names; verl,
docs/advance/fully_async.md.

Assumptions, the same for all rows of a source:

* Lengths are log-normal, cut at the published maximum; NeMo publishes the average, verl none.
* Training time is inversely proportional to the GPUs that train; so is the number of engine replicas.
* A replica's decode step takes ``a + b * n`` seconds for ``n`` sequences.
* Workloads are scaled down (fewer replicas, proportionally fewer prompts): times do not change, noise grows a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from slipstream.config.settings import ScheduleSettings
from slipstream.simulate.distributions import Constant, LogNormal
from slipstream.simulate.scenario import EngineModel, Scenario, TrainerModel, WorkSettings


@dataclass(frozen=True)
class NemoRow:
    """One published step time (seconds), on ``gpus`` GPUs, at ``lag`` steps off policy.

    On policy, all GPUs generate and then all train.  Off policy, ``gpus_generating`` generate and the rest train.
    """

    gpus: int
    lag: int
    step: float
    gpus_generating: int


@dataclass(frozen=True)
class NemoCase:
    """All rows of one model on one platform.  ``gpus_per_replica`` is the generation's tensor parallel size."""

    name: str
    samples: int
    """Samples of a step (G-GBS)."""
    samples_per_prompt: int
    average: float
    longest: float
    gpus_per_replica: int
    rows: Sequence[NemoRow]
    scale: int = 1
    """Workload and replicas are divided by this."""

    @property
    def on_policy(self) -> NemoRow:
        """The on-policy row with as many GPUs as the one-step-off row."""
        return next(row for row in self.rows if row.lag == 0 and row.gpus == self.off_policy.gpus)

    @property
    def off_policy(self) -> NemoRow:
        """The one-step-off row."""
        return next(row for row in self.rows if row.lag == 1)

    @property
    def published_ratio(self) -> float:
        """On-policy over one-step-off step time, at equal GPUs; above 1 asynchrony wins."""
        return self.on_policy.step / self.off_policy.step


NEMO = (
    NemoCase(
        "DeepSeek-V3, 512 H100", 512, 16, 700, 1536, 32,
        (NemoRow(512, 0, 111.0, 512), NemoRow(512, 1, 64.1, 256), NemoRow(256, 0, 134.0, 256)), scale=2,
    ),
    NemoCase(
        "Qwen3-235B, 256 H100", 512, 16, 5700, 8192, 16,
        (NemoRow(256, 0, 312.0, 256), NemoRow(256, 1, 231.0, 128), NemoRow(128, 0, 395.0, 128)), scale=2,
    ),
    NemoCase(
        "Qwen3-30B-A3B, 32 H100", 2048, 32, 3200, 4096, 2,
        (NemoRow(32, 0, 192.0, 32), NemoRow(32, 1, 152.0, 16), NemoRow(192, 8, 34.5, 64)), scale=4,
    ),
    NemoCase(
        "DeepSeek-V3, 256 GB200", 512, 16, 705, 1536, 32,
        (NemoRow(256, 0, 98.7, 256), NemoRow(256, 1, 61.7, 128), NemoRow(128, 0, 108.0, 128)), scale=2,
    ),
    NemoCase(
        "Qwen3-235B, 128 GB200", 512, 16, 5700, 8192, 8,
        (NemoRow(128, 0, 345.0, 128), NemoRow(128, 1, 278.0, 64), NemoRow(64, 0, 286.0, 64)), scale=2,
    ),
    NemoCase(
        "Qwen3-30B-A3B, 16 GB200", 2048, 32, 3200, 4096, 1,
        (NemoRow(16, 0, 221.0, 16), NemoRow(16, 1, 301.0, 8)), scale=4,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class VerlRow:
    """One size: colocated synchronous against half and half, in seconds of a step of 512 prompts.

    ``sync_*`` are the stages of a synchronous step; ``update`` and ``wait`` (their ``gen``) those of the asynchronous.
    """

    gpus: int
    sync_step: float
    sync_gen: float
    async_step: float
    async_update: float
    async_wait: float
    published_total: tuple[float, float]
    """Least and largest published ratio of total times."""

    @property
    def sync_rest(self) -> float:
        """Everything in a synchronous step but generation."""
        return self.sync_step - self.sync_gen

    @property
    def async_rest(self) -> float:
        """What is neither waiting nor updating: the weight sync and small change."""
        return self.async_step - self.async_update - self.async_wait

    @property
    def published_ratio(self) -> float:
        """Ratio of step times."""
        return self.sync_step / self.async_step


VERL = (
    VerlRow(32, 790.10, 357.41, 294.77, 269.80, 21.26, (1.70, 2.66)),
    VerlRow(64, 365.28, 150.72, 189.26, 156.98, 28.46, (1.83, 2.09)),
    VerlRow(128, 356.30, 177.85, 150.63, 113.16, 33.14, (2.35, 2.67)),
)
VERL_PROMPTS, VERL_SAMPLES, VERL_LONGEST = 512, 16, 28 * 1024
VERL_PARTS = 4
"""Updates between two syncs: verl trains on a quarter of the prompts at a time, as they come."""
VERL_STALENESS = 0.5
"""So at most 1.5 steps' worth of prompts are out.  verl refills after a sync; here places are refilled as they open."""


@cache
def _cut_mean(average: float, cv: float, most: float) -> LogNormal:
    """The log-normal whose average after the cut is ``average``."""
    low, high = average, average * 20
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if LogNormal(middle, cv, most).average(500) < average else (low, middle)
    return LogNormal(low, cv, most)


def nemo_scenario(
    case: NemoCase, row: NemoRow, *, share: float, bound: float, cv: float = 0.6, steps: int = 8
) -> Scenario:
    """A row under the assumption that generation takes ``share`` of the on-policy step.

    ``bound`` is the part of a decode step that grows with the batch, at the on-policy row's batch.  Decode steps are
    given per unit: ``calibrate`` scales them so that the on-policy row generates for ``share`` of its step.
    """
    train = case.on_policy.step * (1 - share) * case.on_policy.gpus
    generating = row.gpus_generating
    training = row.gpus if row.lag == 0 else row.gpus - generating
    batch = case.samples * case.gpus_per_replica / case.on_policy.gpus
    prompts = case.samples // case.samples_per_prompt // case.scale
    return Scenario(
        work=WorkSettings(
            samples_per_prompt=case.samples_per_prompt,
            turn_tokens=_cut_mean(case.average, cv, case.longest),
            prompt_tokens=Constant(0),
        ),
        engines=EngineModel(
            replicas=max(1, generating // case.gpus_per_replica // case.scale),
            max_batch=4096,
            step_seconds=(1 - bound) * 0.01,
            step_seconds_per_sequence=bound * 0.01 / batch,
        ),
        trainer=TrainerModel(update_seconds=Constant(train / training), publish_seconds=Constant(0)),
        schedule=ScheduleSettings(
            kind="sync" if row.lag == 0 else "bounded",
            prompts_per_step=prompts,
            steps=steps if row.lag < 2 else 3 * steps,
            max_staleness_steps=row.lag or 4,
        ),
    )


def verl_scenario(row: VerlRow, *, asynchronous: bool, seconds_per_token: float, steps: int = 8) -> Scenario:
    """A row, one replica per GPU, scaled down 16 times.

    ``seconds_per_token`` is a busy GPU's time per token (the batch-dependent part of a decode step); the rest of a
    decode step is given per unit, to be scaled until the synchronous row generates for as long as was published.
    """
    scale = 16
    gpus = row.gpus // 2 if asynchronous else row.gpus
    parts = VERL_PARTS if asynchronous else 1
    prompts = VERL_PROMPTS // scale
    outstanding = round((1 + VERL_STALENESS) * VERL_PARTS)
    return Scenario(
        work=WorkSettings(
            samples_per_prompt=VERL_SAMPLES,
            turn_tokens=LogNormal(3000, 1.2, VERL_LONGEST),
            prompt_tokens=Constant(0),
        ),
        engines=EngineModel(
            replicas=gpus // scale, max_batch=4096, step_seconds=0.01, step_seconds_per_sequence=seconds_per_token
        ),
        trainer=TrainerModel(
            update_seconds=Constant(row.async_update / parts if asynchronous else row.sync_rest),
            publish_seconds=Constant(row.async_rest if asynchronous else 0),
            publish_every=parts,
        ),
        schedule=ScheduleSettings(
            kind="fully_async" if asynchronous else "sync",
            prompts_per_step=prompts // parts,
            steps=steps * parts,
            max_staleness_steps=outstanding - 1 if asynchronous else 4,
        ),
    )
