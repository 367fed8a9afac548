"""Files and folders are replaced whole or not at all, whenever a process is killed."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from test_checkpoint import Dead, Failing, Kill, names

from l2l.files.replacing import (
    beside,
    empty_folder,
    recover,
    remove_folder,
    replace_folder,
    sync,
    whole_folder,
    write_file,
)


def replace(folder: Path, text: str) -> None:
    made = empty_folder(folder)
    (made / "inner").mkdir()
    (made / "inner" / "file").write_text(text)
    (made / "other").write_text(text)
    replace_folder(folder)


def text_of(folder: Path) -> str:
    one, other = (folder / "inner" / "file").read_text(), (folder / "other").read_text()
    assert one == other
    return one


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replaced"])
def test_a_folder_is_whole_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
):
    folder, seen, before = tmp_path / "folder", list[str | None](), 0
    while True:
        before += 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if is_there:
            replace(folder, "old")
        with monkeypatch.context() as patched:
            kill = Kill(patched, before=before)
            try:
                replace(folder, "new")
            except Dead:
                pass
            else:
                assert kill.count < before
                break
        found = whole_folder(folder)
        value = text_of(found) if found.exists() else None
        recover(folder)
        assert names(tmp_path) == ([] if value is None else ["folder"])  # nothing is left
        assert value == (None if value is None else text_of(folder))
        seen.append(value)
        replace(folder, "next")
        assert text_of(folder) == "next"
        assert names(tmp_path) == ["folder"]
    switched = seen.index("new")
    assert seen == ["old" if is_there else None] * switched + ["new"] * (len(seen) - switched)
    assert switched > 5


def test_a_file_is_whole_whenever_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, seen, before = tmp_path / "file", list[str](), 0
    while True:
        before += 1
        write_file(path, "old")
        with monkeypatch.context() as patched:
            Kill(patched, before=before)
            try:
                write_file(path, "new")
            except Dead:
                pass
            else:
                break
        seen.append(path.read_text())
    write_file(path, "next")
    assert names(tmp_path) == ["file"]
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {"old", "new"}


def test_a_replacement_that_fails_midway_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "folder"
    replace(folder, "old")
    for function, at in (("rename", 1), ("rename", 2), ("fsync", 1), ("fsync", 5)):
        with monkeypatch.context() as patched:
            failing = Failing(patched, function, at=at, code=errno.EACCES)
            with pytest.raises(OSError, match="Permission denied"):
                replace(folder, "new")
            assert failing.calls >= at
        assert text_of(folder) == "old"
        assert names(tmp_path) == ["folder", "folder.partial"]
    recover(folder)
    assert names(tmp_path) == ["folder"]


def test_everything_reaches_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done, fsync, rename = list[str](), os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def note_rename(one: Path, other: Path) -> None:
        done.append(f"rename {one.name} {other.name}")
        rename(one, other)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    write_file(tmp_path / "file", "text")
    parent = f"sync {tmp_path.name}"
    assert done == ["sync file.partial", "rename file.partial file", parent]
    done.clear()
    replace(tmp_path / "folder", "text")
    first = ["sync file", "sync folder.partial", "sync inner", "sync other"]
    assert sorted(done[:4]) == first
    assert done[4:] == ["rename folder.partial folder", parent]


def test_who_writes_the_same_file_at_the_same_time_has_another_beside(tmp_path: Path):
    beside(tmp_path / "file").mkdir()  # somebody else's
    write_file(tmp_path / "file", "one", shared=True)
    assert (tmp_path / "file").read_text() == "one"
    with pytest.raises(OSError, match="directory"):
        write_file(tmp_path / "file", "two")
    assert (tmp_path / "file").read_text() == "one"


def test_a_folder_goes_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replace(tmp_path / "folder", "old")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before that
        remove_folder(tmp_path / "folder")
    assert names(tmp_path) == ["folder.deleted"]
    recover(tmp_path / "folder")
    assert names(tmp_path) == []


def test_a_folder_can_be_synced_and_a_missing_one_is_an_error(tmp_path: Path):
    sync(tmp_path)
    with pytest.raises(OSError, match="missing"):
        sync(tmp_path / "missing")
