"""Names what delays the slowest hundredth of the requests, where the slow ones are otherwise fine. Pure.

A complaint is about the slowest tenth. A pause that one of fifty requests meets is what p99 shows, and is too short for
the tenth as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_infer.analysis.diagnosis.excess import COMPLAINTS, EXCESS_MS, KINDS, TimeByComplaint
from otel_infer.analysis.diagnosis.slow_requests import NS_PER_MS, sum_cause_time
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

SLOWEST_SHARE, MIN_REQUESTS = 0.01, 100
_MAIN_SHARE = 0.5
"""Share of the excess from which one complaint is what delays them."""
_CAUSES = [
    row for row in causes.CAUSE_TABLE if row.group not in (causes.GROUP_OWN_WORK, causes.GROUP_UNKNOWN)
]


def describe_slowest(served: Sequence[RequestRecord], time: TimeByComplaint) -> str:
    """Returns what delays the slowest hundredth, at least three, and what to change; empty if that is their own work."""
    if len(served) < MIN_REQUESTS:
        return ""
    count = max(round(len(served) * SLOWEST_SHARE), 3)
    rows = np.argsort(time.excess.sum(axis=1), kind="stable")[-count:]
    excess = time.excess[rows].mean(axis=0).clip(0) / NS_PER_MS
    delay_ms = max(excess[KINDS.index(kind)] for kind in COMPLAINTS)
    if delay_ms < EXCESS_MS or delay_ms < _MAIN_SHARE * excess.sum():
        return ""
    lengths = [sum(sum_cause_time(served[row], cause.name) for row in rows) for cause in _CAUSES]
    cause, length = max(zip(_CAUSES, lengths), key=lambda known: known[1])
    text = (
        f"the slowest {count} of {len(served):,} took {excess.sum():.0f} ms longer than ordinary ones of their size, "
        f"{length / count / NS_PER_MS:.0f} ms of it {cause.name}: {cause.meaning}"
    )
    return f"{text} ({cause.change})" if cause.change else text
