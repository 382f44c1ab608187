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
from otel_infer.gpu.memory import Allocator, Memory, watch_refusals
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.hooks.instrumentor import Integration
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

log = logging.getLogger(__name__)

CAUSE = "capture"
DEVICE_TIME = "device time"
_GRAPH = "torch.cuda.graphs:CUDAGraph"


class _Cuda(Integration):
    """Also looks at the allocator, of which nobody tells, as long as the hooks are on."""

    def install(self) -> None:
        super().install()
        try:
            recorder.overdue[self.name] = _looking(Allocator(recorder.marked))
        except Exception as exc:
            log.warning("the CUDA allocator is not looked at: %s", type(exc).__name__)
        recorder.overdue[DEVICE_TIME] = timing.harvest
        timing.on_device = _used

    def remove(self) -> None:
        recorder.overdue.pop(self.name, None)
        recorder.overdue.pop(DEVICE_TIME, None)
        timing.on_device = None
        super().remove()
        graph_capture.open_now = 0  # nobody will tell of their ends


def _used(device: Device) -> Callable[[], None]:
    """A device is used first: whoever runs out of its memory says so, and once a second it is said how much there is."""
    if device.kind != "cuda":  # asking for CUDA's memory would turn to it
        return lambda: None
    watch_refusals(_refused)
    return Memory(device.index, recorder.stated).look


def _refused(device: int, wanted: int, limit: int, free: int) -> None:
    """Called by the allocator before it raises, on the thread that asked."""
    try:
        request = start.current()
        if request is not None and recorder.active:
            request.state(events.MemoryRefused(_clock.now(), int(wanted), int(limit), int(free)))
    except Exception as exc:  # it would take the place of the user's error
        log.warning("running out of memory is not recorded: %s", type(exc).__name__)


def _looking(allocator: Allocator) -> Callable[[], None]:
    """Looks until it fails once: a request is about to end, and is not to be held up by another release of torch."""

    def look() -> None:
        try:
            allocator.look()
        except Exception as exc:
            recorder.overdue.pop(integration.name, None)
            log.warning("the CUDA allocator is looked at no more: %s", type(exc).__name__)

    return look


integration = _Cuda("cuda", "torch", ("torch.cuda.graphs",))


class _Capture(threading.local):
    """The one of this thread, of which there is one at a time. `started_at` 0: none, or one that began before we came."""

    started_at = 0
    is_told = False


_current = _Capture()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Nobody asks a device from before a capture begins to its end."""
    graph_capture.begin()
    try:
        yield
    except BaseException:
        graph_capture.end()
        raise
    _current.is_told = True


@integration.step_hook(f"{_GRAPH}.capture_begin")
def capture_begin(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hook.alive:
            return original(self, *args, **kwargs)
        started_at = _clock.now()
        with _told():
            result = original(self, *args, **kwargs)
        _current.started_at = started_at
        return result

    return capture_begin


@integration.step_hook(f"{_GRAPH}.capture_end")
def capture_end(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        started_at, _current.started_at = _current.started_at, 0
        try:
            return original(self, *args, **kwargs)
        finally:
            if _current.is_told:
                _current.is_told = False
                graph_capture.end()
            if hook.alive and started_at:
                recorder.paused(CAUSE, started_at, _clock.now())

    return capture_end
