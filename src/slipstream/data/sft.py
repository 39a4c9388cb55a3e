"""Supervised rows: chat messages and Alpaca columns as trajectories of TARGET spans.

Owns: which tokens of a chat row are learnt.  Refuses: an own way to render; SFT uses the rollout's row builder, so
that a model is taught exactly the tokens it will later be asked to sample.

An assistant message is a TARGET up to and including the end-of-turn token; what the template puts behind that (a
newline, say) is an OBSERVATION, because the model never samples it.  A template that rewrites history gives forked
rows, and each message is learnt in the form in which it would be generated.

Columns: ``messages`` (and optionally ``tools``), or Alpaca's ``instruction``, ``input``, ``output``, ``system``.

>>> dataset = SftDataset.load(["builtin:text2sql/sft?n=64"], renderer)   # doctest: +SKIP
>>> dataset.rows[0].trajectory.rows[0].spans[-1].origin                  # doctest: +SKIP
<Origin.TARGET: 'target'>
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.data.prompts import LoadReport, combined_hash, content_hash, read_messages
from slipstream.data.sources import read_source
from slipstream.errors import DataError
from slipstream.rollout.renderer import Renderer, TemplateError
from slipstream.rollout.rows import RowBuilder
from slipstream.trajectory import Completed, Message, Span, Trajectory

TrainOn = Literal["all_assistant_messages", "last_assistant_message"]


@dataclass(frozen=True)
class SftRow:
    """One supervised example."""

    uid: str
    trajectory: Trajectory
    where: str


def alpaca_messages(columns: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """``instruction`` (+ ``input``) -> user, ``output`` -> assistant, ``system`` -> system."""
    for key in ("instruction", "output"):
        if not isinstance(columns.get(key), str) or not columns[key].strip():
            raise DataError(f"{where}: {key!r} must be text")
    for key in ("input", "system"):
        if columns.get(key) is not None and not isinstance(columns[key], str):
            raise DataError(f"{where}: {key!r} must be text or absent")
    system, given = columns.get("system"), columns.get("input")
    question = columns["instruction"] + (f"\n\n{given}" if given else "")
    head = ({"role": "system", "content": system},) if system else ()
    return (*head, {"role": "user", "content": question}, {"role": "assistant", "content": columns["output"]})


def chat_trajectory(
    messages: Sequence[Message],
    renderer: Renderer,
    uid: str,
    *,
    tools: Sequence[Any] | None = None,
    train_on: TrainOn = "all_assistant_messages",
    where: str = "",
    data_source: str = "",
) -> Trajectory:
    """One chat as a trajectory: PROMPT, TARGET, OBSERVATION, TARGET, ...

    Messages after the last assistant message are left out; an assistant message that opens the chat is context.
    """
    where = where or uid
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    if not turns:
        raise DataError(f"{where}: no assistant message (after another message) to learn from")
    if train_on == "last_assistant_message":
        turns = turns[-1:]
    try:
        builder = RowBuilder(renderer, messages[: turns[0]], tools)
        for turn, at in enumerate(turns):
            content, ids = _target(builder, renderer, messages[: at + 1], tools, where)
            builder.add(Span.target(ids, turn))
            if turn + 1 < len(turns):
                builder.apply(builder.plan(content, messages[: turns[turn + 1]]), turn)
    except TemplateError as error:
        raise DataError(f"{where}: {error}") from error
    return Trajectory(
        trajectory_id=f"sft/{uid}",
        group_id=f"sft/{uid}",
        prompt_uid=uid,
        sample=0,
        attempt=0,
        rows=builder.rows(),
        turns=(),
        rewards=(),
        outcome=Completed(),
        scheduled_step=0,
        data_source=data_source,
        prompt=tuple(messages[: turns[0]]),
    )


def _target(
    builder: RowBuilder, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any] | None, where: str
) -> tuple[str, tuple[int, ...]]:
    """(text, ids with the end of turn) of the last message as it would be generated behind ``builder.text``."""
    shown = renderer.render_text(messages, generation=False, tools=tools)
    if shown.startswith(builder.text):
        # As rendered: tool calls, and whatever else the template makes of the message, are part of the turn.
        content = shown[len(builder.text) :].removesuffix(renderer.closing)
    else:
        # The generation header says more than the history does (an opened <think>, say): behind it stands the text.
        content = str(messages[-1].get("content") or "")
        if not content:
            raise DataError(
                f"{where}: the chat template renders this assistant message differently from its generation prompt, "
                "and it has no content to learn; turn thinking off in model.chat_template_kwargs or rewrite the row"
            )
    return content, (*renderer.encode(content), *renderer.end_of_turn)


class SftDataset:
    """Checked supervised rows; ``fingerprint`` covers their tokens, so also tokenizer and template."""

    def __init__(self, rows: Sequence[SftRow], report: LoadReport) -> None:
        self.rows = tuple(rows)
        self.report = report
        self.fingerprint = combined_hash(
            f"{row.uid}:{content_hash([[s.origin, s.token_ids] for r in row.trajectory.rows for s in r.spans])}"
            for row in self.rows
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SftRow]:
        return iter(self.rows)

    @classmethod
    def load(
        cls,
        sources: str | Sequence[str],
        renderer: Renderer,
        *,
        train_on: TrainOn = "all_assistant_messages",
        max_tokens: int | None = None,
        limit: int | None = None,
    ) -> SftDataset:
        """Read and render; rows with more than ``max_tokens`` in a training row are left out and counted."""
        names = [sources] if isinstance(sources, str) else list(sources)
        kept: list[SftRow] = []
        seen: dict[str, tuple[str, str]] = {}
        read = duplicates = too_long = longest = 0
        for where, columns in (pair for name in names for pair in read_source(name)):
            if limit is not None and len(kept) >= limit:
                break
            read += 1
            messages, tools = _columns(columns, where)
            content = content_hash([messages, tools])
            uid = str(columns.get("uid") or content)
            if uid in seen:
                if seen[uid][0] != content:
                    raise DataError(f"{where}: uid {uid!r} is taken by a different row ({seen[uid][1]})")
                duplicates += 1
                continue
            seen[uid] = (content, where)
            source = str(columns.get("data_source") or "")
            trajectory = chat_trajectory(
                messages, renderer, uid, tools=tools, train_on=train_on, where=where, data_source=source
            )
            length = max(len(row) for row in trajectory.rows)
            if max_tokens is not None and length > max_tokens:
                too_long += 1
                continue
            longest = max(longest, length)
            kept.append(SftRow(uid, trajectory, where))
        report = LoadReport(read, len(kept), duplicates, too_long, max_tokens, longest)
        if not kept:
            raise DataError(f"{', '.join(names) or 'no source'}: no usable row ({report})")
        return cls(kept, report)


def _columns(columns: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], Sequence[Any] | None]:
    if columns.get("messages") is not None:
        tools = columns.get("tools")
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise DataError(f"{where}: 'tools' must be a list of tool schemas, got {type(tools).__name__}")
        return read_messages(columns["messages"], where, "messages"), tools or None
    if "instruction" in columns:
        return alpaca_messages(columns, where), None
    have = ", ".join(sorted(columns)) or "none"
    raise DataError(f"{where}: neither 'messages' nor 'instruction'/'output' (columns: {have})")
