"""One log record for each request that is kept for a reason of its own: to `logging`, and as JSON lines where that is asked for.

A record is bound to the span of its request, so that whatever reads the current context (OpenTelemetry's own logging, say)
finds the right ids, and it has the same as fields. Rate-limited: a storm of failures is told by its number.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
from datetime import datetime, timezone
from typing import Any

from opentelemetry import trace

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.settings import STDERR
from otel_infer.export import console
from otel_infer.export.sampling import tail_sampler
from otel_infer.ringbuffer import events

log = logging.getLogger(__name__)
kept = logging.getLogger("otel_infer.requests")

MOST_A_SECOND, BURST = 10, 100
LOGGED = (*tail_sampler.NOTABLE, semconv.KEEP_REASON_OFFENDER)
_OUTCOMES = {events.OK: "ok", events.ERROR: "error", events.ABORTED: "aborted"}


class RequestLog:
    """Tells of kept requests. `where`: a file, `stderr`, or empty: then only whoever listens to the logger is told."""

    def __init__(self, where: str = "") -> None:
        self._lines = _lines(where)
        self._room, self._filled_at = float(BURST), 0
        self._left_out = 0

    def tell(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Logs one request, unless it is an ordinary one, or nobody listens, or there were too many."""
        listens = kept.isEnabledFor(logging.INFO)
        if decision.reason not in LOGGED or not (listens or self._lines is not None):
            return
        if not self._has_room(record.ended_at):
            self._left_out += 1
            return
        said = described(record, decision)
        if self._left_out:
            said["left_out_before"], self._left_out = self._left_out, 0
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if record.sampled else trace.TraceFlags.DEFAULT)
        ids = int.from_bytes(record.trace_id, "big"), int.from_bytes(record.span_id, "big")
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(*ids, False, flags))):
            line = kept.makeRecord(
                kept.name, logging.INFO, __file__, 0, console.line(record), (), None, extra=said
            )
            if self._lines is not None:
                line.said = said
                self._lines.handle(line)
            if listens:
                kept.handle(line)

    def close(self) -> None:
        """Closes the file; what a full disk does not take is lost."""
        if self._lines is not None:
            with contextlib.suppress(OSError, ValueError):
                self._lines.close()

    def _has_room(self, at: int) -> bool:
        come = max(at - self._filled_at, 0) * MOST_A_SECOND / 1e9
        self._room, self._filled_at = min(self._room + come, BURST), max(at, self._filled_at)
        if self._room < 1:
            return False
        self._room -= 1
        return True


def described(record: RequestRecord, decision: tail_sampler.Decision) -> dict[str, Any]:
    """The fields of a log record, content-free; lengths in ms. What a request does not have is not there."""
    blame = record.blame
    said = {
        "trace_id": record.trace_id.hex(),
        "span_id": record.span_id.hex(),
        "kept_for": decision.reason,
        "missed": list(decision.missed),
        "operation": record.operation,
        "model": record.model,
        "route": record.attributes.get(semconv.HTTP_ROUTE),
        "outcome": _OUTCOMES[record.outcome],
        "error_type": record.error_type,
        "died_in": record.died_in,
        "duration_ms": _ms(record.duration_ns),
        "ttft_ms": _ms(record.ttft_ns),
        "itl_max_ms": _ms(record.summary.gap_max),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "stages_ms": {stage.name: _ms(stage.ended_at - stage.started_at) for stage in record.stages},
        "top_cause": blame.top if blame is not None else "",
        "blame_ms": {cause: _ms(length) for cause, length in blame.causes.items()} if blame else {},
        "held_up_by": blame.offender.trace_id.hex() if blame is not None and blame.offender else "",
        "telemetry_lost": record.telemetry_lost,
    }
    at = datetime.fromtimestamp((record.ended_at + record.wall_offset) / 1e9, timezone.utc)
    return {"ended_at": at.isoformat(timespec="milliseconds"), **{k: v for k, v in said.items() if v}}


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


class _Json(logging.Formatter):
    """One object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = getattr(record, "said", {})
        head = {"level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps({**said, **head}, default=str)


class _ToFile(logging.handlers.WatchedFileHandler):
    """A file that others may rotate."""

    def emit(self, record: logging.LogRecord) -> None:
        """Where the new one cannot be opened, the line is lost, and the request is not."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk is no reason to stop, nor to say so for each line."""


class _ToStderr(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        """A line for which there is no room just now is left out."""
        if console.has_room(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """As of a file."""


def _lines(where: str) -> logging.Handler | None:
    if not where:
        return None
    try:
        handler: logging.Handler = _ToStderr() if where == STDERR else _ToFile(where)
    except OSError as reason:
        log.error("there is no log of requests: %s", reason)
        return None
    handler.setFormatter(_Json())
    return handler
