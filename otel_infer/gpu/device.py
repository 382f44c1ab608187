"""What we ask of an accelerator, and torch's ones that answer: CUDA, ROCm under CUDA's names, and XPU.

An event is torch's own: `record(stream)`, `query()`, `a.elapsed_time(b)` in ms (float32 on CUDA). Nothing here waits for the
device, and nothing initializes it: where the application has not done so, there is no device. `torch.cuda.Event` is not used,
since vLLM's CPU runner replaces it by a placeholder for good (vllm/v1/worker/cpu/shm.py, 0.33): the class is asked for where
torch defines it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any, Protocol

from otel_infer import _clock

SPIN_NS = 50_000
"""How long a stamp may take: whoever stamps holds the GIL meanwhile."""
OCCUPY_CYCLES = 2_000_000
"""Of the device's clock: 1 ms at 2 GHz."""
_THREAD_LOCAL = 1
"""cudaStreamCaptureModeThreadLocal: what this thread asks does not break a capture on another (pytorch#148594)."""


class Device(Protocol):
    """One accelerator. `kind`: torch's module of it; `tick_ns`: the resolution of its clock, as far as it is known."""

    kind: str
    index: int
    tick_ns: int

    def create_event(self) -> Any:
        """A new event with timing; it exists on the device when it is recorded for the first time."""

    def current_stream(self) -> Any:
        """The stream that the calling thread launches on now."""

    def create_idle_stream(self) -> Any:
        """A new stream that nobody else launches on."""

    def is_capturing(self) -> bool:
        """Whether what the calling thread launches now goes into a graph, and is not run."""

    def prepare_thread(self) -> None:
        """Makes the calling thread one that may ask the device while another thread captures."""

    def occupy_stream(self, stream: Any) -> bool:
        """Keeps an idle stream busy for about a ms, on one of the device's many processors; False where that cannot be."""

    def record_and_poll(self, event: Any, stream: Any) -> tuple[int, int] | None:
        """Records an event on an idle stream: host time before it and after it was seen done; None if that took too long."""


class TorchDevice:
    """A device of torch's. Raises `AttributeError` where this release of torch lacks what we call."""

    tick_ns = 1000
    """Of CUDA's events about 0.5 µs says its manual, 32 ns was seen on an H100; of HIP's, 1 µs."""

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
        # torch's own `current_stream` makes a new object each time, at several µs.
        told = self._get_current_stream(self.index)
        stream = self._streams.get(told)
        if stream is None:
            number, index, kind = told
            stream = self._streams[told] = self._stream_class(
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
        # The driver is called with the GIL held: torch gives it up to record, and has it back when the engine lets go.
        known, queue = ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(stream.cuda_stream)
        record, query = self._driver.cuEventRecord, self._driver.cuEventQuery
        return _time_event(lambda: record(known, queue), lambda: query(known) == 0)


def _time_event(record: Callable[[], object], query: Callable[[], bool]) -> tuple[int, int] | None:
    before = _clock.now()
    if record():  # the driver's status; torch has none and raises
        return None
    while not query():
        if _clock.now() - before > SPIN_NS:
            return None
    return before, _clock.now()


def _load_driver() -> Any:
    """libcuda, called with the GIL held; None where it cannot be had."""
    with contextlib.suppress(OSError):
        return ctypes.PyDLL("libcuda.so.1")
    return None


def current_device() -> TorchDevice | None:
    """The device that the calling thread launches on; None where nobody uses one, or none that we can time."""
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
