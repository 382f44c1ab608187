"""When a folder counts as changed: a name was added or removed, or it is another folder."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from otel_infer.ringbuffer.folder_watch import RECHECK_NS, FolderWatch

START = 10**12
OLD_NS = 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rings"
    folder.mkdir(mode=0o700)
    make_old(folder)
    return folder


def make_old(folder: Path, by: int = OLD_NS) -> None:
    """Sets the time of the last change into the past."""
    at = time.time_ns() - by
    os.utime(folder, ns=(at, at))


def test_an_unchanged_folder_is_reported_once(folder: Path) -> None:
    watch = FolderWatch(folder)
    assert [watch.has_changed(START + number) for number in range(3)] == [True, False, False]


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_changed_name_is_reported_once(folder: Path, change: str) -> None:
    (folder / "old").touch()
    make_old(folder, 2 * OLD_NS)
    watch = FolderWatch(folder)
    watch.has_changed(START)
    (folder / "new").touch() if change == "add" else (folder / "old").unlink()
    make_old(folder)
    assert [watch.has_changed(START + number) for number in range(3)] == [True, False, False]


def test_a_recent_change_is_reported_again(folder: Path) -> None:
    """Another name may be added within the same tick of the clock."""
    watch = FolderWatch(folder)
    watch.has_changed(START)
    (folder / "new").touch()
    assert [watch.has_changed(START + number) for number in range(3)] == [True, True, True]


def test_a_replaced_folder_is_watched(folder: Path) -> None:
    watch = FolderWatch(folder)
    watch.has_changed(START)
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    make_old(folder)
    assert [watch.has_changed(START + number) for number in range(2)] == [True, False]
    (folder / "new").touch()
    assert watch.has_changed(START + 2)


def test_a_missing_folder_is_reported_until_it_exists(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    watch = FolderWatch(folder)
    assert [watch.has_changed(START + number) for number in range(2)] == [True, True]
    folder.mkdir(mode=0o700)
    make_old(folder)
    assert [watch.has_changed(START + number) for number in range(2, 4)] == [True, False]


def test_a_renamed_folder_is_noticed_in_time(folder: Path) -> None:
    watch = FolderWatch(folder)
    watch.has_changed(START)
    folder.rename(folder.with_name("other"))
    folder.mkdir(mode=0o700)
    assert watch.has_changed(START + RECHECK_NS)
    watch.close()
