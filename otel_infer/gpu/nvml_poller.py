"""The state of this machine's NVIDIA GPUs, read in the sidecar every 5 s: one poller per server, devices by their UUID.

What a device does not have, or does not show to this user, is left out and not asked again: unsupported is never 0. What fails
otherwise is left out as long as it fails. Not asked at all: PCIe throughput, which blocks for 20 ms, and processes, whose ids mean something else in a container. The energy counter
takes 2 ms (H100, driver 580), the others some µs. NVML: nvml.h of driver 580; activity of SMs by GPM, Hopper and later.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.nvml import decode_text
from otel_infer.ringbuffer.events import GpuClocksThrottled


class GpuReading(NamedTuple):
    """One value of a GPU of this machine, or of a MIG device of the `parent`. `number`: as NVML counts.

    `what`: utilization, memory, power (W), energy (J), temperature (°C), throttled, errors or activity; `of`: of which task,
    reason, kind or unit.
    """

    uuid: str
    name: str
    number: int
    parent: str
    quantity: str
    label: str
    value: float


log = logging.getLogger(__name__)

POLL_INTERVAL_S = 5.0
MAX_PENDING_EVENTS = 120
"""Events that wait to be recorded."""
MAX_XID_EVENTS = 64
"""Of one device, that are taken at once."""
STALE_S = 30.0
"""A driver that has not answered for so long says nothing any more."""
THROTTLE_REASONS = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
"""Why clocks are lower than they could be (nvml.h, nvmlClocksEventReasons); idle and set clocks are no reasons."""
SLOWING_REASONS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"})
"""Those that come and go with heat and supply. The others are how a GPU that is busy runs all day."""
GPM_UNITS = {"sm": 2, "tensor": 5, "dram": 10}
"""Of GPM: nvmlGpmMetricId_t."""


class NvmlDevice(NamedTuple):
    """A GPU, or a MIG device of the `parent`."""

    handle: Any
    uuid: str
    name: str
    number: int
    parent: str = ""


class NvmlReader:
    """Asks NVML; never raises. `wanted`: the server's CUDA_VISIBLE_DEVICES, None where it may use all. `unsupported`: (UUID, what)
    that is not asked again."""

    def __init__(self, wanted: str | None = None) -> None:
        self._visible_devices = wanted
        self._nvml: Any = None
        self._devices: list[NvmlDevice] = []
        self._gpm_samples: dict[str, list[Any]] = {}
        self._event_sets: dict[str, Any] = {}
        self._xid_counts: Counter[tuple[str, int]] = Counter()
        self.unsupported: set[tuple[str, str]] = set()
        self.driver = ""

    def open(self) -> bool:
        """Whether there is a driver, and a device that this server may use."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self.driver = pynvml, decode_text(pynvml.nvmlSystemGetDriverVersion())
            self._devices = [device for device in self._find_gpus() if self._is_visible(device)]
        except Exception as refusal:  # no driver, no library, no permission
            log.debug("no GPU metrics: %s", refusal)
            return False
        return bool(self._devices)

    def close(self) -> None:
        """Lets go of NVML."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def read_all(self) -> list[GpuReading]:
        """All values that there are now."""
        found: list[GpuReading] = []
        for device in self._devices:
            for what, ask in self._select_queries(device).items():
                key = device.uuid, what
                if key in self.unsupported:
                    continue
                try:
                    found += [GpuReading(*device[1:], what, of, value) for of, value in ask(device.handle)]
                except Exception as refusal:
                    self._record_failure(key, refusal)
        return found

    def _select_queries(self, device: NvmlDevice) -> dict[str, Callable[[Any], Iterator[tuple[str, float]]]]:
        if device.parent:
            return {"memory": self._read_memory}
        return {
            "utilization": self._read_utilization,
            "memory": self._read_memory,
            "power": lambda handle: iter([("", self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000)]),
            "energy": lambda handle: iter(
                [("", self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)]
            ),
            "temperature": lambda handle: iter([("", self._nvml.nvmlDeviceGetTemperature(handle, 0))]),
            "throttled": self._read_throttle_reasons,
            "errors": self._read_ecc_errors,
            "activity": lambda handle: self._read_activity(handle, device.uuid),
            "xids": lambda handle: self._read_xid_errors(handle, device.uuid),
        }

    def _read_utilization(self, handle: Any) -> Iterator[tuple[str, float]]:
        yield "general", self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100

    def _read_memory(self, handle: Any) -> Iterator[tuple[str, float]]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        yield "used", memory.used
        yield "total", memory.total

    def _read_throttle_reasons(self, handle: Any) -> Iterator[tuple[str, float]]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        for reason, bit in THROTTLE_REASONS.items():
            yield reason, float(bool(bits & bit))

    def _read_ecc_errors(self, handle: Any) -> Iterator[tuple[str, float]]:
        for kind, number in (("corrected", 0), ("uncorrected", 1)):
            yield kind, self._nvml.nvmlDeviceGetTotalEccErrors(handle, number, 0)

    def _read_xid_errors(self, handle: Any, uuid: str) -> Iterator[tuple[str, float]]:
        """What its driver called critical since we look, by its number (docs.nvidia.com/deploy/xid-errors)."""
        nvml = self._nvml
        if uuid not in self._event_sets:
            self._event_sets[uuid] = self._register_events(handle)
        for _ in range(MAX_XID_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._event_sets[uuid], 0)
            except nvml.NVMLError:  # there is none; or the device is lost, of which the last one told
                break
            self._xid_counts[uuid, int(event.eventData)] += 1
        for (whose, number), count in self._xid_counts.items():
            if whose == uuid:
                yield f"xid_{number}", count

    def _register_events(self, handle: Any) -> Any:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            nvml.nvmlEventSetFree(events)
            raise
        return events

    def _read_activity(self, handle: Any, uuid: str) -> Iterator[tuple[str, float]]:
        """Between this sample and the one before."""
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        samples = self._gpm_samples.setdefault(uuid, [])
        fresh = nvml.nvmlGpmSampleAlloc() if len(samples) < 2 else samples.pop(0)
        nvml.nvmlGpmSampleGet(handle, fresh)
        samples.append(fresh)
        if len(samples) < 2:
            return
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_UNITS)
        asked.sample1, asked.sample2 = samples
        for place, number in enumerate(GPM_UNITS.values()):
            asked.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        for place, unit in enumerate(GPM_UNITS):
            if asked.metrics[place].nvmlReturn == nvml.NVML_SUCCESS:
                yield unit, asked.metrics[place].value / 100

    def _find_gpus(self) -> Iterator[NvmlDevice]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = (
                decode_text(nvml.nvmlDeviceGetUUID(handle)),
                decode_text(nvml.nvmlDeviceGetName(handle)),
            )
            yield NvmlDevice(handle, uuid, name, index)
            yield from self._find_mig_devices(handle, uuid, name, index)

    def _find_mig_devices(self, handle: Any, parent: str, name: str, index: int) -> Iterator[NvmlDevice]:
        """Its MIG devices; most GPUs cannot have any."""
        nvml = self._nvml
        with contextlib.suppress(Exception):
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(Exception):  # that place is empty
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                    yield NvmlDevice(
                        instance, decode_text(nvml.nvmlDeviceGetUUID(instance)), f"{name} MIG", index, parent
                    )

    def _is_visible(self, device: NvmlDevice) -> bool:
        """By CUDA_VISIBLE_DEVICES: UUIDs, or numbers (as NVML counts, by bus; CUDA's own order is the same for equal GPUs)."""
        if self._visible_devices is None:
            return True
        names = [name.strip() for name in self._visible_devices.split(",")]
        ids = (device.uuid, device.parent)
        return str(device.number) in names or any(
            name and any(one.startswith(name) for one in ids) for name in names
        )

    def _record_failure(self, key: tuple[str, str], refusal: Exception) -> None:
        nvml, code = self._nvml, getattr(refusal, "value", None)
        final = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        if code in final:
            self.unsupported.add(key)
        log.debug("%s of %s is not to be had: %s", key[1], key[0], refusal)


class NvmlPoller(threading.Thread):
    """Reads every 5 s, on a thread of its own: a driver may take its time."""

    def __init__(self, wanted: str | None = None, every_s: float = POLL_INTERVAL_S) -> None:
        super().__init__(name="otel_infer-nvml", daemon=True)
        self._reader, self._interval_s = NvmlReader(wanted), every_s
        self._stopping = threading.Event()
        self._latest: tuple[int, list[GpuReading]] = 0, []
        self._pending_events: deque[GpuClocksThrottled] = deque(maxlen=MAX_PENDING_EVENTS)

    @property
    def driver(self) -> str:
        """Its version."""
        return self._reader.driver

    @property
    def latest(self) -> list[GpuReading]:
        """The last values, while they are fresh."""
        at, readings = self._latest
        return readings if _clock.now() - at < STALE_S * 1e9 else []

    def run(self) -> None:
        is_open = self._reader.open()
        while is_open:
            self.record_readings(_clock.now(), self._reader.read_all())
            is_open = not self._stopping.wait(self._interval_s)
        self._reader.close()

    def record_readings(self, at: int, readings: list[GpuReading]) -> None:
        """These were read at this instant."""
        self._latest = at, readings
        held = {one.label for one in readings if one.quantity == "throttled" and one.value}
        if held:
            until = at + int(self._interval_s * 1e9)
            self._pending_events.append(
                GpuClocksThrottled(at, until, ",".join(sorted(held)), bool(held & SLOWING_REASONS))
            )

    def drain_events(self) -> list[GpuClocksThrottled]:
        """Returns what was seen of throttled clocks since the last call."""
        return [self._pending_events.popleft() for _ in range(len(self._pending_events))]

    def stop(self) -> None:
        """Ends it, soon."""
        self._stopping.set()
