"""How this process began, and that it ends before it served anybody: what no library could tell of it."""

from __future__ import annotations

import sys

from otel_infer import _clock
from otel_infer.config import environment
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import SERVER, recorder
from otel_infer.tracing import request_span


class Birth:
    """Of one process; a forked child has its own. Told once, however often rings are made that somebody reads."""

    def __init__(self) -> None:
        self._seen_at = _clock.now()
        self._fact: events.ProcessStarted | None = None
        self._is_known = False

    def fact(self) -> events.ProcessStarted | None:
        """The same whenever it is asked; nothing of an interactive interpreter, which starts no server."""
        if self._is_known or request_span.opener is None or hasattr(sys, "ps1"):
            return None
        if self._fact is None:
            now, wall_now = _clock.wall_pair()
            at = _clock.process_started_at() or self._seen_at
            self._fact = events.ProcessStarted(at, wall_now - (now - at), *_ids(*request_span.opener.ids()))
        return self._fact

    def known(self) -> None:
        """Who read the rings up to now has been told; the next one would tell it again."""
        self._is_known = self._fact is not None


def _ids(trace_id: bytes, span_id: bytes) -> tuple[bytes, bytes, bytes]:
    """Of this start and the one that it is a part of. A server leaves its own to the processes that it starts."""
    if recorder.role == SERVER:
        environment.hand_on_start((trace_id + span_id).hex())
        return trace_id, span_id, bytes(8)
    try:
        of = bytes.fromhex(environment.start_handed_on())
    except ValueError:
        of = b""
    return (of[:16], span_id, of[16:]) if len(of) == 24 else (trace_id, span_id, bytes(8))


def leaving() -> None:
    """The process ends in an orderly way: called when it exits."""
    uncaught = getattr(sys, "last_type", None)
    recorder.startup(events.ProcessLeft(_clock.now(), uncaught.__qualname__ if uncaught else ""))
