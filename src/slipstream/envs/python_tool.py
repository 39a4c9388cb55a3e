"""SkyRL's Python tool, executed in a sandbox: bubblewrap's namespaces, and limits on what a program may use.

Owns: ``run_python`` and ``PythonCodeExecutorToolGroup``.  Refuses: running anything without the sandbox; where
bubblewrap is missing or may not make namespaces, the fault says so.

A program sees the interpreter and the system's libraries, read only, and an empty directory of its own in memory.  It
has no network, no files of the user, no environment variables; it sees no other process and starts none (a filter of
system calls lets it have threads alone: limits on processes do not hold for root), and it ends with its time.

>>> run_python("print(6 * 7)").text if sandbox_works() else "42"
'42'
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

from slipstream.envs.tools import ToolGroup, tool
from slipstream.errors import EnvironmentFault

_PROGRAM = "bwrap"
_SCRATCH = "/scratch"
"""A program's own directory; not /tmp, below which the interpreter itself may lie."""
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
# Runs the program from its standard input, after giving up for good what it shall not have.
_PRELUDE = """
import os, resource, sys
os.write({started}, b"1")
os.close({started})
for name, value in ((resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {cpu}), (resource.RLIMIT_FSIZE, {output}),
                    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(name, (value, value))
exec(compile(sys.stdin.read(), "<tool>", "exec"), {{"__name__": "__main__"}})
"""


# Linux's numbers by machine: audit architecture, clone, and the older calls that make processes.
_CALLS: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 56, (57, 58)),
    "aarch64": (0xC00000B7, 220, ()),
}
_CLONE3, _CLONE_THREAD, _X32 = 435, 0x10000, 0x40000000
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _no_processes(machine: str) -> bytes:
    """A seccomp filter (classic BPF) under which threads can be made, and processes cannot."""
    arch, clone, older = _CALLS[machine]
    again, unknown = _ERRNO | errno.EAGAIN, _ERRNO | errno.ENOSYS
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
        (_ABOVE, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory, which a filter cannot read; libraries fall back to clone
        (_RETURN, 0, 0, unknown),
    ]
    for call in older:
        lines += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, again)]
    lines += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),  # its flags
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, again),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


@dataclass(frozen=True)
class PythonLimits:
    """What one program may use."""

    wall_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    """Of standard output, of standard error, and of each file."""
    scratch_bytes: int = 64 << 20
    """Of all its files together."""


@dataclass(frozen=True)
class PythonResult:
    """``text`` is standard output, or what went wrong."""

    kind: Literal["ok", "error", "timeout"]
    text: str


def _roots() -> Iterator[str]:
    """What a program may read: the interpreter with its packages, and the system's libraries."""
    seen: set[str] = set()
    for path in (*_SYSTEM, sys.base_prefix, sys.prefix):
        if os.path.exists(path) and not any(path == root or path.startswith(f"{root}/") for root in seen):
            seen.add(path)
            yield path


def _command(program: str, limits: PythonLimits, filter_fd: int, started_fd: int) -> list[str]:
    binds = [part for root in _roots() for part in ("--ro-bind", root, root)]
    prelude = _PRELUDE.format(
        started=started_fd,
        memory=limits.memory_bytes,
        cpu=max(1, round(limits.wall_seconds)),
        output=limits.output_bytes,
    )
    return [
        *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--seccomp", str(filter_fd)),
        *binds,
        *("--proc", "/proc", "--dev", "/dev", "--size", str(limits.scratch_bytes), "--tmpfs", _SCRATCH),
        # What is left of the sandbox's own file system would be memory without a limit.
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--setenv", "TMPDIR", _SCRATCH, "--chdir", _SCRATCH, "--", sys.executable, "-I", "-B", "-c", prelude),
    ]


def run_python(code: str, limits: PythonLimits | None = None) -> PythonResult:
    """Run a program and collect what it prints; anything on standard error makes it an error, as in SkyRL.

    Raises ``EnvironmentFault`` when there is no sandbox.
    """
    limits = limits or PythonLimits()
    program = shutil.which(_PROGRAM)
    if program is None:
        raise EnvironmentFault(
            f"programs that a model writes run in a sandbox only, and {_PROGRAM} is missing: install bubblewrap "
            "(apt install bubblewrap)"
        )
    if platform.machine() not in _CALLS:
        raise EnvironmentFault(f"the sandbox for programs knows {' and '.join(_CALLS)}, not {platform.machine()}")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as rules:
        rules.write(_no_processes(platform.machine()))
        rules.seek(0)
        begun, started = os.pipe()
        child = subprocess.Popen(
            _command(program, limits, rules.fileno(), started),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={},
            pass_fds=(rules.fileno(), started),
        )
        os.close(started)
        try:
            child.communicate(code.encode("utf-8", "surrogatepass"), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return PythonResult("timeout", f"Execution timed out after {limits.wall_seconds:g} seconds.")
        except BaseException:
            child.kill()
            child.wait()
            raise
        finally:
            # The program cannot say so itself: its end of the pipe is closed before it begins.
            ran = os.read(begun, 1) == b"1"
            os.close(begun)
        printed, wrong = (_read(stream, limits.output_bytes) for stream in (out, err))
    if not ran:
        why = wrong.splitlines()[0] if wrong else f"status {child.returncode}"
        raise EnvironmentFault(
            f"the sandbox cannot be made ({why}): allow unprivileged user namespaces, or run where they are"
        )
    if wrong or child.returncode:
        return PythonResult("error", wrong or f"The program ended with status {child.returncode}.")
    return PythonResult("ok", printed)


def _read(stream: IO[bytes], most: int) -> str:
    stream.seek(0)
    return stream.read(most).decode("utf-8", "replace").strip()


@cache
def sandbox_works() -> bool:
    """Whether programs can be run here."""
    try:
        return run_python("print(1)").text == "1"
    except EnvironmentFault:
        return False


class PythonCodeExecutorToolGroup(ToolGroup):
    """SkyRL's Python tool; SkyRL itself runs the program on the host.

    Args:
        timeout: seconds that a program may take.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout
        super().__init__(name="PythonCodeExecutorToolGroup")

    @tool
    def python(self, code: str) -> str:
        """What the program printed, or ``Error executing Python code: ...``; raises ``EnvironmentFault`` as above."""
        result = run_python(code, PythonLimits(wall_seconds=self.timeout))
        return result.text if result.kind == "ok" else f"Error executing Python code: {result.text}"
