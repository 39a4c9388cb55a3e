"""The task ``text2sql``: answer a question with a query, see what it gives, repair it.

Owns: the protocol, the reward, the metrics.  Refuses: executing SQL itself (see ``sqldb``), questions (see
``sql_questions``), SkyRL's tag protocol (see ``text2sql_skyrl``; ``mode="skyrl"`` selects it).

The model's turn holds one query: plain SQL, or the last ```` ```sql ```` block, or what follows ``SQL:``.  It is
right when its result set equals that of the gold query on the original *and* on the perturbed database, which ends
the episode with reward 1.  Otherwise, while turns remain, the next observation shows rows or the error.

Reward components (``metadata["reward_components"]``; they add up to the reward):

* ``correct``: 1 in the first turn, ``repair_reward`` later;
* ``executable``: ``executable_bonus`` when the episode ends wrong but its last query ran (default 0: off);
* ``partial``: ``partial_bonus`` x F1 of the rows, the lower of both databases, when it ends wrong (default 0: off).

Settings come from ``env_config`` (``Text2SQLSettings``), the gold query from ``extras["reward_spec"]``, the turn limit
from ``extras["max_turns"]``, else from the settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.envs._row import ground_truth, turn_limit
from slipstream.envs.chinook import chinook
from slipstream.envs.core import BaseTextEnv, BaseTextEnvStepOutput
from slipstream.envs.sql_compare import is_ordered, results_match, row_overlap
from slipstream.envs.sql_questions import env_revision
from slipstream.envs.sqldb import SqlResult, shared_sandbox
from slipstream.errors import DataError, SettingsError


class Text2SQLSettings(BaseModel):
    """Settings of ``text2sql``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["auto", "result", "skyrl"] = Field(
        "auto", description="result: this module's protocol; skyrl: SkyRL's tags; auto: skyrl for rows with a db_id."
    )
    max_turns: int = Field(2, ge=1, description="Used when the row does not say.")
    executable_bonus: float = Field(0.0, ge=0)
    partial_bonus: float = Field(0.0, ge=0)
    repair_reward: float = Field(1.0, description="Reward of a right answer after the first turn.")
    shown_rows: int = Field(3, ge=0, description="Rows shown in an observation.")
    observation_chars: int = Field(240, ge=40, description="Length of an observation's rows or error.")
    db_path: str | None = Field(
        None, description="result: an SQLite file (default: Chinook); skyrl: the folder of the collections."
    )
    perturbed_path: str | None = Field(None, description="Second database that a right query must also match.")

    @classmethod
    def read(cls, env_config: Any) -> Text2SQLSettings:
        """From a mapping, a dataclass, an object with attributes, or None; raises ``SettingsError``."""
        if isinstance(env_config, cls):
            return env_config
        if env_config is None:
            fields: dict[str, Any] = {}
        elif isinstance(env_config, Mapping):
            fields = {str(key): value for key, value in env_config.items()}
        elif dataclasses.is_dataclass(env_config) and not isinstance(env_config, type):
            fields = dataclasses.asdict(env_config)
        else:
            fields = {key: value for key, value in vars(env_config).items() if not key.startswith("_")}
        try:
            return cls(**fields)
        except ValidationError as wrong:
            raise SettingsError(f"env_config of text2sql: {wrong}") from wrong


# ---------------------------------------------------------------------------------------------------------------
# Reading the answer

_FENCE = re.compile(r"```(?:sql|sqlite)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_LABEL = re.compile(r"\bSQL(?:\s+query)?\s*:", re.IGNORECASE)
_START = re.compile(r"\b(?:SELECT|VALUES|WITH\s+(?:RECURSIVE\s+)?\w+\s*(?:\([^)]*\)\s*)?AS\s*\()", re.IGNORECASE)
_MAX_ANSWER_CHARS = 20_000
# Up to a semicolon outside of quotes, or an empty line.
_STATEMENT = re.compile(r"""(?:'(?:[^']|'')*'|"(?:[^"]|"")*"|(?!\n\s*\n)[^;'"]|['"])*""")


def extract_sql(text: str) -> str | None:
    """The query in the model's text, without a trailing semicolon; None when there is none.

    >>> extract_sql("SQL: SELECT 1;  -- done")
    'SELECT 1'
    """
    text = text[:_MAX_ANSWER_CHARS]
    blocks = [block for block in _FENCE.findall(text) if block.strip()]
    if blocks:
        text = blocks[-1]
    elif label := _LABEL.search(text):
        text = text[label.end() :]
    start = _START.search(text)
    if start is None:
        return None
    statement = _STATEMENT.match(text, start.start())
    return statement.group().strip() if statement else None


# ---------------------------------------------------------------------------------------------------------------
# Judging it


@lru_cache(maxsize=8192)
def gold_result(path: Path, sql: str) -> SqlResult:
    """The gold query's result, executed in the sandbox once; raises ``DataError`` when it fails or is cut."""
    result = shared_sandbox(path).execute(sql)
    if not result.ok or result.truncated:
        raise DataError(f"gold SQL {sql!r} fails on {path.name}: {result.error or 'too many rows'}; drop the row")
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What one query was worth: its result on the original, correctness, and the shared rows (F1, lower of both)."""

    result: SqlResult
    correct: bool
    coincidence: bool
    """Right on the original only: a constant, or a lucky condition."""
    overlap: float


def judge(sql: str, gold_sql: str, paths: tuple[Path, ...], want_overlap: bool = False) -> Verdict:
    """Run ``sql`` on each database and compare with the gold query; the first database is the one shown.

    A query that is too expensive is a wrong one.  Raises ``EnvironmentFault`` when the machine is at fault (see
    ``sqldb``), and ``DataError`` when the gold query fails.
    """
    ordered = is_ordered(gold_sql)
    result = shared_sandbox(paths[0]).execute(sql)
    matched = results_match(gold_result(paths[0], gold_sql), result, ordered)
    overlap = row_overlap(gold_result(paths[0], gold_sql), result) if want_overlap else 0.0
    right = matched
    if matched or overlap > 0:
        for path in paths[1:]:
            other, gold = shared_sandbox(path).execute(sql), gold_result(path, gold_sql)
            right = right and results_match(gold, other, ordered)
            overlap = min(overlap, row_overlap(gold, other)) if want_overlap else 0.0
    return Verdict(result, right, matched and not right, overlap)


def gold_of(extras: Mapping[str, Any]) -> str:
    """``reward_spec.ground_truth`` of a row; raises ``DataError`` when it is missing or no text."""
    gold = ground_truth(extras, "text2sql")
    if not isinstance(gold, str) or not gold.strip():
        raise DataError("text2sql: the row needs reward_spec.ground_truth, the gold SQL")
    return gold


class Text2SQLEnv(BaseTextEnv):
    """One question; see the module's contract.

    Raises:
        DataError: the row has no gold query, or a database file is missing.
        SettingsError: ``env_config`` has an unknown or wrong setting.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        self.settings = Text2SQLSettings.read(env_config)
        self.gold_sql = gold_of(extras)
        self.max_turns = turn_limit(extras, self.settings.max_turns, "text2sql")
        self.executed = False
        self.correct = False
        self.coincidence = False

    @property
    def env_revision(self) -> str:
        """What the episode's outcome depends on besides the model: databases and question generator."""
        return env_revision() if self.settings.db_path is None else f"db:{Path(self.settings.db_path).name}"

    def _paths(self) -> tuple[Path, ...]:
        if self.settings.db_path is None:
            files = chinook()
            return files.original, files.perturbed
        second = self.settings.perturbed_path
        return (Path(self.settings.db_path), *([Path(second)] if second else []))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judge the query in ``action``."""
        self.turns += 1
        sql = extract_sql(action)
        verdict = None
        if sql is not None:
            verdict = judge(sql, self.gold_sql, self._paths(), self.settings.partial_bonus > 0)
        self.executed = verdict is not None and verdict.result.ok
        self.correct = verdict is not None and verdict.correct
        self.coincidence = verdict is not None and verdict.coincidence
        done = self.correct or self.turns >= self.max_turns
        components = self._components(verdict, done)
        observation = None if done else self._observation(verdict)
        return BaseTextEnvStepOutput(
            observations=[] if observation is None else [{"role": "user", "content": observation}],
            reward=float(sum(components.values())),
            done=done,
            metadata={"sql": sql, "reward_components": components},
        )

    def _components(self, verdict: Verdict | None, done: bool) -> dict[str, float]:
        settings = self.settings
        first_time = self.turns == 1
        components = {"correct": (1.0 if first_time else settings.repair_reward) if self.correct else 0.0}
        wrong_end = done and not self.correct
        if settings.executable_bonus:
            components["executable"] = settings.executable_bonus * float(wrong_end and self.executed)
        if settings.partial_bonus:
            overlap = verdict.overlap if verdict is not None else 0.0
            components["partial"] = settings.partial_bonus * overlap if wrong_end else 0.0
        return components

    def _observation(self, verdict: Verdict | None) -> str:
        if verdict is None:
            return "No query found. Answer with one SQLite query."
        limit = self.settings.observation_chars
        result = verdict.result
        if not result.ok:
            return f"Error: {(result.error or '')[:limit]}\nWrite a corrected query."
        count = f"{len(result.rows)}{'+' if result.truncated else ''}"
        shown = result.rows[: self.settings.shown_rows]
        text = "\n".join(" | ".join(_show(value) for value in row) for row in shown)
        return f"Rows: {count}\n{text[:limit]}\nThat is not the answer. Write a corrected query."

    def get_metrics(self) -> dict[str, float]:
        """``executed``, ``correct``, ``repaired``, ``coincidence`` (0 or 1, of the last query) and ``turns``."""
        return {
            "executed": float(self.executed),
            "correct": float(self.correct),
            "repaired": float(self.correct and self.turns > 1),
            "coincidence": float(self.coincidence),
            "turns": float(self.turns),
        }


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "NULL" if value is None else str(value)[:60]


def text2sql(env_config: Any = None, extras: Mapping[str, Any] | None = None) -> BaseTextEnv:
    """What the id ``text2sql`` builds: the protocol that the settings' ``mode`` names."""
    from slipstream.envs.text2sql_skyrl import SkyRLText2SQLEnv

    settings = Text2SQLSettings.read(env_config)
    row = extras or {}
    named = row.get("db_id") is not None and row.get("data") is not None
    skyrl = settings.mode == "skyrl" or (settings.mode == "auto" and named)
    return SkyRLText2SQLEnv(settings, row) if skyrl else Text2SQLEnv(settings, row)
