"""Charts as inline SVG, drawn here so that they show without JavaScript.

Owns: line charts, histograms, stacked bars.  Refuses: knowing what the numbers mean.
Colours come from the page's style sheet by class (``c1`` .. ``c6``), so that light and dark themes share one
drawing.  A line chart carries its numbers in ``data-chart``; the page's script turns them into a cross-hair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line (``kind="line"``), faint raw dots (``"dots"``) or marked points (``"marks"``); ``cls`` is its colour."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    cls: str = "c1"
    kind: str = "line"


def number(value: float) -> str:
    """A number in as few digits as it needs.

    >>> number(0.12345), number(1234.5), number(3.0), number(4e-5)
    ('0.123', '1,234', '3', '4e-05')
    """
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.1f}".rstrip("0").rstrip(".")


def percent(value: float) -> str:
    """A share in per cent.

    >>> percent(0.234)
    '23.4 %'
    """
    return f"{100 * value:.1f} %"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that cover ``[low, high]``.

    >>> ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, count)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def smooth(ys: Sequence[float], window: int | None = None) -> list[float]:
    """Centred moving mean; the window grows with the series and shrinks at its ends."""
    half = (window or max(3, len(ys) // 12)) // 2
    return [sum(part) / len(part) for i in range(len(ys)) if (part := ys[max(0, i - half) : i + half + 1])]


@dataclass(frozen=True, slots=True)
class _Frame:
    width: int
    height: int
    x0: float
    x1: float
    y0: float
    y1: float
    left: int = 46
    right: int = 12
    top: int = 10
    bottom: int = 28

    def x(self, value: float) -> float:
        span = self.x1 - self.x0 or 1.0
        return round(self.left + (value - self.x0) / span * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        span = self.y1 - self.y0 or 1.0
        return round(self.height - self.bottom - (value - self.y0) / span * (self.height - self.top - self.bottom), 1)


def line_chart(
    series: Sequence[Series],
    title: str,
    *,
    width: int = 720,
    height: int = 260,
    y_format: Format = number,
    x_label: str = "step",
    floor: float | None = None,
) -> str:
    """An SVG line chart; ``title`` is its accessible name.  Empty series give an empty string."""
    drawn = [s for s in series if len(s.xs)]
    if not drawn:
        return ""
    ys = [y for s in drawn for y in s.ys] + ([] if floor is None else [floor])
    xs = [x for s in drawn for x in s.xs]
    y_ticks = ticks(min(ys), max(ys), 4 if height < 200 else 5)
    x_ticks = [t for t in ticks(min(xs), max(xs), 4 if width < 400 else 8) if min(xs) <= t <= max(xs) and t == int(t)]
    frame = _Frame(width, height, min(xs), max(xs), y_ticks[0], y_ticks[-1])
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{width - frame.right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 6}" y="{y + 3.5}" text-anchor="end">{y_format(tick)}</text>')
    for tick in x_ticks:
        parts.append(f'<text class="tick" x="{frame.x(tick)}" y="{height - 12}" text-anchor="middle">{tick:.0f}</text>')
    parts.append(
        f'<text class="axis" x="{width - frame.right}" y="{height - 1}" text-anchor="end">{escape(x_label)}</text>'
    )
    parts.extend(_draw(s, frame, y_format) for s in drawn)
    data = {
        "left": frame.left,
        "right": width - frame.right,
        "top": frame.top,
        "bottom": height - frame.bottom,
        "x": x_label,
        "series": [
            {
                "name": s.name,
                "cls": s.cls,
                "px": [frame.x(x) for x in s.xs],
                "x": list(s.xs),
                "py": [frame.y(y) for y in s.ys],
                "t": [y_format(y) for y in s.ys],
            }
            for s in drawn
            if s.kind != "dots"
        ],
    }
    payload = escape(json.dumps(data, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}" '
        f'data-chart="{payload}">{"".join(parts)}</svg>'
    )


def _draw(series: Series, frame: _Frame, y_format: Format) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in zip(series.xs, series.ys, strict=True)]
    if series.kind == "dots":
        return "".join(f'<circle class="dot {series.cls}" cx="{x}" cy="{y}" r="1.8"/>' for x, y in points)
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    line = f'<path class="line {series.cls} {series.kind}" d="{path}"/>'
    if series.kind == "marks" or len(points) == 1:
        line += "".join(
            f'<circle class="mark {series.cls}" cx="{x}" cy="{y}" r="4"><title>{escape(series.name)}: '
            f"{y_format(v)}</title></circle>"
            for (x, y), v in zip(points, series.ys, strict=True)
        )
    return line


def histogram(
    bins: Sequence[tuple[str, float]], title: str, *, width: int = 420, height: int = 180, cls: str = "c1"
) -> str:
    """Bars with a label each; every bar's count is its native tooltip.  At most eight labels are written."""
    if not bins or not any(count for _, count in bins):
        return ""
    top = max(count for _, count in bins)
    y_ticks = ticks(0, top, 3)
    frame = _Frame(width, height, 0, len(bins), 0, y_ticks[-1])
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{width - frame.right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 6}" y="{y + 3.5}" text-anchor="end">{number(tick)}</text>')
    every = math.ceil(len(bins) / 8)
    for i, (label, count) in enumerate(bins):
        x0, x1 = frame.x(i), frame.x(i + 1)
        gap = min(2.0, (x1 - x0) * 0.15)
        bar = min(x1 - x0 - gap, 46.0)
        left = round((x0 + x1 - bar) / 2, 1)
        y = frame.y(count)
        parts.append(
            f'<rect class="bar {cls}" x="{left}" y="{y}" width="{bar:.1f}" height="{round(frame.y(0) - y, 1)}">'
            f"<title>{escape(label)}: {count:,.0f}</title></rect>"
        )
        if i % every == 0:
            middle, base = round((x0 + x1) / 2, 1), height - 12
            parts.append(f'<text class="tick" x="{middle}" y="{base}" text-anchor="middle">{escape(label)}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def bin_counts(values: Sequence[float], bins: int = 24) -> list[tuple[str, float]]:
    """Whole-number bins ``[low, high)`` of about equal width, labelled by their lower end."""
    if not values:
        return []
    low, high = math.floor(min(values)), math.floor(max(values)) + 1
    width = max(1, math.ceil((high - low) / bins))
    counts = [0] * math.ceil((high - low) / width)
    for value in values:
        counts[int((value - low) // width)] += 1
    return [(str(low + i * width), float(count)) for i, count in enumerate(counts)]


def stacked_bar(parts: Sequence[tuple[str, float]], unit: Format) -> str:
    """One bar split by share, with a legend table below; parts come with their own order and colours."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    bar, rows = [], []
    for i, (name, value) in enumerate(parts):
        share = value / total
        cls = f"c{i % 6 + 1}"
        label = f"{escape(name)}: {unit(value)}, {percent(share)}"
        if share > 0:
            bar.append(f'<i class="{cls}" style="width:{100 * share:.3f}%" title="{label}"></i>')
        rows.append(
            f'<tr><td><i class="key {cls}"></i>{escape(name)}</td><td class="num">{unit(value)}</td>'
            f'<td class="num">{percent(share)}</td></tr>'
        )
    return f'<div class="stack" aria-hidden="true">{"".join(bar)}</div><table class="legend">{"".join(rows)}</table>'
