"""The `service.instance.id` of a writer of telemetry: no two living writers of this user have the same.

A given id reaches every worker of a server through its environment. Workers that are started on their own each
have a sidecar, and two writers of one series make it jump between their values. So a writer holds a lock of
`flock` for its id: the first has the given id, the others have `ID.2`, `ID.3` and so on. The kernel releases
the lock when the writer ends, so that its successor has the same id.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import uuid
from pathlib import Path

from otel_infer.config import private_files
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.arena import RingUnavailable

MAX_WRITERS = 256
"""Numbered ids of one given id; further writers have a random end."""
_LOCK_PREFIX = "instance-"


class InstanceClaim:
    """The id of one writer, which it holds until `release`.

    `given`: the configured id. `preferred`: the id that an earlier sidecar of the same server had, or "".
    """

    def __init__(self, given: str, preferred: str = "") -> None:
        self.given = given
        self._descriptor, self._path = -1, Path()
        self.id = self._claim_id(preferred) or f"{given}.{uuid.uuid4()}"

    def release(self) -> None:
        """Releases the id for other writers."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                private_files.remove_beside_rings(self._path)
            os.close(descriptor)

    def _claim_id(self, preferred: str) -> str:
        """Returns the first free id; "" if there is none, or nowhere to lock one."""
        folder = _find_lock_folder()
        if folder is None:
            return ""
        numbered = (
            self.given if number == 1 else f"{self.given}.{number}" for number in range(1, MAX_WRITERS)
        )
        for candidate in (preferred, *numbered):
            if candidate and self._lock_id(folder, candidate):
                return candidate
        return ""

    def _lock_id(self, folder: Path, candidate: str) -> bool:
        path = folder / (_LOCK_PREFIX + hashlib.sha256(candidate.encode(errors="replace")).hexdigest()[:32])
        try:
            descriptor = private_files.open_beside_rings(path, os.O_RDWR | os.O_CREAT)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = private_files.read_status(path)
            is_current = status is not None and os.path.samestat(os.fstat(descriptor), status)
        except OSError:
            is_current = False
        if not is_current:  # another writer has it, or removed the file in between
            os.close(descriptor)
            return False
        self._descriptor, self._path = descriptor, path
        return True


def _find_lock_folder() -> Path | None:
    """Returns this user's folder in shared memory, or else among temporary files; None if there is neither."""
    with contextlib.suppress(RingUnavailable):
        return directory.ensure_user_folder(directory.BASE)
    with contextlib.suppress(RingUnavailable, OSError):  # no folder may be writable
        return directory.ensure_user_folder(Path(tempfile.gettempdir()))
    return None
