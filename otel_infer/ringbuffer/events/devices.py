"""TODO ringbuffer.events.devices."""

from __future__ import annotations

from typing import NamedTuple


class StepTimed(NamedTuple):
    """The same by the device: from `started_at` to `at` on the host's clock, each within `bound_ns`.

    Lengths in ns: `launched_ns` the host took to launch it, `queued_ns` from then until the device came to it, `gap_ns` the device
    had nothing to do on that stream before it (`UNKNOWN_NS` where the first or the last is not known). Longer than 4 s is said to be 4 s.
    """

    at: int
    started_at: int
    engine: str
    pid: int
    rank: int
    step: int
    log: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


class StageTimed(NamedTuple):
    """When the device was at what was launched in a stage of a request; as `StepTimed`."""

    at: int
    started_at: int
    stage: str
    launched_ns: int
    queued_ns: int
    bound_ns: int


class MemorySeen(NamedTuple):
    """Memory of a device that this process uses, bytes; the first four as torch's allocator has them, `free` and `total` as the
    driver does (0 of 0 = not asked). `private_pools`: of what is reserved, what CUDA graphs and pools of the application's own have
    to themselves; `pinned`: page-locked memory of the host's that torch's allocator holds in this process; -1 = this torch does
    not say. `uuid`: as NVML calls it."""

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
    """A device had no room for `wanted` bytes while the request was at work: of `limit` (the device's, or what torch was told to
    keep to), so many were `free`."""

    at: int
    wanted: int
    limit: int
    free: int


LONGEST_NS, UNKNOWN_NS = (1 << 32) - 2, (1 << 32) - 1
"""Of those lengths."""


def encode_ns(length: int) -> int:
    """A length as such a fact has it; below 0 = not known."""
    return UNKNOWN_NS if length < 0 else min(length, LONGEST_NS)


def decode_ns(told: int) -> int:
    """And back."""
    return -1 if told == UNKNOWN_NS else told


class GpuClocksThrottled(NamedTuple):
    """Recorded by the sidecar: NVML showed at `at` that clocks of a GPU were throttled, which holds until `until`, the next reading.

    `reasons`: names of NVML's clock event reasons, joined by commas. `is_slowing`: whether one of them slows steps beyond what
    a busy GPU does all day (heat, or its power supply).
    """

    at: int
    until: int
    reasons: str
    is_slowing: bool
