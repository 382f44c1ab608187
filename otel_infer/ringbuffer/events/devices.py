"""Events about devices: GPU time of steps and stages, memory, failed allocations, throttled clocks."""

from __future__ import annotations

from typing import NamedTuple


class StepTimed(NamedTuple):
    """Execution of a step on the device, from `started_at` to `at`.

    Both instants are on the host's clock, each within `bound_ns`. The fields up to `ring_number` are those of
    `StepExecuted`. Lengths are in ns and clamped to about 4 s. `launched_ns`: the time in which the host
    launched it. `queued_ns`: from then until the device began. `gap_ns`: the device's idle time on that
    stream before it. `launched_ns` and `gap_ns` are `UNKNOWN_NS` where unknown.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    ring_number: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


class StageTimed(NamedTuple):
    """Execution on the device of the work that a stage of a request launched; fields as in `StepTimed`."""

    at: int
    started_at: int
    stage: str
    launched_ns: int
    queued_ns: int
    bound_ns: int


class MemorySeen(NamedTuple):
    """Memory of a device that this process uses, in bytes.

    `allocated`, `reserved`, `active` and `inactive_split` come from torch's allocator. `free` and `total`
    come from the driver (0 of 0 = not read). `private_pools`: the part of `reserved` that belongs to CUDA
    graphs and to the application's own pools. `pinned`: page-locked host memory of torch's allocator in this
    process. Both are -1 where this torch does not report them. `uuid`: the device's id in NVML.
    """

    at: int
    uuid: str
    allocated: int
    reserved: int
    active: int
    inactive_split: int
    free: int
    total: int
    private_pools: int
    pinned: int


class MemoryRefused(NamedTuple):
    """Failed allocation of `wanted` bytes while a request was running.

    `free` bytes were left of `limit`: the device's memory, or the limit that torch was given.
    """

    at: int
    wanted: int
    limit: int
    free: int


LONGEST_NS, UNKNOWN_NS = (1 << 32) - 2, (1 << 32) - 1
"""The longest length that an event holds, and the mark of an unknown length."""


def encode_ns(length: int) -> int:
    """Returns a length as an event stores it; below 0 = unknown."""
    return UNKNOWN_NS if length < 0 else min(length, LONGEST_NS)


def decode_ns(stored: int) -> int:
    """Returns the length that an event stores, ns; -1 = unknown."""
    return -1 if stored == UNKNOWN_NS else stored


class GpuClocksThrottled(NamedTuple):
    """Throttled clocks of a GPU, recorded by the sidecar: NVML reported them at `at`.

    They count as throttled until `until`, the next reading. `reasons`: names of NVML's clock event reasons,
    joined by commas. `is_slowing`: whether a reason slows steps beyond the normal state of a busy GPU (heat,
    or its power supply).
    """

    at: int
    until: int
    reasons: str
    is_slowing: bool


DEVICE_EVENTS = (
    StepTimed, StageTimed, MemorySeen, MemoryRefused, GpuClocksThrottled,
)  # fmt: skip
"""The types that this module defines."""
