"""Rows under construction: the one builder behind the turn loop and SFT.

Owns: which spans a trajectory's rows hold, and when a row forks.
Refuses: engines, environments, rewards.

Lifecycle: ``RowBuilder(renderer, messages)`` -> ``add(span, ...)`` for a turn's spans -> ``plan(...)`` for what comes
next -> ``apply(plan)`` (or drop it, when a budget forbids it) -> ... -> ``rows()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.rollout.renderer import Extension, Renderer
from slipstream.trajectory import ROUTED_EXPERTS, Message, Origin, Row, SideChannel, Span


class RowBuilder:
    """Builds the rows of one trajectory.

    ``ids`` are all tokens of the current row: what the next generation continues.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        self._renderer = renderer
        self._tools = tools
        rendered = renderer.render_prompt(messages, tools)
        self.ids: list[int] = list(rendered.ids)
        self.text: str = rendered.text
        self._turn_at = len(self.ids)
        self._done: list[Row] = []
        self._parent: int | None = None
        self._fork_point = 0
        self._spans: list[Span] = [Span.prompt(rendered.ids)]

    def add(self, span: Span) -> None:
        """Append a turn's span (SAMPLED or TARGET) to the current row."""
        self._spans.append(span)
        self.ids.extend(span.token_ids)

    def note_routes(self, routes: npt.NDArray[np.int16]) -> None:
        """Attach the experts of the row's inputs, ``(tokens fed, layers, top-k)``, to every span that lacks them.

        A token gets those of the input that predicts it, the one before; nothing predicts a row's first token.
        """
        at = self._fork_point
        for i, span in enumerate(self._spans):
            if ROUTED_EXPERTS not in span.side:
                fed = np.arange(at, at + len(span)) - 1
                values = routes[np.maximum(fed, 0)].copy()
                values[fed < 0] = -1
                channel = SideChannel(ROUTED_EXPERTS, "token", values)
                self._spans[i] = replace(span, side={**span.side, ROUTED_EXPERTS: channel})
            at += len(span)

    @property
    def last(self) -> Span:
        """The newest span."""
        return self._spans[-1]

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of all rows."""
        spans = [span for row in self._done for span in row.spans] + self._spans
        return sum(len(span) for span in spans if span.origin is Origin.SAMPLED)

    def plan(self, action: str, messages: Sequence[Message], *, rewritten: bool = False) -> Extension:
        """What the template puts behind the turn that was just added; nothing changes yet."""
        return self._renderer.extend(
            self.ids,
            self.text,
            action,
            closed=self._renderer.closed(self.ids[self._turn_at :]),
            messages=messages,
            rewritten=rewritten,
            tools=self._tools,
        )

    def apply(self, extension: Extension, turn: int) -> None:
        """Append the glue, or start the child row that a rewritten history needs."""
        if extension.fork_point is not None:
            self._close_row()
            self._parent, self._fork_point = len(self._done) - 1, extension.fork_point
            self.ids = self.ids[: extension.fork_point]
        if extension.synthetic:
            self._spans.append(Span.synthetic(extension.synthetic, turn))
        if extension.observation:
            self._spans.append(Span.observation(extension.observation, turn))
        self.ids.extend((*extension.synthetic, *extension.observation))
        self.text = extension.text
        self._turn_at = len(self.ids)

    def length_after(self, extension: Extension) -> int:
        """Tokens of the row once ``extension`` is applied."""
        head = len(self.ids) if extension.fork_point is None else extension.fork_point
        return head + extension.added

    def _close_row(self) -> None:
        self._done.append(Row(tuple(self._spans), self._parent, self._fork_point))
        self._spans = []

    def rows(self) -> tuple[Row, ...]:
        """All rows.  A child row in which nothing was generated is left out: it holds no news."""
        if self._parent is not None and not any(span.trained for span in self._spans):
            return tuple(self._done)
        return (*self._done, Row(tuple(self._spans), self._parent, self._fork_point))
