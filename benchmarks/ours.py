"""otel_infer on the simulated engine, the way an integration would put it there, and otel_infer pointed at a receiver."""

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
HOOKED = ("schedule", "update", "admit", "answer")

_packed_of = attrgetter("packed")


class Exporting:
    """otel_infer with the real sidecar, for as long as `with` lasts. Every step of every request is exported, unless `steps`
    (OTEL_INFER_STEPS) says otherwise. `metrics`: they are sent as well, as they are by default."""

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
            raise RuntimeError("the sidecar was not started; `otel-infer doctor` says why")
        self.pid: int = installation.sidecar.pid
        if not otel_infer.flush(30):
            raise RuntimeError("the sidecar does not answer")
        _, others = machine.cores()
        machine.pin_process(self.pid, others)

    def flush(self) -> None:
        """Everything stated so far is with the receiver afterwards."""
        if not otel_infer.flush(60):
            raise RuntimeError("the sidecar did not get everything sent within a minute")

    def __enter__(self) -> Exporting:
        return self

    def __exit__(self, *_: object) -> None:
        sidecar = installation.sidecar
        otel_infer.uninstrument()
        if sidecar is not None:
            sidecar.wait(30)


class Binding:
    """Our hooks on one engine. `put_on` and `take_off` change what the engine calls: off is the bare engine.

    Not `sampled`: every request comes from a caller who does not sample.
    """

    def __init__(self, engine: Engine, sampled: bool = True) -> None:
        self.engine, self._around = engine, None if sampled else _unsampled()
        log = recorder.acquire_batch_writer(ENGINE)
        if log is None:
            raise RuntimeError("no step log to be had")
        self.log: BatchWriter = log
        self.hook = Hook("benchmarks.engine:Engine")
        self._left: list[Sequence] = []
        self._open: set[Sequence] = set()
        self._seen: list[range] = []
        self._step = 0
        # Each member carries its handle, as the states of transformers do.
        self.log.pack_handles = lambda members: b"".join(map(_packed_of, members))

    def put_on(self) -> None:
        """Catches up with what came and went meanwhile, then hooks the engine."""
        engine = self.engine
        engine.settle()
        here = {*engine.running, *engine.arrivals}
        for sequence in self._open - here:
            self._finished(sequence)
            self._ended(sequence)
        for sequence in here - self._open:
            self._arrived(sequence)
        self._began = engine.steps + 1
        for name in HOOKED:
            setattr(engine, name, getattr(self, name)(getattr(engine, name)))

    def take_off(self) -> None:
        """The bare engine again."""
        self.engine.settle()
        self._seen.append(range(self._began, self.engine.steps + 1))
        for name in HOOKED:
            delattr(self.engine, name)

    def end_all(self) -> int:
        """Ends whoever is in flight; returns how many step spans there should be in all."""
        self.engine.settle()
        for sequence in list(self._open):
            self._ended(sequence)
        recorder.release_batch_writer(ENGINE, self.log)
        running = [(sequence.first, self.engine.steps) for sequence in self.engine.running]
        return sum(max(self._steps_between(*steps) - 1, 0) for steps in self.engine.answered + running)

    def schedule(self, original: Callable[[], list[Sequence]]) -> Callable[[], list[Sequence]]:
        """The hook on `Engine.schedule`."""
        engine, hook, log = self.engine, self.hook, self.log

        def schedule() -> list[Sequence]:
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

        return schedule

    def update(self, original: Callable[[], Sequence | None]) -> Callable[[], Sequence | None]:
        """The hook on `Engine.update`."""
        hook, log, engine = self.hook, self.log, self.engine

        def update() -> Sequence | None:
            finished = original()
            if hook.alive and recorder.active:
                try:
                    log.write_done(self._step, b"", engine.size)
                    if finished is not None:
                        self._finished(finished)
                except Exception as reason:
                    hook.mark_failed(reason)
            return finished

        return update

    def admit(self, original: Callable[[], Sequence]) -> Callable[[], Sequence]:
        """The hook on `Engine.admit`."""

        def admit() -> Sequence:
            sequence = original()
            self._arrived(sequence)
            return sequence

        return admit

    def answer(self, original: Callable[[Sequence], None]) -> Callable[[Sequence], None]:
        """The hook on `Engine.answer`."""

        def answer(sequence: Sequence) -> None:
            original(sequence)
            self._ended(sequence)

        return answer

    def _arrived(self, sequence: Sequence) -> None:
        request: Any = start.open_request(
            f"chat {MODEL}", owner=ENGINE, around=self._around, operation="chat", provider=ENGINE, model=MODEL
        )
        request.record_submitted(ENGINE, 1, 0, 0)
        request.record_event(events.RequestReceived(_clock.now()))
        sequence.live, sequence.packed = request, request.packed
        self._open.add(sequence)

    def _finished(self, sequence: Sequence) -> None:
        self._left.append(sequence)
        sequence.live.record_event(events.EngineFinished(_clock.now(), "length", 0))

    def _ended(self, sequence: Sequence) -> None:
        self._open.discard(sequence)
        sequence.live.close()

    def _steps_between(self, first: int, last: int) -> int:
        """The steps of these that we watched; the first of them is the request's prefill to us."""
        return sum(max(min(last + 1, seen.stop) - max(first, seen.start), 0) for seen in self._seen)


def _unsampled() -> Context:
    """A caller's context whose flags say 00."""
    caller = trace.SpanContext(1 << 100, 1 << 50, is_remote=True, trace_flags=trace.TraceFlags(0))
    return trace.set_span_in_context(trace.NonRecordingSpan(caller))
