"""Where the rings of one server lie, and who looks after them.

    BASE/otel_infer-UID/SERVER/     0700, on tmpfs; BASE is /dev/shm
        owner.lock                  held by `otel-infer run` while it lives
        sidecar.lock                held by the one sidecar of this server
        PID-TOKEN.requests          held by each writing process
        PID-TOKEN-N.steps
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.ring import layout
from otel_infer.ring.write import RingRefused

BASE = Path("/dev/shm")
OWNER_LOCK = "owner.lock"
SIDECAR_LOCK = "sidecar.lock"
ABANDONED_S = 3600.0


def user_folder(base: Path = BASE) -> Path:
    """This user's folder; raises `RingRefused` where it cannot be had, or belongs to somebody else."""
    folder = base / f"otel_infer-{os.getuid()}"
    return private_folder(folder)


def private_folder(folder: Path) -> Path:
    """The folder, made 0700 if it is not there; raises `RingRefused` unless it is ours alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as refusal:
        raise RingRefused(f"{folder}: {refusal.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RingRefused(f"{folder}: belongs to somebody else")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def new_server_folder(base: Path = BASE) -> Path:
    """A fresh folder for one server."""
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    return private_folder(user_folder(base) / token)


class Lock:
    """A file lock that lives as long as this object or its process. Held once per file and process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        """Takes the lock; False while somebody else lives who has it. Raises `OSError` where the file cannot be made."""
        if self._descriptor >= 0:
            return True
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Gives it up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """Whether a living process other than this one holds this lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def dead_servers(folder: Path) -> Iterator[tuple[Path, Lock]]:
    """Folders beside `folder` whose server and sidecar are gone, each with its sidecar lock, now ours."""
    try:
        siblings = sorted(path for path in folder.parent.iterdir() if path != folder and path.is_dir())
    except OSError:
        return
    for sibling in siblings:
        lock = Lock(sibling / SIDECAR_LOCK)
        try:
            if not _is_abandoned(sibling) or not lock.acquire():
                continue
        except OSError:
            continue
        yield sibling, lock


def _is_abandoned(folder: Path) -> bool:
    rings = [path for path in folder.iterdir() if path.suffix == layout.SUFFIX_REQUESTS]
    if is_held(folder / OWNER_LOCK) or any(is_held(ring) for ring in rings):
        return False
    return bool(rings) or time.time() - folder.stat().st_mtime > ABANDONED_S


def remove(folder: Path) -> None:
    """Removes a server's folder and what is left in it."""
    try:
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        pass


def is_tmpfs(folder: Path) -> bool:
    """Whether stores into files there stay in memory (Linux; elsewhere False)."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    best, kind = "", ""
    resolved = str(folder.resolve())
    for line in mounts:
        _, point, filesystem, *_ = line.split(" ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, filesystem
    return kind in ("tmpfs", "ramfs")
