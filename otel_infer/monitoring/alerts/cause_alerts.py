"""Alerts on causes: what is going wrong, whether somebody feels it already or not. Each knows its complaint and the first change.

Long, since it is one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.promql import Promql, equal, matches, per, unlike
from otel_infer.semconv import prometheus

PAGE, TICKET, INFO = "page", "ticket", "info"
JOB = ("job",)


class Cause(NamedTuple):
    """`says`: the summary, with Prometheus' templates. `complaint`: how people put it. `change`: what to do first. `board`: where
    to look."""

    name: str
    severity: str
    expr: str
    hold: str
    says: str
    means: str
    complaint: str
    change: str
    board: str


def _over(window: str) -> Promql:
    return Promql({}, window)


_SOON, _LONG = _over("5m"), _over("10m")
_WAITING = _SOON.pick(semconv.REQUEST_ACTIVE, equal(semconv.REQUEST_STATE, semconv.STATE_QUEUED))
_QUEUED = f"sum by (job) ({_WAITING})"
_OWN = "|".join(
    (
        semconv.CAUSE_PREFILL,
        semconv.CAUSE_DECODE,
        semconv.CAUSE_BATCHING,
        semconv.CAUSE_APPLICATION,
        semconv.CAUSE_UNEXPLAINED,
    )
)
"""What is no fault: a request's own work, what sharing a batch costs, and what nobody knows."""
_MODEL = (*JOB, semconv.REQUEST_MODEL)
_WHO = (*JOB, semconv.OPERATION_NAME, semconv.REQUEST_MODEL)
_INSTANCE = (*JOB, "instance")
_GPU = (*JOB, semconv.HW_ID)

_THERE = prometheus.series(semconv.SELF_MEMORY)[0]
"""Whoever is there says so."""

_PEAK = "explodes at peak hours"
_STUTTER = "starts, then freezes or stutters"
_WAITS = "nothing for a while, then fast"
_BIG = "big customers slow down small ones"


def _preempted(ask: Promql) -> str:
    return ask.rate(semconv.REQUEST_PREEMPTIONS, by=JOB)


def _queue_share() -> str:
    """Whoever left while queued waited too, and has no first token."""
    queue = _LONG.spent(semconv.STAGE_DURATION, equal(semconv.STAGE, semconv.SPAN_QUEUE), by=_WHO)
    return f"clamp_max({per(queue, _LONG.spent(semconv.TIME_TO_FIRST_TOKEN, by=_WHO))}, 1)"


def _host_bound() -> str:
    """Of one server: another may have no requests, and so gaps, while this one has a queue."""
    gaps = _LONG.spent(semconv.DEVICE_IDLE, by=_INSTANCE)
    busy = _LONG.spent(semconv.STEP_EXECUTION, equal(semconv.CLOCK, semconv.CLOCK_DEVICE), by=_INSTANCE)
    waiting = f"sum by (job, instance) (avg_over_time({_WAITING}[10m]))"
    return f"{per(gaps, f'({gaps} + {busy})')} > 0.4 and {waiting} > 0.5"


def _stalled() -> str:
    decode = (
        equal(semconv.STEP_KIND, semconv.STEP_DECODE),
        equal(semconv.CLOCK, semconv.CLOCK_HOST),
    )
    by = (*_INSTANCE, semconv.ENGINE, semconv.PROCESS_PID)  # engines of other models are slower for good
    worst = _SOON.quantile(0.99, semconv.STEP_DURATION, *decode, by=by)
    usual = _over("1h").quantile(0.5, semconv.STEP_DURATION, *decode, by=by)
    return f"{worst} > 10 * {usual}"


def _dominates() -> str:
    by = (*JOB, semconv.BLAME_CAUSE)
    cause = _LONG.rate(semconv.BLAME_SLOW_DURATION, unlike(semconv.BLAME_CAUSE, _OWN), by=by)
    whole = _LONG.rate(semconv.BLAME_SLOW_DURATION, by=JOB)
    return f"{cause} / on (job) group_left () ({whole} > 0.05) > 0.3"


def _cold() -> str:
    paused = _LONG.happened(
        semconv.PAUSES,
        matches(semconv.PAUSE_CAUSE, "compile|capture"),
        by=(*JOB, semconv.PAUSE_CAUSE),
        series=prometheus.COUNT,
    )
    return f"{paused} and on (job) {_LONG.rate(semconv.REQUEST_DURATION, by=JOB)} > 0"


def _gone() -> str:
    return f"count by (job) ({_THERE} offset 10m) unless count by (job) ({_THERE})"


def _silent() -> str:
    # After a restart nobody has asked yet, and there is no series that says 0.
    now = f"({_LONG.rate(semconv.REQUEST_DURATION, by=JOB)} or 0 * count by (job) ({_THERE}))"
    before = (
        f"sum by (job) (rate({_LONG.pick(semconv.REQUEST_DURATION, series=prometheus.COUNT)}[1h] offset 10m))"
    )
    return f"{now} == 0 and {before} > 0.1"


CAUSES: Sequence[Cause] = (
    Cause(
        "QueueGrowing",
        TICKET,
        f"({_QUEUED}) > 10 and deriv(({_QUEUED})[10m:1m]) > 0",
        "5m",
        "{{ $value | humanize }} requests wait for {{ $labels.job }}, and it becomes more",
        "More requests come than are served.",
        _PEAK,
        "Shed or spread load, add a replica; scale on this queue instead of on GPU utilisation.",
        "overview",
    ),
    Cause(
        "QueueDominatesTTFT",
        INFO,
        f"{_queue_share()} > 0.5",
        "10m",
        "{{ $value | humanizePercentage }} of the time to the first token of {{ $labels.job }} {{ $labels.gen_ai_request_model }} is waiting",
        "Before the first token, requests mostly wait for a place in the batch.",
        "fine locally, bad in production",
        "A larger batch or KV cache, concurrency limits in front, another replica.",
        "anatomy",
    ),
    Cause(
        "KVCachePressure",
        TICKET,
        f"{_SOON.peak(semconv.KV_UTILIZATION, by=JOB)} > 0.95 and {_preempted(_SOON)} > 0",
        "5m",
        "the KV cache of {{ $labels.job }} is {{ $value | humanizePercentage }} full, and requests are preempted",
        "A full KV cache alone is normal under load; together with preemptions, requests are computed twice.",
        _STUTTER,
        "Fewer sequences at once, shorter outputs, more memory for the cache, or another replica.",
        "memory",
    ),
    Cause(
        "PreemptionStorm",
        TICKET,
        f"{per(_preempted(_SOON), _SOON.rate(semconv.REQUEST_DURATION, by=JOB))} > 0.1",
        "5m",
        "{{ $value | humanizePercentage }} preemptions per request on {{ $labels.job }}",
        "Running sequences are put back to free KV blocks, again and again.",
        _STUTTER,
        "Lower the limit of sequences in a batch until it stops; then more KV cache.",
        "memory",
    ),
    Cause(
        "CauseDominates",
        INFO,
        _dominates(),
        "10m",
        "{{ $value | humanizePercentage }} of the time of slow requests on {{ $labels.job }} is {{ $labels.infer_blame_cause }}",
        "One cause that is not the request's own work takes over 30 % of the time of the slow ones.",
        "depends on the cause",
        "`otel-infer explain` on the server names the change for each cause; the table of causes is in the docs.",
        "overview",
    ),
    Cause(
        "Interference",
        TICKET,
        f"{per(_LONG.rate(semconv.BLAME_DURATION, equal(semconv.BLAME_CAUSE, semconv.CAUSE_INTERFERENCE), by=_MODEL), _LONG.rate(semconv.BLAME_DURATION, by=_MODEL))} > 0.2",
        "10m",
        "{{ $value | humanizePercentage }} of the time of requests for {{ $labels.gen_ai_request_model }} goes to others' prompts",
        "Prompts of some requests hold up the tokens of all others.",
        _BIG,
        "Chunked prefill with fewer tokens per step, or long prompts on replicas of their own.",
        "decode",
    ),
    Cause(
        "DecodeStall",
        TICKET,
        _stalled(),
        "5m",
        "the slowest decode steps of {{ $labels.job }} {{ $labels.instance }} take {{ $value | humanizeDuration }}, over ten times the usual",
        "Steps without a prompt in them are interrupted.",
        _STUTTER,
        "Look at the pauses beside the steps: garbage collection, CPU quota, capture, a lock.",
        "decode",
    ),
    Cause(
        "HostBound",
        INFO,
        _host_bound(),
        "15m",
        "the GPU of {{ $labels.job }} {{ $labels.instance }} waits for the host {{ $value | humanizePercentage }} of the time of steps",
        "Requests wait, and between steps the device has nothing to do: the host is late.",
        _STUTTER,
        "CUDA graphs, asynchronous scheduling, fewer things on the engine's thread; only then a faster GPU.",
        "gpu",
    ),
    Cause(
        "ColdPaths",
        INFO,
        _cold(),
        "0s",
        "{{ $labels.job }} compiled or captured while it served",
        "Something was used for the first time under traffic.",
        _WAITS,
        "Warm up with the shapes that come, before the server says that it is ready.",
        "decode",
    ),
    Cause(
        "OutOfDeviceMemory",
        PAGE,
        _LONG.happened(semconv.MARKS, equal(semconv.MARK, "allocator_oom"), by=JOB),
        "0s",
        "{{ $labels.job }} ran out of device memory",
        "A request asked for more than the device had, and failed.",
        "it fails with long prompts",
        "Cap prompts and batch, leave more outside of the KV cache; the request has the state of the memory on it.",
        "memory",
    ),
    Cause(
        "DeviceMemoryShort",
        TICKET,
        _SOON.happened(semconv.MARKS, equal(semconv.MARK, "allocator_retry"), by=JOB),
        "5m",
        "the allocator of {{ $labels.job }} gives memory back and asks again",
        "Torch's allocator found no piece large enough; giving back stops the device.",
        _STUTTER,
        "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; less memory for the KV cache.",
        "memory",
    ),
    Cause(
        "ClientsLeave",
        TICKET,
        f"{per(_LONG.rate(semconv.REQUEST_ABANDONED, equal(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT), by=JOB), _LONG.rate(semconv.REQUEST_DURATION, by=JOB))} > 0.1",
        "10m",
        "{{ $value | humanizePercentage }} of the clients of {{ $labels.job }} leave before the end",
        "People give up; it mostly follows latency, and is not counted as an error.",
        "nothing happens",
        "Look at TTFT; and at the time-outs of clients and proxies.",
        "overview",
    ),
    Cause(
        "ServerGone",
        PAGE,
        _gone(),
        "2m",
        "{{ $labels.job }} was there ten minutes ago, and is not",
        "No server of this name says anything any more.",
        "it is down",
        "Look at the process, then at the way of its metrics.",
        "health",
    ),
    Cause(
        "NoTraffic",
        TICKET,
        _silent(),
        "15m",
        "nobody asks {{ $labels.job }} any more",
        "Requests came for an hour, and none for ten minutes, while the server is there.",
        "it is down",
        "Look at what is in front of it, and whether it is still starting.",
        "overview",
    ),
    Cause(
        "GpuThrottled",
        TICKET,
        f"{_LONG.value(semconv.GPU_THROTTLED, matches(semconv.THROTTLE_REASON, 'hw_slowdown|sw_thermal|hw_thermal|power_brake'), by=(*_GPU, semconv.THROTTLE_REASON), take='max')} > 0",
        "10m",
        "the clocks of GPU {{ $labels.hw_id }} are held down: {{ $labels.infer_gpu_throttle_reason }}",
        "The GPU is slower than it could be; in a group, all wait for it.",
        "slow for everybody, since today",
        "Cooling and power of that machine; take it out of service meanwhile.",
        "gpu",
    ),
    Cause(
        "GpuMemoryErrors",
        TICKET,
        f"{_LONG.increase(semconv.GPU_ERRORS, equal(semconv.ERROR_TYPE, 'uncorrected'), by=_GPU)} > 0",
        "0s",
        "GPU {{ $labels.hw_id }} has memory errors that could not be corrected",
        "ECC found errors that it cannot repair.",
        "wrong answers, crashes",
        "Take the GPU out of service and reset it; replace it if they come back.",
        "gpu",
    ),
    Cause(
        "GpuXid",
        TICKET,
        _LONG.happened(semconv.GPU_ERRORS, matches(semconv.ERROR_TYPE, "xid_.*"), by=(*_GPU, semconv.ERROR_TYPE)),
        "0s",
        "the driver of GPU {{ $labels.hw_id }} told {{ $labels.error_type }}",
        "The driver reported something critical of this GPU; its number says what (NVIDIA's table of Xid errors).",
        "wrong answers, crashes",
        "Look the number up: some are the application's, 48, 63, 64, 74, 79, 94 and 95 are the hardware's.",
        "gpu",
    ),
    Cause(
        "TelemetryDropping",
        TICKET,
        f"{_SOON.rate(semconv.SELF_LOST, unlike(semconv.LOSS_REASON, semconv.LOSS_OVER_BUDGET), by=(*JOB, semconv.LOSS_REASON))} > 0",
        "5m",
        "{{ $labels.job }} loses telemetry: {{ $labels.infer_loss_reason }}",
        "Facts or spans do not arrive. Requests are served all the same.",
        "traces are missing",
        "Refused or given up: the collector. Overwritten: a CPU for the sidecar.",
        "health",
    ),
    Cause(
        "HooksMissing",
        TICKET,
        f"{_SOON.value(semconv.SELF_HOOKS, equal(semconv.HOOK_STATE, semconv.HOOK_MISSING), by=(*JOB, semconv.INTEGRATION))} > 0",
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
