"""Finds requests that end late after their last token: because of the server's work, or of slow clients. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer import semconv
from otel_infer.analysis.diagnosis.excess import TimeByComplaint
from otel_infer.analysis.diagnosis.slow_requests import (
    NS_PER_MS,
    client_backpressure,
    find_rows,
    is_main_part,
    name_last_output,
    select_slowest,
    sum_cause_time,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.analysis.diagnosis.worker_code import describe_waits
from otel_infer.assembly.records.request import RequestRecord

_END_CAUSES = (
    semconv.CAUSE_EGRESS,
    semconv.CAUSE_DETOKENIZE,
    semconv.CAUSE_APPLICATION,
    semconv.CAUSE_EVENT_LOOP,
)


def find_late_end(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds work of the server between the last token and the last byte."""
    kind = semconv.SYMPTOM_LATE_END
    slowest = select_slowest(served, lambda r: r.duration_ns)
    behind = time.for_code.after[find_rows(served, slowest.records)]
    if not time.is_complaint(kind) and not is_main_part(behind.sum(), slowest):
        return []
    rows = time.longest_own(kind)
    slow = [served[row] for row in rows]
    parts = {cause: sum(sum_cause_time(record, cause) for record in slow) for cause in _END_CAUSES}
    parts[semconv.CAUSE_EGRESS] -= sum(map(client_backpressure, slow))
    cause = max(parts, key=lambda cause: parts[cause])
    mean_ms = time.mean_ms(kind, rows) - float(time.for_code.after[rows].mean()) / NS_PER_MS
    return [Finding(kind, cause, time.total_share(kind), [
        f"the slowest {len(slow)} of {len(served)} requests end {mean_ms:.0f} ms after {name_last_output(slow)}, without waiting for the client",
        f"{cause}: {parts[cause] / len(slow) / NS_PER_MS:.0f} ms each",
        *describe_waits(time.for_code.after[time.longest(kind)]),
    ])]  # fmt: skip


def find_slow_reader(served: Sequence[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds responses that wait because their clients read slowly."""
    kind = semconv.SYMPTOM_SLOW_READER
    if not time.is_complaint(kind):
        return []
    rows = time.longest(kind)
    waiting = sum(client_backpressure(record) > 0 for record in served)
    return [Finding(kind, semconv.CAUSE_EGRESS, time.total_share(kind), [
        f"{waiting} of {len(served)} requests wait until their client reads, the slowest {len(rows)} {time.mean_ms(kind, rows):.0f} ms each",
        "the server has generated all tokens by then",
    ])]  # fmt: skip
