"""Finds, creates, locks and removes the folders in which the rings of servers lie.

The layout of a folder:

    BASE/otel_infer-UID/instance-*  held by each writer with a given `service.instance.id`
    BASE/otel_infer-UID/SERVER/     0700, on tmpfs; BASE is /dev/shm
        owner.lock                  held by `otel-infer run` while it lives
        sidecar.lock                held by the only sidecar of this server
        starting                    held while a sidecar is started, until it has its lock
        ledger                      what became of this server's requests (`ringbuffer.ledger`)
        instance                    this server's `service.instance.id`
        service                     this server's `service.name`, once it follows from the engine
        destination                 digest of where this server exports (`sidecar.destination`)
        stopped                     exists once `otel-infer run` received a signal to stop the server
        PID-TOKEN.requests          held by each writing process
        PID-TOKEN-N.steps
        PID-TOKEN.stacks                stacks of its threads (`ringbuffer.stack_signal`)
        dump-TOKEN.*                a request for a tape, and its answer (`recording.dump_request`)

A folder that the operator named (`OTEL_INFER_RINGS`) takes the place of SERVER. If other users may use it
too, it holds an `otel_infer-UID` in that place. Another user may be able to rename that folder, so every file
is reached through a descriptor of a folder that was checked (`config.private_files`). Only files with these
names are ever removed, and only where no writer lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import struct
from pathlib import Path

from otel_infer.config import private_files
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import ForeignFolder, NotOnTmpfs, RingUnavailable
from otel_infer.ringbuffer.sidecar_claim import RESOURCE_ERRNOS, STARTING_FILE

BASE = Path("/dev/shm")
OWNER_LOCK = "owner.lock"
SIDECAR_LOCK = "sidecar.lock"
INSTANCE_FILE, SERVICE_FILE = "instance", "service"
LEDGER_FILE, DESTINATION_FILE, STOPPED_FILE = "ledger", "destination", "stopped"
ERROR_FILE = "sidecar.error"
"""Why the sidecar ended, for the process that started it."""
NOTICES_FILE = "sidecar.notices"
"""Lines for the stderr of the process that started the sidecar."""
DUMP_PREFIX = "dump-"
DUMP_REQUESTED, DUMP_DONE, DUMP_REJECTED, DUMP_PART = ".requested", ".tape", ".rejected", ".part"
_DUMP_PATTERN = re.compile(r"dump-[0-9a-f]{16}\.(requested|tape|rejected|part)")
_SERVER_FILES = frozenset(
    (
        OWNER_LOCK,
        SIDECAR_LOCK,
        STARTING_FILE,
        INSTANCE_FILE,
        SERVICE_FILE,
        DESTINATION_FILE,
        STOPPED_FILE,
        ERROR_FILE,
        NOTICES_FILE,
        LEDGER_FILE,
    )
)
_RING_SUFFIXES = frozenset((layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS))
_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


def get_user_folder(base: Path = BASE) -> Path:
    """Returns the path of this user's folder. The folder may not exist."""
    return base / user_folder_name()


def ensure_user_folder(base: Path = BASE) -> Path:
    """Returns this user's folder; raises `RingUnavailable` if it cannot be created or has another owner."""
    return ensure_private_folder(get_user_folder(base))


def ensure_private_folder(folder: Path) -> Path:
    """Returns a folder that this module named, 0700, after creating it if it is missing.

    Raises `RingUnavailable` if it cannot be created or has another owner.
    """
    try:
        private_files.create_private_folder(folder)
    except OSError as error:
        kind = ForeignFolder if error.errno == errno.EPERM else RingUnavailable
        raise kind(f"{folder}: {error.strerror}") from None
    return folder


def create_server_folder(base: Path = BASE, token: str = "") -> Path:
    """Returns a new folder for one server; raises `RingUnavailable`, also where `base` is not on tmpfs.

    `token`: the name of a folder that several processes share, which may exist.
    """
    if not is_tmpfs(base):
        raise NotOnTmpfs(f"{base} is not on tmpfs")
    token = token or f"{os.getpid()}-{secrets.token_hex(4)}"
    return ensure_private_folder(ensure_user_folder(base) / token)


def resolve_rings_folder(folder: Path) -> Path:
    """Returns the private folder in, or below, a folder that the operator named.

    Raises `RingUnavailable` as `create_server_folder` does. A folder that other users may use, such as a
    volume or /dev/shm itself, stays as it is: the private folder is created inside it.
    """
    if not is_tmpfs(folder):
        raise NotOnTmpfs(f"{folder} is not on tmpfs")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with private_files.open_folder(folder) as descriptor:
            status = os.fstat(descriptor)
        folder = Path(os.path.realpath(folder))
    except OSError as error:
        kind = ForeignFolder if error.errno == errno.EPERM else RingUnavailable
        raise kind(f"{folder}: {error.strerror}") from None
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return folder
    return ensure_user_folder(folder)


class FileLock:
    """File lock that lives as long as this object or its process; at most one per file and process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        """Takes the lock; returns False while a living process holds it.

        Raises `OSError` where the file cannot be created.
        """
        if self._descriptor >= 0:
            return True
        descriptor = private_files.open_beside_rings(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def ensure_held(self) -> bool:
        """Returns whether the lock is held on the file that now has this name.

        If the folder was removed and created again, the lock is taken on the new file.
        """
        try:
            if self._descriptor >= 0 and self._is_same_file():
                return True
            self.release()
            return self.acquire()
        except OSError:
            return False

    def _is_same_file(self) -> bool:
        status = private_files.read_status(self.path)
        return status is not None and os.path.samestat(os.fstat(self._descriptor), status)

    def release(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path, *, any_owner: bool = False) -> bool:
    """Returns whether a living process holds this lock; True also where resources are too short to check.

    Not for a lock of this process, because closing the second descriptor would release it. `any_owner`: root
    checks the lock of another user's server.
    """
    try:
        descriptor = private_files.open_beside_rings(path, os.O_RDWR, any_owner=any_owner)
    except OSError as error:
        return error.errno in RESOURCE_ERRNOS
    try:
        return _query_lock(descriptor)[0] != fcntl.F_UNLCK
    except OSError:
        return True
    finally:
        os.close(descriptor)


def find_lock_holder(descriptor: int) -> int:
    """Returns the pid that holds this file's lock, as seen from here; 0 = none, or not visible."""
    try:
        kind, _, _, _, pid = _query_lock(descriptor)
    except OSError:
        return 0
    return max(pid, 0) if kind != fcntl.F_UNLCK else 0


def _query_lock(descriptor: int) -> tuple[int, ...]:
    """Returns a `struct flock` of the current holder.

    The lock is queried, not tried, because trying it could make a process fail that is about to take it.
    """
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))


def is_dump(name: str) -> bool:
    """Returns whether a file of this name belongs to a requested tape."""
    return _DUMP_PATTERN.fullmatch(name) is not None


def find_served_folders(folders: Path) -> list[Path]:
    """Returns the folders where a sidecar runs now: the folder itself and those in it.

    Folders in its `otel_infer-UID` of this user count too.
    """
    candidates = [folders, get_user_folder(folders)]
    for folder in list(candidates):
        try:
            subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
        except OSError:
            continue
        # Every user may create folders in BASE, so only folders of this user are trusted.
        candidates += [path for path in subfolders if folders != BASE or _is_own(path)]
    return [folder for folder in dict.fromkeys(candidates) if is_held(folder / SIDECAR_LOCK, any_owner=True)]


def list_writer_pids(folder: Path) -> list[int]:
    """Returns the pids in the names of this folder's rings, as the server's processes see themselves."""
    try:
        names = private_files.list_names(folder, any_owner=True)
    except OSError:
        return []
    pids = sorted(name.partition("-")[0] for name in names if name.endswith(layout.SUFFIX_REQUESTS))
    return [int(pid) for pid in pids if pid.isdecimal()]


def remove_server_folder(folder: Path) -> None:
    """Removes the files of otel_infer where no writer lives, and the folder unless the operator named it."""
    try:
        paths = [folder / name for name in private_files.list_names(folder)]
        if any(path.suffix in _RING_SUFFIXES and is_held(path) for path in paths):
            return
        for path in paths:
            is_ring = path.suffix in (*_RING_SUFFIXES, layout.SUFFIX_STACKS)
            if is_ring or path.name in _SERVER_FILES or is_dump(path.name):
                private_files.remove_beside_rings(path)
        if user_folder_name() in folder.parts[:-1]:
            with private_files.open_folder(folder.parent) as parent:
                os.rmdir(folder.name, dir_fd=parent)
    except OSError:
        pass


def user_folder_name() -> str:
    return f"otel_infer-{os.geteuid()}"


def _is_own(folder: Path) -> bool:
    with contextlib.suppress(OSError), private_files.open_private_folder(folder):
        return True
    return False


def is_tmpfs(folder: Path) -> bool:
    """Returns whether files there stay in memory (Linux; elsewhere False)."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    best, kind = "", ""
    resolved = str(folder.resolve())
    for line in mounts:
        _, escaped, filesystem, *_ = line.split(" ")
        point = escaped.replace("\\040", " ")
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, filesystem
    return kind in ("tmpfs", "ramfs")
