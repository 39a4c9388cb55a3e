"""Where and from what a benchmark's figures come: written into every record."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def processor() -> str:
    """The processor's name, as the kernel gives it where it does."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Short hash of the checkout, ``-dirty`` where the library differs from it; records may differ."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    here = git("rev-parse", "--short", "HEAD").stdout.strip()
    clean = git("diff", "--quiet", "HEAD", "--", "src", "pyproject.toml").returncode == 0
    return (here if clean else f"{here}-dirty") if here else "unknown"


def machine() -> dict[str, Any]:
    """What a record says of the machine; call it before the work, since ``load`` is that of the last minutes."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "commit": commit(),
    }
