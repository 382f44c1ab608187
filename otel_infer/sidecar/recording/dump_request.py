"""How somebody else asks a sidecar for a tape: by files in the folder of its rings, which both can reach and nobody else.

    dump-TOKEN.asked      made by who asks, removed by the sidecar that takes it up
    dump-TOKEN.tape       the answer, whole
    dump-TOKEN.refused    or why there is none

Never a signal to a pid: pids lie across containers. The asker takes the tape away.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.ringbuffer import directory

DUMP_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.05
STALE_S = 2 * DUMP_TIMEOUT_S


class DumpFailed(Exception):
    """The sidecar gave none; the message says why."""


def request_dump(folder: Path, patience_s: float = DUMP_TIMEOUT_S) -> Path:
    """Has the sidecar of this folder write a tape there and waits for it; raises `NoTape`."""
    asked = folder / f"{directory.DUMP_PREFIX}{secrets.token_hex(8)}{directory.DUMP_REQUESTED}"
    tape, refused = asked.with_suffix(directory.DUMP_DONE), asked.with_suffix(directory.DUMP_FAILED)
    is_answered = False
    try:
        os.close(os.open(asked, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if tape.is_symlink():
                raise DumpFailed(f"{tape} is a link: whoever answers is no sidecar")
            if tape.exists():
                is_answered = True
                return tape
            if refused.exists():
                reason = refused.read_text(encoding="utf-8")
                refused.unlink(missing_ok=True)
                raise DumpFailed(reason)
            if not directory.is_held(folder / directory.SIDECAR_LOCK):
                raise DumpFailed("its sidecar ended meanwhile")
            time.sleep(POLL_INTERVAL_S)
    except OSError as reason:
        raise DumpFailed(f"{reason.filename}: {reason.strerror}") from None
    finally:
        asked.unlink(missing_ok=True)
        if not is_answered:  # nobody waits for what comes later, in memory that the server needs
            tape.unlink(missing_ok=True)
    raise DumpFailed(f"its sidecar did not answer within {patience_s:g} s")


def pending_dumps(folder: Path) -> Iterator[Path]:
    """The tapes that somebody waits for. What nobody fetched is removed."""
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
    """Says why there will be no such tape."""
    part = tape.with_suffix(directory.DUMP_PART)
    try:
        part.write_text(reason, encoding="utf-8")
        part.rename(tape.with_suffix(directory.DUMP_FAILED))
    except OSError:
        part.unlink(missing_ok=True)


def file_age_s(path: Path) -> float:
    """Since it was written to; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
