"""Torn checkpoints and a full disk."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from drill_forge import Forge
from drill_kit import ASYNC, MOMENTS, cause, conserved, drilling, sound, trained_prompts

from run_kit import EXACT, tiny_settings, weights_digest
from slipstream.errors import CheckpointError, SlipstreamError
from slipstream.trainers.callbacks import Callback, Control, StepInfo
from slipstream.trainers.checkpoint import CheckpointStore
from slipstream.trainers.run import train

pytestmark = pytest.mark.proof
SECONDS = 900.0
EVERY = [*EXACT, "data.eval=[]", "checkpoint.every_steps=1", "schedule.steps=4"]


class StopAt(Callback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, info: StepInfo, control: Control) -> None:
        if info.phase == "rl" and info.step == self.step:
            control.stop("enough")


# ---- torn checkpoints


def tear(path: Path, rng: random.Random) -> str:
    """Damage a file as a crash, a bad disk or a careless hand does; says how."""
    body = bytearray(path.read_bytes())
    how = rng.choice(["cut", "flipped", "zeroed", "gone"])
    if how == "gone":
        path.unlink()
        return how
    at = rng.randrange(len(body))
    if how == "cut":
        del body[at:]
    elif how == "flipped":
        body[at] ^= 1 << rng.randrange(8)
    else:
        body[at : at + 512] = bytes(len(body[at : at + 512]))
    path.write_bytes(bytes(body))
    return how


def test_a_torn_checkpoint(tiny_dir: Path, tmp_path: Path) -> None:
    name = "tear a checkpoint"
    with drilling(name, "a random file of it (or the pointer) cut, flipped, zeroed or gone") as drill:
        settings = tiny_settings(tiny_dir, tmp_path / "whole", *EVERY)
        assert train(settings).finished
        want, prompts = weights_digest(tmp_path / "whole"), trained_prompts(tmp_path / "whole")
        stopped = tmp_path / "stopped"
        train(tiny_settings(tiny_dir, stopped, *EVERY), [StopAt(2)])
        pointer = stopped / "checkpoints" / "latest"
        assert pointer.read_text() == "rl-000002"
        newest = stopped / "checkpoints" / "rl-000002"
        files = sorted(p.relative_to(stopped) for p in [*newest.rglob("*"), pointer] if p.is_file())
        drill.rng.shuffle(files)
        for i in range(MOMENTS):
            run_dir = tmp_path / f"run-{i:02d}"
            shutil.copytree(stopped, run_dir)
            target = files[i % len(files)]
            how = tear(run_dir / target, drill.rng)
            settings = tiny_settings(tiny_dir, run_dir, *EVERY)
            with drill.nothing_left():
                outcome = refused_then_resumed(settings, target)
            assert weights_digest(run_dir) == want, f"{target} {how}: the weights differ"
            assert trained_prompts(run_dir) == prompts, f"{target} {how}: prompts lost or repeated"
            conserved(run_dir)
            drill.happened(outcome)
            shutil.rmtree(run_dir)


def refused_then_resumed(settings: Any, target: Path) -> str:
    """The torn checkpoint is refused by name, and an older one serves; harmless damage may go through."""
    try:
        assert train(settings).finished
        return "harmless (its content is whole); finished, weights equal to the bit"
    except CheckpointError as error:
        named = target.name if target.name in str(error) else target.parent.name
        if named not in str(error):
            raise
    root = settings.run_dir / "checkpoints"
    CheckpointStore(root).point_to("rl-000001")
    assert train(settings).finished
    return "refused, naming it; resumed from the one before, weights equal to the bit, every prompt once"


# ---- a full disk

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def can_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    try:
        done = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def _mount(folder: Path, size: int, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size}".encode()
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", ctypes.c_ulong(flags), options):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(folder))


def fill_a_disk(model: str, folder: str, size: int, overrides: list[str], verdict: str) -> None:
    """In a process with mounts of its own: a run on a disk of ``size`` bytes, then with room; says what happened."""
    disk = Path(folder)
    _mount(disk, size)
    found = run_out_of_room(Path(model), disk / "run", overrides, lambda: _mount(disk, 1 << 28, flags=32))
    Path(verdict).write_text(json.dumps(found))


def limit_file_sizes(model: str, folder: str, size: int, overrides: list[str], verdict: str) -> None:
    """Without mounts: a limit on file sizes refuses writes as a full disk does, at whichever file grows first."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, before[1]))
    more_room = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)  # noqa: E731
    found = run_out_of_room(Path(model), Path(folder) / "run", overrides, more_room)
    Path(verdict).write_text(json.dumps(found))


def run_out_of_room(model: Path, run_dir: Path, overrides: list[str], more_room: Any) -> dict[str, Any]:
    """Train until there is no room, then on; checks the books and returns what a verdict needs."""
    settings = tiny_settings(model, run_dir, *overrides)
    stopped: BaseException | None = None
    try:
        train(settings)
    except (SlipstreamError, OSError) as error:
        stopped = error
    more_room()
    if stopped is not None:
        assert train(settings).finished
    sound(run_dir)
    return {
        "cause": None if stopped is None else cause(stopped),
        "named": stopped is not None and _names_the_disk(stopped),
        "digest": weights_digest(run_dir),
        "prompts": len(trained_prompts(run_dir)),
    }


def _names_the_disk(error: BaseException) -> bool:
    words = [os.strerror(code) for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)]
    return any(word in str(error) for word in words)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_full_disk(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    overrides = EVERY if kind == "sync" else [*ASYNC, "checkpoint.every_steps=1", "schedule.steps=4"]
    own = can_mount()
    injected = "a file system of a random size, filled by the run" if own else "a random limit on the size of files"
    call = "test_drill_storage:" + ("fill_a_disk" if own else "limit_file_sizes")
    least = max(1, MOMENTS // 2)  # of each kind, so that both have as many as any other drill
    with (
        drilling(f"fill the disk, {kind}", injected, least=least) as drill,
        Forge(("unshare", "-rm") if own else ()) as forge,
    ):
        drill.known.add(forge.pid)
        whole = tmp_path / "whole"
        assert train(tiny_settings(tiny_dir, whole, *overrides)).finished
        want, prompts = weights_digest(whole), len(trained_prompts(whole))
        full = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file())
        while drill.moments < least:
            (tmp_path / "disk").mkdir(exist_ok=True)
            size = int(full * drill.rng.uniform(0.01, 0.99))
            verdict = tmp_path / "verdict.json"
            with drill.nothing_left():
                ended = forge.run(
                    call, tmp_path / "log", SECONDS, model=str(tiny_dir), folder=str(tmp_path / "disk"), size=size,
                    overrides=overrides, verdict=str(verdict),
                )  # fmt: skip
            assert ended.status == 0, f"{size} bytes: {ended.output}"
            found = json.loads(verdict.read_text())
            assert found["prompts"] == prompts, f"{size} bytes: prompts lost or repeated"
            assert kind == "async" or found["digest"] == want, f"{size} bytes: the weights differ"
            shutil.rmtree(tmp_path / "disk")
            if found["cause"] is None:
                continue  # there was room enough
            assert found["named"], f"{size} bytes: the disk is not named: {found['cause']}"
            same = "weights equal to the bit, " if kind == "sync" else ""
            drill.happened(f"stopped: {found['cause']}; with room: {same}every prompt once")
