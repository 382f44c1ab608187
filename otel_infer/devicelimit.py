"""What held a device back while requests were computed, over many of them, and what makes it quicker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import devicesteps, semconv
from otel_infer.records import RequestRecord

STAGES = (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)


class Words(NamedTuple):
    """What it means, and what to change."""

    means: str
    change: str


_LESS_WORK = (
    "a faster GPU, smaller or quantized weights, or another replica: the host is not what holds it up"
)
LIMITS = {
    devicesteps.GPU_BOUND: Words("the device is at work", _LESS_WORK),
    devicesteps.LAUNCH_BOUND: Words(
        "launching its kernels takes as long as they run",
        "CUDA graphs or torch.compile, larger batches, a faster core for the engine's thread",
    ),
    devicesteps.HOST_STALLED: Words(
        "between two steps it waits for the host",
        "see what the engine's thread does between its steps (py-spy), or schedule one step ahead",
    ),
    devicesteps.BACK_PRESSURED: Words("the host waits for room in the device's queue", _LESS_WORK),
}


class DeviceLimit(NamedTuple):
    """`requests` of the `timed` ones had this as the limit of this stage: more than had any other."""

    stage: str
    limit: str
    requests: int
    timed: int

    @property
    def words(self) -> Words:
        """What that means, and what to change."""
        return LIMITS[self.limit]


def device_limits(records: Sequence[RequestRecord]) -> list[DeviceLimit]:
    """Of each stage that a device was seen to compute; nothing where none was timed."""
    found = []
    for name in STAGES:
        stages = [stage for record in records for stage in record.stages if stage.name == name]
        limits = Counter(str(stage.attributes.get(semconv.DEVICE_LIMIT, "")) for stage in stages)
        del limits[""]
        if limits:
            limit, requests = limits.most_common(1)[0]
            found.append(DeviceLimit(name, limit, requests, limits.total()))
    return found
