"""Errors as a user sees them: one line that names the thing and the mend, and an exit code.

Owns: exit codes (0 done, 1 something was found by a check, 2 an error or a refusal, 130 interrupted), ``--debug``, the
end of a process in which threads are left.
Refuses: hiding what is not a deliberate error (that is a bug of ours, and shows its traceback).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from slipstream.errors import SlipstreamError

FOUND, REFUSED, INTERRUPTED = 1, 2, 130
checking = threading.Event()
"""Set once a check runs: a class under test may leave threads that wait for ever, and Python would join them."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside (nested) exception groups; any other exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def verdict(error: BaseException) -> tuple[int, str] | None:
    """Exit code and text of a deliberate error or an interruption; None for anything else."""
    from asyncio import CancelledError

    found = list(leaves(error))
    deliberate = [leaf for leaf in found if isinstance(leaf, SlipstreamError)]
    if deliberate:
        return REFUSED, f"error: {deliberate[0]}"
    if any(isinstance(leaf, KeyboardInterrupt | CancelledError) for leaf in found):
        return INTERRUPTED, "interrupted"
    return None


def leave(end: BaseException) -> NoReturn:
    """End this process as ``end`` would, but at once: no thread is joined, and nothing registered for the exit runs."""
    if isinstance(end, SystemExit):
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    else:
        code = 1
        traceback.print_exception(end)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe whose reader has gone
            stream.flush()
    os._exit(code)


class FaultGroup(TyperGroup):
    """The root command: every deliberate error ends here."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a deliberate error becomes ``error: ...`` on stderr and exit code 2."""
        try:
            return super().invoke(ctx)
        except BaseException as error:
            found = verdict(error)
            if found is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exception(error)
            code, text = found
            print(text, file=sys.stderr)
            raise typer.Exit(code) from None


class CheckGroup(TyperGroup):
    """Commands that run somebody's class or function; ``leave`` ends their process."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        checking.set()
        return super().invoke(ctx)
