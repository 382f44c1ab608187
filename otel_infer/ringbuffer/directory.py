"""Where the rings of one server lie, and who looks after them.

    BASE/otel_infer-UID/SERVER/     0700, on tmpfs; BASE is /dev/shm
        owner.lock                  held by `otel-infer run` while it lives
        sidecar.lock                held by the one sidecar of this server
        starting                    there while a sidecar was started and has not taken its lock
        instance                    this server's `service.instance.id`
        PID-TOKEN.requests          held by each writing process
        PID-TOKEN-N.steps
        dump-TOKEN.*                somebody asks for a tape, and the answer (`flight.asking`)

A folder that somebody named (`OTEL_INFER_RINGS`) takes the place of SERVER, or holds an `otel_infer-UID` in that place if
others may use it too. Only files with these names are ever removed, and only where no writer lives.
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
from otel_infer.ringbuffer.writer import RingUnavailable

BASE = Path("/dev/shm")
OWNER_LOCK = "owner.lock"
SIDECAR_LOCK = "sidecar.lock"
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What says nothing of the file: this process, or the machine, has no more of something."""
STARTING_FILE = "starting"
INSTANCE_FILE, SERVICE_FILE = "instance", "service"
DUMP_PREFIX = "dump-"
DUMP_REQUESTED, DUMP_DONE, DUMP_FAILED, DUMP_PART = ".asked", ".tape", ".refused", ".part"
_DUMP_PATTERN = re.compile(r"dump-[0-9a-f]{16}\.(asked|tape|refused|part)")
ABANDONED_S = 3600.0
START_TIMEOUT_S = 10.0
_SERVER_FILES = frozenset((OWNER_LOCK, SIDECAR_LOCK, STARTING_FILE, INSTANCE_FILE, SERVICE_FILE))
_RING_SUFFIXES = frozenset((layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS))
_FLOCK = struct.Struct("hhqqi")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""


def ensure_user_folder(base: Path = BASE) -> Path:
    """This user's folder; raises `RingRefused` where it cannot be had, or belongs to somebody else."""
    return ensure_private_folder(base / _user_folder_name())


def ensure_private_folder(folder: Path) -> Path:
    """A folder of this module's own naming, 0700, made if it is not there; raises `RingRefused` if it is not ours."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as refusal:
        raise RingUnavailable(f"{folder}: {refusal.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RingUnavailable(f"{folder}: belongs to somebody else")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def create_server_folder(base: Path = BASE) -> Path:
    """A fresh folder for one server; raises `RingRefused` also where `base` is not on tmpfs."""
    if not is_tmpfs(base):
        raise RingUnavailable(f"{base} is not on tmpfs")
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    return ensure_private_folder(ensure_user_folder(base) / token)


def resolve_rings_folder(given: Path) -> Path:
    """The private folder in, or below, a folder that somebody named; raises `RingRefused` as `new_server_folder` does.

    A folder that others may use, such as a volume or /dev/shm itself, is left as it is: ours is then inside it.
    """
    given = Path(os.path.realpath(given))
    if not is_tmpfs(given):
        raise RingUnavailable(f"{given} is not on tmpfs")
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = given.stat()
    except OSError as refusal:
        raise RingUnavailable(f"{given}: {refusal.strerror}") from None
    if found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return given
    return ensure_user_folder(given)


class FileLock:
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

    def ensure_held(self) -> bool:
        """Whether we hold what others see under this name; where the folder was made anew, after taking it there."""
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
        """Gives it up."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_held(path: Path) -> bool:
    """Whether a living process holds this lock, or nobody can tell. Not for a lock of this process: to look at it would release
    it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as refusal:
        return refusal.errno in RESOURCE_ERRNOS
    try:
        return _query_lock(descriptor)[0] != fcntl.F_UNLCK
    except OSError:
        return True
    finally:
        os.close(descriptor)


def find_lock_holder(descriptor: int) -> int:
    """The pid of whoever holds the lock of this file, as seen from here; 0: nobody, or nobody that can be seen."""
    try:
        kind, _, _, _, pid = _query_lock(descriptor)
    except OSError:
        return 0
    return max(pid, 0) if kind != fcntl.F_UNLCK else 0


def _query_lock(descriptor: int) -> tuple[int, ...]:
    """A `struct flock`. Asking, where trying to take it would keep the one from having it who is just about to."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))


def claim_sidecar_start(folder: Path) -> bool:
    """Whether it is for this process to start the sidecar: not while one that another has started is on its way."""
    starting = folder / STARTING_FILE
    try:
        if starting.exists() and not is_starting(folder):
            starting.unlink(missing_ok=True)
        os.close(os.open(starting, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError as refusal:
        return refusal.errno not in RESOURCE_ERRNOS
    return True


def is_starting(folder: Path) -> bool:
    """Whether a sidecar was started here that may still take its lock, whoever started it."""
    try:
        return time.time() - (folder / STARTING_FILE).stat().st_mtime <= START_TIMEOUT_S
    except OSError:
        return False


def claim_dead_servers(folder: Path) -> Iterator[tuple[Path, FileLock]]:
    """Folders beside `folder` whose server and sidecar are gone, each with its sidecar lock, now ours.

    There are none beside a folder that somebody named: what lies there is not ours.
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
    """Whether a file of this name belongs to a tape that somebody asked for."""
    return _DUMP_PATTERN.fullmatch(name) is not None


def find_served_folders(folders: Path) -> list[Path]:
    """The folder itself, or those in it, where a sidecar is at work now; for this user and those in `otel_infer-UID`."""
    candidates = [folders, folders / _user_folder_name()]
    for folder in list(candidates):
        try:
            found = sorted(path for path in folder.iterdir() if path.is_dir())
        except OSError:
            continue
        # Where everybody may make folders, only one's own are to be trusted.
        candidates += [path for path in found if folders != BASE or _is_own(path)]
    return [folder for folder in dict.fromkeys(candidates) if is_held(folder / SIDECAR_LOCK)]


def list_writer_pids(folder: Path) -> list[int]:
    """The pids in the names of this folder's rings: of the server's processes, as they see themselves."""
    names = sorted(path.name.partition("-")[0] for path in folder.glob(f"*{layout.SUFFIX_REQUESTS}"))
    return [int(name) for name in names if name.isdigit()]


def remove_server_folder(folder: Path) -> None:
    """Removes what is ours in a folder where no writer lives, and the folder unless somebody named it."""
    try:
        found = list(folder.iterdir())
        if any(path.suffix in _RING_SUFFIXES and is_held(path) for path in found):
            return
        for path in found:
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
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_abandoned(folder: Path) -> bool:
    rings = [path for path in folder.iterdir() if path.suffix == layout.SUFFIX_REQUESTS and _is_written(path)]
    if is_starting(folder) or is_held(folder / OWNER_LOCK) or any(is_held(ring) for ring in rings):
        return False
    return bool(rings) or time.time() - folder.stat().st_mtime > ABANDONED_S


def _is_written(ring: Path) -> bool:
    """Whether the ring is complete: its writer takes the lock first, so until then it may be alive without one."""
    with ring.open("rb") as file:
        return file.read(len(layout.MAGIC_BYTES)) == layout.MAGIC_BYTES


def is_tmpfs(folder: Path) -> bool:
    """Whether stores into files there stay in memory (Linux; elsewhere False)."""
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
