"""Reads back what integrations record in a test: rings in memory, and the assembler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from otel_infer import _clock
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, span_ids
from otel_infer.tracing.context import attach, detach
from tests.support.trees import WAITS


class Recording:
    """Records events from its creation to `stop`."""

    def __init__(self) -> None:
        self.arena = MemoryArena()
        self._rings, self._assembler = MergedReader(), Assembler()
        request_span.span_factory = span_ids.SdkSpanFactory(ALWAYS_ON, RandomIdGenerator(), span_ids.Limits())
        recorder.start(lambda: self.arena, lambda: None, lambda reason: None)

    def records(self) -> list[RequestRecord]:
        """Returns the requests that ended since the last call, in order of their ends."""
        self._assembler.feed_events(self._poll(now := _clock.now()))
        return self._assembler.drain_records(now + GRACE_NS)

    def events(self) -> list[Any]:
        """Returns the events that were recorded since the last call, which `records` does not see then."""
        return [recorded.event for recorded in self._poll(_clock.now())]

    def _poll(self, now: int) -> list[RecordedEvent]:
        for name, memory in self.arena.buffers:
            self._rings.add_ring(name, memory, now)
        return self._rings.poll(now, final=True)

    @property
    def events_lost(self) -> int:
        """Returns the events that the assembler counted as lost, as of the last `records`."""
        return self._assembler.events_lost

    @property
    def in_flight(self) -> int:
        """Returns the number of open requests, as of the last `records`."""
        return len(self._assembler.open_requests)

    def stop(self) -> None:
        """Stops recording events."""
        recorder.stop()
        request_span.span_factory = None


@contextmanager
def record_with(*instrumentors: Instrumentor) -> Iterator[Recording]:
    """Records with the hooks of these instrumentors, outside of any context."""
    for instrumentor in instrumentors:
        instrumentor.install()
        assert instrumentor.status.drift is None
    recording = Recording()
    token = attach(Context())
    try:
        yield recording
    finally:
        detach(token)
        recording.stop()
        for instrumentor in reversed(instrumentors):
            instrumentor.remove()


def stages_of(record: RequestRecord) -> list[str]:
    """Returns the names of the record's stages, in the order in which they began, without waits of a busy machine."""
    stages = sorted(record.stages, key=lambda stage: stage.started_at)
    return [stage.name for stage in stages if stage.name not in WAITS]
