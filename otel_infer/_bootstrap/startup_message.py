"""Formats the startup message: version, hooks, destination, mode, span volume, how to disable."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from otel_infer._version import VERSION
from otel_infer.config.environment import Config
from otel_infer.config.redaction import redact_url
from otel_infer.instrumentation import unseen_libraries
from otel_infer.instrumentation.hooks.instrumentor import InstrumentorStatus

BYTES_PER_STEP_SPAN = 125
BYTES_PER_STEP_SPAN_SENT = 20
"""Bytes of an encoded step span, uncompressed and compressed."""


def format_message(
    settings: Config, statuses: Sequence[InstrumentorStatus], provider_given: bool, why_in_process: str
) -> str:
    """Returns the startup message for the current state; modules that are imported later have more hooks."""
    present = [status for status in statuses if status.hooks_total]
    bound = sum(status.hooks_active for status in present)
    total = sum(status.hooks_total for status in present)
    names = ", ".join(status.name for status in present if status.hooks_active) or "none yet"
    later = "" if bound == total else ", the rest when their modules are imported"
    mismatches = [f"{status.name}: {status.drift}" for status in present if status.drift]
    parts = [
        f"otel_infer {VERSION}: {bound} of {total} hooks bound ({names}){later}",
        "spans to the given tracer_provider" if provider_given else _format_destination(settings),
        f"in-process, because {why_in_process}" if why_in_process else "sidecar",
        _format_volume(settings),
        "off: OTEL_INFER_ENABLED=off",
    ]
    unseen = [library.module for library in unseen_libraries.find_imported()]
    if unseen:
        parts.insert(1, f"not followed: {', '.join(unseen)} (see `otel-infer doctor`)")
    if mismatches:
        parts.insert(1, "mismatch: " + "; ".join(mismatches) + " (see `otel-infer doctor`)")
    return " · ".join(parts)


def _format_destination(settings: Config) -> str:
    places = []
    spans = (
        f"{redact_url(settings.traces_endpoint) or 'localhost'} ({settings.traces_protocol})"
        if settings.exports_spans
        else ""
    )
    metrics = (
        f"{redact_url(settings.metrics_endpoint) or 'localhost'} ({settings.metrics_protocol})"
        if settings.exports_metrics
        else ""
    )
    if spans and metrics and spans != metrics:
        places.append(f"OTLP: spans to {spans}, metrics to {metrics}")
    elif spans or metrics:
        places.append(f"OTLP to {spans or metrics}")
    if settings.console:
        places.append("console")
    others = {
        "request log": settings.request_log,
        "tape": settings.tape,
        "metrics to scrape at": settings.scrape_address,
        "tapes of SLO breaches in": settings.dump_on_slo,
        "webhook at": settings.dump_port,
    }
    places += [f"{label} {target}" for label, target in others.items() if target]
    return ", ".join(places) or "nothing is exported"


def _format_volume(settings: Config) -> str:
    if settings.steps == "off":
        return "no step spans"
    if settings.steps == "all":
        return "every step of every request, without a budget"
    daily = settings.step_budget * 86400 / 1e9
    stored, sent = daily * BYTES_PER_STEP_SPAN, daily * BYTES_PER_STEP_SPAN_SENT
    return f"≤ {stored:.0f} GB/day of step spans ({sent:.1f} sent) at {settings.step_budget} spans/s"


def print_stderr(line: str) -> None:
    """Prints a line to the server's stderr, if it has one."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass
