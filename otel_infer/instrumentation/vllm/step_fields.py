"""The fields of a scheduler's steps and of a counter that compiled code (`_scheduler.c`) reads and writes as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from otel_infer.ringbuffer.native import native


class RequestRemoval(NamedTuple):
    """A request that left while steps were in flight: those after `done`, until `scheduled`."""

    request_id: str
    done: int
    scheduled: int


class PythonCounter:
    """The field of a counter that compiled code increments as well."""

    __slots__ = ("count",)

    count: int


class PythonSteps:
    """The fields of a scheduler's steps that compiled code reads and writes as well."""

    __slots__ = (
        "done",
        "ended_early",
        "free_blocks",
        "hook",
        "pid",
        "removals",
        "removed",
        "report_due_at",
        "ring",
        "scheduled",
        "scheduler",
        "single_tokens",
        "size",
        "total_blocks",
        "waiting",
    )

    scheduler: Any
    ring: Any
    hook: Any
    pid: int
    free_blocks: Any
    removed: list[str]
    removals: list[RequestRemoval]
    size: int
    scheduled: int
    done: int
    waiting: int
    total_blocks: int
    report_due_at: int
    single_tokens: bool
    ended_early: bool


if TYPE_CHECKING:
    Counter = PythonCounter
    Steps = PythonSteps
else:
    Counter = PythonCounter if native is None else native.EventCounter
    Steps = PythonSteps if native is None else native.SchedulerSteps
