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

    count: int = 0


class PythonSteps:
    """The fields of a scheduler's steps that compiled code reads and writes as well."""

    scheduler: Any = None
    ring: Any = None
    hook: Any = None
    pid: int
    free_blocks: Any = None
    removed: list[str]
    removals: list[RequestRemoval]
    size: int
    scheduled: int = 0
    done: int = 0
    waiting: int = 0
    total_blocks: int
    report_due_at: int
    single_tokens: bool
    ended_early: bool = False


if TYPE_CHECKING or native is None:
    Counter, Steps = PythonCounter, PythonSteps
else:
    Counter, Steps = native.EventCounter, native.SchedulerSteps
