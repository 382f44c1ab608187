"""The table of alerts on causes: a problem in the server, before or after clients notice it.

Each alert names the symptom that users report and the first change to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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

PAGE, TICKET, INFO = "page", "ticket", "info"
BY_JOB = ("job",)


class CauseAlert(NamedTuple):
    """One alert.

    `pending_period`: how long the condition must hold ("0s" = not at all). `summary`: with Prometheus'
    templates. `symptom`: in the words of users. `change`: the first step. `dashboard`: its name.
    """

    name: str
    severity: str
    expr: str
    pending_period: str
    summary: str
    meaning: str
    symptom: str
    change: str
    dashboard: str


def _over_window(window: str) -> PromqlBuilder:
    return PromqlBuilder({}, window)


_OVER_5M, _OVER_10M = _over_window("5m"), _over_window("10m")
_QUEUED_SERIES = _OVER_5M.select_series(
    semconv.REQUEST_ACTIVE, label_equals(semconv.REQUEST_STATE, semconv.STATE_QUEUED)
)
_QUEUED_BY_JOB = f"sum by (job) ({_QUEUED_SERIES})"
_EXPECTED_CAUSES = "|".join(row.name for row in semconv.CAUSE_TABLE if not row.is_fault)
"""Causes that are no fault: a request's own work, the cost of batching, and unexplained time."""
_BY_MODEL = (*BY_JOB, semconv.REQUEST_MODEL)
_BY_OPERATION = (*BY_JOB, semconv.OPERATION_NAME, semconv.REQUEST_MODEL)
_BY_INSTANCE = (*BY_JOB, "instance")
_BY_GPU = (*BY_JOB, semconv.HW_ID)


def _preemption_rate(promql: PromqlBuilder) -> str:
    return promql.rate(semconv.REQUEST_PREEMPTIONS, by=BY_JOB)


def _queue_share_query() -> str:
    # Clamped to 1, because a client that disconnects in the queue adds queue time but no TTFT.
    queue = _OVER_10M.sum_rate(
        semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_QUEUE), by=_BY_OPERATION
    )
    return f"clamp_max({ratio_or_absent(queue, _OVER_10M.sum_rate(semconv.TIME_TO_FIRST_TOKEN, by=_BY_OPERATION))}, 1)"


def _host_bound_query() -> str:
    # Per instance, because another instance may be idle without requests while this one has a queue.
    gaps = _OVER_10M.sum_rate(semconv.DEVICE_IDLE, by=_BY_INSTANCE)
    busy = _OVER_10M.sum_rate(
        semconv.STEP_EXECUTION, label_equals(semconv.CLOCK, semconv.CLOCK_DEVICE), by=_BY_INSTANCE
    )
    waiting = f"sum by (job, instance) (avg_over_time({_QUEUED_SERIES}[10m]))"
    return f"{ratio_or_absent(gaps, f'({gaps} + {busy})')} > 0.4 and {waiting} > 0.5"


def _decode_stall_query() -> str:
    decode = (
        label_equals(semconv.STEP_KIND, semconv.STEP_DECODE),
        label_equals(semconv.CLOCK, semconv.CLOCK_HOST),
    )
    by = (*_BY_INSTANCE, semconv.ENGINE, semconv.PROCESS_PID)  # engines of different models differ in speed
    worst = _OVER_5M.quantile(0.99, semconv.STEP_DURATION, *decode, by=by)
    usual = _over_window("1h").quantile(0.5, semconv.STEP_DURATION, *decode, by=by)
    return f"{worst} > 10 * {usual}"


def _cause_dominates_query() -> str:
    by = (*BY_JOB, semconv.LATENCY_CAUSE)
    cause = _OVER_10M.rate(
        semconv.LATENCY_SLOW_DURATION, label_not_matches(semconv.LATENCY_CAUSE, _EXPECTED_CAUSES), by=by
    )
    whole = _OVER_10M.rate(semconv.LATENCY_SLOW_DURATION, by=BY_JOB)
    return f"{cause} / on (job) group_left () ({whole} > 0.05) > 0.3"


def _cold_paths_query() -> str:
    paused = _OVER_10M.count_occurrences(
        semconv.PAUSES,
        label_matches(semconv.PAUSE_CAUSE, "compile|capture"),
        by=(*BY_JOB, semconv.PAUSE_CAUSE),
        series=prometheus.COUNT,
    )
    return f"{paused} and on (job) {_OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB)} > 0"


def _server_gone_query() -> str:
    return f"count by (job) ({PRESENCE_SERIES} offset 10m) unless count by (job) ({PRESENCE_SERIES})"


def _no_traffic_query() -> str:
    # After a restart without requests the series does not exist yet, so it counts as 0.
    now = f"({_OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB)} or 0 * count by (job) ({PRESENCE_SERIES}))"
    before = f"sum by (job) (rate({_OVER_10M.select_series(semconv.REQUEST_DURATION, series=prometheus.COUNT)}[1h] offset 10m))"
    return f"{now} == 0 and {before} > 0.1"


CAUSE_ALERTS: Sequence[CauseAlert] = (
    CauseAlert(
        "QueueGrowing",
        TICKET,
        f"({_QUEUED_BY_JOB}) > 10 and deriv(({_QUEUED_BY_JOB})[10m:1m]) > 0",
        "5m",
        "{{ $value | humanize }} requests are queued on {{ $labels.job }}, and the queue grows",
        "Requests arrive faster than they are served.",
        semconv.COMPLAINTS[semconv.SYMPTOM_PEAK],
        "Shed or spread load, or add a replica. Scale on this queue instead of GPU utilisation.",
        "overview",
    ),
    CauseAlert(
        "QueueDominatesTTFT",
        INFO,
        f"{_queue_share_query()} > 0.5",
        "10m",
        "{{ $value | humanizePercentage }} of TTFT on {{ $labels.job }} {{ $labels.gen_ai_request_model }} is queue time",
        "Most of the time to first token is spent in the queue.",
        semconv.COMPLAINTS[semconv.SYMPTOM_QUEUEING],
        "Use a larger batch or KV cache, limit concurrency in front of the server, or add a replica.",
        "latency-breakdown",
    ),
    CauseAlert(
        "KVCachePressure",
        TICKET,
        f"{_OVER_5M.max_over_window(semconv.KV_UTILIZATION, by=BY_JOB)} > 0.95 and {_preemption_rate(_OVER_5M)} > 0",
        "5m",
        "the KV cache of {{ $labels.job }} is {{ $value | humanizePercentage }} full, and requests are preempted",
        "A full KV cache alone is normal under load. With preemptions, requests are computed twice.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "Allow fewer sequences per batch or shorter outputs, give the cache more memory, or add a replica.",
        "memory",
    ),
    CauseAlert(
        "PreemptionStorm",
        TICKET,
        f"{ratio_or_absent(_preemption_rate(_OVER_5M), _OVER_5M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
        "5m",
        "{{ $value | humanizePercentage }} preemptions per request on {{ $labels.job }}",
        "Running sequences are preempted repeatedly, to free KV blocks.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "Lower the maximum number of sequences per batch until it stops. Then add KV cache.",
        "memory",
    ),
    CauseAlert(
        "CauseDominates",
        INFO,
        _cause_dominates_query(),
        "10m",
        "{{ $value | humanizePercentage }} of the time of slow requests on {{ $labels.job }} is {{ $labels.infer_latency_cause }}",
        "One cause that is not the request's own work takes over 30 % of the time of slow requests.",
        "depends on the cause",
        "Run `otel-infer explain` on the server: it names the change for each cause. The docs list all causes.",
        "overview",
    ),
    CauseAlert(
        "Interference",
        TICKET,
        f"{ratio_or_absent(_OVER_10M.rate(semconv.LATENCY_DURATION, label_equals(semconv.LATENCY_CAUSE, semconv.CAUSE_INTERFERENCE), by=_BY_MODEL), _OVER_10M.rate(semconv.LATENCY_DURATION, by=_BY_MODEL))} > 0.2",
        "10m",
        "{{ $value | humanizePercentage }} of the time of requests for {{ $labels.gen_ai_request_model }} goes to prompts of other requests",
        "The prefill of long prompts delays the tokens of all other requests.",
        semconv.COMPLAINTS[semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING],
        "Use chunked prefill with fewer tokens per step, or serve long prompts on separate replicas.",
        "decode",
    ),
    CauseAlert(
        "DecodeStall",
        TICKET,
        _decode_stall_query(),
        "5m",
        "p99 of decode steps of {{ $labels.job }} {{ $labels.instance }} is {{ $value | humanizeDuration }}, over 10 times the median",
        "Steps without prompts are interrupted.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "Compare with the pauses: garbage collection, CPU quota, graph capture, a lock.",
        "decode",
    ),
    CauseAlert(
        "HostBound",
        INFO,
        _host_bound_query(),
        "15m",
        "the GPU of {{ $labels.job }} {{ $labels.instance }} is idle between steps for {{ $value | humanizePercentage }} of the time",
        "Requests wait while the device is idle between steps, so the host is the bottleneck.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "See what the engine's thread does between steps (py-spy), move it off that thread, and schedule one step ahead. "
        "CUDA graphs shorten steps, not the time between them. A faster GPU comes last.",
        "gpu",
    ),
    CauseAlert(
        "ColdPaths",
        INFO,
        _cold_paths_query(),
        "0s",
        "{{ $labels.job }} compiled code or captured graphs while it served requests",
        "A shape or code path was used for the first time under traffic.",
        semconv.COMPLAINTS[semconv.SYMPTOM_PREFILL],
        "Warm up with the shapes of real traffic before the server reports that it is ready.",
        "decode",
    ),
    CauseAlert(
        "OutOfDeviceMemory",
        PAGE,
        _OVER_10M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, semconv.MARK_ALLOCATOR_OOM), by=BY_JOB),
        "0s",
        "{{ $labels.job }} ran out of device memory",
        "A request needed more device memory than was available, and failed.",
        "it fails with long prompts",
        "Limit prompt length and batch size, or give the KV cache less memory. The request's span shows the memory state.",
        "memory",
    ),
    CauseAlert(
        "DeviceMemoryShort",
        TICKET,
        _OVER_10M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, semconv.MARK_ALLOCATOR_RETRY), by=BY_JOB),
        "5m",
        "the allocator of {{ $labels.job }} frees its cache and retries",
        "Torch's allocator found no free block of sufficient size. Freeing its cache stops the device.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, or give the KV cache less memory.",
        "memory",
    ),
    CauseAlert(
        "ClientsLeave",
        TICKET,
        f"{ratio_or_absent(_OVER_10M.rate(semconv.REQUEST_ABANDONED, label_equals(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT), by=BY_JOB), _OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
        "10m",
        "{{ $value | humanizePercentage }} of the clients of {{ $labels.job }} disconnect before the end",
        "Clients disconnect, mostly because of latency. It does not count as an error.",
        "nothing happens",
        "Check TTFT, and the timeouts of clients and proxies.",
        "overview",
    ),
    CauseAlert(
        "ServerGone",
        PAGE,
        _server_gone_query(),
        "2m",
        "{{ $labels.job }} reported metrics ten minutes ago, and now reports none",
        "No server of this name exports metrics any more.",
        "it is down",
        "Check the process, then the path of its metrics.",
        "self-monitoring",
    ),
    CauseAlert(
        "NoTraffic",
        TICKET,
        _no_traffic_query(),
        "15m",
        "{{ $labels.job }} receives no requests any more",
        "Requests arrived for an hour and none for ten minutes, while the server runs.",
        "it is down",
        "Check the load balancer or proxy in front of it, and whether it is still starting.",
        "overview",
    ),
    CauseAlert(
        "GpuThrottled",
        TICKET,
        f"{_OVER_10M.aggregate_gauge(semconv.GPU_THROTTLED, label_matches(semconv.THROTTLE_REASON, 'hw_slowdown|sw_thermal|hw_thermal|power_brake'), by=(*_BY_GPU, semconv.THROTTLE_REASON), aggregation='max')} > 0",
        "10m",
        "the clocks of GPU {{ $labels.hw_id }} are throttled: {{ $labels.infer_gpu_throttle_reason }}",
        "The GPU runs below its normal clocks. In a group of GPUs, all ranks wait for it.",
        "slow for all users, since today",
        "Check cooling and power of that machine, and take it out of service meanwhile.",
        "gpu",
    ),
    CauseAlert(
        "GpuMemoryErrors",
        TICKET,
        f"{_OVER_10M.increase(semconv.GPU_ERRORS, label_equals(semconv.ERROR_TYPE, semconv.ECC_UNCORRECTED), by=_BY_GPU)} > 0",
        "0s",
        "GPU {{ $labels.hw_id }} has uncorrected memory errors",
        "ECC detected errors that it cannot correct.",
        "wrong answers, crashes",
        "Take the GPU out of service and reset it. Replace it if the errors return.",
        "gpu",
    ),
    CauseAlert(
        "GpuXid",
        TICKET,
        _OVER_10M.count_occurrences(semconv.GPU_ERRORS, label_matches(semconv.ERROR_TYPE, "xid_.*"), by=(*_BY_GPU, semconv.ERROR_TYPE)),
        "0s",
        "the driver of GPU {{ $labels.hw_id }} reported {{ $labels.error_type }}",
        "The driver reported a critical error of this GPU. NVIDIA's table of Xid errors explains the number.",
        "wrong answers, crashes",
        "Look up the number: 48, 63, 64, 74, 79, 94 and 95 are hardware errors, others may come from the application.",
        "gpu",
    ),
    CauseAlert(
        "TelemetryDropping",
        TICKET,
        _OVER_10M.count_occurrences(
            semconv.SELF_LOST,
            label_not_matches(semconv.LOSS_REASON, f"{semconv.LOSS_OVER_BUDGET}|{semconv.LOSS_VALUES_CUT}"),
            by=(*BY_JOB, semconv.LOSS_REASON),
        ),
        "0s",
        "{{ $labels.job }} loses telemetry: {{ $labels.infer_loss_reason }}",
        "Events or spans are lost. Requests are still served.",
        "traces are missing",
        "For `refused` or `queue_full`, check the collector. For `events_overwritten`, give the sidecar more CPU.",
        "self-monitoring",
    ),
    CauseAlert(
        "HooksMissing",
        TICKET,
        f"{_OVER_5M.aggregate_gauge(semconv.SELF_HOOKS, label_equals(semconv.HOOK_STATE, semconv.HOOK_MISSING), by=(*BY_JOB, semconv.INTEGRATION))} > 0",
        "15m",
        "{{ $value }} hooks of {{ $labels.infer_integration }} are not installed on {{ $labels.job }}",
        "A library release does not match its hooks, so stages are missing from traces.",
        "a stage is missing",
        "Run `otel-infer doctor` on the server: it lists the hooks and the releases that have them.",
        "self-monitoring",
    ),
)  # fmt: skip
"""All alerts on causes, in the order of the docs."""

WATCHDOG = "Watchdog"
"""Name of the alert that always fires, which shows that alerts reach their receivers."""
