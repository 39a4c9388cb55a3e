"""Griffe extension for the API pages: doctest examples in docstrings become code blocks.

Docstrings here put ``>>>`` examples into their prose, which Markdown would read as quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^([ \t]*)>>> .*\n?(?:^(?![ \t]*$).*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """``text`` with each example (a ``>>>`` line up to the next empty line) in a Python fence."""
    return _EXAMPLE.sub(lambda m: f"{m[1]}```python\n{m[0].rstrip()}\n{m[1]}```\n", text)


class FencedExamples(griffe.Extension):
    """Rewrites every docstring as it is collected."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
