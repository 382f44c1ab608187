"""Work that is timed on a device, and the events that record its time."""

from __future__ import annotations

from otel_infer.gpu.timeline import DeviceInterval
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import encode_ns
from otel_infer.ringbuffer.recorder import recorder


class StepWork:
    """A step of an engine in process `pid`, or this rank's part of it. `ring_number`: as in `StepExecuted`."""

    __slots__ = ("_step_ids",)

    def __init__(self, engine: str, pid: int, rank: int, step: int, ring_number: int) -> None:
        self._step_ids = engine, pid, rank, step, ring_number

    def on_device(self, interval: DeviceInterval) -> None:
        started_at, ended_at, launched, queued, gap, bound = interval
        lengths = encode_ns(launched), encode_ns(queued), encode_ns(gap), encode_ns(bound)
        recorder.record_process(events.StepTimed(ended_at, started_at, *self._step_ids, *lengths))

    def on_host(self, begun_at: int, launched_at: int) -> None:
        recorder.record_process(events.StepExecuted(launched_at, begun_at, *self._step_ids))


class StageWork:
    """The launches of a stage, for one request or several together."""

    __slots__ = ("_handles", "_stage")

    def __init__(self, stage: str, *handles: int) -> None:
        self._stage, self._handles = stage, handles

    def on_device(self, interval: DeviceInterval) -> None:
        started_at, ended_at, *lengths, bound = interval
        launched, queued = map(encode_ns, lengths[:2])
        event = events.StageTimed(ended_at, started_at, self._stage, launched, queued, encode_ns(bound))
        for handle in self._handles:
            recorder.record(handle, event)

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Records nothing, because the stage itself has these times."""
