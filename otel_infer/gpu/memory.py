"""Device memory of this process, by torch's allocator and the driver, read once a second.

torch counts memory in use by tensors (allocated) and memory held from the device (reserved). Memory in use or
waiting for a stream is active. Parts of blocks that cannot be returned are inactive splits. CUDA graphs and
the application's own pools are counted apart (private pools, torch 2.13 and later). Memory that is neither
free nor reserved belongs to something else: a context, NCCL, another process. The host allocator holds
page-locked memory (pinned), and the driver takes ms to allocate more.

The timing thread reads the figures in 15 to 30 µs (H100, torch 2.11). `mem_get_info` costs 7 µs there, but
took 8 ms on a driver in a container (sglang#25225). The longer it takes, the less often it is called.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events

SAMPLE_INTERVAL_NS = 1_000_000_000
DRIVER_QUERY_RATIO, RECENT_QUERIES = 1000, 4
"""Time between driver queries, as a multiple of the shortest of the last 4 query durations.

The shortest counts, because longer ones may include a wait for the GIL.
"""
OomCallback = Callable[[int, int, int, int], None]
_CURRENT_PATH = ("all", "current")


class DeviceMemorySampler:
    """Samples the memory of one device.

    It never imports torch or initializes CUDA. It raises what a torch release without these functions raises.
    """

    def __init__(
        self,
        index: int,
        record_event: Callable[[events.MemorySeen], None],
        now: Callable[[], int] = _clock.now,
    ) -> None:
        self._index, self._record_event, self._now = index, record_event, now
        self._sampled_at = self._next_query_at = 0
        self._uuid = ""
        self._free = self._total = 0
        self._query_durations: deque[int] = deque(maxlen=RECENT_QUERIES)

    def record_sample(self) -> None:
        """Records the memory figures, at most once a second."""
        at, cuda = self._now(), sys.modules.get("torch.cuda")
        if cuda is None or (self._sampled_at and at - self._sampled_at < SAMPLE_INTERVAL_NS):
            return
        self._sampled_at = at
        stats = cuda.memory_stats_as_nested_dict(self._index)
        free, total = self._read_device_memory(cuda)
        self._uuid = self._uuid or get_device_uuid(cuda, self._index)
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
        allocated, reserved, active, split = (_read_current(stats, kind) for kind in kinds)
        pools, pinned = _sum_private_pools(stats), _read_pinned_bytes(cuda)
        event = events.MemorySeen(
            at, self._uuid, allocated, reserved, active, split, free, total, pools, pinned
        )
        self._record_event(event)

    def _read_device_memory(self, cuda: Any) -> tuple[int, int]:
        """Returns free and total bytes, as of the latest driver query."""
        before = self._now()
        if before >= self._next_query_at:
            self._free, self._total = map(int, cuda.mem_get_info(self._index))
            self._query_durations.append(self._now() - before)
            self._next_query_at = before + DRIVER_QUERY_RATIO * min(self._query_durations)
        return self._free, self._total


_oom_callbacks: list[OomCallback] = []


def attach_oom_observer(callback: OomCallback) -> None:
    """Registers `callback(device, requested, limit, free)`, bytes, for failed allocations.

    torch calls it before it raises, on the allocating thread. Only the first callback is registered, because
    torch cannot remove one. It must not be called before CUDA is in use, because it initializes CUDA.
    """
    attach = getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_cuda_attach_out_of_memory_observer", None
    )
    if attach is not None and not _oom_callbacks:
        _oom_callbacks.append(callback)
        attach(lambda *figures: _oom_callbacks[0](*figures))


def get_device_uuid(cuda: Any, index: int) -> str:
    """Returns the device's UUID as NVML writes it, to join the figures of both; else `cuda:INDEX`."""
    uuid = str(getattr(cuda.get_device_properties(index), "uuid", "") or f"cuda:{index}")
    return uuid if uuid.startswith(("GPU-", "MIG-", "cuda:")) else f"GPU-{uuid}"


def _sum_private_pools(stats: Any) -> int:
    pools = stats.get("reserved_bytes_by_private_pools")
    return -1 if pools is None else sum(_read_current(pools, pool) for pool in pools)


def _read_pinned_bytes(cuda: Any) -> int:
    read_stats = getattr(cuda, "host_memory_stats_as_nested_dict", None)
    allocated = read_stats().get("allocated_bytes") if read_stats is not None else None
    return -1 if allocated is None else int(allocated.get("current", 0))


def _read_current(stats: Any, kind: Any) -> int:
    value: Any = stats.get(kind, {})
    for key in _CURRENT_PATH:
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return int(value or 0)


COUNTER_INTERVAL_NS = 1_000_000_000
MARK_BY_COUNTER = {"num_alloc_retries": "allocator_retry", "num_ooms": "allocator_oom"}
"""The allocator's counters, and the marks that record their increments."""

MarkCallback = Callable[[str, int, int, int], None]
"""(mark, since, at, count)."""


class AllocatorCounters:
    """The allocator's counters at the last reading. It never imports torch or initializes CUDA."""

    def __init__(self, record_mark: MarkCallback, now: Callable[[], int] = _clock.now) -> None:
        self._record_mark, self._now = record_mark, now
        self._sampled_at = now()
        self._last_counts = self._read_counts() or dict.fromkeys(MARK_BY_COUNTER.values(), 0)

    def record_increments(self) -> None:
        """Records a mark for each counter that rose since the last reading, at most once a second."""
        at = self._now()
        if at - self._sampled_at < COUNTER_INTERVAL_NS:
            return
        since, self._sampled_at = self._sampled_at, at
        counts = self._read_counts()
        if counts is None:
            return
        before, self._last_counts = self._last_counts, counts
        for mark, count in counts.items():
            if count > before[mark]:
                self._record_mark(mark, since, at, count - before[mark])

    def _read_counts(self) -> dict[str, int] | None:
        """Returns the counters by mark, over all devices; None while CUDA is not in use."""
        cuda = sys.modules.get("torch.cuda")
        is_initialized = getattr(cuda, "is_initialized", None)  # another thread may be importing it
        if cuda is None or is_initialized is None or not is_initialized():
            return None
        devices: list[Mapping[str, Any]] = [
            cuda.memory_stats_as_nested_dict(device) for device in range(cuda.device_count())
        ]
        return {
            mark: sum(int(stats.get(key, 0)) for stats in devices) for key, mark in MARK_BY_COUNTER.items()
        }
