r"""Chat template -> token ids, append-only.

Owns: the one place where messages become ids, for rollouts, SFT and length filters alike; the glue between turns;
the start-up check of a tokenizer's template.
Refuses: turning a sampled turn back into ids.  A turn's ids go on exactly as they were sampled; when the template
would show that turn differently (thinking stripped, text rewritten), the answer is a fork, never an edit.

How a turn is appended: the whole conversation is rendered *in context* (so that a template that merges neighbouring
tool messages, or treats the last message specially, does so), what was already there is cut off as text, and only
the remainder is encoded.  The remainder begins with the template's end of turn; the part of it that the model sampled
itself is dropped, and the part that it did not (the turn was cut) is kept as SYNTHETIC.

>>> rendered = renderer.render_prompt([{"role": "user", "content": "2+2?"}])            # doctest: +SKIP
>>> glue = renderer.extend(row_ids, rendered.text, "4", closed=True, messages=history)  # doctest: +SKIP
>>> glue.fork_point is None, renderer.tokenizer.decode(glue.observation)                # doctest: +SKIP
(True, '\n<|im_start|>user\nand 3+3?<|im_end|>\n<|im_start|>assistant\n')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.errors import ContractError
from slipstream.trajectory import Message

_SENTINEL = "ZQXJ"
_NEXT = "WKVY"


class TemplateError(ContractError):
    """The chat template refused a conversation (unknown role, roles must alternate, missing content)."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer; transformers' tokenizers have it."""

    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Messages -> text (called with ``tokenize=False``)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text -> ids."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        """Ids -> text."""
        ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text and as ids, the generation header included."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extension:
    """What comes after a turn.

    ``fork_point`` None: append ``synthetic`` and then ``observation`` to the row.  Otherwise the template rewrote the
    history: start a child row that shares the first ``fork_point`` tokens and continues with ``observation``.
    ``text`` is the rendered conversation up to the next generation.
    """

    text: str
    synthetic: tuple[int, ...]
    observation: tuple[int, ...]
    fork_point: int | None = None

    @property
    def added(self) -> int:
        """How many tokens the row grows by when nothing is forked."""
        return len(self.synthetic) + len(self.observation)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What the start-up check found; every field is measured by rendering, none is declared.

    ``append_only``: two turns rendered whole equal the same two turns built up turn by turn.
    ``tool_messages``: the same for two adjacent tool messages; None when the template refuses the role.
    ``strips_thinking``: a next user message removes ``<think>`` of the turn before, so each turn forks a row.
    ``end_of_turn`` / ``boundary``: ids that close a turn / that the template puts behind them.
    """

    append_only: bool
    tool_messages: bool | None
    strips_thinking: bool
    end_of_turn: tuple[int, ...]
    boundary: tuple[int, ...]


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(v) for v in value)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _skip_action(rest: str, action: str) -> int | None:
    """Where ``action`` ends in ``rest``; None if it is not there.

    Templates trim white space at the ends of a message, and some normalise it inside; that is not a rewrite
    (the sampled ids stay), so only the other characters must match.
    """
    if rest.startswith(action):
        return len(action)
    at = 0
    for char in action:
        if char.isspace():
            continue
        while at < len(rest) and rest[at].isspace():
            at += 1
        if at >= len(rest) or rest[at] != char:
            return None
        at += 1
    return at


class Renderer:
    """Messages -> ids through one tokenizer's chat template.

    Args:
        tokenizer: see ``Tokenizer``.
        chat_template_kwargs: passed to every ``apply_chat_template`` call (``enable_thinking=False``, ...).
        eos_token_ids: further ids that end a generation (an engine knows them; the tokenizer names only one).
        chat_template: a Jinja template that replaces the tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        if chat_template is not None:
            self._kwargs["chat_template"] = chat_template
        self.eos_token_ids = frozenset(_as_ids(getattr(tokenizer, "eos_token_id", None))) | frozenset(eos_token_ids)
        self.end_of_turn, self.boundary = self._find_end_of_turn()

    def add_eos(self, ids: Iterable[int]) -> None:
        """Further ids that end a generation; an engine's are added by the generator at its start."""
        self.eos_token_ids |= frozenset(ids)
        self.end_of_turn, self.boundary = self._find_end_of_turn()

    # ---- text and ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text; no special token is added, those spelled out in the text are recognised."""
        return tuple(int(i) for i in self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def render_text(
        self, messages: Sequence[Message], *, generation: bool = True, tools: Sequence[Any] | None = None
    ) -> str:
        """The conversation as text; raises ``TemplateError`` with the template's own complaint."""
        kwargs = {**self._kwargs, "tools": list(tools)} if tools else self._kwargs
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=generation, **kwargs
            )
        except Exception as error:  # fault boundary: a template is a user's program
            roles = [m.get("role") for m in messages]
            raise TemplateError(
                f"the chat template refused a conversation with roles {roles}: {error}; "
                "set model.chat_template to a Jinja template that takes it"
            ) from error
        if not isinstance(text, str):
            raise TemplateError(f"apply_chat_template(tokenize=False) returned {type(text).__name__}, not text")
        return text

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Rendered:
        """A conversation that waits for the assistant, as text and ids."""
        text = self.render_text(messages, tools=tools)
        return Rendered(text, self.encode(text))

    def prompt_length(self, messages: Sequence[Message]) -> int:
        """Tokens of the rendered prompt; give this to ``PromptDataset.load`` as its ``length_fn``."""
        return len(self.render_prompt(messages).ids)

    # ---- turns

    def closed(self, ids: Sequence[int]) -> bool:
        """Whether a turn's ids already contain its end (an EOS id, or the template's end of turn)."""
        eot = self.end_of_turn
        if not ids:
            return False
        return ids[-1] in self.eos_token_ids or (bool(eot) and tuple(ids[-len(eot) :]) == eot)

    def extend(
        self,
        row_ids: Sequence[int],
        base_text: str,
        action: str,
        *,
        closed: bool,
        messages: Sequence[Message],
        rewritten: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> Extension:
        """What comes between a turn and the next generation.

        Args:
            row_ids: all ids of the row, the turn's included.
            base_text: the text that the turn continued (``Rendered.text`` or the last ``Extension.text``).
            action: the turn's text as it stands in ``messages``.
            closed: whether the turn's ids contain its end; see ``closed``.
            messages: the whole conversation: history, the turn, and what came after it.
            rewritten: the turn's text in ``messages`` is not what was sampled; always forks.
            tools: tool schemas, as given to ``render_prompt``.
        """
        full = self.render_text(messages, tools=tools)
        if not rewritten and full.startswith(base_text):
            rest = full[len(base_text) :]
            end = _skip_action(rest, action)
            if end is not None:
                ids, eot = self.encode(rest[end:]), self.end_of_turn
                if ids[: len(eot)] == eot:
                    return Extension(full, () if closed else eot, ids[len(eot) :])
        ids = self.encode(full)
        fork = common_prefix(row_ids, ids)
        return Extension(full, (), ids[fork:], fork)

    def _find_end_of_turn(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that close an assistant turn inside a conversation, and those between them and the next header."""
        turn = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": _SENTINEL}]
        alone = self.render_text(turn, generation=False)
        if _SENTINEL not in alone:
            raise TemplateError("the chat template does not show an assistant message's content")
        self.closing = alone = alone.rpartition(_SENTINEL)[2]
        inside = self.render_text([*turn, {"role": "user", "content": _NEXT}], generation=False)
        between = inside.rpartition(_NEXT)[0].rpartition(_SENTINEL)[2]
        specials = frozenset(_as_ids(getattr(self.tokenizer, "all_special_ids", None)))
        for text, ends in ((between, self.eos_token_ids), (alone, specials)):
            ids = self.encode(text)
            for i, token in enumerate(ids):
                if token in ends and (ids[: i + 1] == self.encode(between)[: i + 1]):
                    tail = self.encode(alone)
                    return ids[: i + 1], tail[i + 1 :] if tail[: i + 1] == ids[: i + 1] else ()
        return (), ()

    # ---- the start-up check

    def check(self) -> TemplateReport:
        """Render two turns both ways; see ``TemplateReport``.  Raises ``TemplateError`` if not even that renders."""
        user, next_user = {"role": "user", "content": "first question"}, {"role": "user", "content": "second one"}
        tools: list[Message] = [{"role": "tool", "content": "left"}, {"role": "tool", "content": "right"}]
        append_only, _ = self._both_ways([user], "an answer", [next_user])
        try:
            tool_messages: bool | None = self._both_ways([user], "a call", tools)[0]
        except TemplateError:
            tool_messages = None
        _, forked = self._both_ways([user], "<think>\nwhy\n</think>\n\nan answer", [next_user])
        return TemplateReport(append_only, tool_messages, forked, self.end_of_turn, self.boundary)

    def _both_ways(self, prompt: list[Message], action: str, news: list[Message]) -> tuple[bool, bool]:
        """(built up turn by turn equals rendered at once, the template rewrote the turn)."""
        rendered = self.render_prompt(prompt)
        row = (*rendered.ids, *self.encode(action), *self.end_of_turn)
        messages = [*prompt, {"role": "assistant", "content": action}, *news]
        glue = self.extend(row, rendered.text, action, closed=True, messages=messages)
        whole = self.encode(glue.text)
        if glue.fork_point is not None:
            return False, True
        return (*row, *glue.observation) == whole, False
