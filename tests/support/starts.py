"""Process starts, written as events, and the records and spans that result."""

from __future__ import annotations

from typing import Any

from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.process import StartRecord
from otel_infer.export.spans.exporter import OtlpSpanExporter
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded
from tests.support.story import AFTER_ALL_EVENTS, BASE, PROCESS, WALL, BatchCollector, Story, ids, ns

BEGUN = ids("start")


class Starting(Story):
    """A process that becomes ready, or fails to."""

    def __init__(self, concluded_at: int = 0, role: str = "server", parent: bytes = bytes(8)) -> None:
        super().__init__()
        self.add_event(PROCESS, 0, events.ProcessSeen(0, 77, role, concluded_at))
        self.add_event(PROCESS, 0, events.ProcessStarted(BASE, WALL, *BEGUN, parent))

    def imported(self, at: float, module: str, since: float | None = None) -> None:
        started_at = 0 if since is None else ns(since)
        self.add_event(PROCESS, 0, events.ModuleImported(ns(at), module, started_at))

    def begins(self, at: float, phase: str) -> None:
        self.add_event(PROCESS, 0, events.PhaseBegan(ns(at), phase))

    def loaded(self, since: float, until: float, model: str = "toy", error: str = "") -> None:
        self.begins(since, events.WEIGHTS)
        ended = events.PhaseEnded(ns(until), ns(since), events.WEIGHTS, "transformers", model, error)
        self.add_event(PROCESS, 0, ended)

    def ready(self, since: float, until: float, by: str = events.BY_LIFESPAN, error: str = "") -> None:
        if by == events.BY_LIFESPAN:
            self.begins(since, events.READY)
        self.add_event(PROCESS, 0, events.PhaseEnded(ns(until), ns(since), events.READY, by, "", error))

    def left(self, at: float, error: str = "") -> None:
        self.add_event(PROCESS, 0, events.ProcessLeft(ns(at), error))

    def died(self, at: float) -> None:
        self.add_event(PROCESS, 0, events.ProcessDied(ns(at)))

    def starts(self) -> list[StartRecord]:
        assembler = Assembler()
        assembler.feed_events(self.in_order())
        return assembler.drain_starts(AFTER_ALL_EVENTS)

    def start_spans(self) -> list[dict[str, Any]]:
        """Returns the start spans as a receiver decodes them."""
        batches = BatchCollector()
        exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
        for record in self.starts():
            exporter.export_start(record)
        exporter.flush(0)
        return [span for body in batches.bodies() for span in decoded("traces", body)]

    def outcome(self) -> tuple[str, str, float]:
        """Returns (ready by, error type, ms) of the only start."""
        (record,) = self.starts()
        return record.ready_by, record.error_type, record.duration_ns / 1e6


def server() -> Starting:
    """Returns a server that imports, loads, warms up in its lifespan, and serves."""
    story = Starting()
    story.imported(900, "uvicorn.config")
    story.imported(2000, "torch")
    story.imported(3000, "transformers.generation.utils")
    story.loaded(3500, 7000)
    story.ready(7200, 9000)
    story.paused(7300, 8300, "compile")
    story.paused(8400, 8900, "capture")
    story.paused(5000, 5100, "gc")
    return story
