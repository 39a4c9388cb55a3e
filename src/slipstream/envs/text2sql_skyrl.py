"""SkyRL's Text-to-SQL protocol (``text2sql`` with ``mode="skyrl"``).

Owns: the ``<think>``/``<sql>``/``<solution>`` protocol and its reward rule, executed in the read-only sandbox.

Each turn may call the tool with ``<sql>...</sql>``; ``<solution>...</solution>`` or the turn limit ends the episode.
The reward is judged once, at the end, on the text of the whole history: -1 when the format is broken, 1 when the
*set* of rows equals the gold query's (duplicates, order and column names do not count), else 0.  The format holds when
there is exactly one solution without tags inside, at least one ``<think>`` block, and every observation before the
solution is followed at once by ``<think>``.

Rows carry ``db_id``, ``data`` (``synsql``, ``spider`` or ``bird``) and ``reward_spec.ground_truth``; the folder is
``env_config.db_path``.  ``data="chinook"``, or none, stands for the bundled database.

A solution may use 50 million operations, a second or two.  One that needs more is a wrong answer, and so is one that
uses up 2.5 s of processor time before that (see ``sqldb``).  A gold query has no more, and one that fails makes every
solution wrong, as in SkyRL.  Judging takes 25 s at worst, on a machine that hardly runs, so that it ends before the
deadline of a step (``rollout.env_step_seconds``, 30 s) and holds no SQL child beyond it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.envs._row import turn_limit
from slipstream.envs.chinook import chinook, revision
from slipstream.envs.core import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from slipstream.envs.sqldb import shared_sandbox
from slipstream.envs.text2sql import Text2SQLSettings, gold_of
from slipstream.envs.tools import LARGE_LIMITS, SQLCodeExecutorToolGroup
from slipstream.errors import DataError, SettingsError

LAYOUTS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
"""Where each collection's ``<db_id>/<db_id>.sqlite`` lie under ``db_path``."""

_DEFAULT_TURNS = 5
_JUDGE_OPS = 50_000_000
_JUDGE_SECONDS = 2.5
_TAG_INSIDE = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)


def extract_solution(transcript: str) -> str | None:
    """The solution's SQL when the transcript keeps the format, else None."""
    if transcript.count("<solution>") != 1:
        return None
    before, after = transcript.split("<solution>")
    if after.count("</solution>") != 1:
        return None
    solution = after.split("</solution>")[0]
    if _TAG_INSIDE.search(solution) or not re.search(r"<think>.*?</think>", transcript, re.DOTALL):
        return None
    for observation in re.finditer(r"</observation>", before, re.IGNORECASE):
        if not before[observation.end() :].lstrip().lower().startswith("<think>"):
            return None
    return solution.strip()


class SkyRLText2SQLEnv(BaseTextEnv):
    """One SQL task in SkyRL's protocol; see the module's contract."""

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        row = extras or {}
        settings = Text2SQLSettings.read(env_config)
        self.gold_sql = gold_of(row)
        self.max_turns = turn_limit(row, _DEFAULT_TURNS, "text2sql")
        data = "chinook" if row.get("data") is None else row["data"]
        group: SQLCodeExecutorToolGroup
        if data == "chinook":
            self.db_id, self.db_file = "chinook", chinook().original
            group = _OneFileToolGroup(self.db_file)
        else:
            if data not in LAYOUTS:
                raise DataError(f"text2sql: data={data!r}; want one of {sorted(LAYOUTS)} or 'chinook'")
            if row.get("db_id") is None:
                raise DataError("text2sql: the row needs db_id, the database's folder name")
            if settings.db_path is None:
                raise SettingsError(
                    f"text2sql: data={data!r} needs env_config.db_path, the folder above {LAYOUTS[data]}"
                )
            self.db_id = str(row["db_id"])
            root = Path(settings.db_path) / LAYOUTS[data]
            self.db_file = root / self.db_id / f"{self.db_id}.sqlite"
            group = SQLCodeExecutorToolGroup(root)
        if not self.db_file.is_file():
            raise DataError(f"Database file not found at: {self.db_file}")
        self.init_tool_groups([group])
        self.chat_history: ConversationType = []
        self.reward = 0.0

    @property
    def env_revision(self) -> str:
        """The database that the outcome depends on."""
        return f"chinook:{revision()}" if self.db_id == "chinook" else f"db:{self.db_id}"

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the turn's tool call, or judge the transcript when the episode ends."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            self.reward = self._judge()
            return BaseTextEnvStepOutput(observations=[], reward=self.reward, done=True, metadata={})
        call = re.search(r"<sql>(.*?)</sql>", action, re.DOTALL)
        arguments = (self.db_id, call.group(1) if call else None, self.max_turns - self.turns)
        group = self.tool_groups[0].get_name()
        message = {"role": "user", "content": self._execute_tool(group, "sql", arguments)}
        self.chat_history.append(message)
        return BaseTextEnvStepOutput(
            observations=[message],
            reward=0.0,
            done=False,
            metadata={"tool_group": group, "tool_name": "sql", "tool_input": arguments},
        )

    def _judge(self) -> float:
        solution = extract_solution("".join(message["content"] for message in self.chat_history))
        if solution is None:
            return -1.0
        sandbox = shared_sandbox(self.db_file, LARGE_LIMITS)
        found = []
        for sql in (solution, self.gold_sql):
            result = sandbox.execute(sql, max_ops=_JUDGE_OPS, wall_seconds=_JUDGE_SECONDS)
            if not result.ok or result.truncated:
                return 0.0
            found.append(frozenset(result.rows))
        return float(found[0] == found[1])

    def get_metrics(self) -> dict[str, float]:
        """``correct``, ``bad_format`` (0 or 1) and ``turns``."""
        return {
            "correct": float(self.reward == 1.0),
            "bad_format": float(self.reward == -1.0),
            "turns": float(self.turns),
        }


class _OneFileToolGroup(SQLCodeExecutorToolGroup):
    """The SQL tool on one file, whatever its folder layout."""

    def _file(self, db_id: str) -> Path:
        return self.db_path
