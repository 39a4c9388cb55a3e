"""The program between a parent and a server: when either end goes, everything goes.

Owns: the life of one command and of all its descendants.  Refuses: importing the package (it is run by path, isolated,
with the standard library only, so that it starts in milliseconds).

    python -I guard.py GRACE_SECONDS -- COMMAND [ARGUMENT]...

The parent holds the other end of standard input.  End of file there means that the parent is gone (also by SIGKILL) or
wants the command stopped: the command gets SIGTERM, and after the grace period SIGKILL.  On Linux the guard is the
subreaper of its descendants, so that also those which left their process group (an engine's workers do) are found and
ended.  If the guard itself is killed, the kernel ends the command.  The exit status is the command's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform.startswith("linux")


def _prctl() -> Callable[[int, int], int] | None:
    if not _LINUX:
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return None
    return lambda option, value: int(call(option, value, 0, 0, 0))


def _children_by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # gone meanwhile
            # The name in parentheses may hold anything; what follows the last one does not.
            parent = int(stat.rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry.name))
    return found


def descendants() -> list[int]:
    """Process ids below this process; those that lost their parent count, since the guard adopts them."""
    if not _LINUX:
        return []
    tree = _children_by_parent()
    found: list[int] = []
    stack = [os.getpid()]
    while stack:
        for child in tree.get(stack.pop(), ()):
            found.append(child)
            stack.append(child)
    return found


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _end_all(group: int) -> None:
    """SIGKILL until nothing is left; the loop is bounded, since a killed process cannot start others."""
    for _ in range(50):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        left = descendants()
        _send(left, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0 if left else os.WNOHANG)[0]:
                left = []
        except ChildProcessError:
            return


def main(arguments: list[str]) -> int:
    """Run the command; see the module."""
    grace, command = float(arguments[0]), arguments[2:]
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def in_child() -> None:
        os.setpgid(0, 0)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # A terminal's Ctrl-C reaches the whole foreground group; stopping is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    stopped = threading.Event()

    def stop() -> None:
        if stopped.is_set():
            return
        stopped.set()
        try:
            os.killpg(child.pid, signal.SIGTERM)
        except (ProcessLookupError, PermissionError):
            return
        killer = threading.Timer(grace, _send, ([child.pid], signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    signal.signal(signal.SIGTERM, lambda *_: stop())
    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    _end_all(child.pid)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    # os._exit: the watching thread blocks in a read that nothing may end.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
