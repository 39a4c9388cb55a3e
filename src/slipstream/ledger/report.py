"""The report of a run: one HTML file that needs nothing else.

Owns: putting facts, charts, advice and trajectories into the page.  Refuses: network, servers, foreign fonts.
Everything but the trajectory reader shows without JavaScript.

    path = write_report(Path("runs/quickstart"))        # runs/quickstart/report.html

The reader decodes its data in the browser (gzip in base64, ``DecompressionStream``) and draws only what is
in view, so that a thousand trajectories stay usable.  Beyond ``max_trajectories`` whole groups are chosen
evenly over the steps, and the page says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from slipstream.ledger import report_charts as charts
from slipstream.ledger.journal import write_atomically
from slipstream.ledger.report_data import EvalPoint, RunFacts, embed, gather
from slipstream.ledger.report_insight import advice, change, delta_text, headline, rl_pair, score_text
from slipstream.ledger.sinks import format_duration
from slipstream.ledger.trackers import flatten

HEALTH: tuple[tuple[str, str, bool], ...] = (
    ("policy/policy_entropy", "Policy entropy", False),
    ("policy/policy_kl", "KL to the reference", False),
    ("policy/grad_norm", "Gradient norm", False),
    ("policy/loss_metrics/clip_fraction", "Clipped tokens", True),
    ("policy/rollout_train_logprobs_abs_diff_mean", "Log-prob gap, trainer − sampler", False),
    ("generate/avg_assistant_tokens", "Sampled tokens per trajectory", False),
    ("reward/avg_pass_at_n", "Groups with a success", True),
    ("guard/zero_spread_share", "Groups without spread", True),
    ("guard/truncated_share", "Truncated samples", True),
    ("guard/failed_share", "Failed samples", True),
    ("guard/duplicate_rate", "Duplicate samples", True),
    ("trainer/tokens_per_second", "Tokens per second", False),
    ("timing/step", "Seconds per step", False),
    ("perf/trainer_idle_share", "Trainer waits for groups", True),
    ("perf/engine_idle_share", "Nothing is asked of the engine", True),
)
AHEAD: tuple[tuple[str, str, bool], ...] = (
    ("schedule/lag_mean", "Lag of trained groups in steps", False),
    ("async/staleness_mean", "Lag of trained tokens in versions", False),
    ("async/mixed_version_share", "Trajectories of several versions", True),
    ("schedule/queue_seconds_mean", "Seconds a finished group waits", False),
)
"""Shown when sampling ran ahead of training."""
ACCOUNT = (
    ("trained", "trained"),
    ("filtered", "filtered"),
    ("stale_dropped", "stale"),
    ("failed", "failed"),
    ("superseded", "superseded by a resume"),
    ("buffered", "buffered"),
    ("in_flight", "in flight"),
)
MAX_RECEIPTS = 200


def write_report(
    run_dir: Path | str,
    out: Path | str | None = None,
    *,
    decode: Callable[[int], str] | None = None,
    max_trajectories: int = 1000,
) -> Path:
    """Write the report of a run and return its path.

    Args:
        run_dir: a run directory with a ledger; the run may be unfinished.
        out: the file to write; default ``<run_dir>/report.html``.  Replaced atomically.
        decode: text of one token id; default is the run's ``tokens.json``, else ids are shown.
        max_trajectories: how many trajectories the reader holds at most.

    Raises:
        LedgerError: no ledger there, a damaged file in it, or ``out`` cannot be written.
    """
    run_dir = Path(run_dir)
    path = Path(out) if out is not None else run_dir / "report.html"
    page = render(gather(run_dir), embed(run_dir, decode, max_trajectories))
    write_atomically(path, page.encode("utf-8", "replace"), "free space, or choose another file (--out)")
    return path


def render(facts: RunFacts, embedded: Any) -> str:
    """The page as text."""
    assets = files("slipstream.ledger") / "assets"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((assets / "report.html.j2").read_text("utf-8"))
    return template.render(
        css=Markup((assets / "report.css").read_text("utf-8")),
        js=Markup((assets / "report.js").read_text("utf-8")),
        facts=facts,
        when=time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(facts.started)),
        headline=headline(facts),
        advice=advice(facts),
        tiles=_tiles(facts),
        learning=Markup(_learning_curve(facts)),
        sft=Markup(_sft_curve(facts)),
        evaluations=_evaluations(facts),
        health=[(title, Markup(svg)) for title, svg in _health(facts)],
        phases=Markup(charts.stacked_bar(facts.timings(), format_duration)),
        rollout=Markup(charts.stacked_bar(list(facts.rollout_seconds.items()), format_duration)),
        lengths=Markup(charts.histogram(charts.bin_counts(facts.lengths), "Sampled tokens per trajectory")),
        lags=Markup(
            charts.histogram(_lag_bins(facts.lags), "Version lag per sampled token", cls="c2")
            + charts.histogram(_lag_bins(_group_lags(facts)), "Steps between start and training, per group", cls="c3")
        ),
        account=Markup(charts.stacked_bar(_account(facts), lambda v: f"{v:,.0f}")),
        account_total=f"{facts.account.sampled:,}",
        outcomes=facts.outcomes,
        dispositions=facts.dispositions,
        settings=_settings(facts.settings),
        receipts=facts.receipts[-MAX_RECEIPTS:],
        receipt_columns=_columns(facts.receipts[-MAX_RECEIPTS:]),
        receipts_total=len(facts.receipts),
        embedded=embedded,
        body=Markup(embedded.body),
    )


def _tiles(facts: RunFacts) -> list[tuple[str, str, str]]:
    """``(label, value, note)``: the numbers a reader looks for first."""
    tiles = []
    rewards = facts.series("reward/avg_raw_reward")[1]
    if rewards:
        window = max(1, len(rewards) // 10)
        first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
        tiles.append(("Training reward", charts.number(last), f"from {charts.number(first)}"))
    tiles.append(("Steps", f"{len(facts.train):,}", f"{len(facts.sft):,} supervised before" if facts.sft else ""))
    tiles.append(("Trajectories", f"{facts.n_trajectories:,}", "evaluations included"))
    share = facts.account.trained / facts.account.sampled if facts.account.sampled else 0.0
    tiles.append(("Tokens sampled", f"{facts.account.sampled:,}", f"{charts.percent(share)} trained on"))
    starts = facts.incarnations
    tiles.append(("Time", format_duration(60 * facts.minutes), f"{starts} starts" if starts > 1 else facts.status))
    memory = facts.peak_memory_gb or max(facts.series("trainer/peak_memory_gb")[1], default=None)
    if memory:
        tiles.append(("Peak memory", f"{memory:.1f} GB", ""))
    return tiles


def _learning_curve(facts: RunFacts) -> str:
    steps, rewards = facts.series("reward/avg_raw_reward")
    series = []
    if steps:
        series.append(charts.Series("training reward, per step", steps, rewards, "c1", "dots"))
        series.append(charts.Series("training reward, smoothed", steps, charts.smooth(rewards), "c1"))
    for number, name in enumerate(facts.eval_names()):
        points = [(e.step, e.score) for e in facts.evals if e.name == name and e.score is not None]
        label = f"evaluation: {name.replace('_', ' ')}"
        kept = [(x, y) for x, y in points if y is not None]
        series.append(
            charts.Series(label, [float(x) for x, _ in kept], [y for _, y in kept], f"c{number % 5 + 2}", "marks")
        )
    return charts.line_chart(series, "Training reward and evaluation scores by step", floor=0.0)


def _sft_curve(facts: RunFacts) -> str:
    steps, losses = facts.series("sft/loss", "sft")
    series = [charts.Series("supervised loss", steps, losses, "c3")] if steps else []
    return charts.line_chart(series, "Supervised loss by step", width=360, height=150)


def _health(facts: RunFacts) -> list[tuple[str, str]]:
    out = []
    for i, (name, title, share) in enumerate((*HEALTH, *(AHEAD if _group_lags(facts) else ()))):
        steps, values = facts.series(name)
        if len(steps) < 2:
            continue
        line = charts.Series(title, steps, values, f"c{i % 6 + 1}")
        shape = charts.percent if share else charts.number
        out.append((title, charts.line_chart([line], title, width=340, height=150, y_format=shape, floor=0.0)))
    return out


def _evaluations(facts: RunFacts) -> list[dict[str, Any]]:
    """One table per evaluation set: sources down, start / warm start / before RL / after across."""
    tables = []
    for name in facts.eval_names():
        points = [e for e in facts.evals if e.name == name]
        pair = rl_pair(facts, name)
        columns: list[EvalPoint] = []
        for stage in ("start", "sft"):
            columns += [e for e in points if e.stage == stage][-1:]
        if pair:
            columns += [e for e in pair if e not in columns]
        elif not columns:
            columns = points[-1:]
        metric = columns[-1].metric
        scores = [e.by_source(metric) for e in columns]
        unit = facts.eval_shares
        sources = [*sorted({s for part in scores for s in part} - {"all"}), "all"]
        before, after = (columns[-2], columns[-1]) if len(columns) > 1 else (columns[-1], columns[-1])
        result = change(before, after, facts.eval_shares) if pair else None
        tables.append(
            {
                "name": name.replace("_", " "),
                "metric": metric.replace("avg_score", "mean score"),
                "columns": [_column_title(e) for e in columns],
                "rows": [_eval_row(s, scores, unit, pair is not None) for s in sources],
                "interval": None
                if result is None or result.half_width is None
                else f"at most ±{100 * result.half_width:.1f} points (95 %, {after.prompts} independent prompts)",
                "failed": charts.percent(after.scores.get("eval/all/failed_share", 0.0)),
                "spec": flatten(dict(after.spec)),
                "versions": [e.weight_version for e in columns],
            }
        )
    return tables


def _column_title(point: EvalPoint) -> str:
    if point.stage == "start":
        return "untouched model"
    if point.stage == "sft":
        return "after warm start"
    return "before" if point.step == 0 else f"step {point.step}"


def _eval_row(source: str, scores: list[dict[str, float]], unit: bool, paired: bool) -> dict[str, Any]:
    values = [part.get(source) for part in scores]
    before, after = (values[-2], values[-1]) if paired and len(values) > 1 else (None, None)
    delta = after - before if before is not None and after is not None else None
    return {
        "source": source,
        "values": ["–" if v is None else score_text(v, unit) for v in values],
        "delta": "" if delta is None else delta_text(delta, unit),
        "tone": "flat" if not delta else "up" if delta > 0 else "down",
        "before": before,
        "after": after,
        "unit": unit,
    }


def _lag_bins(lags: Mapping[int, float]) -> list[tuple[str, float]]:
    if not lags:
        return []
    low, high = min(0, *lags), max(*lags, 3)
    return [(str(lag), float(lags.get(lag, 0))) for lag in range(low, high + 1)]


def _group_lags(facts: RunFacts) -> dict[int, float]:
    """Trained groups by lag in steps, over the run; empty when nothing ran ahead."""
    highest = int(max(facts.series("schedule/lag_max")[1], default=0.0))
    counts = {lag: sum(facts.series(f"schedule/lag_{lag}")[1]) for lag in range(highest + 1)}
    return counts if highest else {}


def _account(facts: RunFacts) -> list[tuple[str, float]]:
    return [(label, float(value)) for name, label in ACCOUNT if (value := getattr(facts.account, name))]


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Settings by section; values of the top level come first, under ``run``."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for key, value in flatten(settings).items():
        section, _, rest = key.partition(".")
        if rest:
            sections.setdefault(section, []).append((rest, str(value)))
        else:
            sections.setdefault("run", []).append((section, str(value)))
    return sorted(sections.items(), key=lambda kv: kv[0] != "run")


def _columns(receipts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for receipt in receipts for key in receipt))
