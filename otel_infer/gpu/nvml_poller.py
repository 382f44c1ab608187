"""Polls the state of this machine's NVIDIA GPUs every 5 s in the sidecar, one poller per server.

A quantity that a device lacks, or denies to this user, is omitted and not queried again: unsupported is never
0. A quantity that fails otherwise is omitted while it fails. Two are never queried: PCIe throughput blocks
for 20 ms, and process ids differ in a container. The energy counter takes 2 ms (H100, driver 580), the others
a few µs. NVML: nvml.h of driver 580; activity of SMs by GPM, Hopper and later.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.nvml import decode_text, read_name, state_from_error
from otel_infer.ringbuffer.events import GpuClocksThrottled


class GpuReading(NamedTuple):
    """One value of a GPU of this machine, or of a MIG device of the `parent`. `number`: NVML's index.

    `quantity`: utilization, memory (bytes), power (W), energy (J), temperature (°C), throttled, errors,
    activity or xids. `label`: its task, reason, kind or unit; empty if it has none.
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
RETRIES_AFTER = 6
"""Intervals until NVML is opened again after a failure, for example while a driver is upgraded."""
MAX_PENDING_EVENTS = 120
"""Events that wait to be drained; older ones are dropped."""
MAX_XID_EVENTS = 64
"""XID events that are read per device and poll."""
STALE_S = 30.0
"""Age of readings from which they are no longer current: the driver does not answer."""
THROTTLE_REASONS = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
"""Bits of the reasons for lowered clocks (nvml.h, nvmlClocksEventReasons), without idle and user-set clocks.
"""
SLOWING_REASONS = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "power_brake"})
"""Reasons that come and go with heat and power supply. A busy GPU can have the others all day."""
GPM_UNITS = {"sm": 2, "tensor": 5, "dram": 10}
"""GPM metric of each unit (nvmlGpmMetricId_t)."""


class NvmlDevice(NamedTuple):
    """A GPU, or a MIG device of the `parent`."""

    handle: Any
    uuid: str
    name: str
    number: int
    parent: str = ""


class NvmlReader:
    """Reads NVML; never raises.

    `visible_devices`: the server's CUDA_VISIBLE_DEVICES; None = it may use all. `unsupported`: each (UUID,
    quantity) that is not queried again.
    """

    def __init__(self, visible_devices: str | None = None) -> None:
        self._visible_devices = visible_devices
        self._nvml: Any = None
        self._devices: list[NvmlDevice] = []
        self._gpm_samples: dict[str, list[Any]] = {}
        self._event_sets: dict[str, Any] = {}
        self._xid_counts: Counter[tuple[str, int]] = Counter()
        self.unsupported: set[tuple[str, str]] = set()
        self.driver = ""
        self.may_open_later = False

    def open(self) -> bool:
        """Initializes NVML; returns whether there is a device that this server may use.

        After a failure that may pass, `may_open_later` is true.
        """
        self.may_open_later = False
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self.driver = pynvml, decode_text(pynvml.nvmlSystemGetDriverVersion())
            self._devices = [device for device in self._find_gpus() if self._is_visible(device)]
        except ImportError:
            return False
        except Exception as error:
            status = state_from_error(pynvml, error).status
            self.may_open_later = status == "broken"
            if status != "no driver":
                log.warning("no GPU metrics: NVML cannot be opened: %s", error)
            self.close()
            return False
        if not self._devices:
            self.close()
        return bool(self._devices)

    def close(self) -> None:
        """Shuts NVML down."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def read_all(self) -> list[GpuReading]:
        """Returns the current values of all visible devices."""
        readings: list[GpuReading] = []
        for device in self._devices:
            for quantity, query in self._select_queries(device).items():
                key = device.uuid, quantity
                if key in self.unsupported:
                    continue
                try:
                    readings += [
                        GpuReading(*device[1:], quantity, label, value)
                        for label, value in query(device.handle)
                    ]
                except Exception as error:
                    self._record_failure(key, error)
        return readings

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
        """Yields the count of each critical error since the first call, by XID.

        The numbers: docs.nvidia.com/deploy/xid-errors.
        """
        nvml = self._nvml
        if uuid not in self._event_sets:
            self._event_sets[uuid] = self._register_events(handle)
        for _ in range(MAX_XID_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._event_sets[uuid], 0)
            except nvml.NVMLError:  # no event; or the device is lost, which an earlier XID reported
                break
            self._xid_counts[uuid, int(event.eventData)] += 1
        for (owner, number), count in self._xid_counts.items():
            if owner == uuid:
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
        """Yields the activity of each unit between the previous sample and this one; nothing at the first."""
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        samples = self._gpm_samples.setdefault(uuid, [])
        fresh = nvml.nvmlGpmSampleAlloc() if len(samples) < 2 else samples.pop(0)
        nvml.nvmlGpmSampleGet(handle, fresh)
        samples.append(fresh)
        if len(samples) < 2:
            return
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_UNITS)
        query.sample1, query.sample2 = samples
        for place, number in enumerate(GPM_UNITS.values()):
            query.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(query)
        for place, unit in enumerate(GPM_UNITS):
            if query.metrics[place].nvmlReturn == nvml.NVML_SUCCESS:
                yield unit, query.metrics[place].value / 100

    def _find_gpus(self) -> Iterator[NvmlDevice]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = decode_text(nvml.nvmlDeviceGetUUID(handle))
            except Exception as error:  # a GPU that fell off the bus hides no other
                log.warning("GPU %d is not monitored: %s", index, error)
                continue
            name = read_name(nvml, handle)
            yield NvmlDevice(handle, uuid, name, index)
            yield from self._find_mig_devices(handle, uuid, name, index)

    def _find_mig_devices(self, handle: Any, parent: str, name: str, index: int) -> Iterator[NvmlDevice]:
        """Yields the MIG devices of a GPU; most GPUs cannot have any."""
        nvml = self._nvml
        with contextlib.suppress(Exception):
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(Exception):  # no device at this index
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
                    yield NvmlDevice(
                        instance, decode_text(nvml.nvmlDeviceGetUUID(instance)), f"{name} MIG", index, parent
                    )

    def _is_visible(self, device: NvmlDevice) -> bool:
        """Returns whether CUDA_VISIBLE_DEVICES lists the device, by UUID (or its beginning) or by number.

        A number is taken as NVML's, in bus order. CUDA's own order is the same for equal GPUs.
        """
        if self._visible_devices is None:
            return True
        names = [name.strip() for name in self._visible_devices.split(",")]
        ids = (device.uuid, device.parent)
        return str(device.number) in names or any(
            name and any(uuid.startswith(name) for uuid in ids) for name in names
        )

    def _record_failure(self, key: tuple[str, str], error: Exception) -> None:
        nvml, code = self._nvml, getattr(error, "value", None)
        final = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        )
        if code in final:
            self.unsupported.add(key)
        log.debug("cannot read %s of GPU %s: %s", key[1], key[0], error)


class NvmlPoller(threading.Thread):
    """Reads NVML every 5 s, on a separate thread, because a driver may be slow."""

    def __init__(self, visible_devices: str | None = None, interval_s: float = POLL_INTERVAL_S) -> None:
        super().__init__(name="otel_infer-nvml", daemon=True)
        self._reader, self._interval_s = NvmlReader(visible_devices), interval_s
        self._retry_s = RETRIES_AFTER * interval_s
        self._stopping = threading.Event()
        self._latest: tuple[int, list[GpuReading]] = 0, []
        self._pending_events: deque[GpuClocksThrottled] = deque(maxlen=MAX_PENDING_EVENTS)

    @property
    def driver(self) -> str:
        """Returns the driver version; empty if there is none."""
        return self._reader.driver

    @property
    def latest(self) -> list[GpuReading]:
        """Returns the latest readings; empty if they are older than `STALE_S`."""
        at, readings = self._latest
        return readings if _clock.now() - at < STALE_S * 1e9 else []

    def run(self) -> None:
        is_open = self._reader.open()
        while not is_open and self._reader.may_open_later and not self._stopping.wait(self._retry_s):
            is_open = self._reader.open()
        while is_open:
            self.record_readings(_clock.now(), self._reader.read_all())
            is_open = not self._stopping.wait(self._interval_s)
        self._reader.close()

    def record_readings(self, at: int, readings: list[GpuReading]) -> None:
        """Stores the readings of this instant, and an event if they show throttled clocks."""
        self._latest = at, readings
        reasons = {reading.label for reading in readings if reading.quantity == "throttled" and reading.value}
        if reasons:
            until = at + int(self._interval_s * 1e9)
            self._pending_events.append(
                GpuClocksThrottled(at, until, ",".join(sorted(reasons)), bool(reasons & SLOWING_REASONS))
            )

    def drain_events(self) -> list[GpuClocksThrottled]:
        """Returns the events of throttled clocks since the last call."""
        return [self._pending_events.popleft() for _ in range(len(self._pending_events))]

    def stop(self) -> None:
        """Stops the thread after its current reading."""
        self._stopping.set()
