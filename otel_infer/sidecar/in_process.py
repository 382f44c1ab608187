"""In-process mode: the sidecar's pipeline as a thread of the server. The compatible, costlier way.

It is used when a tracer provider is given, when no child process or shared memory is available, and in tests.

Only the thread runs the pipeline, because a provider may have a processor that sends each span before it
returns. A flush and the exit wait for the thread, but not longer than their time.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import uuid
from typing import TYPE_CHECKING

from otel_infer import _clock, semconv
from otel_infer.config.environment import Config
from otel_infer.config.resource import find_given_instance_id
from otel_infer.export.provider import TracerProviderExporter
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.instance_claim import InstanceClaim
from otel_infer.sidecar.main import make_pipeline
from otel_infer.sidecar.notices import RefusalReporter
from otel_infer.sidecar.pipeline import CYCLE_NS, Pipeline
from otel_infer.tracing import request_span

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

log = logging.getLogger("otel_infer")

FLUSH_S = 5.0
"""Longest wait at exit for the thread, and in the thread for the senders."""
CLOSE_S = 2.5
"""Added to that wait: the senders' threads end, and metrics are sent after the spans."""

# A child forked during an import on our thread could never import that module, so a fork waits.
_import_lock = threading.RLock()
os.register_at_fork(
    before=_import_lock.acquire, after_in_parent=_import_lock.release, after_in_child=_import_lock.release
)

_PRELOADED_MODULES = (
    "netrc",
    "encodings.idna",
)  # requests 2.34 `get_netrc_auth`; socket.getaddrinfo


class InProcessReader(threading.Thread):
    """Thread that reads the rings of this process.

    It passes spans to the provider, or exports them itself if there is none.
    """

    def __init__(
        self,
        settings: Config,
        arena: MemoryArena,
        provider: TracerProvider | None,
        resource: dict[str, Value],
    ) -> None:
        super().__init__(name="otel_infer", daemon=True)
        self._resource = resource
        self._arena, self._settings, self._provider = arena, settings, provider
        self._rings = MergedReader()
        self._first_cycle_done = threading.Event()
        self._condition = threading.Condition()
        self._flushes_requested = self._flushes_done = self._refused_before = 0
        self._stopping = self._ended = self._closed = False
        self._exit_deadline = 0
        self._pid = os.getpid()
        self._built_pipeline: Pipeline | None = None
        self._refusals: RefusalReporter | None = None
        self._claim: InstanceClaim | None = None

    @property
    def _pipeline(self) -> Pipeline:
        """Returns the pipeline, created on the thread, because its imports would delay a request."""
        if self._built_pipeline is None:
            with _import_lock:
                for name in _PRELOADED_MODULES:
                    importlib.import_module(name)
                pipeline = self._built_pipeline = self._build_pipeline()
                self._refusals = RefusalReporter(
                    pipeline.delivery.describe_refusals, lambda lines: log.warning("; ".join(lines))
                )
        return self._built_pipeline

    def start(self) -> None:
        """Starts the thread, and makes the interpreter's exit wait for its first cycle.

        Since Python 3.12 no thread can be started once the interpreter exits, but a sender needs one. The
        wait covers a program that ends before its senders exist.
        """
        super().start()
        with contextlib.suppress(Exception):
            threading._register_atexit(self._wait_for_first_cycle)  # type: ignore[attr-defined]

    def _wait_for_first_cycle(self) -> None:
        if self._pid == os.getpid():
            self._exit_deadline = _clock.now() + int(FLUSH_S * 1e9)
            self._first_cycle_done.wait(FLUSH_S)

    def run(self) -> None:
        try:
            self._run_cycles()
        except Exception as error:
            log.error(
                "export stopped after an internal error: %s: %s; the server continues without telemetry",
                type(error).__name__,
                error,
            )
        finally:
            self._first_cycle_done.set()
            with self._condition:
                self._ended = True
                self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Exports everything that has ended.

        Returns False if `timeout` (s) was not enough, or if a receiver refused something since the last
        flush.
        """
        deadline = _clock.now() + int(timeout * 1e9)
        if not self.is_alive():
            return False
        with self._condition:
            self._flushes_requested += 1
            number = self._flushes_requested
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._flushes_done >= number or self._ended, timeout)
            if self._flushes_done < number:
                return False
        if not self._pipeline.is_sent(max(deadline - _clock.now(), 0) / 1e9):
            return False
        delivery, refused_before = self._pipeline.delivery, self._refused_before
        self._refused_before = delivery.count_refused()
        return delivery.is_accepted(refused_before)

    def close(self) -> None:
        """Flushes and stops; returns after about `FLUSH_S`, even if the thread has not ended by then.

        A second call does nothing, nor does a call in a forked child, where the thread does not run.
        """
        if self._closed or self._pid != os.getpid() or not self.is_alive():
            return
        self._closed = True
        now = _clock.now()
        deadline = self._exit_deadline or now + int(FLUSH_S * 1e9)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: self._ended, max(deadline - now, 0) / 1e9 + CLOSE_S)
        if not done:
            log.warning("the last requests were not exported within %.0f s and are lost", FLUSH_S)

    def _run_cycles(self) -> None:
        self._run_cycle()
        self._first_cycle_done.set()
        while not self._wait_for_work():
            self._run_cycle()
            if self._flushes_done < self._flushes_requested:
                self._serve_flush()
        self._add_rings()
        self._pipeline.run_cycle(_clock.now(), final=True)
        self._pipeline.close(FLUSH_S)
        if self._refusals is not None:
            self._refusals.report_new()
        if self._claim is not None:
            self._claim.release()

    def _wait_for_work(self) -> bool:
        """Waits for the next cycle, a flush or the end; returns whether it is the end."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._stopping or self._flushes_done < self._flushes_requested, CYCLE_NS / 1e9
            )
            return self._stopping

    def _serve_flush(self) -> None:
        """Exports what was recorded before the flush was requested; the senders may not be done then."""
        number = self._flushes_requested
        self._run_cycle()
        self._run_cycle()
        self._pipeline.export_without_grace(_clock.now())
        self._pipeline.flush(0.0)
        with self._condition:
            self._flushes_done = number
            self._condition.notify_all()

    def _build_pipeline(self) -> Pipeline:
        if self._provider is None:
            resource = {semconv.SERVICE_INSTANCE_ID: str(uuid.uuid4()), **self._resource}
            given = find_given_instance_id(resource)
            if given:
                self._claim = InstanceClaim(given)
                resource[semconv.SERVICE_INSTANCE_ID] = self._claim.id
            return make_pipeline(self._settings, resource, self._rings, show=False)
        exporter = TracerProviderExporter(
            self._provider.get_tracer("otel_infer"),
            request_span.pending_provider_spans.pop,
            self._settings.latency_attributes,
            self._rings.ledger,
        )
        return Pipeline(self._settings, self._rings, [exporter], None, {}, None, _clock.read_clocks()[1])

    def _run_cycle(self) -> None:
        self._add_rings()
        self._pipeline.run_cycle(_clock.now())
        if self._refusals is not None:
            self._refusals.report_new()

    def _add_rings(self) -> None:
        for name, memory in list(self._arena.buffers):
            self._rings.add_ring(name, memory, _clock.now())
