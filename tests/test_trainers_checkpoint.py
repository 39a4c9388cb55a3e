"""Checkpoints: whole or absent, verified, pruned last."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.trainers.checkpoint import CheckpointStore


def fill(text: str):
    def write(directory: Path) -> None:
        (directory / "part").mkdir()
        (directory / "part" / "weights.bin").write_text(text)

    return write


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2)
    for step in range(4):
        store.save(f"rl-{step:06d}", {"step": step}, fill(f"w{step}"))
    found = store.latest()
    assert found is not None
    assert found.state == {"step": 3}
    assert (found.directory / "part" / "weights.bin").read_text() == "w3"
    assert store.names() == ["rl-000002", "rl-000003"]


def test_saving_the_same_name_again_replaces_it_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("a", {"n": 1}, fill("old"))
    store.save("a", {"n": 2}, fill("new"))
    found = store.latest()
    assert found is not None
    assert found.state == {"n": 2}
    assert (found.directory / "part" / "weights.bin").read_text() == "new"


@pytest.mark.parametrize("broken", ["part/weights.bin", "state.json"])
def test_a_corrupt_file_is_named_with_the_way_back(tmp_path: Path, broken: str) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("old", {}, fill("1"))
    store.save("new", {}, fill("2"))
    path = tmp_path / "c" / "new" / broken
    path.write_text("{}" + path.read_text())
    with pytest.raises(CheckpointError, match=r"corrupt.*'old'") as caught:
        store.latest()
    assert broken.rsplit("/", 1)[-1] in str(caught.value)


def test_a_missing_file_and_a_missing_manifest_are_errors(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("only", {}, fill("1"))
    (tmp_path / "c" / "only" / "part" / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        store.latest()
    (tmp_path / "c" / "only" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        store.latest()


def test_a_full_disk_keeps_the_earlier_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("good", {"n": 1}, fill("1"))

    def full(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match="No space left"):
        store.save("bad", {"n": 2}, full)
    found = store.latest()
    assert found is not None
    assert found.state == {"n": 1}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["good", "latest"]


@pytest.mark.parametrize("point", ["hash", "rename", "pointer"])
def test_a_kill_at_any_commit_point_leaves_a_whole_checkpoint(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child dies without cleaning up, at a named point of the second save."""
    store = CheckpointStore(tmp_path / "c")
    store.save("first", {"n": 1}, fill("1"))
    pid = os.fork()
    if pid == 0:
        die = lambda *a, **k: os._exit(9)  # noqa: E731
        if point == "hash":
            monkeypatch.setattr("slipstream.trainers.checkpoint._digest", die)
        elif point == "rename":
            monkeypatch.setattr(os, "rename", die)
        else:
            monkeypatch.setattr(os, "replace", die)
        store.save("second", {"n": 2}, fill("2"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    again = CheckpointStore(tmp_path / "c")
    found = again.latest()
    assert found is not None
    assert found.state == {"n": 1}
    again.save("third", {"n": 3}, fill("3"))
    found = again.latest()
    assert found is not None
    assert found.state == {"n": 3}
    assert not list((tmp_path / "c").glob(".staging-*"))


def test_a_kill_while_a_checkpoint_is_replaced_by_one_of_its_name_leaves_it_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("same", {"n": 1}, fill("1"))
    pid = os.fork()
    if pid == 0:
        rename, calls = os.rename, []

        def dies_at_the_second(source: Path, target: Path) -> None:
            calls.append(source)
            if len(calls) == 2:
                os._exit(9)
            rename(source, target)

        monkeypatch.setattr(os, "rename", dies_at_the_second)
        store.save("same", {"n": 2}, fill("2"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    again = CheckpointStore(tmp_path / "c")
    found = again.latest()
    assert found is not None
    assert found.state == {"n": 1}
    again.save("same", {"n": 3}, fill("3"))
    found = again.latest()
    assert found is not None
    assert found.state == {"n": 3}
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["latest", "same"]


def test_without_a_pointer_the_newest_whole_checkpoint_serves(tmp_path: Path) -> None:
    """A first save that was killed before the pointer moved, or a pointer that was lost."""
    store = CheckpointStore(tmp_path / "c")
    store.save("one", {"n": 1}, fill("1"))
    store.save("two", {"n": 2}, fill("2"))
    (tmp_path / "c" / "latest").unlink()
    found = store.latest()
    assert found is not None
    assert found.state == {"n": 2}


@pytest.mark.parametrize("content", [b"", b"tw", b"t\xff\xfe", b"two\0"])
def test_a_torn_pointer_is_named(content: bytes, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("one", {"n": 1}, fill("1"))
    store.save("two", {"n": 2}, fill("2"))
    (tmp_path / "c" / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest.*to go back, write"):
        store.latest()


@pytest.mark.parametrize("manifest", ["[]", "{}", '"text"', "null", "{"])
def test_a_manifest_that_is_none_is_named(manifest: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("one", {"n": 1}, fill("1"))
    store.save("two", {"n": 2}, fill("2"))
    (tmp_path / "c" / "two" / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"two: no readable manifest .*to go back, write 'one'"):
        store.latest()


@pytest.mark.parametrize("place", ["two/part/weights.bin", "two/manifest.json", "latest"])
def test_a_directory_in_the_place_of_a_file_is_named(place: str, tmp_path: Path) -> None:
    """As any other file that cannot be read."""
    store = CheckpointStore(tmp_path / "c")
    store.save("one", {"n": 1}, fill("1"))
    store.save("two", {"n": 2}, fill("2"))
    (tmp_path / "c" / place).unlink()
    (tmp_path / "c" / place).mkdir()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*Is a directory.*to go back, write"):
        store.latest()


def test_a_pointer_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("one", {"n": 1}, fill("1"))
    (tmp_path / "c" / "latest").unlink()
    (tmp_path / "c" / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest could not be written .*free disk space"):
        store.point_to("one")


def test_a_file_in_the_place_of_the_store_is_named_when_something_is_saved(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    store = CheckpointStore(tmp_path / "c")
    assert (store.names(), store.latest()) == ([], None)
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'c'}.* could not be written"):
        store.save("one", {}, fill("1"))
    assert (tmp_path / "c").read_text() == "mine"


def test_a_replaced_checkpoint_that_cannot_be_put_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "c")
    store.save("same", {"n": 1}, fill("1"))
    os.rename(tmp_path / "c" / "same", tmp_path / "c" / ".replaced-same")

    def refuses(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    with monkeypatch.context() as change:
        change.setattr(os, "rename", refuses)
        with pytest.raises(CheckpointError, match=r"cannot be put back \(.*Permission denied.*writable"):
            store.latest()
        with pytest.raises(CheckpointError, match=r"could not be written"):
            store.save("same", {"n": 2}, fill("2"))
    found = store.latest()
    assert found is not None
    assert found.state == {"n": 1}
