"""What is timed on a device, and the fact that it becomes."""

from __future__ import annotations

from otel_infer.gpu.timeline import Timed
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import told_ns
from otel_infer.ringbuffer.recorder import recorder


class StepWork:
    """A step of an engine in process `pid`, or the part of it that the worker of this rank does. `log`: as in `StepExecuted`."""

    __slots__ = ("_of",)

    def __init__(self, engine: str, pid: int, rank: int, step: int, log: int) -> None:
        self._of = engine, pid, rank, step, log

    def on_device(self, timed: Timed) -> None:
        started_at, ended_at, launched, queued, gap, bound = timed
        lengths = told_ns(launched), told_ns(queued), told_ns(gap), told_ns(bound)
        recorder.stated(events.StepTimed(ended_at, started_at, *self._of, *lengths))

    def on_host(self, begun_at: int, launched_at: int) -> None:
        recorder.stated(events.StepExecuted(launched_at, begun_at, *self._of))


class StageWork:
    """What is launched in a stage, for one request or for several together."""

    __slots__ = ("_handles", "_stage")

    def __init__(self, stage: str, *handles: int) -> None:
        self._stage, self._handles = stage, handles

    def on_device(self, timed: Timed) -> None:
        started_at, ended_at, *lengths, bound = timed
        launched, queued = map(told_ns, lengths[:2])
        fact = events.StageTimed(ended_at, started_at, self._stage, launched, queued, told_ns(bound))
        for handle in self._handles:
            recorder.state(handle, fact)

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """The stage itself says that."""
