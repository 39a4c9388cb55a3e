"""The public surface changes only on purpose: names and signatures per room, commands and their options."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from update_public_api import CLI_SURFACE, PUBLIC_API, cli_surface, public_api

HOW = "If that is intended, run: python tests/update_public_api.py  (and commit the file that it rewrites)"


@pytest.mark.parametrize(
    ("path", "make"),
    [(PUBLIC_API, public_api), (CLI_SURFACE, cli_surface)],
    ids=["public names and signatures", "commands and options"],
)
def test_surface_is_as_frozen(path: Path, make: Callable[[], str]) -> None:
    frozen, now = path.read_text().splitlines(), make().splitlines()
    diff = "\n".join(difflib.unified_diff(frozen, now, path.name, "the code", lineterm="", n=1))
    assert not diff, f"The public surface has changed:\n{diff}\n{HOW}"


def test_the_frozen_list_notices_a_changed_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    import slipstream.trajectory

    class SampleKey:
        def __init__(self, seed: int, new_argument: int) -> None: ...

    monkeypatch.setattr(slipstream.trajectory, "SampleKey", SampleKey)
    assert public_api() != PUBLIC_API.read_text()


def test_the_root_command_is_light() -> None:
    """``--help`` imports no room that could make it slow; the count of modules does not depend on the machine."""
    code = (
        "import sys\nfrom slipstream.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'pyarrow', 'duckdb', 'pydantic', 'omegaconf', "
        "'fastapi') if m in sys.modules]\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
