"""The one way in which files and folders are replaced: what has its name is whole.

    NAME.partial     what is being written; through to the disk before it gets its name
    NAME.replaced    the folder that had the name, while another one takes it
    NAME.deleted     a folder that goes

A file is replaced by a single rename. No system can do that with a folder that is not empty: the
old one is moved aside, the new one gets the name, the old one goes. If the process is killed in
between, nothing has the name, but what is aside is whole: `whole_folder` finds it, and `recover`,
which whoever writes there next calls, gives it its name back. A folder is removed under another
name, so that nothing that is half there looks whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

SUFFIXES = PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"


def beside(path: Path, suffix: str = PARTIAL) -> Path:
    """What a file or folder is called while it is being written, or goes."""
    return path.with_name(path.name + suffix)


def write_file(path: Path, text: str, *, shared: bool = False) -> None:
    """Write a file, through to the disk, then let it have its name.

    Args:
        path: of the file; what has this name is there, whole, until the new one is.
        text: all of it.
        shared: whether others may write the same file at the same time: the last one wins.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    own = f".{os.getpid()}-{threading.get_ident()}" if shared else ""
    made = beside(path, own + PARTIAL)
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
        raise
    sync(path.parent)


def empty_folder(folder: Path) -> Path:
    """A folder to write what will replace `folder`; `replace_folder` lets it have the name.

    Raises:
        OSError: it cannot be made.
    """
    recover(folder)
    made = beside(folder)
    if made.exists() or made.is_symlink():  # and could not be removed
        shutil.rmtree(made)
    made.mkdir(parents=True)
    return made


def replace_folder(folder: Path) -> None:
    """Let what was written beside a folder have its name; what had that name goes.

    Raises:
        OSError: that is not possible; all is as it was.
    """
    made, old = beside(folder), beside(folder, REPLACED)
    for path in (*made.rglob("*"), made):
        if path.is_file() or path.is_dir():
            sync(path)
    with contextlib.ExitStack() as undo:
        if folder.exists():
            _remove(old, folder)
            folder.rename(old)
            undo.callback(old.rename, folder)
        made.rename(folder)
        undo.callback(folder.rename, made)
        sync(folder.parent)
        undo.pop_all()
    _remove(old, folder)


def whole_folder(folder: Path) -> Path:
    """Where the folder of this name is, also if a process was killed when it replaced it."""
    old = beside(folder, REPLACED)
    return old if not folder.exists() and old.is_dir() else folder


def recover(folder: Path) -> None:
    """Give a folder that was about to be replaced its name back; remove what is not whole.

    For whoever writes there: somebody who is writing just now would lose it.
    """
    with contextlib.suppress(OSError):
        old = whole_folder(folder)
        if old != folder:
            old.rename(folder)
    if folder.exists() or not beside(folder, REPLACED).exists():
        for suffix in SUFFIXES:
            shutil.rmtree(beside(folder, suffix), ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder; what has its name is whole until it is gone."""
    _remove(folder, folder)


def sync(path: Path) -> None:
    """Make a file, or what was created or renamed in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path, folder: Path) -> None:
    """Remove a folder under the name of those that go; what cannot be removed now goes later."""
    goes = beside(folder, DELETED)
    with contextlib.suppress(OSError):
        if path.exists():
            shutil.rmtree(goes, ignore_errors=True)
            path.rename(goes)
            shutil.rmtree(goes, ignore_errors=True)
