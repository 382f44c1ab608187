"""What is timed on a device, and the fact that it becomes."""

from __future__ import annotations

from otel_infer import facts
from otel_infer.facts import LONGEST_NS, UNKNOWN_NS
from otel_infer.gpu.timeline import Timed
from otel_infer.ring.recorder import recorder


class StepWork:
    """A step of an engine in process `pid`, or the part of it that the worker of this rank does. `log`: as in `StepExecuted`."""

    __slots__ = ("_of",)

    def __init__(self, engine: str, pid: int, rank: int, step: int, log: int) -> None:
        self._of = engine, pid, rank, step, log

    def on_device(self, timed: Timed) -> None:
        started_at, ended_at, launched, queued, gap, bound = timed
        lengths = _told(launched), _told(queued), _told(gap), _told(bound)
        recorder.stated(facts.StepTimed(ended_at, started_at, *self._of, *lengths))

    def on_host(self, begun_at: int, launched_at: int) -> None:
        recorder.stated(facts.StepExecuted(launched_at, begun_at, *self._of))


def _told(length: int) -> int:
    return UNKNOWN_NS if length < 0 else min(length, LONGEST_NS)


class StageWork:
    """What is launched in a stage, for one request or for several together."""

    __slots__ = ("_handles", "_stage")

    def __init__(self, stage: str, *handles: int) -> None:
        self._stage, self._handles = stage, handles

    def on_device(self, timed: Timed) -> None:
        started_at, ended_at, *lengths, bound = timed
        launched, queued = map(_told, lengths[:2])
        fact = facts.StageTimed(ended_at, started_at, self._stage, launched, queued, _told(bound))
        for handle in self._handles:
            recorder.state(handle, fact)

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """The stage itself says that."""
