"""What we say of ourselves: which hooks are bound, and what this process takes."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from otel_infer import semconv
from otel_infer.sinks.numbers import Set


def resident() -> int:
    """Bytes of memory that this process holds now; the most it ever held where that cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say_usage(set_value: Set) -> None:
    """Sets CPU time and memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "user"}, usage.ru_utime)
    set_value(semconv.SELF_CPU, {semconv.CPU_MODE: "system"}, usage.ru_stime)
    set_value(semconv.SELF_MEMORY, {}, resident())


def say_hooks(reported: Mapping[tuple[int, str], tuple[int, int]], set_value: Set) -> None:
    """Sets how many hooks of each integration are bound and how many are not, over all processes: (ring, integration) →
    (active, all)."""
    hooks: Counter[tuple[str, str]] = Counter()
    for (_, integration), (active, total) in reported.items():
        hooks[integration, semconv.HOOK_ACTIVE] += active
        hooks[integration, semconv.HOOK_MISSING] += total - active
    for (integration, state), count in hooks.items():
        attributes = {semconv.INTEGRATION: integration, semconv.HOOK_STATE: state}
        set_value(semconv.SELF_HOOKS, attributes, count)
