"""Opens files and folders of this user: tapes, logs, rings and the files beside them.

In a folder that others may write to, a file may be a link to another file of this user, belong to another
user, or be a pipe that blocks. A folder may be renamed, and a link put in its place, between any two calls. So
a file beside rings is opened relative to the descriptor of its folder, which was checked after it was opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

MAX_LINKS = 40
"""Links on the way to a folder; the kernel's own limit."""
_WALK = os.O_CLOEXEC | getattr(os, "O_PATH", 0)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextlib.contextmanager
def open_folder(folder: str | Path) -> Iterator[int]:
    """Yields a descriptor to open names below a folder of any user; it cannot be listed.

    On the way, links of root and of this user are followed. Raises `OSError` for a link of another user.
    """
    descriptor = os.open("/", _WALK | os.O_DIRECTORY)
    try:
        remaining, links = _split_reversed(os.path.abspath(folder)), 0
        while remaining:
            below = os.open(remaining.pop(), _WALK | os.O_NOFOLLOW, dir_fd=descriptor)
            status = os.fstat(below)
            if not stat.S_ISLNK(status.st_mode):
                os.close(descriptor)
                descriptor = below
                continue
            links += 1
            try:
                target = _read_link(below, status, folder, links)
            finally:
                os.close(below)
            if target.startswith("/"):
                os.close(descriptor)
                descriptor = -1
                descriptor = os.open("/", _WALK | os.O_DIRECTORY)
            remaining += _split_reversed(target)
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def open_private_folder(folder: Path, *, any_owner: bool = False) -> Iterator[int]:
    """Yields the descriptor of a folder of this user, in which no other user can write.

    `any_owner`: root may use folders of other users, too. Raises `OSError` for other folders and for a link.
    """
    with open_folder(folder.parent) as parent:
        descriptor = _open_own_folder(parent, folder, any_owner)
    try:
        if os.fstat(descriptor).st_mode & _OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "other users can write to it", str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def create_private_folder(folder: Path) -> None:
    """Creates a folder of mode 0700, or gives an existing folder of this user that mode.

    Raises `OSError`: `PermissionError` with EPERM for a link or a folder of another user.
    """
    with open_folder(folder.parent) as parent:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder.name, 0o700, dir_fd=parent)
        descriptor = _open_own_folder(parent, folder, any_owner=False)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def open_beside_rings(path: Path, flags: int, *, any_owner: bool = False) -> int:
    """Returns the descriptor of a file in a private folder; a new file has mode 0600.

    Links are not followed, and a pipe does not block. Raises `OSError` as `open_private_folder` does.
    """
    with open_private_folder(path.parent, any_owner=any_owner) as folder:
        return os.open(path.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)


def remove_beside_rings(path: Path, *, any_owner: bool = False) -> None:
    """Removes a file from a private folder, if both exist; raises `OSError` as `open_private_folder` does."""
    with (
        contextlib.suppress(FileNotFoundError),
        open_private_folder(path.parent, any_owner=any_owner) as folder,
    ):
        os.unlink(path.name, dir_fd=folder)


def read_status(path: Path, *, any_owner: bool = False) -> os.stat_result | None:
    """Returns the status of a file in a private folder; None if it is missing or the folder is not private."""
    try:
        with open_private_folder(path.parent, any_owner=any_owner) as folder:
            return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def list_names(folder: Path, *, any_owner: bool = False) -> list[str]:
    """Returns the sorted names in a private folder; raises `OSError` as `open_private_folder` does."""
    with open_private_folder(folder, any_owner=any_owner) as descriptor:
        return sorted(os.listdir(descriptor))


def open_private_file(path: str | Path, flags: int = os.O_WRONLY, folder: int | None = None) -> int:
    """Returns the descriptor of a regular file of this user with mode 0600, created if it is missing.

    `flags`: os.O_WRONLY or os.O_RDWR, with os.O_APPEND or os.O_TRUNC if wanted. `folder`: descriptor that a
    relative path starts from. Raises `OSError` for a link, a file of another user, and anything that is no
    regular file.
    """
    truncates = bool(flags & os.O_TRUNC)
    opened = (flags & ~os.O_TRUNC) | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, opened, 0o600, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        check_private(status, path)
        if status.st_uid != os.geteuid():  # also for root: its owner could read what is written
            raise PermissionError(errno.EPERM, "belongs to another user", str(path))
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o600)
        if truncates:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private_text(path: Path, text: str) -> None:
    """Writes a file beside rings, mode 0600; raises `OSError`."""
    with (
        open_private_folder(path.parent) as folder,
        open(
            open_private_file(path.name, os.O_WRONLY | os.O_TRUNC, folder),
            "w",
            encoding="utf-8",
            errors="replace",
        ) as file,
    ):
        file.write(text)


def read_private_text(path: Path, max_bytes: int, *, any_owner: bool = False) -> str:
    """Returns the beginning of a regular file of this user beside rings.

    Raises `OSError` like `open_private_file`, and `ValueError` for a text that is not UTF-8.
    """
    descriptor = open_beside_rings(path, os.O_RDONLY, any_owner=any_owner)
    try:
        check_private(os.fstat(descriptor), path)
        return os.read(descriptor, max_bytes).decode("utf-8")
    finally:
        os.close(descriptor)


def check_private(status: os.stat_result, path: str | Path) -> None:
    """Raises `OSError` unless this is a regular file of this user. Root may read files of other users."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if not is_readable_owner(status):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))


def is_readable_owner(status: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to this user, or this user is root."""
    return status.st_uid == os.geteuid() or os.geteuid() == 0


def _open_own_folder(parent: int, folder: Path, any_owner: bool) -> int:
    """Returns the descriptor of a folder of this user, for listing."""
    descriptor = os.open(folder.name, _WALK | os.O_NOFOLLOW, dir_fd=parent)
    try:
        status = os.fstat(descriptor)
        is_owned = is_readable_owner(status) if any_owner else status.st_uid == os.geteuid()
        if not stat.S_ISDIR(status.st_mode) or not is_owned:
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _read_link(descriptor: int, status: os.stat_result, folder: str | Path, links: int) -> str:
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "its path has a link of another user", str(folder))
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    return os.readlink("", dir_fd=descriptor)


def _split_reversed(path: str) -> list[str]:
    return [part for part in reversed(PurePath(path).parts) if part != "/"]
