"""The in-process mode: the sidecar's rooms as a thread of the server. The compatible, costlier way.

Used when a tracer provider is given, when no child process or shared memory is to be had, and in tests.
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
from otel_infer.export.provider import TracerProviderExporter
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.writer import MemoryArena
from otel_infer.sidecar.main import make_pipeline
from otel_infer.sidecar.pipeline import CYCLE_NS, Pipeline
from otel_infer.tracing import request_span

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

log = logging.getLogger("otel_infer")

FLUSH_S = 5.0

# A child that is forked while a thread of ours imports could never import the same: so a fork waits for that.
_import_lock = threading.RLock()
os.register_at_fork(
    before=_import_lock.acquire, after_in_parent=_import_lock.release, after_in_child=_import_lock.release
)

_PRELOADED_MODULES = (
    "netrc",
    "encodings.idna",
)  # requests 2.34 `get_netrc_auth`; socket.getaddrinfo


class InProcessReader(threading.Thread):
    """Reads the rings of this process and hands spans to its provider, or sends them itself where there is none."""

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
        self._stopping, self._first_cycle_done = threading.Event(), threading.Event()
        self._cycle_lock = threading.Lock()
        self._closed = self._broken = False
        self._pid = os.getpid()
        self._built_pipeline: Pipeline | None = None

    @property
    def _pipeline(self) -> Pipeline:
        """Made on the thread, since what it imports takes longer than a request should wait."""
        if self._built_pipeline is None:
            with _import_lock:
                for name in _PRELOADED_MODULES:
                    importlib.import_module(name)
                self._built_pipeline = self._build_pipeline()
        return self._built_pipeline

    def start(self) -> None:
        """Python 3.12 lets nobody start a thread any more once it ends, and what sends has one: that is waited for, at the end of a
        program that is over before it is made."""
        super().start()
        with contextlib.suppress(Exception):
            threading._register_atexit(self._wait_for_first_cycle)  # type: ignore[attr-defined]

    def _wait_for_first_cycle(self) -> None:
        if self._pid == os.getpid():
            self._first_cycle_done.wait(FLUSH_S)

    def run(self) -> None:
        try:
            self._run_cycles()
        except Exception as reason:
            self._mark_failed(reason)
        finally:
            self._first_cycle_done.set()

    def _mark_failed(self, reason: Exception) -> None:
        """The server goes on; what it records is read by nobody."""
        if not self._broken:
            self._broken = True
            log.error("nothing is exported any more: %s: %s", type(reason).__name__, reason)

    def flush(self, timeout: float) -> bool:
        """Concludes everything that has ended and has it sent; False if `timeout` s were not enough."""
        deadline = _clock.now() + int(timeout * 1e9)
        if self._broken or not self._cycle_lock.acquire(timeout=timeout):
            return False
        try:
            self._run_cycle()
            self._run_cycle()
            self._pipeline.export_without_grace(_clock.now())
            self._pipeline.flush(0.0)
        finally:
            self._cycle_lock.release()
        return self._pipeline.is_sent(max(deadline - _clock.now(), 0) / 1e9)

    def close(self) -> None:
        """Flushes and stops; the second call does nothing, nor does one in a forked child, whose it is not."""
        if self._closed or self._broken or self._pid != os.getpid():
            return
        self._closed = True
        self._stopping.set()
        try:
            with self._cycle_lock:
                self._add_rings()
                self._pipeline.run_cycle(_clock.now(), final=True)
            self._pipeline.close(FLUSH_S)
        except Exception as reason:
            self._mark_failed(reason)

    def _run_cycles(self) -> None:
        with self._cycle_lock:
            self._run_cycle()
        self._first_cycle_done.set()
        while not self._stopping.wait(CYCLE_NS / 1e9):
            with self._cycle_lock:
                if not self._closed:
                    self._run_cycle()

    def _build_pipeline(self) -> Pipeline:
        if self._provider is None:
            resource = {semconv.SERVICE_INSTANCE_ID: str(uuid.uuid4()), **self._resource}
            return make_pipeline(self._settings, resource, self._rings, show=False)
        sink = TracerProviderExporter(
            self._provider.get_tracer("otel_infer"),
            request_span.pending_provider_spans.pop,
            self._settings.latency_attributes,
        )
        return Pipeline(self._settings, self._rings, [sink], None, {}, None, _clock.read_clocks()[1])

    def _run_cycle(self) -> None:
        self._add_rings()
        self._pipeline.run_cycle(_clock.now())

    def _add_rings(self) -> None:
        for name, memory in list(self._arena.buffers):
            self._rings.add_ring(name, memory, _clock.now())
