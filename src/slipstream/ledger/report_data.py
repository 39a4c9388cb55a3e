"""The facts of a run that the report shows, read from its ledger.

Owns: ``RunFacts`` and how they are gathered; which trajectories are embedded, and their compact form.
Refuses: HTML.

The embedded form keeps every token of the chosen trajectories once: prompts and observations are pooled (the
samples of a group share a prompt), token texts come through one vocabulary, log-probs keep three decimals.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.ledger.codec import read_parquet
from slipstream.ledger.conservation import TokenAccount
from slipstream.ledger.query import query
from slipstream.ledger.reader import Event, LedgerReader, MetricsRow
from slipstream.ledger.records import plain

ORIGINS = ("prompt", "sampled", "observation", "synthetic", "target")
STAGE_ORDER = {"start": 0, "sft": 1, "rl": 2}
TOKEN_BUDGET = 1_300_000
"""Sampled tokens that the page holds at most (an observed one counts a third): about 15 MB."""

MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One live evaluation."""

    name: str
    stage: str
    step: int
    prompts: int
    spec: Mapping[str, Any]
    scores: Mapping[str, float]
    weight_version: str

    @property
    def order(self) -> tuple[int, int]:
        """Evaluations in the order of the run: before, after the warm start, then by step."""
        return STAGE_ORDER[self.stage], self.step

    def by_source(self, metric: str) -> dict[str, float]:
        """``metric`` by data source, ``all`` included."""
        out = {}
        for key, value in self.scores.items():
            parts = key.split("/")
            if len(parts) >= 3 and parts[0] == "eval" and parts[-1] == metric:
                out["/".join(parts[1:-1])] = float(value)
        return out

    @property
    def metric(self) -> str:
        """The metric that speaks for this evaluation: accuracy where there is one."""
        return "accuracy" if "eval/all/accuracy" in self.scores else "avg_score"

    @property
    def score(self) -> float | None:
        """The overall score, or None."""
        value = self.scores.get(f"eval/all/{self.metric}")
        return None if value is None else float(value)


@dataclass
class RunFacts:
    """Everything that the report says, as numbers."""

    run_dir: Path
    name: str
    status: str
    started: float
    minutes: float
    incarnations: int
    version: str
    settings: dict[str, Any]
    train: list[MetricsRow]
    sft: list[MetricsRow]
    evals: list[EvalPoint]
    account: TokenAccount
    receipts: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    peak_memory_gb: float | None = None
    lengths: list[float] = field(default_factory=list)
    lags: dict[int, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    dispositions: dict[str, int] = field(default_factory=dict)
    rollout_seconds: dict[str, float] = field(default_factory=dict)
    n_trajectories: int = 0
    eval_shares: bool = True
    """Whether every evaluated sample scored within [0, 1], so that a mean score is a share."""

    def series(self, name: str, phase: str = "train") -> tuple[list[float], list[float]]:
        """``(steps, values)`` of a metric, where it is finite."""
        rows = self.train if phase == "train" else self.sft
        found = [(float(r.step), float(r.values[name])) for r in rows if name in r.values]
        found = [(x, y) for x, y in found if math.isfinite(y)]
        return [x for x, _ in found], [y for _, y in found]

    def mean(self, name: str, last: int | None = None) -> float | None:
        """Mean of a metric over the steps (the ``last`` ones), or None without data."""
        values = self.series(name)[1]
        values = values[-last:] if last else values
        return sum(values) / len(values) if values else None

    def eval_names(self) -> list[str]:
        """Evaluation sets in order of first appearance."""
        return list(dict.fromkeys(e.name for e in self.evals))

    def timings(self) -> list[tuple[str, float]]:
        """Seconds by phase over the run, largest first; ``other`` is what the phases leave of ``timing/step``."""
        sums: dict[str, float] = defaultdict(float)
        for row in self.train:
            for key, value in row.values.items():
                if key.startswith("timing/") and math.isfinite(value):
                    sums[key.removeprefix("timing/")] += value
        whole = sums.pop("step", 0.0)
        parts = sorted(sums.items(), key=lambda kv: -kv[1])
        rest = whole - sum(sums.values())
        return [*parts, ("other", rest)] if parts and rest > 0.005 * whole else parts


def gather(run_dir: Path) -> RunFacts:
    """Read all facts of a run; raises ``LedgerError`` like the reader."""
    reader = LedgerReader(run_dir)
    events = reader.events()
    starts = [e for e in events if e.kind in ("run_started", "run_resumed")]
    settings: dict[str, Any] = next(
        (e.data["settings"] for e in reversed(starts) if isinstance(e.data.get("settings"), dict)), {}
    )
    by_incarnation: dict[int, list[float]] = defaultdict(list)
    for event in events:
        by_incarnation[event.incarnation].append(event.time)
    steps = [e for e in events if e.kind == "step" and e.live]
    last = events[-1] if events else None
    end = next((e for e in reversed(events) if e.kind == "run_finished"), None)
    seconds = float(end.clock["seconds"]) if end is not None and "seconds" in end.clock else None
    facts = RunFacts(
        run_dir=run_dir,
        name=run_dir.resolve().name,
        status=_status(last),
        started=events[0].time if events else 0.0,
        minutes=(sum(max(t) - min(t) for t in by_incarnation.values()) if seconds is None else seconds) / 60,
        incarnations=len(by_incarnation),
        version=str(next((e.data["version"] for e in starts if "version" in e.data), "")),
        settings=settings,
        train=sorted(reader.metrics("train"), key=lambda m: m.step),
        sft=sorted(reader.metrics("sft"), key=lambda m: m.step),
        evals=sorted(
            (_eval_point(e.step, e.data) for e in events if e.kind == "eval" and e.live), key=lambda e: e.order
        ),
        account=TokenAccount.from_json(steps[-1].data["account"]) if steps else TokenAccount(),
        receipts=_receipts(events),
        messages=[m for e in events if (m := _message(e)) is not None],
        peak_memory_gb=end.clock.get("peak_memory_gb") if end is not None else None,
    )
    _add_distributions(facts, {int(e.step or 0): str(e.data["weight_version_before"]) for e in steps})
    return facts


def _status(last: Event | None) -> str:
    if last is None or last.kind not in ("run_finished", "error"):
        return "unfinished"
    if last.kind == "error":
        return "failed"
    return "finished" if last.data.get("finished", True) else "stopped"


def _message(event: Event) -> dict[str, Any] | None:
    if event.kind in ("warning", "error"):
        text = str(event.data.get("message", ""))
    elif event.kind == "superseded":
        text = "resumed after step {after_step}; {steps} later steps ({tokens} tokens) are superseded".format(
            **event.data
        )
    elif event.kind == "repaired":
        text = f"a torn last line of {event.data['journal']} was cut off"
    else:
        return None
    return {"kind": event.kind, "step": event.step, "text": text}


def _receipts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Every receipt, with the step that ended with its version."""
    steps = {str(e.data["weight_version_after"]): e.step for e in events if e.kind == "step"}
    receipts = [event.data["receipt"] for event in events if event.kind == "receipt" and event.live]
    return [{"step": steps.get(str(receipt.get("version")), ""), **flat_receipt(receipt)} for receipt in receipts]


def _eval_point(step: int | None, data: Mapping[str, Any]) -> EvalPoint:
    scores = {k: float(v) for k, v in data["scores"].items()}
    return EvalPoint(
        data["name"], data["stage"], step or 0, data["prompts"], data["spec"], scores, data["weight_version"]
    )


def flat_receipt(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """A receipt as one level of short values; seconds by phase in one cell, long collections as their size."""
    out: dict[str, Any] = {}
    for key, value in receipt.items():
        if isinstance(value, dict) and all(isinstance(v, (int, float)) for v in value.values()):
            out[key] = ", ".join(f"{k} {v:.3g}" for k, v in value.items())
        elif isinstance(value, (dict, list)) and len(value) > 3:
            out[key] = f"{len(value)} entries"
        else:
            out[key] = ", ".join(map(str, value)) if isinstance(value, list) else plain(value)
    return out


def _add_distributions(facts: RunFacts, trained_versions: Mapping[int, str]) -> None:
    where = "WHERE live AND phase = 'train'"
    run = facts.run_dir
    facts.lengths = [float(r[0]) for r in query(run, f"SELECT sampled_tokens FROM trajectories {where}").rows]
    facts.n_trajectories = query(run, "SELECT count(*) FROM trajectories WHERE live").rows[0][0]
    span = "SELECT coalesce(min(total_reward), 0), coalesce(max(total_reward), 0) FROM trajectories"
    low, high = query(run, f"{span} WHERE live AND phase = 'eval'").rows[0]
    facts.eval_shares = low >= 0 and high <= 1
    facts.outcomes = dict(
        query(run, f"SELECT outcome || coalesce(': ' || coalesce(fault, outcome_reason), ''), count(*) "
                   f"FROM trajectories {where} GROUP BY 1 ORDER BY 2 DESC").rows
    )  # fmt: skip
    facts.dispositions = dict(
        query(run, f"SELECT disposition, count(*) FROM trajectories {where} GROUP BY 1 ORDER BY 2 DESC").rows
    )
    llm, env, total = query(
        run, f"SELECT sum(llm_seconds), sum(env_seconds), sum(seconds) FROM trajectories {where}"
    ).rows[0]
    if total:
        facts.rollout_seconds = {"model": llm, "environment": env, "waiting and other": max(0.0, total - llm - env)}
    lag_sql = f"""
        WITH s AS (SELECT step, unnest(rows).spans AS spans FROM trajectories {where}),
             r AS (SELECT step, unnest(spans).versions AS versions FROM s),
             v AS (SELECT step, unnest(versions) AS v FROM r)
        SELECT step, v.version, sum(v."end" - v.start) FROM v GROUP BY ALL"""
    for step, version, tokens in query(run, lag_sql).rows:
        now, then = counter(trained_versions.get(step, "")), counter(version)
        if now is not None and then is not None:
            facts.lags[now - then] = facts.lags.get(now - then, 0) + int(tokens)


def counter(version: str) -> int | None:
    """The publish counter of ``policy/incarnation/counter``, or None."""
    tail = version.rpartition("/")[2]
    return int(tail) if version.count("/") == 2 and tail.isdigit() else None


# -- the embedded trajectories -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Embedded:
    """The compressed trajectories: base64 of gzip of JSON, how many, of how many."""

    body: str
    shown: int
    total: int


def choose(run_dir: Path, limit: int) -> dict[str, set[str]]:
    """Trajectory ids to embed, by file name; everything when it fits, else evenly over steps, in whole groups.

    Up to 30 % of the room goes to evaluations, the first and last of them first.
    """
    files = LedgerReader(run_dir).files()
    keyed = {(f.phase, f.step, f.stage, f.eval_name): f.path.name for f in files}
    by_file: dict[str, list[tuple[str, str]]] = {f.path.name: [] for f in files}
    sql = "SELECT phase, step, stage, eval_name, group_id, trajectory_id FROM trajectories WHERE live"
    for *key, group, trajectory in query(run_dir, sql).rows:
        by_file[keyed[key[0], key[1], key[2], key[3]]].append((group, trajectory))
    if sum(len(v) for v in by_file.values()) <= limit:
        return {name: {t for _, t in members} for name, members in by_file.items()}
    evals = [f.path.name for f in files if f.phase == "eval"]
    trains = [f.path.name for f in files if f.phase == "train"]
    room = limit if not trains else int(limit * 0.3) if evals else 0
    first_last = [*evals[:1], *evals[-1:]] if len(evals) > 1 else evals
    chosen = _spread_over(first_last, by_file, room)
    chosen |= _spread_over(trains, by_file, limit - sum(len(v) for v in chosen.values()))
    others = [name for name in evals if name not in chosen]
    return chosen | _spread_over(others, by_file, limit - sum(len(v) for v in chosen.values()))


def _spread_over(
    names: Sequence[str], members: Mapping[str, Sequence[tuple[str, str]]], room: int
) -> dict[str, set[str]]:
    if not names or room <= 0:
        return {}
    size = max(1, sum(len(members[n]) for n in names) // max(1, sum(len({g for g, _ in members[n]}) for n in names)))
    steps = min(len(names), max(1, room // size))
    picked = [names[round(i * (len(names) - 1) / max(1, steps - 1))] for i in range(steps)]
    out: dict[str, set[str]] = {}
    for name in dict.fromkeys(picked):
        groups = list(dict.fromkeys(g for g, _ in members[name]))
        keep = max(1, room // steps // size)
        wanted = {groups[i * len(groups) // min(keep, len(groups))] for i in range(min(keep, len(groups)))}
        out[name] = {t for g, t in members[name] if g in wanted}
    return out


def embed(run_dir: Path, decode: Callable[[int], str] | None, limit: int) -> Embedded:
    """The reader's data; token texts come from ``decode``, else from the run's ``tokens.json``, else are ids."""
    reader = LedgerReader(run_dir)
    chosen = choose(run_dir, min(limit, max(1, int(TOKEN_BUDGET / _mean_weight(run_dir)))))
    packer = _Packer()
    packed: list[str] = []
    for file in reader.files():
        if wanted := chosen.get(file.path.name):
            packed.extend(_dumps(packer.trajectory(row)) for row in _only(read_parquet(file.path), wanted))
    texts = reader.token_texts() if decode is None else {}
    ids = sorted(packer.used)
    vocab = [decode(i) if decode else texts.get(i, f"⟨{i}⟩") for i in ids]
    head = {"origins": ORIGINS, "ids": ids, "texts": vocab, "pool": packer.pool, "versions": packer.versions}
    body = f'{_dumps(head)[:-1]},"trajectories":[{",".join(packed)}]}}'
    total = query(run_dir, "SELECT count(*) FROM trajectories WHERE live").rows[0][0]
    squeezed = gzip.compress(body.encode("utf-8", "replace"), 6, mtime=0)
    return Embedded(base64.b64encode(squeezed).decode(), len(packed), int(total))


def _mean_weight(run_dir: Path) -> float:
    """What a trajectory weighs on average in the page, in sampled tokens; at least 1."""
    sql = """SELECT avg(CASE origin WHEN 'sampled' THEN n ELSE n / 3 END) * count(*) / count(DISTINCT id) FROM (
        SELECT id, s.origin AS origin, len(s.token_ids) AS n FROM (
            SELECT trajectory_id AS id, unnest(flatten([r.spans for r in rows])) AS s FROM trajectories WHERE live))
        WHERE origin <> 'prompt'"""
    mean = query(run_dir, sql).rows[0][0]
    return max(1.0, float(mean or 0.0))


def _only(rows: Iterable[dict[str, Any]], wanted: set[str]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row["trajectory_id"] in wanted)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _short(values: Sequence[float] | None) -> list[float] | None:
    if values is None:
        return None
    return [round(v, 3) if v is not None and math.isfinite(v) else 0.0 for v in values]


class _Packer:
    """Turns Parquet rows into the compact form, pooling token runs and version names."""

    def __init__(self) -> None:
        self.pool: list[list[int]] = []
        self.versions: list[str] = []
        self.used: set[int] = set()
        self._pooled: dict[tuple[int, ...], int] = {}
        self._version: dict[str, int] = {}

    def _run(self, ids: Sequence[int]) -> int:
        key = tuple(ids)
        if key not in self._pooled:
            self._pooled[key] = len(self.pool)
            self.pool.append(list(ids))
        return self._pooled[key]

    def _span(self, span: Mapping[str, Any]) -> list[Any]:
        ids = span["token_ids"]
        self.used.update(ids)
        out: list[Any] = [ORIGINS.index(span["origin"]), span["turn"]]
        if span["origin"] != "sampled":
            return [*out, self._run(ids)]
        runs = []
        for run in span["versions"] or ():
            number = self._version.setdefault(run["version"], len(self.versions))
            if number == len(self.versions):
                self.versions.append(run["version"])
            runs.append([number, run["end"]])
        return [*out, ids, _short(span["logprobs"]), _short(span["trainer_logprobs"]), runs]

    def trajectory(self, row: Mapping[str, Any]) -> dict[str, Any]:
        prompt = json.loads(row["prompt"])
        asked = next((str(m.get("content", "")) for m in reversed(prompt) if m.get("role") == "user"), "")
        rewards: dict[int, list[list[Any]]] = defaultdict(list)
        for r in row["rewards"]:
            value = r["value"] if r["missing"] is None else None
            rewards[r["turn"]].append([r["component"], value, r["missing"]])
        return {
            "id": row["trajectory_id"],
            "group": row["group_id"],
            "uid": row["prompt_uid"],
            "sample": row["sample"],
            "attempt": row["attempt"],
            "step": row["step"],
            "scheduled": row["scheduled_step"],
            "phase": row["phase"] if row["phase"] == "train" else f"eval {row['eval_name']} ({row['stage']})",
            "source": row["data_source"],
            "env": f"{row['env_class']} {row['env_revision']}".strip(),
            "outcome": row["outcome"],
            "why": ": ".join(x for x in (row["fault"], row["outcome_reason"]) if x),
            "fate": row["disposition"],
            "reward": row["total_reward"],
            "adv": None if row["advantage"] is None else round(row["advantage"], 4),
            "n": row["sampled_tokens"],
            "seconds": round(row["seconds"], 2),
            "asked": asked[-400:],
            "rows": [[r["parent"], r["fork_point"], [self._span(s) for s in r["spans"]]] for r in row["rows"]],
            "turns": [
                {
                    "i": t["index"],
                    "obs": [[str(m.get("role", "")), _text(m.get("content"))] for m in json.loads(t["observations"])],
                    "end": t["finish_reason"],
                    "llm": round(t["llm_seconds"], 3),
                    "env": round(t["env_seconds"], 3),
                    "rewards": rewards.get(t["index"], []),
                }
                for t in row["turns"]
            ],
        }


def _text(content: Any) -> str:
    text = content if isinstance(content, str) else _dumps(content)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"
