"""TODO events."""

from otel_infer.ringbuffer.events.codec import *
from otel_infer.ringbuffer.events.devices import *
from otel_infer.ringbuffer.events.processes import *
from otel_infer.ringbuffer.events.requests import *
from otel_infer.ringbuffer.events.steps import *
