"""A synthetic Text-to-SQL run for ledger and report tests: plausible, deterministic, no model."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.ledger import EvalRecord, Ledger, StepRecord, eval_metrics, next_incarnation
from slipstream.ledger.conservation import TokenFlow
from slipstream.trajectory import (
    Completed,
    Failed,
    Group,
    Outcome,
    Reward,
    Row,
    SamplingSpec,
    Span,
    Trajectory,
    Truncated,
    Turn,
    VersionRun,
)

PIECE = re.compile(r"<\|[a-z_]+\|>|\s?\w+|\s?[^\w\s]|\s+")
FAMILIES = ("count", "filter", "join", "group_by", "top_n")
TABLES = ("Artist", "Album", "Track", "Genre", "Customer", "Invoice", "Employee")
SCHEMA_TEXT = (
    "You answer questions about a music shop with one SQLite query.\n"
    "Tables: Artist(ArtistId, Name), Album(AlbumId, Title, ArtistId), "
    "Track(TrackId, Name, AlbumId, GenreId, Milliseconds, UnitPrice), Genre(GenreId, Name), "
    "Customer(CustomerId, FirstName, LastName, Country), Invoice(InvoiceId, CustomerId, InvoiceDate, Total), "
    "Employee(EmployeeId, LastName, Title, HireDate).\n"
    "Example: How many genres are there? <sql>SELECT COUNT(*) FROM Genre;</sql>\n"
)


@dataclass
class Pieces:
    """A growing word-piece vocabulary; ids in order of first use."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in PIECE.findall(text)]

    def texts(self) -> dict[int, str]:
        return {number: piece for piece, number in self.ids.items()}


@dataclass
class Synth:
    """Makes groups whose chance of being right grows with ``skill``."""

    seed: int = 0
    pieces: Pieces = field(default_factory=Pieces)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def _sampled(self, text: str, version: str, turn: int) -> Span:
        ids = self.pieces.encode(text)
        logprobs = [-min(6.0, self.random.expovariate(2.2)) for _ in ids]
        runs = [VersionRun(version, 0, len(ids))]
        return Span.sampled(ids, logprobs, runs, SamplingSpec(), turn)

    def trajectory(
        self, step: int, prompt: int, sample: int, skill: float, version: str, *, prefix: str = "s", size_note: str = ""
    ) -> Trajectory:
        rng = self.random
        family = FAMILIES[prompt % len(FAMILIES)]
        table = TABLES[prompt % len(TABLES)]
        question = f"How many rows of {table} have an id above {prompt * 3 + 1}?{size_note}"
        uid = f"{family}-{prompt:04d}"
        ease = skill - 0.1 * (prompt % len(FAMILIES))
        right_first, right_second = rng.random() < ease, rng.random() < ease * 0.5
        head = (
            f"<|im_start|>system\n{SCHEMA_TEXT}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        spans = [Span.prompt(self.pieces.encode(head))]
        turns: list[Turn] = []
        rewards: list[Reward] = []
        for turn in range(2):
            good = right_first if turn == 0 else right_second
            column = f"{table}Id" if good or rng.random() < 0.5 else "Identifier"
            bound = prompt * 3 + 1 if good else prompt
            extra = "".join(
                f" AND Name <> '{w}'" for w in rng.sample(("Rock", "Jazz", "Blues", "Latin"), rng.randint(0, 3))
            )
            sql = f"<sql>SELECT COUNT(*) FROM {table} WHERE {column} > {bound}{extra};</sql>"
            spans.append(self._sampled(sql, version, turn))
            spans.append(Span.synthetic(self.pieces.encode("<|im_end|>"), turn))
            runs = column != "Identifier"
            answer = "rows: [(42,)]" if runs else f"error: no such column: {column}"
            rewards.append(Reward(turn, 1.0 if good else 0.0, "correct"))
            if runs and turn == 1 and not good:
                rewards.append(Reward(turn, 0.1, "runs"))
            observation = ({"role": "user", "content": answer},)
            turns.append(
                Turn(turn, sql, observation, "stop", None, 0.4 + rng.random() * 0.3, 0.01 + rng.random() * 0.02)
            )
            if good:
                break
            if turn == 0:
                glue = f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
                spans.append(Span.observation(self.pieces.encode(glue), turn))
        outcome: Outcome = Completed()
        if not any(r.component == "correct" and r.value for r in rewards) and rng.random() < 0.15:
            outcome = Truncated("max_turns")
        elif rng.random() < 0.02:
            outcome, rewards = Failed("env_timeout", "the database did not answer in 5 s", True), []
        return Trajectory(
            trajectory_id=f"{prefix}{step}-p{prompt}-s{sample}",
            group_id=f"{prefix}{step}-p{prompt}",
            prompt_uid=uid,
            sample=sample,
            attempt=0,
            rows=(Row(tuple(spans)),),
            turns=tuple(turns),
            rewards=tuple(rewards),
            outcome=outcome,
            scheduled_step=step,
            env_class="text2sql",
            env_revision="chinook-1",
            data_source=family,
            prompt=({"role": "system", "content": SCHEMA_TEXT}, {"role": "user", "content": question}),
            env_metrics={"executed": float(len(turns)), "correct": float(turns[-1].action.find("Identifier") < 0)},
            seconds=sum(t.llm_seconds + t.env_seconds for t in turns) + 0.05,
        )

    def group(self, step: int, prompt: int, size: int, skill: float, version: str, prefix: str = "s") -> Group:
        members = tuple(self.trajectory(step, prompt, i, skill, version, prefix=prefix) for i in range(size))
        return Group(members[0].group_id, members[0].prompt_uid, size, members)

    def step(
        self, step: int, *, prompts: int = 4, size: int = 8, skill: float = 0.4, incarnation: int = 0
    ) -> StepRecord:
        before = f"policy/{incarnation}/{step - 1}"
        groups = [self.group(step, step * prompts + i, size, skill, before) for i in range(prompts)]
        fates: dict[str, str] = {}
        advantages: dict[str, float] = {}
        scores: dict[str, list[list[float] | None]] = {}
        for group in groups:
            rewards = [m.total_reward for m in group.voters]
            mean = sum(rewards) / max(1, len(rewards))
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1))
            for member in group.members:
                if not member.votes:
                    fates[member.trajectory_id] = "failed"
                elif std < 1e-6:
                    fates[member.trajectory_id] = "filtered:zero_variance"
                else:
                    fates[member.trajectory_id] = "trained"
                    advantages[member.trajectory_id] = (member.total_reward - mean) / (std + 1e-6)
                    scores[member.trajectory_id] = [
                        [x + self.random.gauss(0, 0.02) for s in member.sampled_spans() for x in s.logprobs or ()]  # type: ignore[union-attr]
                    ]
        sampled = sum(g.sampled_tokens for g in groups)
        generate = 20 + self.random.random()
        return StepRecord(
            step=step,
            groups=groups,
            dispositions=fates,
            advantages=advantages,
            trainer_logprobs=scores,
            metrics={
                "policy/final_loss": -0.01 * self.random.random(),
                "policy/policy_entropy": 1.1 - skill,
                "policy/grad_norm": 0.4 + 0.2 * self.random.random(),
                "policy/policy_lr": 4e-5,
            },
            timings={"generate": generate, "update": 14.2, "publish": 0.3, "step": generate + 14.6},
            receipts=[{"version": f"policy/{incarnation}/{step}", "verified": True, "replicas": 1, "seconds": 0.3}],
            weight_version_before=before,
            weight_version_after=f"policy/{incarnation}/{step}",
            flow=TokenFlow(sampled),
        )

    def evaluation(self, step: int, skill: float, *, prompts: int = 40, stage: str = "rl") -> EvalRecord:
        groups = [self.group(step, 1000 + i, 1, skill, f"policy/0/{step}", f"e{stage}") for i in range(prompts)]
        return EvalRecord(
            step=step,
            name="held_out",
            spec={"temperature": 0.0, "samples_per_prompt": 1, "max_tokens_per_turn": 96, "prompts": prompts},
            groups=groups,
            scores=eval_metrics(groups),
            stage=stage,  # type: ignore[arg-type]
            weight_version=f"policy/0/{step}",
        )


def skills(steps: int) -> Iterator[tuple[int, float]]:
    for step in range(1, steps + 1):
        yield step, 0.25 + 0.5 * (1 - math.exp(-2.2 * step / max(1, steps)))


def make_run(run_dir: Path, *, steps: int = 6, prompts: int = 4, size: int = 8, eval_prompts: int = 20) -> Path:
    """Write a whole run; about ``steps * prompts * size`` training trajectories."""
    synth = Synth()
    with Ledger(run_dir, next_incarnation(run_dir)) as ledger:
        settings = {
            "seed": 0,
            "model": {"path": "smollm2-135m-instruct", "dtype": "bfloat16"},
            "rollout": {"samples_per_prompt": size, "max_turns": 2, "sampling": {"temperature": 1.0}},
            "schedule": {"kind": "sync", "steps": steps, "prompts_per_step": prompts},
            "training": {"optimizer": {"lr": 4e-5}},
        }
        ledger.event("run_started", settings=settings, version="0.1.0")
        ledger.record_eval(synth.evaluation(0, 0.22, prompts=eval_prompts, stage="start"))
        for i in range(1, 6):
            ledger.record_metrics(i, {"sft/loss": 2.0 / i, "timing/step": 2.0}, phase="sft")
        ledger.record_eval(synth.evaluation(0, 0.30, prompts=eval_prompts, stage="sft"))
        for step, skill in skills(steps):
            record = synth.step(step, prompts=prompts, size=size, skill=skill)
            for receipt in record.receipts:
                ledger.event("receipt", receipt=receipt)
            ledger.record_step(record)
            if step % max(1, steps // 4) == 0 or step == steps:
                ledger.record_eval(synth.evaluation(step, skill, prompts=eval_prompts))
        ledger.event("warning", message="held-out family top_n is still at 0.3")
        ledger.event("checkpoint", step=steps, path=str(run_dir / "checkpoints"))
        ledger.event("run_finished", finished=True, seconds=38.0 * steps, peak_memory_gb=3.1)
        ledger.store_token_texts(synth.pieces.texts())
    return run_dir
