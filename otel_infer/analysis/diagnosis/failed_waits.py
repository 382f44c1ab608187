"""Finds requests that failed while they waited for a worker, such as those whose handler gave up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord

if TYPE_CHECKING:
    from otel_infer.analysis.diagnosis.rules import Diagnosis

MIN_FAILED, MIN_SHARE = 3, 0.2
"""Requests, and their share of all, from which their waiting is the complaint."""
_NS_PER_MS = 1_000_000


def add_failed_waits(diagnosis: Diagnosis, records: Sequence[RequestRecord]) -> Diagnosis:
    """Returns the diagnosis, whose verdict is `queueing` if a large part of these requests failed in the queue."""
    failed = [record for record in records if record.failed_in_queue]
    if len(failed) < MIN_FAILED or len(failed) < MIN_SHARE * len(records):
        return diagnosis
    lengths = np.array([record.duration_ns for record in failed])
    weight = float(lengths.sum() / (sum(record.duration_ns for record in records) or 1))
    evidence = [
        f"{len(failed):,} of {len(records):,} requests failed before a worker had called the model for them",
        f"they had waited in the queue for {float(np.median(lengths)) / _NS_PER_MS:.0f} ms (p50)",
    ]
    finding = Finding(semconv.SYMPTOM_QUEUEING, semconv.CAUSE_WORK_QUEUE, weight, evidence)
    others = [other for other in diagnosis.findings if other.symptom != finding.symptom]
    return diagnosis._replace(
        verdict=finding.symptom, findings=[finding, *others], weighed="the time of all requests"
    )
