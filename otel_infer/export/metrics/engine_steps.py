"""Counts engine steps, and the execution time of each worker, many at a time."""

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
    durations_s = np.array([record.ended_at - record.started_at for record in group]) / 1e9
    sizes = np.array([record.size for record in group], float)
    durations = histograms[semconv.STEP_DURATION.name].get_or_create((kind, semconv.CLOCK_HOST, *engine))
    durations.record_many(np.sort(durations_s))
    histograms[semconv.STEP_BATCH_SIZE.name].get_or_create((kind, *engine)).record_many(np.sort(sizes))
    tokens = numbers[semconv.STEP_TOKENS_TOTAL.name]
    for step_kind, count in (
        (semconv.STEP_PREFILL, sum(record.prefill_tokens for record in group)),
        (semconv.STEP_DECODE, sum(record.decode_tokens for record in group)),
    ):
        if count:
            tokens.add((step_kind, *engine), count)


def set_kv_usage(numbers: Mapping[str, NumberSeries], latest: Mapping[Key, StepRecord]) -> None:
    """Sets the KV usage of each engine from its latest step with a KV cache."""
    for key, record in latest.items():
        numbers[semconv.KV_USAGE.name].set(key, record.kv_used)
        numbers[semconv.KV_LIMIT.name].set(key, record.kv_total)
        numbers[semconv.KV_UTILIZATION.name].set(key, record.kv_used / record.kv_total)
        if record.block_tokens:
            free = (record.kv_total - record.kv_used) * record.block_tokens
            numbers[semconv.KV_BLOCK_SIZE.name].set(key, record.block_tokens)
            numbers[semconv.KV_HEADROOM.name].set(key, free / max(record.running, 1))


def record_executions(histograms: Mapping[str, HistogramSeries], executions: Sequence[Execution]) -> None:
    """Adds the execution times of workers, weighted by the number of steps that each stands for."""
    groups: dict[tuple[str, Key], list[int]] = {}
    for engine, pid, rank, duration, on_device, queued, gap, steps, gaps in executions:
        clock = semconv.CLOCK_DEVICE if on_device else semconv.CLOCK_HOST
        process = engine or None, pid
        groups.setdefault((semconv.STEP_EXECUTION.name, (rank, clock, *process)), []).extend(
            [duration] * steps
        )
        for metric, waited, times in (
            (semconv.DEVICE_QUEUED, queued, steps),
            (semconv.DEVICE_IDLE, gap, gaps),
        ):
            if waited >= 0:
                groups.setdefault((metric.name, (rank, *process)), []).extend([waited] * times)
    for (name, key), durations in groups.items():
        histograms[name].get_or_create(key).record_many(np.sort(np.array(durations) / 1e9))
