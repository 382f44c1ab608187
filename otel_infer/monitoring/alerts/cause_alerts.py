"""Alerts on causes: what is going wrong, whether somebody feels it already or not. Each knows its complaint and the first change.

Long, since it is one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
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
    """`says`: the summary, with Prometheus' templates. `complaint`: how people put it. `change`: what to do first. `board`: where
    to look."""

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
"""What is no fault: a request's own work, what sharing a batch costs, and what nobody knows."""
_BY_MODEL = (*BY_JOB, semconv.REQUEST_MODEL)
_BY_OPERATION = (*BY_JOB, semconv.OPERATION_NAME, semconv.REQUEST_MODEL)
_BY_INSTANCE = (*BY_JOB, "instance")
_BY_GPU = (*BY_JOB, semconv.HW_ID)

_PRESENCE_SERIES = prometheus.series_names(semconv.SELF_MEMORY)[0]
"""Whoever is there says so."""

_SYMPTOM_PEAK_LOAD = "explodes at peak hours"
_SYMPTOM_STALLS = "starts, then freezes or stutters"
_SYMPTOM_SLOW_TTFT = "nothing for a while, then fast"
_SYMPTOM_INTERFERENCE = "big customers slow down small ones"


def _preemption_rate(ask: PromqlBuilder) -> str:
    return ask.rate(semconv.REQUEST_PREEMPTIONS, by=BY_JOB)


def _queue_share_query() -> str:
    """Whoever left while queued waited too, and has no first token."""
    queue = _OVER_10M.sum_rate(
        semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_QUEUE), by=_BY_OPERATION
    )
    return f"clamp_max({ratio_or_absent(queue, _OVER_10M.sum_rate(semconv.TIME_TO_FIRST_TOKEN, by=_BY_OPERATION))}, 1)"


def _host_bound_query() -> str:
    """Of one server: another may have no requests, and so gaps, while this one has a queue."""
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
    by = (*_BY_INSTANCE, semconv.ENGINE, semconv.PROCESS_PID)  # engines of other models are slower for good
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
    return f"count by (job) ({_PRESENCE_SERIES} offset 10m) unless count by (job) ({_PRESENCE_SERIES})"


def _no_traffic_query() -> str:
    # After a restart nobody has asked yet, and there is no series that says 0.
    now = (
        f"({_OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB)} or 0 * count by (job) ({_PRESENCE_SERIES}))"
    )
    before = f"sum by (job) (rate({_OVER_10M.select_series(semconv.REQUEST_DURATION, series=prometheus.COUNT)}[1h] offset 10m))"
    return f"{now} == 0 and {before} > 0.1"


CAUSE_ALERTS: Sequence[CauseAlert] = (
    CauseAlert(
        "QueueGrowing",
        TICKET,
        f"({_QUEUED_BY_JOB}) > 10 and deriv(({_QUEUED_BY_JOB})[10m:1m]) > 0",
        "5m",
        "{{ $value | humanize }} requests wait for {{ $labels.job }}, and it becomes more",
        "More requests come than are served.",
        _SYMPTOM_PEAK_LOAD,
        "Shed or spread load, add a replica; scale on this queue instead of on GPU utilisation.",
        "overview",
    ),
    CauseAlert(
        "QueueDominatesTTFT",
        INFO,
        f"{_queue_share_query()} > 0.5",
        "10m",
        "{{ $value | humanizePercentage }} of the time to the first token of {{ $labels.job }} {{ $labels.gen_ai_request_model }} is waiting",
        "Before the first token, requests mostly wait for a place in the batch.",
        "fine locally, bad in production",
        "A larger batch or KV cache, concurrency limits in front, another replica.",
        "anatomy",
    ),
    CauseAlert(
        "KVCachePressure",
        TICKET,
        f"{_OVER_5M.max_over_window(semconv.KV_UTILIZATION, by=BY_JOB)} > 0.95 and {_preemption_rate(_OVER_5M)} > 0",
        "5m",
        "the KV cache of {{ $labels.job }} is {{ $value | humanizePercentage }} full, and requests are preempted",
        "A full KV cache alone is normal under load; together with preemptions, requests are computed twice.",
        _SYMPTOM_STALLS,
        "Fewer sequences at once, shorter outputs, more memory for the cache, or another replica.",
        "memory",
    ),
    CauseAlert(
        "PreemptionStorm",
        TICKET,
        f"{ratio_or_absent(_preemption_rate(_OVER_5M), _OVER_5M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
        "5m",
        "{{ $value | humanizePercentage }} preemptions per request on {{ $labels.job }}",
        "Running sequences are put back to free KV blocks, again and again.",
        _SYMPTOM_STALLS,
        "Lower the limit of sequences in a batch until it stops; then more KV cache.",
        "memory",
    ),
    CauseAlert(
        "CauseDominates",
        INFO,
        _cause_dominates_query(),
        "10m",
        "{{ $value | humanizePercentage }} of the time of slow requests on {{ $labels.job }} is {{ $labels.infer_latency_cause }}",
        "One cause that is not the request's own work takes over 30 % of the time of the slow ones.",
        "depends on the cause",
        "`otel-infer explain` on the server names the change for each cause; the table of causes is in the docs.",
        "overview",
    ),
    CauseAlert(
        "Interference",
        TICKET,
        f"{ratio_or_absent(_OVER_10M.rate(semconv.LATENCY_DURATION, label_equals(semconv.LATENCY_CAUSE, semconv.CAUSE_INTERFERENCE), by=_BY_MODEL), _OVER_10M.rate(semconv.LATENCY_DURATION, by=_BY_MODEL))} > 0.2",
        "10m",
        "{{ $value | humanizePercentage }} of the time of requests for {{ $labels.gen_ai_request_model }} goes to others' prompts",
        "Prompts of some requests hold up the tokens of all others.",
        _SYMPTOM_INTERFERENCE,
        "Chunked prefill with fewer tokens per step, or long prompts on replicas of their own.",
        "decode",
    ),
    CauseAlert(
        "DecodeStall",
        TICKET,
        _decode_stall_query(),
        "5m",
        "the slowest decode steps of {{ $labels.job }} {{ $labels.instance }} take {{ $value | humanizeDuration }}, over ten times the usual",
        "Steps without a prompt in them are interrupted.",
        _SYMPTOM_STALLS,
        "Look at the pauses beside the steps: garbage collection, CPU quota, capture, a lock.",
        "decode",
    ),
    CauseAlert(
        "HostBound",
        INFO,
        _host_bound_query(),
        "15m",
        "the GPU of {{ $labels.job }} {{ $labels.instance }} waits for the host {{ $value | humanizePercentage }} of the time of steps",
        "Requests wait, and between steps the device has nothing to do: the host is late.",
        _SYMPTOM_STALLS,
        "CUDA graphs, asynchronous scheduling, fewer things on the engine's thread; only then a faster GPU.",
        "gpu",
    ),
    CauseAlert(
        "ColdPaths",
        INFO,
        _cold_paths_query(),
        "0s",
        "{{ $labels.job }} compiled or captured while it served",
        "Something was used for the first time under traffic.",
        _SYMPTOM_SLOW_TTFT,
        "Warm up with the shapes that come, before the server says that it is ready.",
        "decode",
    ),
    CauseAlert(
        "OutOfDeviceMemory",
        PAGE,
        _OVER_10M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, "allocator_oom"), by=BY_JOB),
        "0s",
        "{{ $labels.job }} ran out of device memory",
        "A request asked for more than the device had, and failed.",
        "it fails with long prompts",
        "Cap prompts and batch, leave more outside of the KV cache; the request has the state of the memory on it.",
        "memory",
    ),
    CauseAlert(
        "DeviceMemoryShort",
        TICKET,
        _OVER_5M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, "allocator_retry"), by=BY_JOB),
        "5m",
        "the allocator of {{ $labels.job }} gives memory back and asks again",
        "Torch's allocator found no piece large enough; giving back stops the device.",
        _SYMPTOM_STALLS,
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; less memory for the KV cache.",
        "memory",
    ),
    CauseAlert(
        "ClientsLeave",
        TICKET,
        f"{ratio_or_absent(_OVER_10M.rate(semconv.REQUEST_ABANDONED, label_equals(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT), by=BY_JOB), _OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
        "10m",
        "{{ $value | humanizePercentage }} of the clients of {{ $labels.job }} leave before the end",
        "People give up; it mostly follows latency, and is not counted as an error.",
        "nothing happens",
        "Look at TTFT; and at the time-outs of clients and proxies.",
        "overview",
    ),
    CauseAlert(
        "ServerGone",
        PAGE,
        _server_gone_query(),
        "2m",
        "{{ $labels.job }} was there ten minutes ago, and is not",
        "No server of this name says anything any more.",
        "it is down",
        "Look at the process, then at the way of its metrics.",
        "health",
    ),
    CauseAlert(
        "NoTraffic",
        TICKET,
        _no_traffic_query(),
        "15m",
        "nobody asks {{ $labels.job }} any more",
        "Requests came for an hour, and none for ten minutes, while the server is there.",
        "it is down",
        "Look at what is in front of it, and whether it is still starting.",
        "overview",
    ),
    CauseAlert(
        "GpuThrottled",
        TICKET,
        f"{_OVER_10M.aggregate_gauge(semconv.GPU_THROTTLED, label_matches(semconv.THROTTLE_REASON, 'hw_slowdown|sw_thermal|hw_thermal|power_brake'), by=(*_BY_GPU, semconv.THROTTLE_REASON), take='max')} > 0",
        "10m",
        "the clocks of GPU {{ $labels.hw_id }} are held down: {{ $labels.infer_gpu_throttle_reason }}",
        "The GPU is slower than it could be; in a group, all wait for it.",
        "slow for everybody, since today",
        "Cooling and power of that machine; take it out of service meanwhile.",
        "gpu",
    ),
    CauseAlert(
        "GpuMemoryErrors",
        TICKET,
        f"{_OVER_10M.increase(semconv.GPU_ERRORS, label_equals(semconv.ERROR_TYPE, 'uncorrected'), by=_BY_GPU)} > 0",
        "0s",
        "GPU {{ $labels.hw_id }} has memory errors that could not be corrected",
        "ECC found errors that it cannot repair.",
        "wrong answers, crashes",
        "Take the GPU out of service and reset it; replace it if they come back.",
        "gpu",
    ),
    CauseAlert(
        "GpuXid",
        TICKET,
        _OVER_10M.count_occurrences(semconv.GPU_ERRORS, label_matches(semconv.ERROR_TYPE, "xid_.*"), by=(*_BY_GPU, semconv.ERROR_TYPE)),
        "0s",
        "the driver of GPU {{ $labels.hw_id }} told {{ $labels.error_type }}",
        "The driver reported something critical of this GPU; its number says what (NVIDIA's table of Xid errors).",
        "wrong answers, crashes",
        "Look the number up: some are the application's, 48, 63, 64, 74, 79, 94 and 95 are the hardware's.",
        "gpu",
    ),
    CauseAlert(
        "TelemetryDropping",
        TICKET,
        f"{_OVER_5M.rate(semconv.SELF_LOST, label_not_matches(semconv.LOSS_REASON, semconv.LOSS_OVER_BUDGET), by=(*BY_JOB, semconv.LOSS_REASON))} > 0",
        "5m",
        "{{ $labels.job }} loses telemetry: {{ $labels.infer_loss_reason }}",
        "Facts or spans do not arrive. Requests are served all the same.",
        "traces are missing",
        "Refused or given up: the collector. Overwritten: a CPU for the sidecar.",
        "health",
    ),
    CauseAlert(
        "HooksMissing",
        TICKET,
        f"{_OVER_5M.aggregate_gauge(semconv.SELF_HOOKS, label_equals(semconv.HOOK_STATE, semconv.HOOK_MISSING), by=(*BY_JOB, semconv.INTEGRATION))} > 0",
        "15m",
        "{{ $value }} hooks of {{ $labels.infer_integration }} do not bind on {{ $labels.job }}",
        "A library has changed: stages are missing from traces.",
        "a stage is missing",
        "`otel-infer doctor` on the server says which, and which release has them.",
        "health",
    ),
)  # fmt: skip
"""In the order of the docs."""

WATCHDOG = "Watchdog"
"""Fires always: whoever receives alerts knows by it that they can come."""
