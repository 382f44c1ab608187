"""Finds who used the cores of a server while its slow requests ran. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer.events import CpuSeen

MIN_BUSY_SHARE = 0.8
"""Share of the cores from which a thread may have to wait for one."""
MIN_OUTSIDE_SHARE = 0.2
"""Share of the cores from which their use by others than the engine is the reason."""
_MIN_WORKING_SHARE = 0.2
"""Share of the time with requests below which other work of the server would hide what the requests use."""


class CpuUse(NamedTuple):
    """Shares of the cores: in use, in use by other processes, and by threads of the server that run no engine."""

    busy: float = 0.0
    other_processes: float = 0.0
    other_threads: float = 0.0

    @property
    def is_taken_by_others(self) -> bool:
        """Whether the cores are in use, and others than the server's engine use a large part of them."""
        outside = max(self.other_processes, self.other_threads)
        return self.busy >= MIN_BUSY_SHARE and outside >= MIN_OUTSIDE_SHARE

    def describe(self) -> str:
        """Returns evidence that names who uses the cores."""
        if self.other_processes >= self.other_threads:
            return f"other processes used {self.other_processes:.0%} of this server's cores meanwhile"
        return (
            f"threads of this server that run no engine used {self.other_threads:.0%} of its cores meanwhile"
        )


def measure_cpu_use(cpu_usage: Sequence[CpuSeen], records: Sequence[RequestRecord]) -> CpuUse:
    """Returns the use of the cores in the readings that overlap these requests; all 0 without one."""
    if not cpu_usage or not records:
        return CpuUse()
    spans = np.array([(record.arrived_at, record.ended_at) for record in records], np.int64)
    totals: Any = np.zeros(4)
    for seen in cpu_usage:
        if ((spans[:, 0] < seen.at) & (spans[:, 1] > seen.since)).any():
            others = max(seen.busy_ns - seen.server_ns, 0)
            capacity = seen.cores * (seen.at - seen.since)
            totals += (capacity, seen.busy_ns, others, seen.other_threads_ns)
    capacity, *used = totals.tolist()
    return CpuUse(*(min(ns / capacity, 1.0) for ns in used)) if capacity else CpuUse()


def measure_cores_in_use(cpu_usage: Sequence[CpuSeen], records: Sequence[RequestRecord]) -> tuple[float, int]:
    """Returns how many cores the server uses while it has requests, and how many there are; (0, 0) if not known."""
    spans = np.array(sorted((record.arrived_at, record.ended_at) for record in records), np.int64).reshape(
        -1, 2
    )
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.maximum(spans[:, 0], np.append(0, ends[:-1]))  # without the time that earlier requests cover
    used_ns = working_ns = whole_ns = cores = 0
    for seen in cpu_usage:
        working = int((np.minimum(ends, seen.at) - np.maximum(begins, seen.since)).clip(0).sum())
        if working:
            used_ns, working_ns = used_ns + seen.server_ns, working_ns + working
            whole_ns, cores = whole_ns + seen.at - seen.since, seen.cores
    if not cores or working_ns < _MIN_WORKING_SHARE * whole_ns:
        return 0.0, 0
    return min(used_ns / working_ns, cores), cores
