"""Sets metrics of otel_infer and of the observed processes: hooks, waiting requests, CPU and memory."""

from __future__ import annotations

import resource
from collections import Counter

from otel_infer import semconv
from otel_infer.assembly.process_state import ProcessState
from otel_infer.export.metrics.counters import SetValue


def read_resident_bytes() -> int:
    """Returns the resident memory of this process in bytes; its peak if the current value cannot be read."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def set_self_usage(set_value: SetValue) -> None:
    """Sets the CPU time and memory of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "user"}, usage.ru_utime)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "system"}, usage.ru_stime)
    set_value(semconv.SELF_MEMORY, {}, read_resident_bytes())


PROCESS_METRICS = (semconv.ENGINE_WAITING, semconv.SELF_HOOKS, semconv.SERVER_STOPPED, semconv.REQUEST_HUNG)


def set_process_metrics(processes: ProcessState, set_value: SetValue) -> None:
    """Sets the waiting requests of engines by reason, the hooks of integrations by state, and the server's end.

    The first two are sums over all processes.
    """
    set_value(semconv.SERVER_STOPPED, {}, int(processes.is_server_stopped()))
    set_value(semconv.REQUEST_HUNG, {}, processes.hang.requests if processes.hang is not None else 0)
    for reason, count in processes.count_waiting().items():
        set_value(semconv.ENGINE_WAITING, {semconv.WAIT_REASON: reason}, count)
    hooks: Counter[tuple[str, str]] = Counter()
    for (_, integration), (active, total) in processes.hooks.items():
        hooks[integration, semconv.HOOK_ACTIVE] += active
        hooks[integration, semconv.HOOK_MISSING] += total - active
    for (integration, state), count in hooks.items():
        attributes = {semconv.INTEGRATION: integration, semconv.HOOK_STATE: state}
        set_value(semconv.SELF_HOOKS, attributes, count)
