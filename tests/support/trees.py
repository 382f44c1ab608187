"""The spans of one trace as an OTLP receiver got them, and as a drawn tree."""

from __future__ import annotations

import time
from typing import Any

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver

WAITS = (semconv.SPAN_ACCEPT, *semconv.WAIT_STAGES)
"""Stages that a request has only on a machine that is busy at that moment."""


def tree(spans: list[dict[str, Any]], parent: str, depth: int = 0) -> list[str]:
    """Returns the spans below `parent`, indented, in order of time; consecutive steps are counted, waits left out."""
    lines: list[str] = []
    children = [span for span in spans if span["parent_span_id"] == parent and span["name"] not in WAITS]
    below = sorted(children, key=lambda s: (s["start"], -s["end"]))
    for span in below:
        line = "  " * depth + span["name"]
        if lines and lines[-1].startswith(line + " ×"):
            lines[-1] = f"{line} ×{int(lines[-1].rpartition('×')[2]) + 1}"
            continue
        lines.append(f"{line} ×1" if span["name"] == semconv.SPAN_DECODE_STEP else line)
        lines += tree(spans, span["span_id"], depth + 1)
    return lines


def trace(receiver: OtlpReceiver, trace_id: str, request: str) -> list[dict[str, Any]]:
    """Returns all spans of a trace once its root and the span `request` arrived, perhaps from two exporters."""

    def there(it: OtlpReceiver) -> bool:
        spans = [span for span in it.spans if span["trace_id"] == trace_id]
        return any(span["kind"] == 2 for span in spans) and any(span["name"] == request for span in spans)

    assert receiver.wait_for(there, 15), "the request has not arrived"
    time.sleep(0.2)
    return [span for span in receiver.spans if span["trace_id"] == trace_id]
