"""Client-side latencies of requests, as the terminal and the report show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events


def collect_latencies(records: Sequence[RequestRecord]) -> list[tuple[str, Any]]:
    """Returns (name, values in ns) of each latency that a successful request has."""
    good = [record for record in records if record.outcome == events.OK]
    rows: tuple[tuple[str, Any], ...] = (
        ("time to first token", [record.ttft_ns for record in good if record.ttft_ns]),
        ("between tokens", np.concatenate([[], *(np.asarray(record.gaps_ns()) for record in good)])),
        ("end to end", [record.duration_ns for record in good]),
    )
    return [(name, values) for name, values in rows if len(values)]
