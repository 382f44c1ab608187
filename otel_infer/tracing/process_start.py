"""Records process start and exit, which no instrumented library reports."""

from __future__ import annotations

import sys

from otel_infer import _clock
from otel_infer.config import environment
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import SERVER, recorder
from otel_infer.tracing import request_span
from otel_infer.tracing.process_family import ForkFamily, ProcessFamily


class ProcessStartRecorder:
    """Makes the start event of one process; a forked child has its own recorder.

    The event is recorded once, even if the process creates rings with a reader several times. The start of a
    forked process is that of its `family`.
    """

    def __init__(self, family: ProcessFamily | None = None) -> None:
        self.family = family
        self._created_at = _clock.now()
        self._event: events.ProcessStarted | None = None
        self._is_recorded = False

    def make_event(self, joins: bool = True) -> events.ProcessStarted | None:
        """Returns the start event, the same at each call; None once it was recorded. `joins`: as in `ProcessFamily`.

        Also None before there is a span factory, and in an interactive interpreter, which starts no server.
        """
        if self._is_recorded or request_span.span_factory is None or hasattr(sys, "ps1"):
            return None
        shared = self.family if recorder.role == SERVER else None
        if shared is not None and not shared.claim_start(joins):
            return None
        if self._event is None:
            now, wall_now = _clock.read_clocks()
            at = _clock.read_process_start() or self._created_at
            ids = (
                _create_and_export_ids(*request_span.span_factory.generate_ids())
                if shared is None
                else shared.start_ids
            )
            self._event = events.ProcessStarted(at, wall_now - (now - at), *ids)
        return self._event

    def prepare_fork(self) -> ProcessFamily | None:
        """Returns the family of this process and its children, created before it starts the first one.

        None before there is a span factory.
        """
        if self.family is None and (factory := request_span.span_factory) is not None:
            has_recorded = self._event is not None
            ids = (
                self._event[2:5]
                if self._event is not None
                else _create_and_export_ids(*factory.generate_ids())
            )
            self.family = ForkFamily(ids)
            if has_recorded:
                self.family.claim_start()
            if recorder.role == SERVER:
                environment.export_startup_ids(self.family.exported)
        return self.family

    def mark_recorded(self) -> None:
        """Records that the current reader has the event, so that later readers do not report it again."""
        self._is_recorded = self._event is not None


def _create_and_export_ids(trace_id: bytes, span_id: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns trace id, span id and parent span id of this start; parent zeros = none.

    A server exports its ids to the processes that it starts; their starts are children of its start.
    """
    if recorder.role == SERVER:
        environment.export_startup_ids((trace_id + span_id).hex())
        return trace_id, span_id, bytes(8)
    try:
        inherited = bytes.fromhex(environment.inherited_startup_ids())[:24]
    except ValueError:
        inherited = b""
    return (
        (inherited[:16], span_id, inherited[16:]) if len(inherited) == 24 else (trace_id, span_id, bytes(8))
    )


def record_process_exit() -> None:
    """Records an orderly exit of the process, with the type of an uncaught exception if there is one."""
    uncaught = getattr(sys, "last_type", None)
    recorder.record_startup(events.ProcessLeft(_clock.now(), uncaught.__qualname__ if uncaught else ""))
