"""Engine steps, and what each worker took for them, many at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.types import Execution, StepRecord
from otel_infer.export.metrics.counters import NumberSeries
from otel_infer.export.metrics.histograms import HistogramSeries, Key, Label


def record_steps(
    histograms: Mapping[str, HistogramSeries],
    numbers: Mapping[str, NumberSeries],
    kind: Label,
    engine: Key,
    group: Sequence[StepRecord],
) -> None:
    """Adds steps of one kind and one engine."""
    lengths = np.array([record.ended_at - record.started_at for record in group]) / 1e9
    sizes = np.array([record.size for record in group], float)
    durations = histograms[semconv.STEP_DURATION.name].get_or_create((kind, semconv.CLOCK_HOST, *engine))
    durations.record_many(np.sort(lengths))
    histograms[semconv.STEP_BATCH_SIZE.name].get_or_create((kind, *engine)).record_many(np.sort(sizes))
    tokens = numbers[semconv.STEP_TOKENS_TOTAL.name]
    for of, number in (
        (semconv.STEP_PREFILL, sum(record.prefill_tokens for record in group)),
        (semconv.STEP_DECODE, sum(record.decode_tokens for record in group)),
    ):
        if number:
            tokens.add((of, *engine), number)


def record_executions(histograms: Mapping[str, HistogramSeries], executions: Sequence[Execution]) -> None:
    """Adds what workers took, as many times as each stands for."""
    groups: dict[tuple[str, Key], list[int]] = {}
    for engine, pid, rank, length, on_device, queued, gap, steps, gaps in executions:
        clock = semconv.CLOCK_DEVICE if on_device else semconv.CLOCK_HOST
        of = engine or None, pid
        groups.setdefault((semconv.STEP_EXECUTION.name, (rank, clock, *of)), []).extend([length] * steps)
        for metric, waited, times in (
            (semconv.DEVICE_QUEUED, queued, steps),
            (semconv.DEVICE_IDLE, gap, gaps),
        ):
            if waited >= 0:
                groups.setdefault((metric.name, (rank, *of)), []).extend([waited] * times)
    for (name, key), lengths in groups.items():
        histograms[name].get_or_create(key).record_many(np.sort(np.array(lengths) / 1e9))
