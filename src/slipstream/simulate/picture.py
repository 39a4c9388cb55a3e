"""Simulated runs as a page and as text.

Owns: the drawing: what the trainer does when, how many sequences run, how far behind groups are.
Refuses: figures of its own; every number comes from ``Outcome``.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import pairwise

from slipstream.simulate.compare import Compared
from slipstream.simulate.outcome import Outcome, quantile

COLOURS = {"update": "#3b6ea5", "publish": "#c8553d", "wait": "#e6e2d8"}
_MARKS = {"update": "█", "publish": "▒", "wait": "·"}
_WIDTH, _HEIGHT = 920, 46

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #e5e5e5}
td:first-child,th:first-child{text-align:left}
h2{font-size:1.05rem;margin:1.8rem 0 .3rem}
small{color:#666}.key i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 1em}
svg{display:block;width:100%;height:auto;margin:.2rem 0}
"""

COLUMNS = (
    "schedule", "s/step", "steps/h", "tokens/s", "speed-up", "trainer idle", "engines idle", "batch", "lag mean",
    "lag max", "queue p90 s", "group p90 s", "evicted", "length bias",
)  # fmt: skip


def table_rows(results: Sequence[Compared]) -> list[tuple[str, ...]]:
    """One row per schedule, for ``COLUMNS``."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        o = result.outcome
        mean = sum(lag * share for lag, share in o.lags.items())
        rows.append(
            (
                result.name,
                f"{o.seconds_per_step:.1f}",
                f"{o.steps_per_hour:.1f}",
                f"{o.tokens_per_second:.0f}",
                f"{result.speedup:.2f}x",
                f"{o.trainer_idle:.0%}",
                f"{o.engine_idle:.0%}",
                f"{o.batch:.1f}",
                f"{mean:.2f}",
                f"{max(o.lags, default=0)}",
                f"{quantile([w for s in o.steady for w in s.waits], 0.9):.1f}",
                f"{quantile(o.group_seconds, 0.9):.1f}",
                f"{o.evicted_share:.0%}",
                f"{o.length_bias:+.1%}",
            )
        )
    return rows


SHORT_COLUMNS = ("schedule", "s/step", "tokens/s", "speed-up", "idle", "lag", "lost")
"""Columns that fit a terminal; ``idle`` is trainer/engines, ``lag`` mean/most, ``lost`` evicted groups/length bias."""


def short_rows(results: Sequence[Compared]) -> list[tuple[str, ...]]:
    """One row per schedule, for ``SHORT_COLUMNS``."""
    rows: list[tuple[str, ...]] = []
    for full in table_rows(results):
        cell = dict(zip(COLUMNS, full, strict=True))
        idle, lag = f"{cell['trainer idle']}/{cell['engines idle']}", f"{cell['lag mean']}/{cell['lag max']}"
        lost = "" if cell["evicted"] == "0%" else f"{cell['evicted']}/{cell['length bias']}"
        rows.append((full[0], cell["s/step"], cell["tokens/s"], cell["speed-up"], idle, lag, lost))
    return rows


def text_picture(results: Sequence[Compared], width: int = 72) -> str:
    """A line per schedule and party over the same seconds, and the lags."""
    span = min(max(r.outcome.seconds for r in results), 6 * max(r.outcome.seconds_per_step for r in results))
    cell = span / width
    out = [
        f"the first {span:.0f} s, {cell:.1f} s per mark; trainer: █ update ▒ publish · waits; engines: busier is higher"
    ]
    for result in results:
        o = result.outcome
        out += [
            "",
            result.name,
            f"  trainer {_trainer_line(o, width, cell)}",
            f"  engines {_engine_line(o, width, cell)}",
            "  lags    " + "  ".join(f"{lag}: {share:.0%}" for lag, share in o.lags.items()),
        ]
    return "\n".join(out)


def _trainer_line(outcome: Outcome, width: int, cell: float) -> str:
    line = []
    for i in range(width):
        inside = dict.fromkeys(_MARKS, 0.0)
        for s in outcome.timeline:
            inside[s.kind] += max(0.0, min(s.end, (i + 1) * cell) - max(s.start, i * cell))
        kind = max(inside, key=lambda k: inside[k])
        line.append(_MARKS[kind] if inside[kind] > 0 else " ")
    return "".join(line)


def _engine_line(outcome: Outcome, width: int, cell: float) -> str:
    levels = " ▁▂▃▄▅▆▇█"
    means = _mean_running(outcome, width * cell, width)
    top = max(max(means), 1e-9)
    return "".join(levels[min(int(m / top * 8 + 0.999), 8)] for m in means)


def _mean_running(outcome: Outcome, span: float, bins: int) -> list[float]:
    """Mean number of running sequences in each of ``bins`` equal parts of the first ``span`` seconds."""
    means, width = [0.0] * bins, span / bins
    for (at, running), (until, _) in pairwise([*outcome.occupancy, (outcome.seconds, 0)]):
        first, last = int(at / width), int(min(until, span) / width)
        for i in range(first, min(last, bins - 1) + 1):
            inside = min(until, (i + 1) * width) - max(at, i * width)
            means[i] += running * max(inside, 0.0) / width
    return means


def html_page(results: Sequence[Compared], notes: Sequence[str] = (), title: str = "Simulated schedules") -> str:
    """One page without scripts or references."""
    span = min(max(r.outcome.seconds for r in results), 12 * max(r.outcome.seconds_per_step for r in results))
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table_rows(results)
    )
    key = "".join(f'<i style="background:{colour}"></i>{kind}' for kind, colour in COLOURS.items())
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        "".join(f"<p><small>{html.escape(note)}</small></p>" for note in notes),
        f"<table><tr>{head}</tr>{body}</table>",
        f"<p class=key><small>Trainer over the first {span:.0f} s:{key}. Below it: sequences that run on the engines. "
        "Right of the name: share of groups by lag in steps.</small></p>",
    ]
    for result in results:
        lags = ", ".join(f"{lag}: {share:.0%}" for lag, share in result.outcome.lags.items())
        parts += [
            f"<h2>{html.escape(result.name)} <small>{html.escape(lags)}</small></h2>",
            _trainer_svg(result.outcome, span),
            _engine_svg(result.outcome, span),
        ]
    return "\n".join(parts) + "</html>\n"


def _trainer_svg(outcome: Outcome, span: float) -> str:
    bars = [
        f'<rect x="{s.start / span * _WIDTH:.2f}" y="0" height="18" '
        f'width="{max((min(s.end, span) - s.start) / span * _WIDTH, 0.4):.2f}" fill="{COLOURS[s.kind]}">'
        f"<title>{s.kind}: {s.start:.1f} to {s.end:.1f} s</title></rect>"
        for s in outcome.timeline
        if s.start < span
    ]
    return f'<svg viewBox="0 0 {_WIDTH} 18" role="img" aria-label="trainer">{"".join(bars)}</svg>'


def _engine_svg(outcome: Outcome, span: float) -> str:
    bins = 230
    means = _mean_running(outcome, span, bins)
    top = max(max(means), 1e-9)
    points = " ".join(
        f"{i * _WIDTH / bins:.1f},{_HEIGHT - m / top * (_HEIGHT - 10):.1f} "
        f"{(i + 1) * _WIDTH / bins:.1f},{_HEIGHT - m / top * (_HEIGHT - 10):.1f}"
        for i, m in enumerate(means)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="running sequences">'
        f'<polygon points="0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}" fill="#8fb08c"/>'
        f'<text x="2" y="9" font-size="9" fill="#555">{top:.0f} sequences</text></svg>'
    )
