"""Captures what a server would export, for tests of that server, without a collector or another process.

    from otel_infer.testing import capture

    def test_documents_are_reranked_before_generation():
        with capture() as captured:
            TestClient(app).post("/v1/chat/completions", json={...})
            (request,) = captured.requests()
            assert request.find_stage("rerank") is not None
            assert request.output_tokens == 8
            assert "rerank" in captured.tree()

As a pytest fixture:

    @pytest.fixture
    def captured():
        with capture() as captured:
            yield captured

Every step is captured: sampling and budgets of the environment do not apply. Nothing leaves the process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from otel_infer import _clock, semconv
from otel_infer.analysis.finish import finish_requests
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import SETTLED_NS
from otel_infer.config import environment
from otel_infer.export.otlp import Span
from otel_infer.export.sampling.tail_sampler import TailSampler
from otel_infer.export.spans import tree
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, span_ids

__all__ = ["Captured", "capture"]

LATE_EVENTS_S = 0.02
"""How long to wait for events of ended requests that other threads have not recorded yet."""

STEP_SPAN_NAMES = (semconv.SPAN_PREFILL_STEP, semconv.SPAN_DECODE_STEP)


class Captured:
    """The requests recorded since the capture began. It stays readable after the capture."""

    def __init__(self) -> None:
        self._arena = MemoryArena()
        self._rings, self._assembler = MergedReader(), Assembler()
        self._sampler = TailSampler("all", 0, keep_unsampled=True, ratio=False)
        self._records: list[RequestRecord] = []
        self._lock = threading.Lock()
        self._has_ended = False

    def requests(self, timeout: float = 2.0) -> list[RequestRecord]:
        """Returns all requests that have ended, in the order of their ends.

        A client may have its response shortly before the server records the end. So this waits for requests
        in flight, at most `timeout` s. If the server runs in the event loop of the test, use `await
        asyncio.to_thread(captured.requests)`. Instants of a record are monotonic ns and lengths are ns; see
        `otel_infer.assembly.records.request`.
        """
        deadline = time.monotonic() + timeout
        while self._count_in_flight() and time.monotonic() < deadline and not self._has_ended:
            time.sleep(0.005)
        if not self._has_ended:
            time.sleep(LATE_EVENTS_S)
        with self._lock:
            self._read_events()
            self._records += finish_requests(self._assembler, _clock.now() + SETTLED_NS)
            return list(self._records)

    def tree(self, times: bool = False, timeout: float = 2.0) -> str:
        """Returns the spans of all requests as an indented tree, one line per span, in order of time.

            POST /v1/chat/completions
              chat tiny
                tokenize
                prefill
                decode
                  decode step ×7

        Consecutive steps share a line with their count. `times`: adds start and end in ms after the request's
        arrival.
        """
        return "\n".join(
            line for record in self.requests(timeout) for line in self._render_spans(record, times)
        )

    def _count_in_flight(self) -> int:
        with self._lock:
            self._read_events()
            return sum(self._assembler.count_active().values())

    def _read_events(self) -> None:
        """Reads all events that were complete before the call.

        A reader returns what was complete at its previous poll, so it polls twice.
        """
        for _ in range(2):
            now = _clock.now()
            for name, memory in list(self._arena.buffers):
                self._rings.add_ring(name, memory, now)
            self._assembler.feed_events(self._rings.poll(now))

    def _drain_rings(self) -> None:
        """Keeps the rings from filling up. Called once a second while requests arrive."""
        if self._lock.acquire(blocking=False):
            try:
                self._read_events()
            finally:
                self._lock.release()

    def _end_capture(self) -> None:
        self.requests(timeout=0)
        self._has_ended = True

    def _render_spans(self, record: RequestRecord, times: bool) -> Iterator[str]:
        decision = self._sampler.make_decision(record)
        spans = tree.build_request_spans(record, decision)
        parents = {span.span_id: span for span in spans}
        decode = next((span for span in spans if span.name == semconv.SPAN_DECODE), None)
        lines = []
        for span in sorted(spans, key=lambda span: _find_tree_path(span, parents)):
            indent = "  " * (len(_find_tree_path(span, parents)) - 1)
            lines.append(
                indent
                + (_format_span(span, record) if times and span.name not in STEP_SPAN_NAMES else span.name)
            )
            if span is decode:
                lines += [f"{indent}  {semconv.SPAN_DECODE_STEP}"] * decision.steps
        for line, group in itertools.groupby(lines):
            if line.strip() in STEP_SPAN_NAMES:
                yield f"{line} ×{len(list(group))}"
            else:
                yield from group


def _find_tree_path(span: Span, parents: dict[bytes, Span]) -> list[tuple[int, int, bytes]]:
    """Returns the position of a span in its tree, from the root down."""
    parent = parents.get(span.parent_span_id)
    return [
        *(_find_tree_path(parent, parents) if parent is not None else []),
        (span.start, -span.end, span.span_id),
    ]


def _format_span(span: Span, record: RequestRecord) -> str:
    arrived_at = record.arrived_at + record.wall_offset
    return f"{span.name}  {(span.start - arrived_at) / 1e6:.1f}–{(span.end - arrived_at) / 1e6:.1f} ms"


@contextlib.contextmanager
def capture(*integrations: str) -> Iterator[Captured]:
    """Instruments this process for the duration of the `with`, and yields what is recorded.

    `integrations`: the names of the integrations to install; empty = all that `otel_infer.instrument()`
    installs. Servers and engines may be imported before or in the `with`. An application that was started
    before it is recorded as far as integrations can hook it then. Raises RuntimeError if this process is
    instrumented already.
    """
    if recorder.active:
        raise RuntimeError(
            "this process is instrumented already; call otel_infer.uninstrument() before capture()"
        )
    captured = Captured()
    installed: list[Instrumentor] = []
    recorder.start(lambda: captured._arena, captured._drain_rings, lambda reason: None, role=lambda: "test")
    request_span.span_factory = span_ids.SdkSpanFactory(ALWAYS_ON, RandomIdGenerator(), span_ids.Limits())
    try:
        settings, _ = environment.from_env_or_defaults()
        registry.configure_instrumentors(settings, _report_hooks)
        for integration in registry.load_instrumentors():
            if not integrations or integration.name in integrations:
                installed.append(integration)
                integration.install()
        yield captured
    finally:
        for integration in reversed(installed):
            integration.remove()
        try:
            captured._end_capture()
        finally:
            recorder.stop()
            request_span.span_factory = None


def _report_hooks(integration: Instrumentor) -> None:
    status = integration.status
    recorder.report_hooks(status.name, status.hooks_active, status.hooks_due)
