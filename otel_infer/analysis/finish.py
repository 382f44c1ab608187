"""Returns the records of finished requests with their latency breakdown. Used live, in replay and in tests."""

from __future__ import annotations

import logging

from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord

log = logging.getLogger(__name__)


def finish_requests(assembler: Assembler, horizon: int) -> list[RequestRecord]:
    """Returns the records, with breakdown, of requests that ended long enough before `horizon` (monotonic ns).

    The fields that only attribution reads (`prefills_by_step`, `thread_delays`) are cleared afterwards,
    because a record may be held for a while.
    """
    records = assembler.drain_records(horizon)
    finish_records(records)
    return records


def finish_records(records: list[RequestRecord]) -> None:
    """Sets the breakdown of records, and clears what only attribution reads."""
    try:
        attribute_latency(records)
    except Exception:  # a record without causes is still correct
        log.exception("%d requests are exported without causes", len(records))
    for record in records:
        record.prefills_by_step = record.thread_delays = None
