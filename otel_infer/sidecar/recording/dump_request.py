"""Requests a tape from a sidecar, through files in the folder of its rings, which only its user can reach.

    dump-TOKEN.requested  created by the requester, removed by the sidecar that accepts it
    dump-TOKEN.tape       the complete tape
    dump-TOKEN.rejected   or the reason why there is none

Signals to a pid are not used, because pids differ between containers. The requester removes the tape.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.config.private_files import check_private, is_readable_owner, read_private_text
from otel_infer.ringbuffer import directory

DUMP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
STALE_S = 2 * DUMP_TIMEOUT_S
MAX_REASON_BYTES = 4096


class DumpFailed(Exception):
    """Failure of a sidecar to write a tape; the message states why."""


def request_dump(folder: Path, patience_s: float = DUMP_TIMEOUT_S) -> Path:
    """Requests a tape from the sidecar of this folder and waits for it; returns its path.

    Raises `DumpFailed`.
    """
    request = folder / f"{directory.DUMP_PREFIX}{secrets.token_hex(8)}{directory.DUMP_REQUESTED}"
    tape, rejection = request.with_suffix(directory.DUMP_DONE), request.with_suffix(directory.DUMP_REJECTED)
    is_answered = False
    try:
        owner = folder.lstat()
        if not stat.S_ISDIR(owner.st_mode) or not is_readable_owner(owner):
            raise DumpFailed(f"{folder}: belongs to another user")
        os.close(os.open(request, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if os.path.lexists(tape):
                check_private(tape.lstat(), tape)
                is_answered = True
                return tape
            if os.path.lexists(rejection):
                reason = read_private_text(rejection, MAX_REASON_BYTES)
                rejection.unlink(missing_ok=True)
                raise DumpFailed(reason)
            if not directory.is_held(folder / directory.SIDECAR_LOCK):
                raise DumpFailed("the sidecar ended before it wrote the tape")
            time.sleep(POLL_INTERVAL_S)
    except OSError as reason:
        raise DumpFailed(f"{reason.filename}: {reason.strerror}") from None
    except ValueError:
        raise DumpFailed(f"{rejection} is no text, which a sidecar never writes") from None
    finally:
        request.unlink(missing_ok=True)
        if not is_answered:  # a later tape would only take memory that the server needs
            tape.unlink(missing_ok=True)
    raise DumpFailed(f"the sidecar did not answer within {patience_s:g} s")


def take_dump_requests(folder: Path) -> Iterator[Path]:
    """Yields the paths of the tapes that were requested; removes old tapes that were not fetched."""
    try:
        names = [name for name in os.listdir(folder) if directory.is_dump(name)]
    except OSError:
        return
    for path in sorted(folder / name for name in names):
        if path.suffix == directory.DUMP_REQUESTED:
            path.unlink(missing_ok=True)
            yield path.with_suffix(directory.DUMP_DONE)
        elif file_age_s(path) > STALE_S:
            path.unlink(missing_ok=True)


def reject_dump(tape: Path, reason: str) -> None:
    """Writes the reason why there will be no such tape."""
    part = tape.with_suffix(directory.DUMP_PART)
    try:
        part.write_text(reason, encoding="utf-8")
        part.rename(tape.with_suffix(directory.DUMP_REJECTED))
    except OSError:
        part.unlink(missing_ok=True)


def file_age_s(path: Path) -> float:
    """Returns the time since the file was written, s; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
