"""otel_infer with a receiver, and its hooks on the simulated engine, as an integration installs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context

import otel_infer
from benchmarks import machine
from benchmarks.engine import PROMPT, Engine, Sequence
from otel_infer import _clock
from otel_infer._bootstrap.install import installation
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

ENGINE = "simulator"
MODEL = "simulated"
HOOKED = ("schedule_batch", "update_batch", "admit_request", "answer_request")

_get_packed = attrgetter("packed")


class Exporting:
    """Runs otel_infer with the real sidecar. `steps` is OTEL_INFER_STEPS; `metrics`: metrics are sent too, as by default."""

    def __init__(
        self,
        endpoint: str,
        integrations: tuple[str, ...] = ("none of them",),
        steps: str = "all",
        metrics: bool = True,
    ) -> None:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            del os.environ[name]
        os.environ.update(
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_INFER_STEPS=steps, OTEL_INFER_MODE="sidecar"
        )
        if not metrics:
            os.environ["OTEL_METRICS_EXPORTER"] = "none"
        otel_infer.instrument(integrations=integrations)
        if not recorder.ensure_rings() or installation.sidecar is None:
            raise RuntimeError("the sidecar did not start; see `otel-infer doctor`")
        self.pid: int = installation.sidecar.pid
        if not otel_infer.flush(30):
            raise RuntimeError("the sidecar did not respond within 30 s")
        _, others = machine.choose_cores()
        machine.pin_process(self.pid, others)

    def flush(self) -> None:
        """Waits until all recorded events are sent."""
        if not otel_infer.flush(60):
            raise RuntimeError("the sidecar did not send everything within 60 s")

    def __enter__(self) -> Exporting:
        return self

    def __exit__(self, *_: object) -> None:
        sidecar = installation.sidecar
        otel_infer.uninstrument()
        if sidecar is not None:
            sidecar.wait(30)


class Binding:
    """Our hooks on one engine. With `sampled` False each request comes from a caller that does not sample."""

    def __init__(self, engine: Engine, sampled: bool = True) -> None:
        self.engine, self._around = engine, None if sampled else _make_unsampled_context()
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            raise RuntimeError("no step log is available")
        self.log: BatchWriter = log
        self.hook = Hook("benchmarks.engine:Engine")
        self._left: list[Sequence] = []
        self._open: set[Sequence] = set()
        self._hooked: list[range] = []
        self._step = 0
        # Each member carries its handle, as the states of transformers do.
        self.log.pack_handles = lambda members: b"".join(map(_get_packed, members))

    def switch_on(self) -> None:
        """Updates the open requests, then hooks the engine."""
        engine = self.engine
        engine.wait_for_front()
        present = {*engine.running, *engine.arrivals}
        for sequence in self._open - present:
            self._finish(sequence)
            self._end(sequence)
        for sequence in present - self._open:
            self._start(sequence)
        self._began = engine.steps + 1
        for name in HOOKED:
            setattr(engine, name, getattr(self, name)(getattr(engine, name)))

    def switch_off(self) -> None:
        """Restores the bare engine."""
        self.engine.wait_for_front()
        self._hooked.append(range(self._began, self.engine.steps + 1))
        for name in HOOKED:
            delattr(self.engine, name)

    def end_requests(self) -> int:
        """Ends the requests in flight. Returns the expected number of step spans."""
        self.engine.wait_for_front()
        for sequence in list(self._open):
            self._end(sequence)
        recorder.release_batch_writer(ENGINE, self.log)
        running = [(sequence.first, self.engine.steps) for sequence in self.engine.running]
        return sum(max(self._count_hooked(*steps) - 1, 0) for steps in self.engine.answered + running)

    def schedule_batch(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        """Hooks `Engine.schedule_batch`."""
        engine, hook, log = self.engine, self.hook, self.log

        def schedule_batch() -> list[Sequence]:
            running = original()
            if hook.alive and recorder.active:
                try:
                    size = len(running)
                    several = () if engine.total_tokens == size else ((running[-1], PROMPT),)
                    self._step = log.write_scheduled(running, self._left, b"", 0, 0, size, 0, several)
                    self._left = []
                except Exception as reason:
                    hook.mark_failed(reason)
            return running

        return schedule_batch

    def update_batch(self, original: Callable[[], Sequence | None]) -> Callable[[], Sequence | None]:
        """Hooks `Engine.update_batch`."""
        hook, log, engine = self.hook, self.log, self.engine

        def update_batch() -> Sequence | None:
            finished = original()
            if hook.alive and recorder.active:
                try:
                    log.write_done(self._step, b"", engine.size)
                    if finished is not None:
                        self._finish(finished)
                except Exception as reason:
                    hook.mark_failed(reason)
            return finished

        return update_batch

    def admit_request(self, original: Callable[[], Sequence]) -> Callable[[], Sequence]:
        """Hooks `Engine.admit_request`."""

        def admit_request() -> Sequence:
            sequence = original()
            self._start(sequence)
            return sequence

        return admit_request

    def answer_request(self, original: Callable[[Sequence], None]) -> Callable[[Sequence], None]:
        """Hooks `Engine.answer_request`."""

        def answer_request(sequence: Sequence) -> None:
            original(sequence)
            self._end(sequence)

        return answer_request

    def _start(self, sequence: Sequence) -> None:
        request: Any = start.open_request(
            f"chat {MODEL}", owner=ENGINE, around=self._around, operation="chat", provider=ENGINE, model=MODEL
        )
        request.record_submitted(ENGINE, 1, 0, 0)
        request.record_event(events.RequestReceived(_clock.now()))
        sequence.live, sequence.packed = request, request.packed
        self._open.add(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._left.append(sequence)
        sequence.live.record_event(events.EngineFinished(_clock.now(), "length", 0))

    def _end(self, sequence: Sequence) -> None:
        self._open.discard(sequence)
        sequence.live.close()

    def _count_hooked(self, first: int, last: int) -> int:
        """Returns the number of hooked steps in this interval. The first of them is recorded as the request's prefill."""
        return sum(max(min(last + 1, steps.stop) - max(first, steps.start), 0) for steps in self._hooked)


def _make_unsampled_context() -> Context:
    caller = trace.SpanContext(1 << 100, 1 << 50, is_remote=True, trace_flags=trace.TraceFlags(0))
    return trace.set_span_in_context(trace.NonRecordingSpan(caller))
