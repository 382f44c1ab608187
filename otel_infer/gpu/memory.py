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

EVERY_NS = 1_000_000_000
APART, OF_THE_LAST = 1000, 4
"""How many times as far apart the driver is asked as it takes to answer: the quickest of the last answers, since whoever waits for
the GIL is no slow driver."""
Refused = Callable[[int, int, int, int], None]
_CURRENT = ("all", "current")


class Memory:
    """Of one device. Never loads torch, never makes it turn to CUDA; raises what another release of torch lacks."""

    def __init__(
        self, index: int, say: Callable[[events.MemorySeen], None], now: Callable[[], int] = _clock.now
    ) -> None:
        self._index, self._say, self._now = index, say, now
        self._looked_at = self._ask_at = 0
        self._uuid = ""
        self._free = self._total = 0
        self._took: deque[int] = deque(maxlen=OF_THE_LAST)

    def look(self) -> None:
        """States it; nothing within a second of the last time."""
        at, cuda = self._now(), sys.modules.get("torch.cuda")
        if cuda is None or (self._looked_at and at - self._looked_at < EVERY_NS):
            return
        self._looked_at = at
        stats = cuda.memory_stats_as_nested_dict(self._index)
        free, total = self._of_device(cuda)
        self._uuid = self._uuid or uuid_of(cuda, self._index)
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
        allocated, reserved, active, split = (_current(stats, kind) for kind in kinds)
        pools, pinned = _private_pools(stats), _pinned(cuda)
        said = events.MemorySeen(
            at, self._uuid, allocated, reserved, active, split, free, total, pools, pinned
        )
        self._say(said)

    def _of_device(self, cuda: Any) -> tuple[int, int]:
        """Free and in all, as of when it was asked last."""
        before = self._now()
        if before >= self._ask_at:
            self._free, self._total = map(int, cuda.mem_get_info(self._index))
            self._took.append(self._now() - before)
            self._ask_at = before + APART * min(self._took)
        return self._free, self._total


_watched: list[Refused] = []


def watch_refusals(say: Refused) -> None:
    """`say` is called with device, bytes wanted, limit and free bytes, before torch raises for want of memory, on the thread that
    asked. Once for all, since torch lets nobody be taken off again; not before CUDA is in use, since asking turns to it."""
    attach = getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_cuda_attach_out_of_memory_observer", None
    )
    if attach is not None and not _watched:
        _watched.append(say)
        attach(lambda *said: _watched[0](*said))


def uuid_of(cuda: Any, index: int) -> str:
    """As NVML has it, which is how both are joined."""
    said = str(getattr(cuda.get_device_properties(index), "uuid", "") or f"cuda:{index}")
    return said if said.startswith(("GPU-", "MIG-", "cuda:")) else f"GPU-{said}"


def _private_pools(stats: Any) -> int:
    pools = stats.get("reserved_bytes_by_private_pools")
    return -1 if pools is None else sum(_current(pools, pool) for pool in pools)


def _pinned(cuda: Any) -> int:
    of_host = getattr(cuda, "host_memory_stats_as_nested_dict", None)
    held = of_host().get("allocated_bytes") if of_host is not None else None
    return -1 if held is None else int(held.get("current", 0))


def _current(stats: Any, kind: Any) -> int:
    found: Any = stats.get(kind, {})
    for key in _CURRENT:
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return int(found or 0)


COUNTERS_EVERY_NS = 1_000_000_000
COUNTED = {"num_alloc_retries": "allocator_retry", "num_ooms": "allocator_oom"}
"""Figures of the allocator, and the marks they become."""

Say = Callable[[str, int, int, int], None]
"""(mark, since, at, count)."""


class Allocator:
    """Its figures as they were at the last look. Never loads torch, never makes it turn to CUDA."""

    def __init__(self, say: Say, now: Callable[[], int] = _clock.now) -> None:
        self._say, self._now = say, now
        self._looked_at = now()
        self._before = self._read() or dict.fromkeys(COUNTED.values(), 0)

    def look(self) -> None:
        """Says what was added since the last time; nothing within a second of it."""
        at = self._now()
        if at - self._looked_at < COUNTERS_EVERY_NS:
            return
        since, self._looked_at = self._looked_at, at
        known = self._read()
        if known is None:
            return
        before, self._before = self._before, known
        for mark, count in known.items():
            if count > before[mark]:
                self._say(mark, since, at, count - before[mark])

    def _read(self) -> dict[str, int] | None:
        """The marks so far, of all devices; None while CUDA is not in use."""
        cuda = sys.modules.get("torch.cuda")
        is_initialized = getattr(cuda, "is_initialized", None)  # another thread may be importing it
        if cuda is None or is_initialized is None or not is_initialized():
            return None
        devices: list[Mapping[str, Any]] = [
            cuda.memory_stats_as_nested_dict(device) for device in range(cuda.device_count())
        ]
        return {mark: sum(int(stats.get(key, 0)) for stats in devices) for key, mark in COUNTED.items()}
