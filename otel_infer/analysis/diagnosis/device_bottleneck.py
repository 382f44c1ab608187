"""What held a device back while requests were computed, over many of them, and what makes it quicker. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine import device_steps
from otel_infer.assembly.records.request import RequestRecord


class BottleneckAdvice(NamedTuple):
    """What it means, and what to change."""

    meaning: str
    change: str


_REDUCE_GPU_WORK = (
    "a faster GPU, smaller or quantized weights, or another replica: the host is not what holds it up"
)
BOTTLENECK_ADVICE = {
    device_steps.GPU_BOUND: BottleneckAdvice("the device is at work", _REDUCE_GPU_WORK),
    device_steps.LAUNCH_BOUND: BottleneckAdvice(
        "launching its kernels takes as long as they run",
        "CUDA graphs or torch.compile, larger batches, a faster core for the engine's thread",
    ),
    device_steps.HOST_STALLED: BottleneckAdvice(
        "between two steps it waits for the host",
        "see what the engine's thread does between its steps (py-spy), or schedule one step ahead",
    ),
    device_steps.BACK_PRESSURED: BottleneckAdvice(
        "the host waits for room in the device's queue", _REDUCE_GPU_WORK
    ),
}


class DeviceBottleneck(NamedTuple):
    """`requests` of the `timed` ones had this as the limit of this stage: more than had any other."""

    stage: str
    bottleneck: str
    requests: int
    timed: int

    @property
    def advice(self) -> BottleneckAdvice:
        """What that means, and what to change."""
        return BOTTLENECK_ADVICE[self.bottleneck]


def find_device_bottlenecks(records: Sequence[RequestRecord]) -> list[DeviceBottleneck]:
    """Of each stage of which a device said so, those with most of its time first; nothing where none was timed."""
    limits: dict[str, Counter[str]] = {}
    spent: defaultdict[str, float] = defaultdict(float)
    for stage in [stage for record in records for stage in record.stages]:
        limit, duration = map(stage.attributes.get, (semconv.DEVICE_BOTTLENECK, semconv.DEVICE_DURATION))
        if limit and isinstance(duration, float):
            limits.setdefault(stage.name, Counter())[str(limit)] += 1
            spent[stage.name] += duration
    found = [DeviceBottleneck(name, *most.most_common(1)[0], most.total()) for name, most in limits.items()]
    return sorted(found, key=lambda one: -spent[one.stage])
