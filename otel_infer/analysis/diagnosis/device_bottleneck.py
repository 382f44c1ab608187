"""Finds what limited the device in each stage of many requests, and what makes it faster. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine import device_steps
from otel_infer.assembly.records.request import RequestRecord


class BottleneckAdvice(NamedTuple):
    """The meaning of a bottleneck, and what to change."""

    meaning: str
    change: str


_REDUCE_GPU_WORK = (
    "a faster GPU, smaller or quantized weights, or another replica: the host is not the bottleneck"
)
SYNC_CHECK = 'torch.cuda.set_sync_debug_mode("warn")'
"""Call in the server with which torch warns at waits for the device, but no silently staged copies."""
BOTTLENECK_ADVICE = {
    device_steps.GPU_BOUND: BottleneckAdvice("the device is busy", _REDUCE_GPU_WORK),
    device_steps.LAUNCH_OR_SYNC: BottleneckAdvice(
        "launching takes the host as long as the device: kernel by kernel, or with a wait for a result "
        "(`.item()`, `nonzero()`, a copy from pageable memory)",
        f"see which: {SYNC_CHECK} warns at each wait. With waits: remove them or move them after the step; the device may "
        "be full. Without: CUDA graphs or torch.compile, larger batches, a faster core for the engine's thread",
    ),
    device_steps.HOST_STALLED: BottleneckAdvice(
        "the device waits for the host between two steps",
        "check what the engine's thread does between steps (py-spy), or schedule one step ahead",
    ),
    device_steps.BACK_PRESSURED: BottleneckAdvice(
        "the host waits while it launches, for space in the device's queue or for a result: the device is behind",
        _REDUCE_GPU_WORK,
    ),
}


class DeviceBottleneck(NamedTuple):
    """The most frequent bottleneck of a stage: `requests` of the `timed` ones had it."""

    stage: str
    bottleneck: str
    requests: int
    timed: int

    @property
    def advice(self) -> BottleneckAdvice:
        """The meaning of the bottleneck, and what to change."""
        return BOTTLENECK_ADVICE[self.bottleneck]

    def to_sentence(self) -> str:
        """Returns the bottleneck, in how many requests, and its meaning."""
        found = f"the device, in {self.stage}: {self.bottleneck} in {self.requests} of {self.timed}"
        return f"{found}: {self.advice.meaning}"


def find_device_bottlenecks(records: Sequence[RequestRecord]) -> list[DeviceBottleneck]:
    """Returns the bottleneck of each stage that a device timed, the stage with the most device time first.

    Empty where no stage was timed.
    """
    counts: dict[str, Counter[str]] = {}
    spent: defaultdict[str, float] = defaultdict(float)
    for stage in [stage for record in records for stage in record.stages]:
        bottleneck, duration = map(stage.attributes.get, (semconv.DEVICE_BOTTLENECK, semconv.DEVICE_DURATION))
        if bottleneck and isinstance(duration, float):
            counts.setdefault(stage.name, Counter())[str(bottleneck)] += 1
            spent[stage.name] += duration
    bottlenecks = [
        DeviceBottleneck(name, *counter.most_common(1)[0], counter.total())
        for name, counter in counts.items()
    ]
    return sorted(bottlenecks, key=lambda item: -spent[item.stage])
