"""Small torch-free stand-ins: tokenizers with real Jinja templates, and scripted environments."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Shows a turn's thinking only after the last user message, as reasoning models' templates do.
STRIP_THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in c and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Neighbouring tool messages become one user turn.
MERGE_TOOLS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '[' + m['role'] + ']' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)

# No generation header; the end of turn stands only behind assistant messages.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# No special token at all.
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

SPECIALS = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
EOS = 257
VOCAB = 259


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ByteTokenizer:
    """Ids below 256 are bytes; three special tokens; a Jinja chat template."""

    def __init__(self, template: str = CHATML, specials: Mapping[str, int] = SPECIALS) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(template)
        self.specials = dict(specials)
        self._names = {i: name for name, i in self.specials.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")
        self.eos_token_id = self.specials["<|im_end|>"]
        self.all_special_ids = list(self.specials.values())
        self.vocab_size = max(self.specials.values()) + 1

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool = False, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        assert not tokenize
        return self._template.render(messages=conversation, add_generation_prompt=add_generation_prompt, **kwargs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.specials:
                ids.append(self.specials[piece])
            else:
                ids.extend(self._pieces(piece))
        return ids

    def _pieces(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        out = b""
        for i in token_ids:
            out += (b"" if skip_special_tokens else self._names[i].encode()) if i in self._names else self._bytes(i)
        return out.decode("utf-8", "replace")

    def _bytes(self, token: int) -> bytes:
        return bytes([token])


class MergeTokenizer(ByteTokenizer):
    """As ``ByteTokenizer``, and "ab" is one token when text is encoded; "..." is one too."""

    AB, DOTS = 300, 301

    def _pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split(r"(ab|\.\.\.)", text):
            ids.extend({"ab": [self.AB], "...": [self.DOTS]}.get(piece, list(piece.encode())))
        return ids

    def _bytes(self, token: int) -> bytes:
        return {self.AB: b"ab", self.DOTS: b"..."}.get(token) or bytes([token])


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}


class ScriptedEnv:
    """An environment that plays a list of step outputs (mappings, exceptions, or callables of the action)."""

    def __init__(self, script: Sequence[Any], extras: Mapping[str, Any] | None = None) -> None:
        self.script = list(script)
        self.extras = dict(extras or {})
        self.actions: list[str] = []
        self.closed = 0
        self.prompt: Any = None
        self.threads: set[int] = set()

    def init(self, prompt: Any) -> tuple[Any, dict[str, Any]]:
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> Any:
        self.threads.add(threading.get_ident())
        self.actions.append(action)
        output = self.script[len(self.actions) - 1]
        if callable(output):
            output = output(action)
        if isinstance(output, BaseException):
            raise output
        return output

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": len(self.actions), "note": "text is left out"}

    def close(self) -> None:
        self.closed += 1


def step(reward: Any, *observations: str, done: bool = False, **more: Any) -> dict[str, Any]:
    """A step output with user messages as observations."""
    return {"observations": [user(text) for text in observations], "reward": reward, "done": done, **more}


class EnvMaker:
    """An ``env_factory`` that remembers what it made; ``build(nth)`` gives the nth environment's script."""

    def __init__(self, build: Callable[[int], Sequence[Any]]) -> None:
        self._build = build
        self.made: list[ScriptedEnv] = []
        self._lock = threading.Lock()

    def __call__(self, env_class: str, extras: dict[str, Any]) -> ScriptedEnv:
        with self._lock:
            env = ScriptedEnv(self._build(len(self.made)), extras)
            self.made.append(env)
        return env
