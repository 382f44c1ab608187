"""CUDA graphs while they are captured: the engine's thread is at it, and whoever is in flight waits. And short memory.

    CUDAGraph.capture_begin ─ capture_end ─▶ a pause               the end of a request ─ `gpu.allocator` ─▶ a mark

Whoever captures comes by here: `torch.cuda.graph`, engines, torch's compiler; what that captures inside a compilation is told
of as a capture. CUDA is never initialized from here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from otel_infer import _clock
from otel_infer.gpu import graph_capture
from otel_infer.gpu.device import Device
from otel_infer.gpu.memory import AllocatorCounters, DeviceMemorySampler, attach_oom_observer
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

log = logging.getLogger(__name__)

CAUSE = "capture"
DEVICE_TIME = "device time"
_GRAPH = "torch.cuda.graphs:CUDAGraph"


class _CudaInstrumentor(Instrumentor):
    """Also looks at the allocator, of which nobody tells, as long as the hooks are on."""

    def install(self) -> None:
        super().install()
        try:
            recorder.deferred_recorders[self.name] = _make_allocator_poll(AllocatorCounters(recorder.count))
        except Exception as exc:
            log.warning("the CUDA allocator is not looked at: %s", type(exc).__name__)
        recorder.deferred_recorders[DEVICE_TIME] = timing.collect_spans
        timing.on_first_use = _watch_memory

    def remove(self) -> None:
        recorder.deferred_recorders.pop(self.name, None)
        recorder.deferred_recorders.pop(DEVICE_TIME, None)
        timing.on_first_use = None
        super().remove()
        graph_capture.open_captures = 0  # nobody will tell of their ends


def _watch_memory(device: Device) -> Callable[[], None]:
    """A device is used first: whoever runs out of its memory says so, and once a second it is said how much there is."""
    if device.kind != "cuda":  # asking for CUDA's memory would turn to it
        return lambda: None
    attach_oom_observer(_record_oom)
    return DeviceMemorySampler(device.index, recorder.record_process).record_sample


def _record_oom(device: int, wanted: int, limit: int, free: int) -> None:
    """Called by the allocator before it raises, on the thread that asked."""
    try:
        request = start.current_request()
        if request is not None and recorder.active:
            request.record_event(events.MemoryRefused(_clock.now(), int(wanted), int(limit), int(free)))
    except Exception as exc:  # it would take the place of the user's error
        log.warning("running out of memory is not recorded: %s", type(exc).__name__)


def _make_allocator_poll(allocator: AllocatorCounters) -> Callable[[], None]:
    """Looks until it fails once: a request is about to end, and is not to be held up by another release of torch."""

    def poll_allocator() -> None:
        try:
            allocator.record_increments()
        except Exception as exc:
            recorder.deferred_recorders.pop(instrumentor.name, None)
            log.warning("the CUDA allocator is looked at no more: %s", type(exc).__name__)

    return poll_allocator


instrumentor = _CudaInstrumentor("cuda_graphs", "torch", ("torch.cuda.graphs",))


class _GraphCapture(threading.local):
    """The one of this thread, of which there is one at a time. `started_at` 0: none, or one that began before we came."""

    started_at = 0
    is_announced = False


_current = _GraphCapture()


@contextlib.contextmanager
def _announce_capture() -> Iterator[None]:
    """Nobody asks a device from before a capture begins to its end."""
    graph_capture.begin_capture()
    try:
        yield
    except BaseException:
        graph_capture.end_capture()
        raise
    _current.is_announced = True


@instrumentor.patch_hot_path(f"{_GRAPH}.capture_begin")
def patch_capture_begin(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hook.alive:
            return original(self, *args, **kwargs)
        started_at = _clock.now()
        with _announce_capture():
            result = original(self, *args, **kwargs)
        _current.started_at = started_at
        return result

    return capture_begin


@instrumentor.patch_hot_path(f"{_GRAPH}.capture_end")
def patch_capture_end(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        started_at, _current.started_at = _current.started_at, 0
        try:
            return original(self, *args, **kwargs)
        finally:
            if _current.is_announced:
                _current.is_announced = False
                graph_capture.end_capture()
            if hook.alive and started_at:
                recorder.record_pause(CAUSE, started_at, _clock.now())

    return capture_end
