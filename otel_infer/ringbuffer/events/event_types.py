"""The types of all events, in the order of the modules that define them."""

from __future__ import annotations

from typing import Any

from otel_infer.ringbuffer.events.devices import (
    GpuClocksThrottled,
    MemoryRefused,
    MemorySeen,
    StageTimed,
    StepTimed,
)
from otel_infer.ringbuffer.events.processes import (
    EngineSeen,
    EventsLost,
    HooksReported,
    LiveListed,
    LiveRecovered,
    MarkSeen,
    ModuleImported,
    PauseSeen,
    PhaseBegan,
    PhaseEnded,
    ProcessDied,
    ProcessLeft,
    ProcessSeen,
    ProcessStarted,
    ThreadSeen,
)
from otel_infer.ringbuffer.events.requests import (
    AttributeSet,
    BytesMoved,
    CacheHeld,
    EngineFinished,
    ExchangeEnded,
    FirstTokenSent,
    HttpDescribed,
    LinkDescribed,
    NameUpdated,
    PrefixRead,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestReceived,
    RequestScheduled,
    RequestSubmitted,
    ResponseStarted,
    SpanEventAdded,
    SpanLinked,
    SpanUnseen,
    StageEnded,
    StateCarried,
    TokenReached,
    TokensDrafted,
)
from otel_infer.ringbuffer.events.steps import (
    BlocksSized,
    StepDone,
    StepExecuted,
    StepScheduled,
    StepsLost,
    WaitingSeen,
)

_REQUEST_EVENTS: tuple[type[Any], ...] = (
    RequestArrived, StageEnded, BytesMoved, CacheHeld, RequestSubmitted, RequestReceived, RequestScheduled,
    RequestPreempted, PrefixRead, TokensDrafted, TokenReached, FirstTokenSent, ResponseStarted, EngineFinished,
    RequestEnded, ExchangeEnded, AttributeSet, SpanEventAdded, SpanLinked, LinkDescribed, NameUpdated,
    StateCarried, SpanUnseen, HttpDescribed,
)  # fmt: skip
_STEP_EVENTS: tuple[type[Any], ...] = (
    StepScheduled, StepDone, StepExecuted, WaitingSeen, BlocksSized, StepsLost,
)  # fmt: skip
_PROCESS_EVENTS: tuple[type[Any], ...] = (
    HooksReported, PauseSeen, MarkSeen, ProcessStarted, ModuleImported, PhaseBegan, PhaseEnded, ProcessLeft,
    EventsLost, ProcessSeen, EngineSeen, ThreadSeen, ProcessDied, LiveListed, LiveRecovered,
)  # fmt: skip
_DEVICE_EVENTS: tuple[type[Any], ...] = (
    StepTimed, StageTimed, MemorySeen, MemoryRefused, GpuClocksThrottled,
)  # fmt: skip
EVENT_TYPES: tuple[type[Any], ...] = (*_REQUEST_EVENTS, *_STEP_EVENTS, *_PROCESS_EVENTS, *_DEVICE_EVENTS)
"""Every type of event that a tape may hold."""
