"""Returns finished requests: their records, with the time of each attributed to causes. Used live, in replay and in tests."""

from __future__ import annotations

import logging

from otel_infer.analysis.attribution import request
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord

log = logging.getLogger(__name__)


def finish_requests(assembler: Assembler, horizon: int) -> list[RequestRecord]:
    """Builds the records of requests that ended long enough before `horizon` (monotonic ns) and attributes their time.

    What attribution alone reads (`prefillers`, `strain`) is dropped afterwards, since a record may be held for a while.
    """
    records = assembler.drain_records(horizon)
    try:
        request.attribute_latency(records)
    except Exception:  # a record is true without its causes
        log.exception("%d requests are exported without causes", len(records))
    for record in records:
        record.prefills_by_step = record.thread_delays = None
    return records
