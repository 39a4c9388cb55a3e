"""Questions with gold SQL over Chinook, their splits, and their prompts.

Owns: which questions are kept, the splits, the prompt styles, rows for RL, evaluation and supervised warm starts.
Refuses: judging an answer (see ``text2sql``).

A question is kept when its gold result is non-empty and not trivial on both databases, *differs* between them (so
that a constant cannot pass), does not hang on ties, and is small enough to read.  Splits share no gold query:

* ``train`` and ``sft``: for RL and for a supervised warm start;
* ``eval``: held-out questions of the same families;
* ``eval_unseen``: two families that ``train`` and ``sft`` know nothing of.

Rows of a split are dealt family by family, so that any first N of them are balanced.  Everything is a function of
the pinned data and ``VERSION``.

    rows = question_rows("train", style="plain", levels=(1, 2))
    rows[0]["prompt"]          # [{"role": "system", ...}, {"role": "user", ...}]
    rows[0]["reward_spec"]     # {"ground_truth": "SELECT ..."}
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from slipstream.envs.chinook import chinook, draw, revision, shuffled
from slipstream.envs.sql_compare import is_ordered, results_match
from slipstream.envs.sql_families import FAMILIES, Family, Template
from slipstream.envs.sqldb import SqlResult
from slipstream.errors import DataError

VERSION = 1
"""Raise when questions, splits or wording change; part of ``env_revision``."""

Split = Literal["train", "sft", "eval", "eval_unseen"]
Style = Literal["plain", "fewshot"]
Row = dict[str, Any]

# Questions per seen family: evaluation first, then training, then warm start; a small pool is split in proportion.
_EVAL, _TRAIN, _SFT = 16, 64, 40
_UNSEEN = 30
_MAX_ROWS = 400

_PLAIN_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .,&/@+()-]{1,27}|\d+")

SCHEMA_TEXT = """\
artist(id, name)
album(id, title, artist_id)
genre(id, name)
media_type(id, name)
track(id, name, album_id, genre_id, media_type_id, composer, milliseconds, bytes, price)
playlist(id, name)
playlist_track(playlist_id, track_id)
employee(id, first_name, last_name, title, city, email)
customer(id, first_name, last_name, company, city, country, email, employee_id)
invoice(id, customer_id, date, city, country, total)
invoice_line(id, invoice_id, track_id, price, quantity)"""
"""What the prompt says of the database: all tables, with every column that any question needs (and no others)."""

SYSTEM_PROMPT = f"Answer with one SQLite query.\n{SCHEMA_TEXT}"

_EXAMPLES = (
    (
        "How many media types have the name AAC audio file?",
        "SELECT COUNT(*) FROM media_type WHERE name = 'AAC audio file'",
    ),
    (
        "List the composer of the 4 longest tracks by milliseconds.",
        "SELECT composer FROM track ORDER BY milliseconds DESC LIMIT 4",
    ),
    (
        "What is the first name of the customer of invoice 300?",
        "SELECT customer.first_name FROM customer JOIN invoice ON invoice.customer_id = customer.id "
        "WHERE invoice.id = 300",
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """One kept question; ``phrasings`` all ask for ``sql``."""

    uid: str
    sql: str
    phrasings: tuple[str, ...]
    family: str
    level: int
    split: Split


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What the filter saw: candidates per family, and how many had the same result on both databases."""

    candidates: dict[str, int]
    same_result: dict[str, int]


def env_revision() -> str:
    """Hash of the databases' content and the question generator's version (16 hex digits)."""
    return hashlib.sha256(f"{revision()}:{VERSION}".encode()).hexdigest()[:16]


class _Gold:
    """Trusted gold queries on one database, without a sandbox."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)

    def close(self) -> None:
        self._db.close()

    def __call__(self, sql: str) -> SqlResult:
        cursor = self._db.execute(sql)
        rows = tuple(cursor.fetchmany(_MAX_ROWS + 1))
        columns = tuple(column[0] for column in cursor.description)
        return SqlResult(columns=columns, rows=rows, truncated=len(rows) > _MAX_ROWS)


def _slot_values(template: Template, gold: _Gold) -> list[tuple[str, ...]]:
    if not isinstance(template.values, str):
        return list(template.values)
    found = gold(template.values.replace("SELECT", "SELECT DISTINCT", 1)).rows if template.values else ()
    texts = [tuple(str(value) for value in row if value is not None) for row in found]
    return [
        t for t, row in zip(texts, found, strict=True) if len(t) == len(row) and all(map(_PLAIN_VALUE.fullmatch, t))
    ]


def _candidates(family: Family, gold: _Gold) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(SQL, phrasings), one template after the other in turn, so that a template with many values does not win."""
    pools = [
        [(t.sql.format(*v), tuple(p.format(*v) for p in t.phrasings)) for v in shuffled(_slot_values(t, gold), t.sql)]
        for t in shuffled(family.templates, family.name)
    ]
    for layer in zip_longest(*pools):
        yield from (candidate for candidate in layer if candidate is not None)


def _trivial(result: SqlResult) -> bool:
    if result.truncated or not result.rows:
        return True
    cells = [cell for row in result.rows for cell in row]
    return all(cell in (None, "", 0) for cell in cells)


def _stable(sql: str, golds: Sequence[_Gold]) -> bool:
    """Whether ties cannot change an ordered result: both ways of breaking them give the same rows."""
    if not is_ordered(sql):
        return True
    head, limit = re.fullmatch(r"(.*?)( LIMIT \d+)?", sql, re.DOTALL).groups("")  # type: ignore[union-attr]
    return all(gold(f"{head}, 1 ASC{limit}").rows == gold(f"{head}, 1 DESC{limit}").rows for gold in golds)


def _keep(
    family: Family, golds: tuple[_Gold, _Gold], wanted: int, report: PoolReport
) -> list[tuple[str, tuple[str, ...]]]:
    kept: dict[str, tuple[str, ...]] = {}
    reserved = {sql for _, sql in _EXAMPLES}
    for sql, phrasings in _candidates(family, golds[0]):
        if len(kept) == wanted:
            break
        if sql in kept or sql in reserved:
            continue
        original, perturbed = golds[0](sql), golds[1](sql)
        if _trivial(original) or _trivial(perturbed):
            continue
        report.candidates[family.name] = report.candidates.get(family.name, 0) + 1
        if results_match(original, perturbed, is_ordered(sql)):
            report.same_result[family.name] = report.same_result.get(family.name, 0) + 1
            continue
        if _stable(sql, golds):
            kept[sql] = phrasings
    return list(kept.items())


@lru_cache(maxsize=1)
def _pool() -> tuple[tuple[Question, ...], PoolReport]:
    files = chinook()
    report = PoolReport({}, {})
    questions: list[Question] = []
    with closing(_Gold(files.original)) as original, closing(_Gold(files.perturbed)) as perturbed:
        for family in FAMILIES:
            wanted = _UNSEEN if family.unseen else _EVAL + _TRAIN + _SFT
            kept = shuffled(_keep(family, (original, perturbed), wanted, report), "split", family.name)
            share = len(kept) / wanted
            n_eval, n_train = round(_EVAL * share), round(_TRAIN * share)
            for i, (sql, phrasings) in enumerate(kept):
                split: Split = "eval" if i < n_eval else "train" if i < n_eval + n_train else "sft"
                uid = f"t2s-{family.name}-{hashlib.sha256(sql.encode()).hexdigest()[:8]}"
                questions.append(
                    Question(uid, sql, phrasings, family.name, family.level, "eval_unseen" if family.unseen else split)
                )
    return tuple(questions), report


def pool_report() -> PoolReport:
    """What the filter saw when the pool was made."""
    return _pool()[1]


def questions(
    split: Split, families: Sequence[str] | None = None, levels: Sequence[int] | None = None
) -> list[Question]:
    """The questions of a split, dealt family by family; optionally only some families or levels.

    Raises ``DataError`` for an unknown split or family, or when nothing is left.
    """
    if split not in ("train", "sft", "eval", "eval_unseen"):
        raise DataError(f"text2sql has no split {split!r}; choose train, sft, eval or eval_unseen")
    known = {family.name for family in FAMILIES}
    if families is not None and (unknown := set(families) - known):
        raise DataError(f"unknown question families {sorted(unknown)}; there are {sorted(known)}")
    by_family: dict[str, list[Question]] = {}
    for question in _pool()[0]:
        wanted = question.split == split and (families is None or question.family in families)
        if wanted and (levels is None or question.level in levels):
            by_family.setdefault(question.family, []).append(question)
    dealt = [q for layer in zip_longest(*by_family.values()) for q in layer if q is not None]
    if not dealt:
        raise DataError(f"text2sql split {split!r} has no questions of families={families} levels={levels}")
    return dealt


def build_prompt(question: str, style: Style = "plain") -> list[dict[str, str]]:
    """The chat messages of one question.

    ``plain``: schema and instruction in the system message, the question in the user message.  ``fewshot``: three
    worked examples as chat turns in between, the same for every question.
    """
    if style not in ("plain", "fewshot"):
        raise DataError(f"unknown prompt style {style!r}; choose plain or fewshot")
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    for asked, sql in _EXAMPLES if style == "fewshot" else ():
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": sql}]
    return [*messages, {"role": "user", "content": question}]


def question_rows(
    split: Split,
    *,
    style: Style = "plain",
    families: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
    limit: int | None = None,
    repair_percent: int = 100,
) -> list[Row]:
    """Data rows of a split: ``uid, prompt, env_class, reward_spec, family, level, split, data_source``.

    A question's wording is one of its phrasings, fixed by its uid.  ``repair_percent`` of the questions, chosen by
    uid, have as many turns as the run allows; the others carry ``max_turns`` 1 (a second turn costs more than twice
    the tokens of the first, so that a run may want it for a part only).
    """
    if not 0 <= repair_percent <= 100:
        raise DataError(f"text2sql: repair_percent={repair_percent} must lie between 0 and 100")
    rows: list[Row] = []
    for question in questions(split, families, levels)[:limit]:
        text = question.phrasings[draw(len(question.phrasings), "wording", question.uid)]
        rows.append(
            {
                "uid": question.uid,
                "prompt": build_prompt(text, style),
                "env_class": "text2sql",
                "reward_spec": {"ground_truth": question.sql},
                "family": question.family,
                "level": question.level,
                "split": question.split,
                "data_source": f"chinook/{question.family}",
            }
        )
        if draw(100, "repair", question.uid) >= repair_percent:
            rows[-1]["max_turns"] = 1
    return rows


def sft_rows(
    n: int,
    seed: int = 0,
    *,
    style: Style = "plain",
    families: Sequence[str] | None = None,
    levels: Sequence[int] | None = None,
) -> list[Row]:
    """``n`` chat rows (``uid``, ``messages``, ``family``) from the ``sft`` split: the prompt, then the gold SQL.

    Each pass over the split has its own order and wording, fixed by ``seed``.
    """
    pool = questions("sft", families, levels)
    rows: list[Row] = []
    for turn in range(-(-n // len(pool))):
        for question in shuffled(pool, "sft", seed, turn):
            text = question.phrasings[draw(len(question.phrasings), "sft wording", seed, turn, question.uid)]
            answer = {"role": "assistant", "content": question.sql}
            messages = [*build_prompt(text, style), answer]
            rows.append({"uid": f"{question.uid}-sft{turn}", "messages": messages, "family": question.family})
    return rows[:n]
