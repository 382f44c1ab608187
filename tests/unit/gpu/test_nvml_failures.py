"""A GPU that fails hides no other, and NVML is opened again after a failure that may pass."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from otel_infer.gpu import nvml
from otel_infer.gpu.nvml_poller import NvmlPoller, NvmlReader


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml(types.ModuleType):
    """pynvml with two GPUs; `init_errors` are raised one after the other, `lost` and `unreadable` are indices."""

    NVMLError = NvmlError
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_NO_PERMISSION = 9, 12, 4
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 13

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.init_errors: list[int] = []
        self.lost: set[int] = set()
        self.unreadable: set[int] = set()
        self.opened = 0

    def nvmlInit(self) -> None:
        if self.init_errors:
            raise NvmlError(self.init_errors.pop(0))
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NvmlError(15)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return b"caf\xe9".decode() if handle in self.unreadable else f"Stub {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=handle + 1, total=10)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def read_used_memory(reader: NvmlReader) -> dict[str, float]:
    return {reading.uuid: reading.value for reading in reader.read_all() if reading.label == "used"}


def test_a_lost_gpu_hides_no_other(fake: FakeNvml) -> None:
    fake.lost = {0}
    reader = NvmlReader()
    assert reader.open()
    assert read_used_memory(reader) == {"GPU-1": 2}
    state = nvml.query_state()
    assert state.status == "ready"
    assert state.devices == ("GPU 0, which does not answer (NVML error 15)", "Stub 1")


def test_a_name_that_is_not_utf8_hides_no_gpu(fake: FakeNvml) -> None:
    fake.unreadable = {0}
    reader = NvmlReader()
    assert reader.open()
    assert {reading.name for reading in reader.read_all()} == {"unknown", "Stub 1"}
    assert nvml.query_state().devices == ("unknown", "Stub 1")


def test_nvml_is_opened_again_after_a_failure_that_may_pass(fake: FakeNvml) -> None:
    fake.init_errors = [999, 999]
    poller = NvmlPoller(interval_s=0.001)
    poller.start()
    for _ in range(5000):
        if poller.latest:
            break
        poller._stopping.wait(0.001)
    assert {reading.uuid for reading in poller.latest} == {"GPU-0", "GPU-1"}
    poller.stop()
    poller.join(5)
    assert fake.opened == 0


@pytest.mark.parametrize("code", [9, 12, 4], ids=["driver not loaded", "library not found", "no permission"])
def test_nvml_is_not_opened_again_without_a_driver(fake: FakeNvml, code: int) -> None:
    fake.init_errors = [code]
    reader = NvmlReader()
    assert not reader.open()
    assert not reader.may_open_later


def test_nvml_is_closed_where_no_device_is_visible(fake: FakeNvml) -> None:
    assert not NvmlReader(visible_devices="7").open()
    assert fake.opened == 0
