"""Opens files that only this user may read: tapes, logs and what the sidecar notes beside its rings.

In a folder that others may write to, a file may be a link to another file of this user, belong to somebody
else, or be a pipe that blocks. Such a file is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_private_file(path: str | Path, flags: int = os.O_WRONLY) -> int:
    """Returns the descriptor of a regular file of this user with mode 0600, created if it is missing.

    `flags`: os.O_WRONLY or os.O_RDWR, with os.O_APPEND or os.O_TRUNC if wanted. Raises `OSError` for a link, a
    file of another user, and anything that is no regular file.
    """
    truncates = bool(flags & os.O_TRUNC)
    opened = (flags & ~os.O_TRUNC) | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, opened, 0o600)
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


def read_private_text(path: str | Path, max_bytes: int) -> str:
    """Returns the beginning of a regular file of this user; raises `OSError` like `open_private_file`, and
    `ValueError` for a text that is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
