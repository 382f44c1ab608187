"""Finds, creates, locks and removes the folders in which the rings of servers lie.

The layout of a folder:

    BASE/otel_infer-UID/SERVER/     0700, on tmpfs; BASE is /dev/shm
        owner.lock                  held by `otel-infer run` while it lives
        sidecar.lock                held by the only sidecar of this server
        starting                    exists while a started sidecar has not taken its lock yet
        instance                    this server's `service.instance.id`
        service                     this server's `service.name`, once it follows from the engine
        starts                      how many sidecars have read these rings
        stopped                     exists once `otel-infer run` received a signal to stop the server
        PID-TOKEN.requests          held by each writing process
        PID-TOKEN-N.steps
        dump-TOKEN.*                a request for a tape, and its answer (`recording.dump_request`)

A folder that the operator named (`OTEL_INFER_RINGS`) takes the place of SERVER. If other users may use it
too, it holds an `otel_infer-UID` in that place. Only files with these names are ever removed, and only where
no writer lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import ForeignFolder, NotOnTmpfs, RingUnavailable

BASE = Path("/dev/shm")
OWNER_LOCK = "owner.lock"
SIDECAR_LOCK = "sidecar.lock"
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that concern no file: this process, or the machine, has run out of a resource."""
STARTING_FILE = "starting"
INSTANCE_FILE, SERVICE_FILE = "instance", "service"
STARTS_FILE, STOPPED_FILE = "starts", "stopped"
ERROR_FILE = "sidecar.error"
"""Why the sidecar ended, for the process that started it."""
DUMP_PREFIX = "dump-"
DUMP_REQUESTED, DUMP_DONE, DUMP_REJECTED, DUMP_PART = ".requested", ".tape", ".rejected", ".part"
_DUMP_PATTERN = re.compile(r"dump-[0-9a-f]{16}\.(requested|tape|rejected|part)")
ABANDONED_S = 3600.0
START_TIMEOUT_S = 10.0
_NOTES = INSTANCE_FILE, SERVICE_FILE, STARTS_FILE, STOPPED_FILE, ERROR_FILE
_SERVER_FILES = frozenset((OWNER_LOCK, SIDECAR_LOCK, STARTING_FILE, *_NOTES))
_RING_SUFFIXES = frozenset((layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS))
_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


def get_user_folder(base: Path = BASE) -> Path:
    """Returns the path of this user's folder. The folder may not exist."""
    return base / _user_folder_name()


def ensure_user_folder(base: Path = BASE) -> Path:
    """Returns this user's folder; raises `RingUnavailable` if it cannot be created or has another owner."""
    return ensure_private_folder(get_user_folder(base))


def ensure_private_folder(folder: Path) -> Path:
    """Returns a folder that this module named, 0700, after creating it if it is missing.

    Raises `RingUnavailable` if it cannot be created or has another owner.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise RingUnavailable(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ForeignFolder(f"{folder}: belongs to another user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def create_server_folder(base: Path = BASE) -> Path:
    """Returns a new folder for one server; raises `RingUnavailable`, also where `base` is not on tmpfs."""
    if not is_tmpfs(base):
        raise NotOnTmpfs(f"{base} is not on tmpfs")
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    return ensure_private_folder(ensure_user_folder(base) / token)


def resolve_rings_folder(folder: Path) -> Path:
    """Returns the private folder in, or below, a folder that the operator named.

    Raises `RingUnavailable` as `create_server_folder` does. A folder that other users may use, such as a
    volume or /dev/shm itself, stays as it is: the private folder is created inside it.
    """
    folder = Path(os.path.realpath(folder))
    if not is_tmpfs(folder):
        raise NotOnTmpfs(f"{folder} is not on tmpfs")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise RingUnavailable(f"{folder}: {error.strerror}") from None
    if status.st_uid == os.getuid() and not status.st_mode & 0o077:
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
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """Returns whether a living process holds this lock; True also where resources are too short to check.

    Not for a lock of this process, because closing the second descriptor would release it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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


def claim_sidecar_start(folder: Path) -> bool:
    """Returns whether this process is to start the sidecar.

    False while a sidecar that another process started may still come up.
    """
    starting = folder / STARTING_FILE
    try:
        if starting.exists() and not is_starting(folder):
            starting.unlink(missing_ok=True)
        os.close(os.open(starting, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError as error:
        return error.errno not in RESOURCE_ERRNOS
    return True


def is_starting(folder: Path) -> bool:
    """Returns whether a sidecar that any process started here may still take its lock."""
    try:
        return time.time() - (folder / STARTING_FILE).stat().st_mtime <= START_TIMEOUT_S
    except OSError:
        return False


def claim_dead_servers(folder: Path) -> Iterator[tuple[Path, FileLock]]:
    """Yields the folders beside `folder` whose server and sidecar have ended, each with its sidecar lock.

    The lock is held from then on. Beside a folder that the operator named there are none, because its
    neighbours are not created by otel_infer.
    """
    if folder.parent.name != _user_folder_name():
        return
    try:
        siblings = sorted(path for path in folder.parent.iterdir() if path != folder and path.is_dir())
    except OSError:
        return
    for sibling in siblings:
        lock = FileLock(sibling / SIDECAR_LOCK)
        try:
            if not _is_abandoned(sibling) or not lock.acquire():
                continue
        except OSError:
            continue
        yield sibling, lock


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
    return [folder for folder in dict.fromkeys(candidates) if is_held(folder / SIDECAR_LOCK)]


def list_writer_pids(folder: Path) -> list[int]:
    """Returns the pids in the names of this folder's rings, as the server's processes see themselves."""
    names = sorted(path.name.partition("-")[0] for path in folder.glob(f"*{layout.SUFFIX_REQUESTS}"))
    return [int(name) for name in names if name.isdigit()]


def remove_server_folder(folder: Path) -> None:
    """Removes the files of otel_infer where no writer lives, and the folder unless the operator named it."""
    try:
        paths = list(folder.iterdir())
        if any(path.suffix in _RING_SUFFIXES and is_held(path) for path in paths):
            return
        for path in paths:
            if path.suffix in _RING_SUFFIXES or path.name in _SERVER_FILES or is_dump(path.name):
                path.unlink(missing_ok=True)
        if _user_folder_name() in folder.parts[:-1]:
            folder.rmdir()
    except OSError:
        pass


def _user_folder_name() -> str:
    return f"otel_infer-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def holds_dead_server(folder: Path) -> bool:
    """Returns whether a folder holds the rings of a server that has ended, and no sidecar reads them."""
    try:
        rings = _list_complete_rings(folder)
        return bool(rings) and not _is_in_use(folder, rings) and not is_held(folder / SIDECAR_LOCK)
    except OSError:
        return False


def _is_abandoned(folder: Path) -> bool:
    rings = _list_complete_rings(folder)
    if _is_in_use(folder, rings):
        return False
    return bool(rings) or time.time() - folder.stat().st_mtime > ABANDONED_S


def _list_complete_rings(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == layout.SUFFIX_REQUESTS and _is_written(path)]


def _is_in_use(folder: Path, rings: list[Path]) -> bool:
    """Returns whether a server or a starting sidecar uses the folder. A living process holds a lock."""
    return is_starting(folder) or is_held(folder / OWNER_LOCK) or any(is_held(ring) for ring in rings)


def _is_written(ring: Path) -> bool:
    """Returns whether the ring is complete.

    Its writer takes the lock before it completes the ring. An incomplete ring without a lock may have a
    living writer.
    """
    with ring.open("rb") as file:
        return file.read(len(layout.MAGIC_BYTES)) == layout.MAGIC_BYTES


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
