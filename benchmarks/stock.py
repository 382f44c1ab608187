"""The same spans made with the stock SDK: a span per token with the two attributes that ours have, a batch span
processor with its defaults, OTLP over HTTP to the same receiver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.engine import Engine, Sequence
from benchmarks.receiver import STEP
from otel_infer import semconv


class Stock:
    """A provider of the SDK, as the documentation sets it up."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
        self._tracer = self._provider.get_tracer("stock")
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
        self._provider.force_flush(60_000)

    def close(self) -> None:
        """Ends the exporting thread."""
        self._provider.shutdown()


class StockBinding:
    """The stock SDK on the simulated engine."""

    def __init__(self, engine: Engine, stock: Stock) -> None:
        self.engine, self.stock = engine, stock
        self._known: dict[Sequence, tuple[Any, Any]] = {}
        self._step = self._began = 0

    def put_on(self) -> None:
        """Catches up with what came and went meanwhile, then hooks the engine."""
        running = set(self.engine.running)
        for sequence in [known for known in self._known if known not in running]:
            self._ended(sequence)
        for sequence in self.engine.running:
            if sequence not in self._known:
                self._known[sequence] = self.stock.request()
        self.engine.schedule = self._scheduling(self.engine.schedule)  # type: ignore[method-assign]
        self.engine.update = self._updating(self.engine.update)  # type: ignore[method-assign]

    def take_off(self) -> None:
        """The bare engine again."""
        for name in ("schedule", "update"):
            delattr(self.engine, name)

    def end_all(self) -> None:
        """Whoever is in flight ends here."""
        for sequence in list(self._known):
            self._ended(sequence)

    def _scheduling(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        def schedule() -> list[Sequence]:
            running = original()
            for sequence in self.engine.admitted:
                self._known[sequence] = self.stock.request()
            self._began = time.time_ns()
            return running

        return schedule

    def _updating(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        def update() -> list[Sequence]:
            members = self.engine.running.copy()
            finished = original()
            self._step += 1
            known = self._known
            contexts = [known[member][1] for member in members]
            self.stock.step(contexts, self._step, self._began, time.time_ns())
            for sequence in finished:
                self._ended(sequence)
            return finished

        return update

    def _ended(self, sequence: Sequence) -> None:
        self._known.pop(sequence)[0].end()
