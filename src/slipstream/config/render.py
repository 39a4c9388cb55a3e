"""Plans and explanations for people: rich tables, or the same as plain text.

Owns: layout and wording.  Refuses: arithmetic (``slipstream.config.plan`` has it).

>>> from slipstream.config.plan import make_plan
>>> from slipstream.config.settings import RunSettings
>>> "prompts trained" in plan_text(make_plan(RunSettings()))
True
"""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.config.memory import PHASES, MemoryPlan
from slipstream.config.plan import Plan
from slipstream.config.problems import Problem


def render_plan(plan: Plan) -> RenderableType:
    """The whole plan: step, run, memory, SkyRL's keys, warnings and errors."""
    parts: list[RenderableType] = [_step(plan), _run(plan)]
    if plan.memory is not None:
        parts.append(_memory(plan.memory))
    else:
        parts.append(Text("Memory: unknown until the model's config.json is here.", style="dim"))
    if plan.notes:
        parts.append(_notes(plan))
    parts += [_problem(problem) for problem in plan.problems]
    return Group(*parts)


def plan_text(plan: Plan, columns: int = 110) -> str:
    """``render_plan`` without colours."""
    return as_text(render_plan(plan), columns)


def as_text(renderable: RenderableType, columns: int = 110) -> str:
    """Any renderable as plain text."""
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None, force_terminal=False).print(renderable)
    return out.getvalue()


def gigabytes(n: int) -> str:
    """Bytes for people (decimal units)."""
    return f"{n / 1e9:.2f} GB" if n >= 5e7 else f"{n / 1e6:.1f} MB"


def _table(title: str, *columns: str, rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _step(plan: Plan) -> Table:
    batch, settings = plan.batch, plan.settings
    per_group = settings.rollout.samples_per_prompt
    rows = [
        ("prompts drawn", f"{batch.prompts_drawn:,}", "schedule.generate_prompts_per_step, or prompts_per_step"),
        ("prompts trained", f"{batch.prompts_trained:,}", "at most; groups without spread may be left out"),
        ("samples", f"{batch.samples_per_step:,}", f"{batch.prompts_drawn:,} prompts x {per_group}"),
        ("rows trained", f"{batch.rows_trained:,}", "one per trajectory; rewritten history adds rows"),
        (
            "optimiser steps",
            f"{batch.optimizer_steps:,}",
            f"{settings.algorithm.epochs_per_step} pass(es) x {settings.algorithm.minibatches_per_step} mini-batch(es)",
        ),
        ("rows per mini-batch", f"{batch.rows_per_minibatch:,}", f"{batch.groups_per_minibatch:,} whole groups"),
        ("micro-batches", f"<= {batch.microbatches_per_minibatch:,}", "per mini-batch, by the token budget"),
        ("tokens sampled", f"<= {batch.sampled_tokens:,}", "turns x tokens per turn, within the total"),
        ("tokens in the update", f"<= {batch.trained_row_tokens:,}", "before shared prompts are counted once"),
    ]
    return _table("One step", "what", "how many", "from", rows=rows, numbers=(1,))


def _run(plan: Plan) -> Table:
    schedule = plan.schedule

    def shown(value: int | float | None, form: str = ",") -> str:
        return "unknown" if value is None else format(value, form)

    rows = [
        ("SFT steps", shown(schedule.sft_steps)),
        ("RL steps", shown(schedule.steps)),
        ("optimiser steps", shown(schedule.optimizer_steps)),
        ("trajectories", shown(schedule.trajectories)),
        ("passes over the prompts", shown(schedule.passes_over_data, ".2f")),
        ("evaluations", shown(schedule.evaluations)),
        ("evaluation samples", shown(schedule.evaluation_samples)),
        ("checkpoints", shown(schedule.checkpoints)),
    ]
    return _table("The run", "what", "how many", rows=rows, numbers=(1,))


def _memory(memory: MemoryPlan) -> Table:
    rows = [
        (
            item.name,
            *(gigabytes(item.bytes) if phase in item.phases else "" for phase in PHASES),
            item.how,
        )
        for item in memory.items
    ]
    rows.append(("total", *(gigabytes(memory.total(phase)) for phase in PHASES), "with the interpreter and libraries"))
    return _table(
        f"Memory (estimated from above; peak {gigabytes(memory.peak)} in {memory.peak_phase})",
        "item",
        *PHASES,
        "what it is",
        rows=rows,
        numbers=tuple(range(1, len(PHASES) + 1)),
    )


def _notes(plan: Plan) -> Table:
    rows = [(note.key, note.status, note.text) for note in plan.notes]
    return _table("SkyRL's keys", "key", "verdict", "what it means here", rows=rows)


def _problem(problem: Problem) -> Text:
    label, style = ("refused", "bold red") if problem.severity == "error" else ("warning", "yellow")
    return Text.assemble((f"{label}: ", style), str(problem))
