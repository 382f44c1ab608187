"""What we say of ourselves and of the processes that we watch: which hooks are bound, who waits, and what this process takes."""

from __future__ import annotations

import resource
from collections import Counter

from otel_infer import semconv
from otel_infer.assembly.process_state import ProcessState
from otel_infer.export.metrics.counters import SetValue


def read_resident_bytes() -> int:
    """Bytes of memory that this process holds now; the most it ever held where that cannot be read."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as said:
            return int(said.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def set_self_usage(set_value: SetValue) -> None:
    """Sets CPU time and memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "user"}, usage.ru_utime)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "system"}, usage.ru_stime)
    set_value(semconv.SELF_MEMORY, {}, read_resident_bytes())


PROCESS_METRICS = (semconv.ENGINE_WAITING, semconv.SELF_HOOKS)


def set_process_metrics(processes: ProcessState, set_value: SetValue) -> None:
    """Sets how many requests wait in engines, by reason, and how many hooks of each integration are bound and how many are
    not, over all processes."""
    for reason, count in processes.count_waiting().items():
        set_value(semconv.ENGINE_WAITING, {semconv.WAIT_REASON: reason}, count)
    hooks: Counter[tuple[str, str]] = Counter()
    for (_, integration), (active, total) in processes.hooks.items():
        hooks[integration, semconv.HOOK_ACTIVE] += active
        hooks[integration, semconv.HOOK_MISSING] += total - active
    for (integration, state), count in hooks.items():
        attributes = {semconv.INTEGRATION: integration, semconv.HOOK_STATE: state}
        set_value(semconv.SELF_HOOKS, attributes, count)
