"""Writes one log record per request with a priority keep reason: to `logging`, and optionally as JSON lines.

A record is bound to the span of its request, so a handler that reads the current context (such as
OpenTelemetry's own) finds the right ids. The ids are fields too. The rate is limited: a later record counts
the dropped ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
from datetime import UTC, datetime
from typing import Any

from opentelemetry import trace

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.private_files import open_private_file
from otel_infer.config.settings import STDERR
from otel_infer.export import console
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.sampling.token_bucket import TokenBucket
from otel_infer.ringbuffer import events

log = logging.getLogger(__name__)
request_logger = logging.getLogger("otel_infer.requests")

MAX_PER_SECOND, BURST = 10, 100


class RequestLog:
    """Logs requests with a priority keep reason. `where`: a file, `stderr`, or empty = only the logger."""

    def __init__(self, where: str = "") -> None:
        self._handler = _open_handler(where)
        self._bucket = TokenBucket(BURST)
        self._dropped = 0

    @property
    def is_enabled(self) -> bool:
        """Whether a handler takes records."""
        return self._handler is not None or request_logger.isEnabledFor(logging.INFO)

    def log_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Logs one request, unless it is ordinary, no handler takes it, or the rate limit is reached."""
        if decision.reason not in semconv.NOTABLE_REASONS or not self.is_enabled:
            return
        is_logger_enabled = request_logger.isEnabledFor(logging.INFO)
        if not self._spend_budget(record.ended_at):
            self._dropped += 1
            return
        fields = build_fields(record, decision)
        if self._dropped:
            fields["dropped_before"], self._dropped = self._dropped, 0
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if record.sampled else trace.TraceFlags.DEFAULT)
        ids = int.from_bytes(record.trace_id, "big"), int.from_bytes(record.span_id, "big")
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(*ids, False, flags))):
            line = request_logger.makeRecord(
                request_logger.name,
                logging.INFO,
                __file__,
                0,
                console.format_request(record),
                (),
                None,
                extra=fields,
            )
            if self._handler is not None:
                line.fields = fields
                self._handler.handle(line)
            if is_logger_enabled:
                request_logger.handle(line)

    def close(self) -> None:
        """Closes the file. Lines that a full disk rejects are lost."""
        if self._handler is not None:
            with contextlib.suppress(OSError, ValueError):
                self._handler.close()

    def _spend_budget(self, at: int) -> bool:
        self._bucket.refill(at, MAX_PER_SECOND, BURST)
        if self._bucket.tokens < 1:
            return False
        self._bucket.tokens -= 1
        return True


def build_fields(record: RequestRecord, decision: tail_sampler.Decision) -> dict[str, Any]:
    """Returns the fields of a log record, without content; durations in ms. Empty fields are absent."""
    breakdown = record.breakdown
    fields = {
        "trace_id": record.trace_id.hex(),
        "span_id": record.span_id.hex(),
        "keep_reason": decision.reason,
        "missed": list(decision.missed),
        "operation": record.operation,
        "model": record.model,
        "route": record.attributes.get(semconv.HTTP_ROUTE),
        "outcome": events.OUTCOME_NAMES[record.outcome],
        "error_type": record.error_type,
        "failed_stage": record.failed_stage,
        "duration_ms": _ns_to_ms(record.duration_ns),
        "ttft_ms": _ns_to_ms(record.ttft_ns),
        "itl_max_ms": _ns_to_ms(record.summary.gap_max),
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "stages_ms": {stage.name: _ns_to_ms(stage.ended_at - stage.started_at) for stage in record.stages},
        "top_cause": breakdown.top_cause if breakdown is not None else "",
        "causes_ms": {cause: _ns_to_ms(length) for cause, length in breakdown.causes.items()}
        if breakdown
        else {},
        "interferer_trace_id": breakdown.interferer.trace_id.hex()
        if breakdown is not None and breakdown.interferer
        else "",
        "telemetry_lost": record.telemetry_lost,
    }
    at = datetime.fromtimestamp((record.ended_at + record.wall_offset) / 1e9, UTC)
    return {"ended_at": at.isoformat(timespec="milliseconds"), **{k: v for k, v in fields.items() if v}}


def _ns_to_ms(ns: int) -> float:
    return round(ns / 1e6, 3)


class _JsonLineFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        head = {"level": record.levelname, "logger": record.name, "message": record.getMessage()}
        return json.dumps({**fields, **head}, default=str)


class _LogFileHandler(logging.handlers.WatchedFileHandler):
    """Writes to a file of mode 0600 that other programs may rotate."""

    def _open(self) -> Any:
        return open(open_private_file(self.baseFilename, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or loses it if the rotated file cannot be opened.

        The request is exported all the same.
        """
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignores the error, because a full disk must not stop the export, nor be reported per line."""


class _StderrHandler(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or drops it if the stream is not writable now."""
        if console.is_writable(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Ignores the error, as `_LogFileHandler` does."""


def _open_handler(where: str) -> logging.Handler | None:
    if not where:
        return None
    try:
        handler: logging.Handler = _StderrHandler() if where == STDERR else _LogFileHandler(where)
    except OSError as reason:
        log.error("request log is disabled, because its file cannot be opened: %s", reason)
        return None
    handler.setFormatter(_JsonLineFormatter())
    return handler
