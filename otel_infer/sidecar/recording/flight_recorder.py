"""Writes the window of the flight recorder as a tape.

Tapes are written one at a time, on a separate thread, because rings fill meanwhile. A tape is requested in
one of five ways: a command through the rings' folder (`dump_request`), a signal, an HTTP request (`webhook`),
missed objectives, or a server that hangs. Tapes that no command waits for go into a folder that keeps the newest ones.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from otel_infer import _clock
from otel_infer._version import VERSION
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.arena import RingUnavailable
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.sidecar.recording import dump_request
from otel_infer.sidecar.recording.file import RecordingWriter
from otel_infer.sidecar.recording.window import EventWindow, WindowSnapshot

log = logging.getLogger(__name__)

COMMAND, SIGNAL, WEBHOOK, SLO, HANG = "command", "signal", "webhook", "slo", "hang"
BREACH_COUNT, BREACH_WINDOW_NS = 3, 10_000_000_000
"""So many requests that missed objectives, within so much time, are a breach."""
BREACH_INTERVAL_NS = 60_000_000_000
"""Time between the first two tapes of a breach; it doubles with each tape, up to `BREACH_MAX_INTERVAL_NS`."""
BREACH_MAX_INTERVAL_NS = 32 * BREACH_INTERVAL_NS
BREACH_RESET_NS = 300_000_000_000
"""After so much time without a breach, the next one is a new breach."""
BREACH_DELAY_NS = 2_000_000_000
"""Delay of a tape after a breach, because its effects show later."""
DUMP_DELAY_CYCLES = 2
"""Cycles after which the events recorded before a request are in the window."""
MAX_RECORDINGS = 20
"""Tapes that are kept of each reason, so that requested tapes do not push out those of breaches."""
NAME_PREFIX = "otel_infer-"
SUFFIX = ".tape"
OWN_NAME_PATTERN = re.compile(
    rf"{NAME_PREFIX}\d{{8}}T\d{{6}}\.\d{{6}}Z-(?P<reason>[a-z]+)-\d+{re.escape(SUFFIX)}"
)
FREE_SPACE_SHARE = 4
"""A tape in the rings' folder takes at most this part (1/4) of its free space. A server whose shared memory
is full may be killed.
"""
ALTERNATIVE_HINT = "SIGUSR2 to the process otel_infer-sidecar writes a tape to the temporary folder instead"
_UNLIMITED = 1 << 63


class DumpRejected(Exception):
    """Refusal to write a tape; the message states why."""


class _DumpRequest(NamedTuple):
    """Requested tape; it is due in cycle `due_cycle`, but not before `due_at` (monotonic ns)."""

    reason: str
    path: Path
    due_cycle: int
    due_at: int


class FlightRecorder:
    """Recorder that holds the window of a sidecar and writes it on request.

    `rings`: the folder of the rings. `folder`: for tapes that no command waits for; "" = one in the temporary
    folder. `on_slo`: whether missed objectives request tapes. `slo`: the objectives as the operator wrote
    them, stored in the tapes.
    """

    def __init__(self, rings: Path, folder: str = "", on_slo: bool = False, slo: str = "") -> None:
        self.window = EventWindow()
        self.signalled = False
        """Set by a signal handler, which must do no more than that."""
        self._rings_folder, self._dump_folder, self._on_slo, self._slo = rings, folder, on_slo, slo
        self._waiting: list[_DumpRequest] = []
        self._running: _DumpRequest | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._slo_miss_times: deque[int] = deque(maxlen=BREACH_COUNT)
        self._breached_at = -BREACH_RESET_NS
        self._next_breach_at = self._breach_interval_ns = 0
        self._now = self._cycles = 0
        self._failure = ""

    # ── the sidecar's own thread ─────────────────────────────────────────────────────────────────────────────────

    def add_events(self, recorded: Sequence[RecordedEvent], horizon: int) -> None:
        """Adds the events of one cycle.

        Never raises: an error ends the flight recorder, not the sidecar.
        """
        if self._failure:
            return
        try:
            self.window.add_events(recorded, horizon)
        except Exception as error:
            self._failure = f"the flight recorder failed: {type(error).__name__}: {error}"
            self.window = EventWindow()
            log.exception("the flight recorder failed; no more tapes can be requested")

    def record_slo_miss(self, ended_at: int) -> None:
        """Records that a request that ended at `ended_at` missed an objective."""
        if not self._on_slo:
            return
        self._slo_miss_times.append(ended_at)
        if (
            len(self._slo_miss_times) == BREACH_COUNT
            and max(self._slo_miss_times) - min(self._slo_miss_times) <= BREACH_WINDOW_NS
        ):
            self._dump_on_breach(self._now)

    def record_hang(self) -> None:
        """Requests a tape of a server that hangs, with the stacks that are read meanwhile."""
        self._try_request_dump(HANG, BREACH_DELAY_NS)

    def _dump_on_breach(self, now: int) -> None:
        """Requests a tape, unless the last one is recent.

        Otherwise a lasting breach would push out the tapes of its beginning.
        """
        if now - self._breached_at >= BREACH_RESET_NS:
            self._next_breach_at, self._breach_interval_ns = now, BREACH_INTERVAL_NS
        self._breached_at = now
        if now >= self._next_breach_at:
            self._next_breach_at = now + self._breach_interval_ns
            self._breach_interval_ns = min(2 * self._breach_interval_ns, BREACH_MAX_INTERVAL_NS)
            self._try_request_dump(SLO, BREACH_DELAY_NS)

    def process_dump_requests(self, now: int, folder_changed: bool = True) -> None:
        """Accepts requests and starts the due one; called once per read of the rings, after `add_events`."""
        self._cycles += 1
        if self.has_due_requests(now, folder_changed):
            self._start_due_dump(self._cycles, now)

    def has_due_requests(self, now: int, folder_changed: bool = True) -> bool:
        """Accepts requests, and returns whether a tape can be written after the next reads of the rings.

        `folder_changed`: there may be new names in the rings' folder.
        """
        self._now = now
        if self.signalled:
            self.signalled = False
            self._try_request_dump(SIGNAL)
        if folder_changed:
            for tape in dump_request.take_dump_requests(self._rings_folder):
                with self._lock:
                    self._waiting.append(_DumpRequest(COMMAND, tape, self._cycles + DUMP_DELAY_CYCLES, 0))
        if not self._waiting or self._running is not None:
            return False
        with self._lock:
            return any(request.due_at <= now for request in self._waiting)

    def close(self, timeout: float) -> None:
        """Writes the tapes that are still waiting, for at most `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        while self._waiting or self._running is not None:
            self._start_due_dump(_UNLIMITED, _UNLIMITED)
            remaining_ns = deadline - _clock.now()
            if remaining_ns <= 0:
                return
            if self._thread is not None:
                self._thread.join(remaining_ns / 1e9)

    def _try_request_dump(self, reason: str, wait_ns: int = 0) -> None:
        try:
            self.request_dump(reason, wait_ns)
        except DumpRejected as rejection:
            log.error("no tape for %s: %s", reason, rejection)

    def _start_due_dump(self, cycle: int, now: int) -> None:
        with self._lock:
            due = next(
                (
                    request
                    for request in self._waiting
                    if request.due_cycle <= cycle and request.due_at <= now
                ),
                None,
            )
            if due is None or self._running is not None:
                return
            self._waiting.remove(due)
            self._running = due
        if self._failure:
            self._finish_dump(due, self._failure)
            return
        try:
            work = (due, self.window.take_snapshot())
            thread = threading.Thread(target=self._write_dump, args=work, name="otel_infer dump", daemon=True)
            thread.start()
        except Exception as error:  # no more threads, for example; the sidecar continues
            self._finish_dump(due, f"{type(error).__name__}: {error}")
        else:
            self._thread = thread

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def request_dump(self, reason: str, wait_ns: int = 0) -> Path:
        """Requests a tape and returns its future path; a pending one for the same reason is shared.

        Raises `DumpRejected`.
        """
        if self._failure:
            raise DumpRejected(self._failure)
        with self._lock:
            pending = [*self._waiting, *([self._running] if self._running is not None else [])]
            for request in pending:
                if request.reason == reason:
                    return request.path
            path = self._new_path(reason)
            self._waiting.append(
                _DumpRequest(reason, path, self._cycles + DUMP_DELAY_CYCLES, self._now + wait_ns)
            )
        return path

    def _new_path(self, reason: str) -> Path:
        try:
            folder = Path(self._dump_folder) if self._dump_folder else _default_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (RingUnavailable, OSError) as error:
            raise DumpRejected(f"no folder for the tape: {error}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise DumpRejected(f"{folder} is not writable")
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return folder / f"{NAME_PREFIX}{at}-{reason}-{os.getpid()}{SUFFIX}"

    # ── the writing thread ───────────────────────────────────────────────────────────────────────────────────────

    def _write_dump(self, request: _DumpRequest, snapshot: WindowSnapshot) -> None:
        failure, folder = "", request.path.parent
        try:
            if request.reason != COMMAND:
                _remove_files(_find_abandoned(folder))
            write_recording(request.path, snapshot, request.reason, self._slo)
        except DumpRejected as error:
            failure = str(error)
        except Exception as error:  # a full disk, for example; the sidecar continues
            failure = f"{type(error).__name__}: {error}"
        else:
            if request.reason != COMMAND:
                log.info(
                    "wrote a tape of the last %.0f s (%s): %s", snapshot.seconds, request.reason, request.path
                )
                _remove_files(_find_excess(folder))
        finally:
            self._finish_dump(request, failure)

    def _finish_dump(self, request: _DumpRequest, failure: str) -> None:
        try:
            if failure:
                log.error("no tape at %s: %s", request.path, failure)
                if request.reason == COMMAND:
                    dump_request.reject_dump(request.path, failure)
        finally:
            with self._lock:
                self._running = None


def write_recording(path: Path, snapshot: WindowSnapshot, reason: str, slo: str = "") -> None:
    """Writes a window as a tape, mode 0600, which gets its name when it is complete.

    Raises `OSError`, or `DumpRejected` where there is too little space.
    """
    part = path.with_suffix(directory.DUMP_PART)
    room = shutil.disk_usage(path.parent).free // FREE_SPACE_SHARE if reason == COMMAND else _UNLIMITED
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        writer = RecordingWriter(
            part,
            by=reason,
            otel_infer=VERSION,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(snapshot.seconds, 3),
            events=snapshot.event_count,
            dropped_requests=snapshot.dropped_requests,
            began_at=snapshot.began_at,
            slo=slo,
        )
        try:
            for batch in snapshot.iter_batches():
                writer.write(*batch)
                if part.stat().st_size > room:
                    raise DumpRejected(
                        f"the tape would take more than 1/{FREE_SPACE_SHARE} of the free space in "
                        f"{path.parent}: {ALTERNATIVE_HINT}"
                    )
        finally:
            writer.close()
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _default_folder() -> Path:
    return directory.ensure_user_folder(Path(tempfile.gettempdir()))


def _find_abandoned(folder: Path) -> list[Path]:
    """Returns the incomplete tapes of sidecars that were killed while they wrote."""
    return [
        part
        for part in folder.glob(f"{NAME_PREFIX}*{directory.DUMP_PART}")
        if dump_request.file_age_s(part) > dump_request.STALE_S
    ]


def _find_excess(folder: Path) -> list[Path]:
    """Returns the oldest tapes of each reason beyond the limit; names begin with the time of the request.

    Tapes that a user dumped or copied here have other names and are never removed. Files of other users do not
    count.
    """
    by_reason: dict[str, list[Path]] = {}
    for tape in sorted(folder.glob(f"{NAME_PREFIX}*{SUFFIX}")):
        named = OWN_NAME_PATTERN.fullmatch(tape.name)
        if named and _is_own_file(tape):
            by_reason.setdefault(named["reason"], []).append(tape)
    return [tape for tapes in by_reason.values() for tape in tapes[:-MAX_RECORDINGS]]


def _is_own_file(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)
