"""Queries of the alerts on causes that are longer than a line, and the windows and labels that they share."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.names import PRESENCE_SERIES
from otel_infer.monitoring.promql import (
    PromqlBuilder,
    label_equals,
    label_matches,
    label_not_matches,
    ratio_or_absent,
)
from otel_infer.semconv import prometheus

BY_JOB = ("job",)


def _over_window(window: str) -> PromqlBuilder:
    return PromqlBuilder({}, window)


OVER_5M, OVER_10M = _over_window("5m"), _over_window("10m")
_QUEUED_SERIES = OVER_5M.select_series(
    semconv.REQUEST_ACTIVE, label_equals(semconv.REQUEST_STATE, semconv.STATE_QUEUED)
)
QUEUED_BY_JOB = f"sum by (job) ({_QUEUED_SERIES})"
_EXPECTED_CAUSES = "|".join(row.name for row in semconv.CAUSE_TABLE if not row.is_fault)
"""Causes that are no fault: a request's own work, the cost of batching, and unexplained time."""
BY_MODEL = (*BY_JOB, semconv.REQUEST_MODEL)
_BY_OPERATION = (*BY_JOB, semconv.OPERATION_NAME, semconv.REQUEST_MODEL)
BY_INSTANCE = (*BY_JOB, "instance")
BY_GPU = (*BY_JOB, semconv.HW_ID)


def build_preemption_rate(promql: PromqlBuilder) -> str:
    """Returns preemptions per second of each server."""
    return promql.rate(semconv.REQUEST_PREEMPTIONS, by=BY_JOB)


def build_queue_share() -> str:
    """Returns the share of the time to first token that is queue time."""
    # Clamped to 1, because a client that disconnects in the queue adds queue time but no TTFT.
    queue = OVER_10M.sum_rate(
        semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_QUEUE), by=_BY_OPERATION
    )
    return f"clamp_max({ratio_or_absent(queue, OVER_10M.sum_rate(semconv.TIME_TO_FIRST_TOKEN, by=_BY_OPERATION))}, 1)"


def build_host_bound() -> str:
    """Returns the idle share of devices between steps, where requests wait."""
    # Per instance, because another instance may be idle without requests while this one has a queue.
    gaps = OVER_10M.sum_rate(semconv.DEVICE_IDLE, by=BY_INSTANCE)
    busy = OVER_10M.sum_rate(
        semconv.STEP_EXECUTION, label_equals(semconv.CLOCK, semconv.CLOCK_DEVICE), by=BY_INSTANCE
    )
    waiting = f"sum by (job, instance) (avg_over_time({_QUEUED_SERIES}[10m]))"
    return f"{ratio_or_absent(gaps, f'({gaps} + {busy})')} > 0.4 and {waiting} > 0.5"


def build_decode_stall() -> str:
    """Returns the p99 of decode steps that is far above their median."""
    decode = (
        label_equals(semconv.STEP_KIND, semconv.STEP_DECODE),
        label_equals(semconv.CLOCK, semconv.CLOCK_HOST),
    )
    by = (*BY_INSTANCE, semconv.ENGINE, semconv.PROCESS_PID)  # engines of different models differ in speed
    worst = OVER_5M.quantile(0.99, semconv.STEP_DURATION, *decode, by=by)
    usual = _over_window("1h").quantile(0.5, semconv.STEP_DURATION, *decode, by=by)
    return f"{worst} > 10 * {usual}"


def build_cause_dominates() -> str:
    """Returns the share of each cause in the time of slow requests."""
    by = (*BY_JOB, semconv.LATENCY_CAUSE)
    cause = OVER_10M.rate(
        semconv.LATENCY_SLOW_DURATION, label_not_matches(semconv.LATENCY_CAUSE, _EXPECTED_CAUSES), by=by
    )
    whole = OVER_10M.rate(semconv.LATENCY_SLOW_DURATION, by=BY_JOB)
    return f"{cause} / on (job) group_left () ({whole} > 0.05) > 0.3"


def build_cold_paths() -> str:
    """Returns compilations and captures of a server that has requests."""
    paused = OVER_10M.count_occurrences(
        semconv.PAUSES,
        label_matches(semconv.PAUSE_CAUSE, "compile|capture"),
        by=(*BY_JOB, semconv.PAUSE_CAUSE),
        series=prometheus.COUNT,
    )
    return f"{paused} and on (job) {OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB)} > 0"


def build_server_gone() -> str:
    """Returns the servers that exported metrics ten minutes ago, and now export none."""
    # Over OTLP the last values of a server that ended are visible for five minutes more.
    stopped = f"min by (job) (last_over_time({OVER_10M.select_series(semconv.SERVER_STOPPED)}[20m])) == 1"
    gone = f"count by (job) ({PRESENCE_SERIES} offset 10m) unless count by (job) ({PRESENCE_SERIES})"
    return f"{gone} unless {stopped}"


def build_no_traffic() -> str:
    """Returns the servers that had requests, and now have none."""
    # After a restart without requests the series does not exist yet, so it counts as 0.
    now = f"({OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB)} or 0 * count by (job) ({PRESENCE_SERIES}))"
    before = f"sum by (job) (rate({OVER_10M.select_series(semconv.REQUEST_DURATION, series=prometheus.COUNT)}[1h] offset 10m))"
    return f"{now} == 0 and {before} > 0.1"
