"""The table of alerts on causes: a problem in the server, before or after clients notice it.

Each alert names the symptom that users report and the first change to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.alerts.cause_queries import (
    BY_GPU,
    BY_INSTANCE,
    BY_JOB,
    BY_MODEL,
    OVER_5M,
    OVER_10M,
    QUEUED_BY_JOB,
    build_cause_dominates,
    build_cold_paths,
    build_decode_stall,
    build_host_bound,
    build_no_traffic,
    build_preemption_rate,
    build_queue_share,
    build_server_gone,
)
from otel_infer.monitoring.promql import label_equals, label_matches, label_not_matches, ratio_or_absent

PAGE, TICKET, INFO = "page", "ticket", "info"


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


CAUSE_ALERTS: Sequence[CauseAlert] = (
    CauseAlert(
        "QueueGrowing",
        TICKET,
        f"({QUEUED_BY_JOB}) > 10 and deriv(({QUEUED_BY_JOB})[10m:1m]) > 0",
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
        f"{build_queue_share()} > 0.5",
        "5m",
        "{{ $value | humanizePercentage }} of TTFT on {{ $labels.job }} {{ $labels.gen_ai_request_model }} is queue time",
        "Most of the time to first token is spent in the queue.",
        semconv.COMPLAINTS[semconv.SYMPTOM_QUEUEING],
        "Use a larger batch or KV cache, limit concurrency in front of the server, or add a replica.",
        "latency-breakdown",
    ),
    CauseAlert(
        "KVCachePressure",
        TICKET,
        f"{OVER_10M.max_over_window(semconv.KV_UTILIZATION, by=BY_JOB)} > 0.95 and {build_preemption_rate(OVER_10M)} > 0",
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
        f"{ratio_or_absent(build_preemption_rate(OVER_10M), OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
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
        build_cause_dominates(),
        "5m",
        "{{ $value | humanizePercentage }} of the time of slow requests on {{ $labels.job }} is {{ $labels.infer_latency_cause }}",
        "One cause that is not the request's own work takes over 30 % of the time of slow requests.",
        "depends on the cause",
        "Run `otel-infer explain` on the server: it names the change for each cause. The docs list all causes.",
        "overview",
    ),
    CauseAlert(
        "Interference",
        TICKET,
        f"{ratio_or_absent(OVER_10M.rate(semconv.LATENCY_DURATION, label_equals(semconv.LATENCY_CAUSE, semconv.CAUSE_INTERFERENCE), by=BY_MODEL), OVER_10M.rate(semconv.LATENCY_DURATION, by=BY_MODEL))} > 0.2",
        "5m",
        "{{ $value | humanizePercentage }} of the time of requests for {{ $labels.gen_ai_request_model }} goes to prompts of other requests",
        "The prefill of long prompts delays the tokens of all other requests.",
        semconv.COMPLAINTS[semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING],
        "Use chunked prefill with fewer tokens per step, or serve long prompts on separate replicas.",
        "decode",
    ),
    CauseAlert(
        "DecodeStall",
        TICKET,
        build_decode_stall(),
        "2m",
        "p99 of decode steps of {{ $labels.job }} {{ $labels.instance }} is {{ $value | humanizeDuration }}, over 10 times the median",
        "Steps without prompts are interrupted.",
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "Compare with the pauses: garbage collection, CPU quota, graph capture, a lock.",
        "decode",
    ),
    CauseAlert(
        "HostBound",
        INFO,
        build_host_bound(),
        "5m",
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
        build_cold_paths(),
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
        OVER_10M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, semconv.MARK_ALLOCATOR_OOM), by=BY_INSTANCE),
        "0s",
        "{{ $labels.job }} {{ $labels.instance }} ran out of device memory",
        "A request needed more device memory than was available, and failed.",
        "it fails with long prompts",
        "Limit prompt length and batch size, or give the KV cache less memory. The request's span shows the memory state.",
        "memory",
    ),
    CauseAlert(
        "DeviceMemoryShort",
        TICKET,
        OVER_10M.count_occurrences(semconv.MARKS, label_equals(semconv.MARK_NAME, semconv.MARK_ALLOCATOR_RETRY), by=BY_JOB),
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
        f"{ratio_or_absent(OVER_10M.rate(semconv.REQUEST_ABANDONED, label_equals(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT), by=BY_JOB), OVER_10M.rate(semconv.REQUEST_DURATION, by=BY_JOB))} > 0.1",
        "5m",
        "{{ $value | humanizePercentage }} of the clients of {{ $labels.job }} disconnect before the end",
        "Clients disconnect, mostly because of latency. It does not count as an error.",
        "nothing happens",
        "Check TTFT, and the timeouts of clients and proxies.",
        "overview",
    ),
    CauseAlert(
        "ServerGone",
        PAGE,
        build_server_gone(),
        "1m",
        "{{ $labels.job }} reported metrics ten minutes ago, and now reports none",
        "No server of this name exports metrics any more, and none of them was stopped on purpose.",
        "it is down",
        "Check the process, then the path of its metrics.",
        "self-monitoring",
    ),
    CauseAlert(
        "ServerHangs",
        PAGE,
        f"{OVER_5M.aggregate_gauge(semconv.REQUEST_HUNG, by=BY_INSTANCE, aggregation='max')} > 0",
        "0s",
        "{{ $value }} requests are in flight on {{ $labels.job }} {{ $labels.instance }}, and no engine step ended for 60 s",
        "The server hangs. Its sidecar has written the stacks of all threads to a tape.",
        "nothing happens",
        "Run `otel-infer explain` on the server, or on the tape whose name contains `-hang-`: it lists the stacks.",
        "overview",
    ),
    CauseAlert(
        "NoTraffic",
        TICKET,
        build_no_traffic(),
        "5m",
        "{{ $labels.job }} receives no requests any more",
        "Requests arrived for an hour and none for ten minutes, while the server runs.",
        "it is down",
        "Check the load balancer or proxy in front of it, and whether it is still starting.",
        "overview",
    ),
    CauseAlert(
        "GpuThrottled",
        TICKET,
        f"{OVER_10M.aggregate_gauge(semconv.GPU_THROTTLED, label_matches(semconv.THROTTLE_REASON, 'hw_slowdown|sw_thermal|hw_thermal|power_brake'), by=(*BY_GPU, semconv.THROTTLE_REASON), aggregation='max')} > 0",
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
        f"{OVER_10M.increase(semconv.GPU_ERRORS, label_equals(semconv.ERROR_TYPE, semconv.ECC_UNCORRECTED), by=BY_GPU)} > 0",
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
        OVER_10M.count_occurrences(semconv.GPU_ERRORS, label_matches(semconv.ERROR_TYPE, "xid_.*"), by=(*BY_GPU, semconv.ERROR_TYPE)),
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
        OVER_10M.count_occurrences(
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
        "SidecarRestarted",
        TICKET,
        OVER_10M.count_occurrences(semconv.SELF_RESTARTS, by=BY_INSTANCE),
        "0s",
        "the sidecar of {{ $labels.job }} {{ $labels.instance }} ended, and was started again",
        "The sidecar crashed or was killed. Requests are still served.",
        "traces are missing",
        "Run `otel-infer doctor` on the server. If the sidecar was killed for its memory, give the container more.",
        "self-monitoring",
    ),
    CauseAlert(
        "HookFailed",
        TICKET,
        OVER_10M.count_occurrences(semconv.SELF_ERRORS, by=BY_INSTANCE),
        "0s",
        "a hook on {{ $labels.job }} {{ $labels.instance }} raised an exception",
        "The hook is disabled until the next start, unless a request caused the exception. A stage may be missing from traces.",
        "a stage is missing",
        "Please report the exception, which is in the server's log.",
        "self-monitoring",
    ),
    CauseAlert(
        "HooksMissing",
        TICKET,
        f"{OVER_5M.aggregate_gauge(semconv.SELF_HOOKS, label_equals(semconv.HOOK_STATE, semconv.HOOK_MISSING), by=(*BY_JOB, semconv.INTEGRATION))} > 0",
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
