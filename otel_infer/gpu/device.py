"""The interface to an accelerator, and torch's devices: CUDA, ROCm (under CUDA's names) and XPU.

An event is torch's own: `record(stream)`, `query()`, `a.elapsed_time(b)` in ms (float32 on CUDA). Nothing
here waits for the device or initializes it: before the application does so, there is no device.
`torch.cuda.Event` is not used, because vLLM's CPU runner replaces it by a placeholder for good
(vllm/v1/worker/cpu/shm.py, 0.33). The class is taken from the module in which torch defines it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any, Protocol

from otel_infer import _clock

SPIN_NS = 50_000
"""Longest time for one stamp: the thread holds the GIL meanwhile."""
OCCUPY_CYCLES = 2_000_000
"""Cycles of the device's clock: 1 ms at 2 GHz."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: this thread's queries do not break a capture on another (pytorch#148594).
"""


class Device(Protocol):
    """One accelerator. `kind`: its torch module; `tick_ns`: the resolution of its clock, as far as known."""

    kind: str
    index: int
    tick_ns: int

    def create_event(self) -> Any:
        """Returns a new event with timing; the device creates it when it is first recorded."""

    def current_stream(self) -> Any:
        """Returns the stream on which the calling thread launches now."""

    def create_idle_stream(self) -> Any:
        """Returns a new stream that no other code launches on."""

    def is_capturing(self) -> bool:
        """Returns whether launches of the calling thread are now captured into a graph instead of run."""

    def prepare_thread(self) -> None:
        """Allows the calling thread to query the device while another thread captures."""

    def occupy_stream(self, stream: Any) -> bool:
        """Keeps an idle stream busy for about 1 ms, on one processor of the device; False if unsupported."""

    def record_and_poll(self, event: Any, stream: Any) -> tuple[int, int] | None:
        """Records an event on an idle stream and polls it.

        Returns the host times before it was recorded and after it was done; None if that took too long.
        """


class TorchDevice:
    """A torch device. Raises `AttributeError` where this torch release lacks a function it calls."""

    tick_ns = 1000
    """CUDA's manual gives about 0.5 µs for events; 32 ns was measured on an H100. HIP's events have 1 µs."""

    def __init__(self, torch: Any, kind: str, index: int) -> None:
        self.index, self.kind = index, kind
        self._module = getattr(torch, kind)
        classes: Any = sys.modules[f"torch.{kind}.streams"]
        self._event_class, self._stream_class = classes.Event, classes.Stream
        self._get_current_stream = getattr(torch._C, f"_{kind}_getCurrentStream")
        self._streams: dict[Any, Any] = {}
        never: Callable[[], bool] = bool
        self.is_capturing = getattr(torch._C, f"_{kind}_isCurrentStreamCapturing", never)
        self._driver = _load_driver() if kind == "cuda" and torch.version.cuda else None

    def create_event(self) -> Any:
        return self._event_class(enable_timing=True)

    def current_stream(self) -> Any:
        # torch's own `current_stream` creates a new object each time, which takes several µs.
        key = self._get_current_stream(self.index)
        stream = self._streams.get(key)
        if stream is None:
            number, index, kind = key
            stream = self._streams[key] = self._stream_class(
                stream_id=number, device_index=index, device_type=kind
            )
        return stream

    def create_idle_stream(self) -> Any:
        return self._stream_class(self.index, priority=-1)

    def prepare_thread(self) -> None:
        self._module.set_device(self.index)
        if self._driver is not None:
            mode = ctypes.c_int(_THREAD_LOCAL)
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def occupy_stream(self, stream: Any) -> bool:
        sleep = getattr(self._module, "_sleep", None)
        if sleep is None:
            return False
        with self._module.stream(stream):
            sleep(OCCUPY_CYCLES)
        return True

    def record_and_poll(self, event: Any, stream: Any) -> tuple[int, int] | None:
        if self._driver is None:
            return _time_event(lambda: event.record(stream), event.query)
        # The driver is called with the GIL held: torch releases it to record, and then waits to get it back.
        handle, queue = ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream)
        record, query = self._driver.cuEventRecord, self._driver.cuEventQuery
        return _time_event(lambda: record(handle, queue), lambda: query(handle) == 0)


def _time_event(record: Callable[[], object], query: Callable[[], bool]) -> tuple[int, int] | None:
    before = _clock.now()
    if record():  # a driver error code; torch returns None and raises
        return None
    while not query():
        if _clock.now() - before > SPIN_NS:
            return None
    return before, _clock.now()


def _load_driver() -> Any:
    """Returns libcuda, whose functions keep the GIL; None where it cannot be loaded."""
    with contextlib.suppress(OSError):
        return ctypes.PyDLL("libcuda.so.1")
    return None


def current_device() -> TorchDevice | None:
    """Returns the calling thread's device; None if no device is in use or it cannot be timed."""
    torch: Any = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module: Any = getattr(torch, kind, None)
        initialized = getattr(module, "is_initialized", None)
        if initialized is not None and initialized():
            try:
                return TorchDevice(torch, kind, int(module.current_device()))
            except (AttributeError, KeyError):
                return None
    return None
