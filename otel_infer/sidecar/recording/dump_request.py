"""Requests a tape from a sidecar, through files in the folder of its rings, which only its user can reach.

    dump-TOKEN.requested  created by the requester, removed by the sidecar that accepts it
    dump-TOKEN.tape       the complete tape
    dump-TOKEN.rejected   or the reason why there is none

Signals to a pid are not used, because pids differ between containers. The requester removes the tape.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.config.private_files import (
    check_private,
    list_names,
    open_beside_rings,
    open_private_folder,
    read_private_text,
    read_status,
    remove_beside_rings,
    write_private_text,
)
from otel_infer.config.redaction import replace_controls
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
        os.close(open_beside_rings(request, os.O_WRONLY | os.O_CREAT | os.O_EXCL, any_owner=True))
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            answer = read_status(tape, any_owner=True)
            if answer is not None:
                check_private(answer, tape)
                is_answered = True
                return tape
            if read_status(rejection, any_owner=True) is not None:
                reason = read_private_text(rejection, MAX_REASON_BYTES, any_owner=True)
                _remove_file(rejection, any_owner=True)
                raise DumpFailed(replace_controls(reason))
            if not directory.is_held(folder / directory.SIDECAR_LOCK, any_owner=True):
                raise DumpFailed("the sidecar ended before it wrote the tape")
            time.sleep(POLL_INTERVAL_S)
    except OSError as reason:
        raise DumpFailed(f"{reason.filename}: {reason.strerror}") from None
    except ValueError:
        raise DumpFailed(f"{rejection} is no text, which a sidecar never writes") from None
    finally:
        _remove_file(request, any_owner=True)
        if not is_answered:  # a later tape would only take memory that the server needs
            _remove_file(tape, any_owner=True)
    raise DumpFailed(f"the sidecar did not answer within {patience_s:g} s")


def take_dump_requests(folder: Path) -> Iterator[Path]:
    """Yields the paths of the tapes that were requested; removes old tapes that were not fetched."""
    try:
        names = list_names(folder)
    except OSError:
        return
    for path in (folder / name for name in names if directory.is_dump(name)):
        if path.suffix == directory.DUMP_REQUESTED:
            _remove_file(path)
            yield path.with_suffix(directory.DUMP_DONE)
        elif file_age_s(path) > STALE_S:
            _remove_file(path)


@contextlib.contextmanager
def open_tape(tape: Path) -> Iterator[Path]:
    """Yields a path of a requested tape that no rename can change, and removes the tape afterwards.

    Raises `DumpFailed`.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_file, tape, any_owner=True)
        try:
            descriptor = open_beside_rings(tape, os.O_RDONLY, any_owner=True)
            undo.callback(os.close, descriptor)
            check_private(os.fstat(descriptor), tape)
        except OSError as reason:
            raise DumpFailed(f"{tape}: {reason.strerror}") from None
        yield Path(f"/proc/self/fd/{descriptor}")


def reject_dump(tape: Path, reason: str) -> None:
    """Writes the reason why there will be no such tape."""
    part, rejection = tape.with_suffix(directory.DUMP_PART), tape.with_suffix(directory.DUMP_REJECTED)
    try:
        write_private_text(part, reason)
        with open_private_folder(tape.parent) as folder:
            os.rename(part.name, rejection.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        _remove_file(part)


def _remove_file(path: Path, *, any_owner: bool = False) -> None:
    with contextlib.suppress(OSError):
        remove_beside_rings(path, any_owner=any_owner)


def file_age_s(path: Path) -> float:
    """Returns the time since the file was written, s; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
