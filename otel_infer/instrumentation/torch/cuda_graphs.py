"""Records CUDA graph captures, for which all requests in flight wait, and shortages of GPU memory.

    CUDAGraph.capture_begin ─ capture_end ─▶ a pause               the end of a request ─ `gpu.memory` ─▶ a mark

All captures pass here: by `torch.cuda.graph`, by engines, and by torch's compiler. A capture inside a
compilation is recorded as a capture. This module never initialises CUDA.
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

DEVICE_TIME = "device time"
_GRAPH = "torch.cuda.graphs:CUDAGraph"


class _CudaInstrumentor(Instrumentor):
    """The instrumentor for CUDA graphs and GPU memory.

    The allocator offers no callback for its retries, so its counters are polled while the hooks are
    installed.
    """

    def install(self) -> None:
        super().install()
        try:
            recorder.deferred_recorders[self.name] = _make_allocator_poll(AllocatorCounters(recorder.count))
        except Exception as exc:
            log.warning("counters of the CUDA allocator are not recorded: %s", type(exc).__name__)
        recorder.deferred_recorders[DEVICE_TIME] = timing.collect_spans
        timing.on_first_use = _watch_memory

    def remove(self) -> None:
        recorder.deferred_recorders.pop(self.name, None)
        recorder.deferred_recorders.pop(DEVICE_TIME, None)
        timing.on_first_use = None
        super().remove()
        graph_capture.open_captures = 0  # their ends are no longer observed


def _watch_memory(device: Device) -> Callable[[], None]:
    """Starts recording of out-of-memory errors of a device at its first use.

    Returns a function that records the device's memory, to be called once a second. Devices other than CUDA
    are ignored.
    """
    if device.kind != "cuda":  # reading CUDA's memory would initialise CUDA
        return lambda: None
    attach_oom_observer(_record_oom)
    return DeviceMemorySampler(device.index, recorder.record_process).record_sample


def _record_oom(device: int, wanted: int, limit: int, free: int) -> None:
    """Records an out-of-memory error. The allocator calls this before it raises, on the allocating thread."""
    try:
        request = start.current_request()
        if request is not None and recorder.active:
            request.record_event(events.MemoryRefused(_clock.now(), int(wanted), int(limit), int(free)))
    except Exception as exc:  # it would replace the application's out-of-memory error
        log.warning("an out-of-memory error is not recorded: %s", type(exc).__name__)


def _make_allocator_poll(allocator: AllocatorCounters) -> Callable[[], None]:
    """Returns a function that records the allocator's counters and removes itself after its first failure.

    It runs before a request ends, and an unsupported release of torch must not fail for each request again.
    """

    def poll_allocator() -> None:
        try:
            allocator.record_increments()
        except Exception as exc:
            recorder.deferred_recorders.pop(instrumentor.name, None)
            log.warning("counters of the CUDA allocator are no longer recorded: %s", type(exc).__name__)

    return poll_allocator


instrumentor = _CudaInstrumentor("cuda_graphs", "torch", ("torch.cuda.graphs",))


class _GraphCapture(threading.local):
    """The current capture of this thread.

    `started_at`: monotonic ns; 0 = none, or it began before the hooks were installed.
    `is_announced`: `graph_capture` counts it, so no device query runs before its end.
    """

    started_at = 0
    is_announced = False


_current = _GraphCapture()


@contextlib.contextmanager
def _announce_capture() -> Iterator[None]:
    """Blocks our device queries from before the begin of a capture until its end."""
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
                recorder.record_pause(events.PAUSE_CAPTURE, started_at, _clock.now())

    return capture_end
