"""When the window is written as a tape, and where: one at a time, by a thread of its own, since rings fill meanwhile.

Asked by a command through the folder of the rings (`asking`), by a signal, by an HTTP request (`webhook`), or by requests
that missed their objectives. What nobody waits for goes into a folder that keeps the newest tapes only.
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
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from otel_infer import _clock
from otel_infer._version import VERSION
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.writer import RingUnavailable
from otel_infer.sidecar.recording import dump_request
from otel_infer.sidecar.recording.file import RecordingWriter
from otel_infer.sidecar.recording.window import EventWindow, WindowSnapshot

log = logging.getLogger(__name__)

COMMAND, SIGNAL, WEBHOOK, SLO = "command", "signal", "webhook", "slo"
BREACH_COUNT, BREACH_WINDOW_NS = 3, 10_000_000_000
"""So many requests that missed objectives within so long are a breach."""
BREACH_INTERVAL_NS = 60_000_000_000
"""Between the first two tapes of a breach; while it lasts, twice as long each time, up to the next."""
BREACH_MAX_INTERVAL_NS = 32 * BREACH_INTERVAL_NS
BREACH_RESET_NS = 300_000_000_000
"""Without one for so long, the next is another."""
BREACH_DELAY_NS = 2_000_000_000
"""What a breach comes to shows a little later."""
DUMP_DELAY_CYCLES = 2
"""Wakes after which what was stated before somebody asked is in the window."""
POLL_INTERVAL_NS = 200_000_000
MAX_RECORDINGS = 20
NAME_PREFIX = "otel_infer-"
SUFFIX = ".tape"
OWN_NAME_PATTERN = re.compile(rf"{NAME_PREFIX}\d{{8}}T\d{{6}}\.\d{{6}}Z-[a-z]+-\d+{re.escape(SUFFIX)}")
FREE_SPACE_SHARE = 4
"""A tape in the rings' folder takes at most this part of what is free there: a server whose shared memory is full may be killed."""
ALTERNATIVE_HINT = "SIGUSR2 to the process otel_infer-sidecar writes one into the temporary folder"
_UNLIMITED = 1 << 63


class DumpRejected(Exception):
    """There will be no tape; the message says why."""


class _DumpRequest(NamedTuple):
    """A tape that is to be written at this wake, but not before `due_at`."""

    reason: str
    path: Path
    due_cycle: int
    due_at: int


class FlightRecorder:
    """Holds the window of a sidecar and writes it when asked. `rings`: their folder. `folder`: of what nobody waits for.

    `slo`: the objectives as the operator wrote them, which its tapes say.
    """

    def __init__(self, rings: Path, folder: str = "", on_slo: bool = False, slo: str = "") -> None:
        self.window = EventWindow()
        self.signalled = False
        """Set by a signal handler, which may do no more than that."""
        self._rings_folder, self._dump_folder, self._on_slo, self._slo = rings, folder, on_slo, slo
        self._waiting: list[_DumpRequest] = []
        self._running: _DumpRequest | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._slo_miss_times: deque[int] = deque(maxlen=BREACH_COUNT)
        self._breached_at = -BREACH_RESET_NS
        self._next_breach_at = self._breach_interval_ns = 0
        self._now = self._polled_at = self._cycles = 0
        self._failure = ""

    # ── the sidecar's own thread ─────────────────────────────────────────────────────────────────────────────────

    def add_events(self, said: Sequence[RecordedEvent], horizon: int) -> None:
        """Takes the facts of one wake. Never raises: what it breaks on ends the recording, not the sidecar."""
        if self._failure:
            return
        try:
            self.window.add_events(said, horizon)
        except Exception as reason:
            self._failure = f"the flight recorder broke: {type(reason).__name__}: {reason}"
            self.window = EventWindow()
            log.exception("nothing is held for a tape any more")

    def record_slo_miss(self, ended_at: int) -> None:
        """A request that ended then missed an objective."""
        if not self._on_slo:
            return
        self._slo_miss_times.append(ended_at)
        if (
            len(self._slo_miss_times) == BREACH_COUNT
            and max(self._slo_miss_times) - min(self._slo_miss_times) <= BREACH_WINDOW_NS
        ):
            self._dump_on_breach(self._now)

    def _dump_on_breach(self, now: int) -> None:
        """A tape of it, unless there was one just now: a breach that lasts must not push out those of its beginning."""
        if now - self._breached_at >= BREACH_RESET_NS:
            self._next_breach_at, self._breach_interval_ns = now, BREACH_INTERVAL_NS
        self._breached_at = now
        if now >= self._next_breach_at:
            self._next_breach_at = now + self._breach_interval_ns
            self._breach_interval_ns = min(2 * self._breach_interval_ns, BREACH_MAX_INTERVAL_NS)
            self._try_request_dump(SLO, BREACH_DELAY_NS)

    def process_dump_requests(self, now: int) -> None:
        """Takes up what was asked, and begins what is due; once a wake, after `keep` (monotonic ns)."""
        self._now = now
        self._cycles += 1
        if self.signalled:
            self.signalled = False
            self._try_request_dump(SIGNAL)
        if now - self._polled_at >= POLL_INTERVAL_NS:
            self._polled_at = now
            for tape in dump_request.pending_dumps(self._rings_folder):
                with self._lock:
                    self._waiting.append(_DumpRequest(COMMAND, tape, self._cycles + DUMP_DELAY_CYCLES, 0))
        if self._waiting:
            self._start_due_dump(self._cycles, now)

    def close(self, timeout: float) -> None:
        """Writes what is still waiting, for at most `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        while self._waiting or self._running is not None:
            self._start_due_dump(_UNLIMITED, _UNLIMITED)
            left = deadline - _clock.now()
            if left <= 0:
                return
            if self._thread is not None:
                self._thread.join(left / 1e9)

    def _try_request_dump(self, reason: str, wait_ns: int = 0) -> None:
        try:
            self.request_dump(reason, wait_ns)
        except DumpRejected as refusal:
            log.error("no tape by %s: %s", reason, refusal)

    def _start_due_dump(self, wake: int, now: int) -> None:
        with self._lock:
            due = next((a for a in self._waiting if a.due_cycle <= wake and a.due_at <= now), None)
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
        except Exception as reason:  # no more threads, say; the sidecar goes on
            self._finish_dump(due, f"{type(reason).__name__}: {reason}")
        else:
            self._thread = thread

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def request_dump(self, reason: str, wait_ns: int = 0) -> Path:
        """Has a tape written and says where it will be; the same one while it is not yet. Raises `CannotDump`."""
        if self._failure:
            raise DumpRejected(self._failure)
        with self._lock:
            pending = [*self._waiting, *([self._running] if self._running is not None else [])]
            for other in pending:
                if other.reason == reason:
                    return other.path
            path = self._new_path(reason)
            self._waiting.append(
                _DumpRequest(reason, path, self._cycles + DUMP_DELAY_CYCLES, self._now + wait_ns)
            )
        return path

    def _new_path(self, reason: str) -> Path:
        try:
            folder = Path(self._dump_folder) if self._dump_folder else _default_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (RingUnavailable, OSError) as refusal:
            raise DumpRejected(f"no folder for it: {refusal}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise DumpRejected(f"{folder} cannot be written")
        at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        return folder / f"{NAME_PREFIX}{at}-{reason}-{os.getpid()}{SUFFIX}"

    # ── the writing thread ───────────────────────────────────────────────────────────────────────────────────────

    def _write_dump(self, ask: _DumpRequest, snapshot: WindowSnapshot) -> None:
        refusal, folder = "", ask.path.parent
        try:
            if ask.reason != COMMAND:
                _remove_files(_find_abandoned(folder))
            write_recording(ask.path, snapshot, ask.reason, self._slo)
        except Exception as reason:  # a full disk, say; the sidecar goes on
            refusal = f"{type(reason).__name__}: {reason}"
        else:
            if ask.reason != COMMAND:
                log.info("a tape of the last %.0f s (%s): %s", snapshot.seconds, ask.reason, ask.path)
                _remove_files(_find_excess(folder))
        finally:
            self._finish_dump(ask, refusal)

    def _finish_dump(self, ask: _DumpRequest, refusal: str) -> None:
        try:
            if refusal:
                log.error("no tape %s: %s", ask.path, refusal)
                if ask.reason == COMMAND:
                    dump_request.reject_dump(ask.path, refusal)
        finally:
            with self._lock:
                self._running = None


def write_recording(path: Path, snapshot: WindowSnapshot, reason: str, slo: str = "") -> None:
    """Writes a window as a tape, mode 0600, which is there when it is whole; raises `OSError`, or `CannotDump` where there is too
    little room."""
    part = path.with_suffix(directory.DUMP_PART)
    room = shutil.disk_usage(path.parent).free // FREE_SPACE_SHARE if reason == COMMAND else _UNLIMITED
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        writer = RecordingWriter(
            part,
            by=reason,
            otel_infer=VERSION,
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(snapshot.seconds, 3),
            facts=snapshot.event_count,
            requests_left_out=snapshot.dropped_requests,
            began_at=snapshot.began_at,
            slo=slo,
        )
        try:
            for passage in snapshot.iter_batches():
                writer.write(*passage)
                if part.stat().st_size > room:
                    raise DumpRejected(
                        f"it would take more than 1/{FREE_SPACE_SHARE} of what is free in {path.parent}: {ALTERNATIVE_HINT}"
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
    """What sidecars were writing when they were killed."""
    return [
        part
        for part in folder.glob(f"{NAME_PREFIX}*{directory.DUMP_PART}")
        if dump_request.file_age_s(part) > dump_request.STALE_S
    ]


def _find_excess(folder: Path) -> list[Path]:
    """Their names begin with when they were asked for. What somebody dumped or copied here is not ours to remove."""
    return sorted(
        tape for tape in folder.glob(f"{NAME_PREFIX}*{SUFFIX}") if OWN_NAME_PATTERN.fullmatch(tape.name)
    )[:-MAX_RECORDINGS]


def _remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as reason:
            log.warning("%s stays: %s", path, reason)
