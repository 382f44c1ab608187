"""What a receiver got of one trace."""

from __future__ import annotations

import time
from typing import Any

from tests.support.otlp_receiver import OtlpReceiver

ERROR = 2
"""Status of a span in OTLP."""
LATE_S = 0.3
"""Spans of one trace may come in two exports."""


def spans_of(receiver: OtlpReceiver, trace_id: str, name: str = "") -> list[dict[str, Any]]:
    """Returns the spans of a trace, once a SERVER span is among them, and a span with this name, if one is given."""
    found: list[dict[str, Any]] = []

    def is_there(receiver: OtlpReceiver) -> bool:
        found[:] = [span for span in receiver.spans if span["trace_id"] == trace_id]
        is_named = not name or any(span["name"] == name for span in found)
        return is_named and any(span["kind"] == 2 for span in found)

    assert receiver.wait_for(is_there, 15), f"no SERVER span, or no {name}, of {trace_id}"
    time.sleep(LATE_S)
    is_there(receiver)
    return found
