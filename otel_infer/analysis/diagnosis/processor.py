"""Finds requests that are slow because cores are short: taken by others, or shared by too many generations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.cpu_use import CpuUse
from otel_infer.analysis.diagnosis.excess import TimeByComplaint
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events


def find_cpu_shortage(served: Sequence[RequestRecord], time: TimeByComplaint, cpu: CpuUse) -> list[Finding]:
    """Finds threads that were ready to run and had no core, and who used the cores."""
    kind = semconv.SYMPTOM_NOT_ENOUGH_CPU
    if not time.is_complaint(kind):
        return []
    rows = time.longest(kind)
    evidence = [
        f"the slowest {len(rows)} of {len(served)} requests lost {time.mean_ms(kind, rows):.0f} ms each, because threads had no core"
    ]
    if cpu.busy:
        evidence.append(f"{cpu.busy:.0%} of the cores were in use")
    if cpu.is_taken_by_others:
        evidence.append(cpu.describe())
    return [Finding(kind, semconv.CAUSE_STARVED, time.total_share(kind), evidence)]


def find_abandoned_work(
    served: Sequence[RequestRecord], time: TimeByComplaint, abandoned_share: float
) -> list[Finding]:
    """Finds requests that wait while the engine generates for clients that have left."""
    kind = semconv.SYMPTOM_ABANDONED_WORK
    if not time.is_complaint(kind):
        return []
    left = sum(record.outcome == events.ABORTED for record in served)
    return [Finding(kind, semconv.CAUSE_DECODE, time.total_share(kind), [
        f"{abandoned_share:.0%} of the engine's time is spent on requests whose client has left",
        f"{left} of {len(served)} requests were given up by their client",
    ])]  # fmt: skip


def find_too_many_at_once(served: Sequence[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds generations that run at the same time, each in its own thread, and slow each other down."""
    kind, shared = semconv.SYMPTOM_TOO_MANY_AT_ONCE, time.shared
    if shared is None or not time.is_complaint(kind):
        return []
    crowd = float(np.mean(shared.concurrency[time.longest(kind)]))
    unit = "a token" if any(record.output_tokens for record in served) else "a request"
    return [Finding(kind, semconv.CAUSE_DECODE, time.total_share(kind), [
        f"on average {crowd:.0f} model calls ran at the same time as the slow requests, each in its own thread",
        f"{unit} takes {shared.alone_ms:.0f} ms with few at the same time, and {shared.crowded_ms:.0f} ms with many",
    ])]  # fmt: skip
