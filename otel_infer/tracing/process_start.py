"""How this process began, and that it ends before it served anybody: what no library could tell of it."""

from __future__ import annotations

import sys

from otel_infer import _clock
from otel_infer.config import environment
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import SERVER, recorder
from otel_infer.tracing import request_span


class ProcessStartRecorder:
    """Of one process; a forked child has its own. Told once, however often rings are made that somebody reads."""

    def __init__(self) -> None:
        self._created_at = _clock.now()
        self._event: events.ProcessStarted | None = None
        self._is_recorded = False

    def make_event(self) -> events.ProcessStarted | None:
        """The same whenever it is asked; nothing of an interactive interpreter, which starts no server."""
        if self._is_recorded or request_span.span_factory is None or hasattr(sys, "ps1"):
            return None
        if self._event is None:
            now, wall_now = _clock.read_clocks()
            at = _clock.read_process_start() or self._created_at
            self._event = events.ProcessStarted(
                at, wall_now - (now - at), *_resolve_ids(*request_span.span_factory.generate_ids())
            )
        return self._event

    def mark_recorded(self) -> None:
        """Who read the rings up to now has been told; the next one would tell it again."""
        self._is_recorded = self._event is not None


def _resolve_ids(trace_id: bytes, span_id: bytes) -> tuple[bytes, bytes, bytes]:
    """Of this start and the one that it is a part of. A server leaves its own to the processes that it starts."""
    if recorder.role == SERVER:
        environment.export_startup_ids((trace_id + span_id).hex())
        return trace_id, span_id, bytes(8)
    try:
        of = bytes.fromhex(environment.inherited_startup_ids())
    except ValueError:
        of = b""
    return (of[:16], span_id, of[16:]) if len(of) == 24 else (trace_id, span_id, bytes(8))


def record_process_exit() -> None:
    """The process ends in an orderly way: called when it exits."""
    uncaught = getattr(sys, "last_type", None)
    recorder.record_startup(events.ProcessLeft(_clock.now(), uncaught.__qualname__ if uncaught else ""))
