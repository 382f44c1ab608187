"""The types of all events, in the order of the modules that define them."""

from __future__ import annotations

from typing import Any

from otel_infer.ringbuffer.events.devices import DEVICE_EVENTS
from otel_infer.ringbuffer.events.exchanges import EXCHANGE_EVENTS
from otel_infer.ringbuffer.events.processes import PROCESS_EVENTS
from otel_infer.ringbuffer.events.requests import REQUEST_EVENTS
from otel_infer.ringbuffer.events.steps import STEP_EVENTS

EVENT_TYPES: tuple[type[Any], ...] = (
    *REQUEST_EVENTS,
    *EXCHANGE_EVENTS,
    *STEP_EVENTS,
    *PROCESS_EVENTS,
    *DEVICE_EVENTS,
)
"""Every type of event that a tape may hold."""
