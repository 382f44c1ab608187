"""Memory of the device that this process uses, as torch's allocator and the driver know it; once a second, from the tender.

torch counts what it gave out (allocated), what it holds of the device (reserved), what of that waits for streams (active), and
pieces of blocks that cannot be given back (inactive split); CUDA graphs and pools of the application's own have theirs apart
(private pools, from torch 2.13 on). What is neither free nor reserved is somebody else's: a context, NCCL, another process. Of
the host's memory it holds some that is page-locked (pinned): to have more of it takes the driver ms. The figures cost 15 to 30 µs
(H100, torch 2.11). `mem_get_info` costs 7 µs there, but took 8 ms on a driver in a container (sglang#25225), so how free
the device is, is asked the later the longer it takes.
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
"""How many times as far apart the driver is asked as it takes to answer: the quickest of the last answers, since whoever waits for
the GIL is no slow driver."""
OomCallback = Callable[[int, int, int, int], None]
_CURRENT_PATH = ("all", "current")


class DeviceMemorySampler:
    """Of one device. Never loads torch, never makes it turn to CUDA; raises what another release of torch lacks."""

    def __init__(
        self, index: int, say: Callable[[events.MemorySeen], None], now: Callable[[], int] = _clock.now
    ) -> None:
        self._index, self._record_event, self._now = index, say, now
        self._sampled_at = self._next_query_at = 0
        self._uuid = ""
        self._free = self._total = 0
        self._query_durations: deque[int] = deque(maxlen=RECENT_QUERIES)

    def record_sample(self) -> None:
        """States it; nothing within a second of the last time."""
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
        said = events.MemorySeen(
            at, self._uuid, allocated, reserved, active, split, free, total, pools, pinned
        )
        self._record_event(said)

    def _read_device_memory(self, cuda: Any) -> tuple[int, int]:
        """Free and in all, as of when it was asked last."""
        before = self._now()
        if before >= self._next_query_at:
            self._free, self._total = map(int, cuda.mem_get_info(self._index))
            self._query_durations.append(self._now() - before)
            self._next_query_at = before + DRIVER_QUERY_RATIO * min(self._query_durations)
        return self._free, self._total


_oom_callbacks: list[OomCallback] = []


def attach_oom_observer(say: OomCallback) -> None:
    """`say` is called with device, bytes wanted, limit and free bytes, before torch raises for want of memory, on the thread that
    asked. Once for all, since torch lets nobody be taken off again; not before CUDA is in use, since asking turns to it."""
    attach = getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_cuda_attach_out_of_memory_observer", None
    )
    if attach is not None and not _oom_callbacks:
        _oom_callbacks.append(say)
        attach(lambda *said: _oom_callbacks[0](*said))


def get_device_uuid(cuda: Any, index: int) -> str:
    """As NVML has it, which is how both are joined."""
    said = str(getattr(cuda.get_device_properties(index), "uuid", "") or f"cuda:{index}")
    return said if said.startswith(("GPU-", "MIG-", "cuda:")) else f"GPU-{said}"


def _sum_private_pools(stats: Any) -> int:
    pools = stats.get("reserved_bytes_by_private_pools")
    return -1 if pools is None else sum(_read_current(pools, pool) for pool in pools)


def _read_pinned_bytes(cuda: Any) -> int:
    of_host = getattr(cuda, "host_memory_stats_as_nested_dict", None)
    held = of_host().get("allocated_bytes") if of_host is not None else None
    return -1 if held is None else int(held.get("current", 0))


def _read_current(stats: Any, kind: Any) -> int:
    found: Any = stats.get(kind, {})
    for key in _CURRENT_PATH:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return int(found or 0)


COUNTER_INTERVAL_NS = 1_000_000_000
MARK_BY_COUNTER = {"num_alloc_retries": "allocator_retry", "num_ooms": "allocator_oom"}
"""Figures of the allocator, and the marks they become."""

MarkCallback = Callable[[str, int, int, int], None]
"""(mark, since, at, count)."""


class AllocatorCounters:
    """Its figures as they were at the last look. Never loads torch, never makes it turn to CUDA."""

    def __init__(self, say: MarkCallback, now: Callable[[], int] = _clock.now) -> None:
        self._record_mark, self._now = say, now
        self._sampled_at = now()
        self._last_counts = self._read_counts() or dict.fromkeys(MARK_BY_COUNTER.values(), 0)

    def record_increments(self) -> None:
        """Says what was added since the last time; nothing within a second of it."""
        at = self._now()
        if at - self._sampled_at < COUNTER_INTERVAL_NS:
            return
        since, self._sampled_at = self._sampled_at, at
        known = self._read_counts()
        if known is None:
            return
        before, self._last_counts = self._last_counts, known
        for mark, count in known.items():
            if count > before[mark]:
                self._record_mark(mark, since, at, count - before[mark])

    def _read_counts(self) -> dict[str, int] | None:
        """The marks so far, of all devices; None while CUDA is not in use."""
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
