"""Prompt rows for rollouts.

Owns: what a row must hold, uids, duplicates, the length filter, the data's fingerprint.
Refuses: dropping a row without counting it; training.

A row: ``prompt`` (chat messages, or text for one user message); optional ``env_class`` and ``uid``; every other
column becomes the environment's ``extras``.  A row without ``uid`` gets a hash of its content, so that it keeps its
name when rows before it come or go.

>>> dataset = PromptDataset.load(["train.parquet"], env_class="gsm8k")        # doctest: +SKIP
>>> print(dataset.report)                                                     # doctest: +SKIP
7473 rows, 7470 kept (2 duplicates, 1 longer than 1024 tokens; longest kept: 611)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.data.sources import read_source
from slipstream.errors import DataError, SlipstreamError
from slipstream.trajectory import Message

LengthFn = Callable[[Sequence[Message]], int]


@dataclass(frozen=True)
class PromptRow:
    """One prompt.  ``where`` names its file and row."""

    uid: str
    messages: tuple[Message, ...]
    env_class: str
    extras: Mapping[str, Any]
    where: str

    @property
    def data_source(self) -> str:
        """The ``data_source`` column, or an empty string."""
        return str(self.extras.get("data_source", "") or "")


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows that were read."""

    rows: int
    kept: int
    duplicates: int
    too_long: int
    max_tokens: int | None
    longest: int
    """Tokens of the longest prompt kept; 0 when lengths were not measured."""

    def __str__(self) -> str:
        parts = [f"{self.duplicates} duplicates"] if self.duplicates else []
        if self.max_tokens is not None:
            parts.append(f"{self.too_long} longer than {self.max_tokens} tokens; longest kept: {self.longest}")
        return f"{self.rows} rows, {self.kept} kept" + (f" ({', '.join(parts)})" if parts else "")


def content_hash(value: Any) -> str:
    """32 hex digits of a value's canonical JSON; stable across processes and platforms."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def combined_hash(parts: Iterable[str]) -> str:
    """One fingerprint of several, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\x1f")
    return digest.hexdigest()


def read_messages(value: Any, where: str, column: str) -> tuple[Message, ...]:
    """Check chat messages; text is one user message.  Null entries (Parquet fills them in) are removed."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: {column!r} is empty; remove the row or give it text")
        return ({"role": "user", "content": value},)
    if not isinstance(value, (list, tuple)) or not value:
        got = "an empty list" if isinstance(value, (list, tuple)) else type(value).__name__
        raise DataError(f"{where}: {column!r} must be text or a list of chat messages, got {got}")
    messages: list[Message] = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: {column}[{i}] must be an object with role and content, got {message!r:.80}")
        kept = {str(key): item for key, item in message.items() if item is not None}
        if not isinstance(kept.get("role"), str):
            raise DataError(f"{where}: {column}[{i}] has no 'role' (system, user, assistant or tool)")
        if not isinstance(kept.get("content"), str):
            if "content" in kept or not kept.get("tool_calls"):
                raise DataError(f"{where}: {column}[{i}]['content'] must be text")
            kept["content"] = ""
        messages.append(kept)
    return tuple(messages)


class PromptDataset:
    """Checked prompt rows.

    ``fingerprint`` changes when a row, its content or the order changes; a resumed run compares it.
    """

    def __init__(self, rows: Sequence[PromptRow], report: LoadReport | None = None) -> None:
        self.rows = tuple(rows)
        self.report = report or LoadReport(len(self.rows), len(self.rows), 0, 0, None, 0)
        self.fingerprint = combined_hash(f"{row.uid}:{_content(row)}" for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self.rows[index]

    @classmethod
    def load(
        cls,
        sources: str | Sequence[str],
        *,
        env_class: str | None = None,
        length_fn: LengthFn | None = None,
        max_prompt_tokens: int | None = None,
        limit: int | None = None,
    ) -> PromptDataset:
        """Read, check and filter.

        Args:
            sources: see ``slipstream.data.sources``.
            env_class: for rows without their own.
            length_fn: the length of a prompt in tokens, by the renderer that rollouts use
                (``Renderer.prompt_length``), so that filter and rollout cannot disagree.
            max_prompt_tokens: longer prompts are left out and counted.
            limit: keep the first N rows that pass.

        Raises ``DataError`` naming file, row and mend; also when nothing is left.
        """
        names = [sources] if isinstance(sources, str) else list(sources)
        if not names:
            raise DataError("no data sources; set data.train (or data.eval) to a file, a hub name or builtin:NAME")
        kept: list[PromptRow] = []
        seen: dict[str, PromptRow] = {}
        read = duplicates = too_long = longest = 0
        for where, columns in (pair for name in names for pair in read_source(name)):
            if limit is not None and len(kept) >= limit:
                break
            read += 1
            row = _prompt_row(columns, where, env_class)
            if (twin := seen.get(row.uid)) is not None:
                if _content(twin) != _content(row):
                    raise DataError(f"{where}: uid {row.uid!r} is taken by a different row ({twin.where})")
                duplicates += 1
                continue
            seen[row.uid] = row
            length = _length(length_fn, row) if length_fn is not None else 0
            if max_prompt_tokens is not None and length > max_prompt_tokens:
                too_long += 1
                continue
            longest = max(longest, length)
            kept.append(row)
        measured = max_prompt_tokens if length_fn is not None else None
        report = LoadReport(read, len(kept), duplicates, too_long, measured, longest)
        if not kept:
            raise DataError(f"{', '.join(names)}: no usable row ({report})")
        return cls(kept, report)


def _content(row: PromptRow) -> str:
    return content_hash([row.messages, row.env_class, row.extras])


def _length(length_fn: LengthFn, row: PromptRow) -> int:
    try:
        return length_fn(row.messages)
    except SlipstreamError as error:
        raise DataError(f"{row.where}: {error}") from error


def _prompt_row(columns: Mapping[str, Any], where: str, default_env: str | None) -> PromptRow:
    if columns.get("prompt") is None:
        have = ", ".join(sorted(columns)) or "none"
        raise DataError(f"{where}: no 'prompt' column or value (columns: {have}); add chat messages or text")
    messages = read_messages(columns["prompt"], where, "prompt")
    env_class = columns.get("env_class") or default_env
    if not isinstance(env_class, str):
        raise DataError(f"{where}: no 'env_class'; add the column or set env.id")
    extras = {key: value for key, value in columns.items() if key not in ("prompt", "env_class", "uid")}
    uid = columns.get("uid")
    if uid is None or uid == "":
        uid = content_hash([messages, env_class, extras])
    elif not isinstance(uid, (str, int)):
        raise DataError(f"{where}: 'uid' must be text or a whole number, got {type(uid).__name__}")
    return PromptRow(str(uid), messages, env_class, extras, where)
