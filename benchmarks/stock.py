"""The same spans made with the stock SDK: a span per token with the two attributes that ours have, a batch span
processor with its defaults, OTLP over HTTP to the same receiver."""

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
    """A provider of the SDK, as the documentation sets it up; not `sampled`: with the sampler that says no."""

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

    def request(self) -> tuple[Any, Any]:
        """A request span and the context of its children."""
        from opentelemetry import trace

        span = self._tracer.start_span("chat simulated")
        return span, trace.set_span_in_context(span)

    def step(self, contexts: list[Any], number: int, began: int, ended: int) -> None:
        """A span for each of these requests."""
        start, size = self._tracer.start_span, len(contexts)
        for context in contexts:
            attributes = {semconv.STEP_ID: number, semconv.BATCH_SIZE: size}
            start(STEP, context=context, attributes=attributes, start_time=began).end(ended)
        self.steps_made += size

    def flush(self) -> None:
        """Everything that was not dropped is with the receiver afterwards."""
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

    def put_on(self) -> None:
        """Catches up with what came and went meanwhile, then hooks the engine."""
        engine = self.engine
        engine.settle()
        here = {*engine.running, *engine.arrivals}
        for sequence in self._open - here:
            self._ended(sequence)
        for sequence in here - self._open:
            self._arrived(sequence)
        for name in HOOKED:
            setattr(engine, name, getattr(self, name)(getattr(engine, name)))

    def take_off(self) -> None:
        """The bare engine again."""
        self.engine.settle()
        for name in HOOKED:
            delattr(self.engine, name)

    def end_all(self) -> int:
        """Ends whoever is in flight; returns how many step spans were made since this was put on for the first time."""
        self.engine.settle()
        for sequence in list(self._open):
            self._ended(sequence)
        made, self.stock.steps_made = self.stock.steps_made, 0
        return made

    def schedule(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        """Notes when the step began."""

        def schedule() -> list[Sequence]:
            running = original()
            self._began = time.time_ns()
            return running

        return schedule

    def update(self, original: Callable[[], Sequence | None]) -> Callable[[], Sequence | None]:
        """Makes the step's spans."""

        def update() -> Sequence | None:
            contexts = [member.live[1] for member in self.engine.running]
            finished = original()
            self._step += 1
            self.stock.step(contexts, self._step, self._began, time.time_ns())
            return finished

        return update

    def admit(self, original: Callable[[], Sequence]) -> Callable[[], Sequence]:
        """Starts the request's span."""

        def admit() -> Sequence:
            sequence = original()
            self._arrived(sequence)
            return sequence

        return admit

    def answer(self, original: Callable[[Sequence], None]) -> Callable[[Sequence], None]:
        """Ends the request's span."""

        def answer(sequence: Sequence) -> None:
            original(sequence)
            self._ended(sequence)

        return answer

    def _arrived(self, sequence: Sequence) -> None:
        sequence.live = self.stock.request()
        self._open.add(sequence)

    def _ended(self, sequence: Sequence) -> None:
        self._open.discard(sequence)
        sequence.live[0].end()
