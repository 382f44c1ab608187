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
from otel_infer.ringbuffer.events import RingFact
from otel_infer.ringbuffer.writer import RingRefused
from otel_infer.sidecar.recording import dump_request
from otel_infer.sidecar.recording.file import TapeWriter
from otel_infer.sidecar.recording.window import Snapshot, Window

log = logging.getLogger(__name__)

COMMAND, SIGNAL, WEBHOOK, SLO = "command", "signal", "webhook", "slo"
BREACH, BREACH_NS = 3, 10_000_000_000
"""So many requests that missed objectives within so long are a breach."""
BREACH_EVERY_NS = 60_000_000_000
"""Between the first two tapes of a breach; while it lasts, twice as long each time, up to the next."""
BREACH_SELDOM_NS = 32 * BREACH_EVERY_NS
BREACH_OVER_NS = 300_000_000_000
"""Without one for so long, the next is another."""
BREACH_WAIT_NS = 2_000_000_000
"""What a breach comes to shows a little later."""
SOON = 2
"""Wakes after which what was stated before somebody asked is in the window."""
LOOK_NS = 200_000_000
MOST_TAPES = 20
NAME = "otel_infer-"
SUFFIX = ".tape"
OWN = re.compile(rf"{NAME}\d{{8}}T\d{{6}}\.\d{{6}}Z-[a-z]+-\d+{re.escape(SUFFIX)}")
SHARE = 4
"""A tape in the rings' folder takes at most this part of what is free there: a server whose shared memory is full may be killed."""
INSTEAD = "SIGUSR2 to the process otel_infer-sidecar writes one into the temporary folder"
_ALL = 1 << 63


class CannotDump(Exception):
    """There will be no tape; the message says why."""


class _Ask(NamedTuple):
    """A tape that is to be written at this wake, but not before `due_at`."""

    reason: str
    path: Path
    due_wake: int
    due_at: int


class FlightRecorder:
    """Holds the window of a sidecar and writes it when asked. `rings`: their folder. `folder`: of what nobody waits for.

    `slo`: the objectives as the operator wrote them, which its tapes say.
    """

    def __init__(self, rings: Path, folder: str = "", on_slo: bool = False, slo: str = "") -> None:
        self.window = Window()
        self.signalled = False
        """Set by a signal handler, which may do no more than that."""
        self._rings, self._folder, self._on_slo, self._slo = rings, folder, on_slo, slo
        self._waiting: list[_Ask] = []
        self._running: _Ask | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._missed: deque[int] = deque(maxlen=BREACH)
        self._breached_at = -BREACH_OVER_NS
        self._next_breach_at = self._apart_ns = 0
        self._now = self._looked_at = self._wakes = 0
        self._broken = ""

    # ── the sidecar's own thread ─────────────────────────────────────────────────────────────────────────────────

    def keep(self, said: Sequence[RingFact], horizon: int) -> None:
        """Takes the facts of one wake. Never raises: what it breaks on ends the recording, not the sidecar."""
        if self._broken:
            return
        try:
            self.window.keep(said, horizon)
        except Exception as reason:
            self._broken = f"the flight recorder broke: {type(reason).__name__}: {reason}"
            self.window = Window()
            log.exception("nothing is held for a tape any more")

    def missed(self, ended_at: int) -> None:
        """A request that ended then missed an objective."""
        if not self._on_slo:
            return
        self._missed.append(ended_at)
        if len(self._missed) == BREACH and max(self._missed) - min(self._missed) <= BREACH_NS:
            self._breached(self._now)

    def _breached(self, now: int) -> None:
        """A tape of it, unless there was one just now: a breach that lasts must not push out those of its beginning."""
        if now - self._breached_at >= BREACH_OVER_NS:
            self._next_breach_at, self._apart_ns = now, BREACH_EVERY_NS
        self._breached_at = now
        if now >= self._next_breach_at:
            self._next_breach_at = now + self._apart_ns
            self._apart_ns = min(2 * self._apart_ns, BREACH_SELDOM_NS)
            self._try(SLO, BREACH_WAIT_NS)

    def look(self, now: int) -> None:
        """Takes up what was asked, and begins what is due; once a wake, after `keep` (monotonic ns)."""
        self._now = now
        self._wakes += 1
        if self.signalled:
            self.signalled = False
            self._try(SIGNAL)
        if now - self._looked_at >= LOOK_NS:
            self._looked_at = now
            for tape in dump_request.asked(self._rings):
                with self._lock:
                    self._waiting.append(_Ask(COMMAND, tape, self._wakes + SOON, 0))
        if self._waiting:
            self._begin(self._wakes, now)

    def close(self, timeout: float) -> None:
        """Writes what is still waiting, for at most `timeout` s."""
        deadline = _clock.now() + int(timeout * 1e9)
        while self._waiting or self._running is not None:
            self._begin(_ALL, _ALL)
            left = deadline - _clock.now()
            if left <= 0:
                return
            if self._thread is not None:
                self._thread.join(left / 1e9)

    def _try(self, reason: str, wait_ns: int = 0) -> None:
        try:
            self.ask(reason, wait_ns)
        except CannotDump as refusal:
            log.error("no tape by %s: %s", reason, refusal)

    def _begin(self, wake: int, now: int) -> None:
        with self._lock:
            due = next((a for a in self._waiting if a.due_wake <= wake and a.due_at <= now), None)
            if due is None or self._running is not None:
                return
            self._waiting.remove(due)
            self._running = due
        if self._broken:
            self._finish(due, self._broken)
            return
        try:
            work = (due, self.window.snapshot())
            thread = threading.Thread(target=self._write, args=work, name="otel_infer dump", daemon=True)
            thread.start()
        except Exception as reason:  # no more threads, say; the sidecar goes on
            self._finish(due, f"{type(reason).__name__}: {reason}")
        else:
            self._thread = thread

    # ── any thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, reason: str, wait_ns: int = 0) -> Path:
        """Has a tape written and says where it will be; the same one while it is not yet. Raises `CannotDump`."""
        if self._broken:
            raise CannotDump(self._broken)
        with self._lock:
            pending = [*self._waiting, *([self._running] if self._running is not None else [])]
            for other in pending:
                if other.reason == reason:
                    return other.path
            path = self._new_path(reason)
            self._waiting.append(_Ask(reason, path, self._wakes + SOON, self._now + wait_ns))
        return path

    def _new_path(self, reason: str) -> Path:
        try:
            folder = Path(self._folder) if self._folder else _own_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (RingRefused, OSError) as refusal:
            raise CannotDump(f"no folder for it: {refusal}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CannotDump(f"{folder} cannot be written")
        at = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        return folder / f"{NAME}{at}-{reason}-{os.getpid()}{SUFFIX}"

    # ── the writing thread ───────────────────────────────────────────────────────────────────────────────────────

    def _write(self, ask: _Ask, snapshot: Snapshot) -> None:
        refusal, folder = "", ask.path.parent
        try:
            if ask.reason != COMMAND:
                _remove(_abandoned(folder))
            write(ask.path, snapshot, ask.reason, self._slo)
        except Exception as reason:  # a full disk, say; the sidecar goes on
            refusal = f"{type(reason).__name__}: {reason}"
        else:
            if ask.reason != COMMAND:
                log.info("a tape of the last %.0f s (%s): %s", snapshot.seconds, ask.reason, ask.path)
                _remove(_too_many(folder))
        finally:
            self._finish(ask, refusal)

    def _finish(self, ask: _Ask, refusal: str) -> None:
        try:
            if refusal:
                log.error("no tape %s: %s", ask.path, refusal)
                if ask.reason == COMMAND:
                    dump_request.refuse(ask.path, refusal)
        finally:
            with self._lock:
                self._running = None


def write(path: Path, snapshot: Snapshot, reason: str, slo: str = "") -> None:
    """Writes a window as a tape, mode 0600, which is there when it is whole; raises `OSError`, or `CannotDump` where there is too
    little room."""
    part = path.with_suffix(directory.DUMP_PART)
    room = shutil.disk_usage(path.parent).free // SHARE if reason == COMMAND else _ALL
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        writer = TapeWriter(
            part,
            by=reason,
            otel_infer=VERSION,
            written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(snapshot.seconds, 3),
            facts=snapshot.facts,
            requests_left_out=snapshot.requests_left_out,
            began_at=snapshot.began_at,
            slo=slo,
        )
        try:
            for passage in snapshot.passages():
                writer.write(*passage)
                if part.stat().st_size > room:
                    raise CannotDump(
                        f"it would take more than 1/{SHARE} of what is free in {path.parent}: {INSTEAD}"
                    )
        finally:
            writer.close()
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _own_folder() -> Path:
    return directory.user_folder(Path(tempfile.gettempdir()))


def _abandoned(folder: Path) -> list[Path]:
    """What sidecars were writing when they were killed."""
    return [
        part
        for part in folder.glob(f"{NAME}*{directory.DUMP_PART}")
        if dump_request.age_s(part) > dump_request.STALE_S
    ]


def _too_many(folder: Path) -> list[Path]:
    """Their names begin with when they were asked for. What somebody dumped or copied here is not ours to remove."""
    return sorted(tape for tape in folder.glob(f"{NAME}*{SUFFIX}") if OWN.fullmatch(tape.name))[:-MOST_TAPES]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as reason:
            log.warning("%s stays: %s", path, reason)
