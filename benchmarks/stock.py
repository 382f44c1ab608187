"""Makes the same spans with the stock SDK: a span per token with our two attributes, and a batch span processor with defaults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine import Engine, Sequence
from benchmarks.ours import HOOKED
from benchmarks.receiver import STEP
from otel_infer import semconv


class Stock:
    """A provider of the SDK with OTLP over HTTP, as in its documentation; with `sampled` False, ALWAYS_OFF."""

    def __init__(self, endpoint: str, sampled: bool = True) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON

        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        self.provider = TracerProvider(DEFAULT_ON if sampled else ALWAYS_OFF, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
        self._tracer = self.provider.get_tracer("stock")
        self.steps_made = 0

    def start_request(self) -> tuple[Any, Any]:
        """Returns a request span and the context of its children."""
        from opentelemetry import trace

        span = self._tracer.start_span("chat simulated")
        return span, trace.set_span_in_context(span)

    def make_step_spans(self, contexts: list[Any], number: int, began: int, ended: int) -> None:
        """Makes a span for each of these requests."""
        start, size = self._tracer.start_span, len(contexts)
        for context in contexts:
            attributes = {semconv.STEP_ID: number, semconv.BATCH_SIZE: size}
            start(STEP, context=context, attributes=attributes, start_time=began).end(ended)
        self.steps_made += size

    def flush(self) -> None:
        """Waits until all spans that were not dropped are sent."""
        self.provider.force_flush(60_000)

    def close(self) -> None:
        """Ends the exporting thread."""
        self.provider.shutdown()


class StockBinding:
    """The stock SDK on the simulated engine."""

    def __init__(self, engine: Engine, stock: Stock) -> None:
        self.engine, self.stock = engine, stock
        self._open: set[Sequence] = set()
        self._step = self._began = 0

    def switch_on(self) -> None:
        """Updates the open requests, then hooks the engine."""
        engine = self.engine
        engine.wait_for_front()
        present = {*engine.running, *engine.arrivals}
        for sequence in self._open - present:
            self._end(sequence)
        for sequence in present - self._open:
            self._start(sequence)
        for name in HOOKED:
            setattr(engine, name, getattr(self, name)(getattr(engine, name)))

    def switch_off(self) -> None:
        """Restores the bare engine."""
        self.engine.wait_for_front()
        for name in HOOKED:
            delattr(self.engine, name)

    def end_requests(self) -> int:
        """Ends the requests in flight. Returns the number of step spans since the first `switch_on`."""
        self.engine.wait_for_front()
        for sequence in list(self._open):
            self._end(sequence)
        made, self.stock.steps_made = self.stock.steps_made, 0
        return made

    def schedule_batch(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        """Hooks `Engine.schedule_batch`: keeps the start of the step."""

        def schedule_batch() -> list[Sequence]:
            running = original()
            self._began = time.time_ns()
            return running

        return schedule_batch

    def update_batch(self, original: Callable[[], Sequence | None]) -> Callable[[], Sequence | None]:
        """Hooks `Engine.update_batch`: makes the spans of the step."""

        def update_batch() -> Sequence | None:
            contexts = [member.live[1] for member in self.engine.running]
            finished = original()
            self._step += 1
            self.stock.make_step_spans(contexts, self._step, self._began, time.time_ns())
            return finished

        return update_batch

    def admit_request(self, original: Callable[[], Sequence]) -> Callable[[], Sequence]:
        """Hooks `Engine.admit_request`: starts the span of the request."""

        def admit_request() -> Sequence:
            sequence = original()
            self._start(sequence)
            return sequence

        return admit_request

    def answer_request(self, original: Callable[[Sequence], None]) -> Callable[[Sequence], None]:
        """Hooks `Engine.answer_request`: ends the span of the request."""

        def answer_request(sequence: Sequence) -> None:
            original(sequence)
            self._end(sequence)

        return answer_request

    def _start(self, sequence: Sequence) -> None:
        sequence.live = self.stock.start_request()
        self._open.add(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._open.discard(sequence)
        sequence.live[0].end()
