"""Device memory samples from a stand-in for `torch.cuda`, and free memory on requests."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import otel_infer
from otel_infer import _clock, semconv
from otel_infer.export.metrics import gpus
from otel_infer.gpu.memory import DeviceMemorySampler
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.support.rings import Recording

S = 1_000_000_000


class Cuda:
    """A stand-in for `torch.cuda`. `driver_calls`: calls of the driver. `takes_ns`: duration of each."""

    def __init__(self) -> None:
        self.driver_calls = self.at = self.takes_ns = 0

    def now(self) -> int:
        return self.at

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        kinds = {"allocated_bytes": 10, "reserved_bytes": 20, "active_bytes": 12, "inactive_split_bytes": 3}
        pools = {(0, 1): 4, (0, 2): 1}
        pool_sizes = {pool: {"all": {"current": size, "peak": 99}} for pool, size in pools.items()}
        stats: dict[str, Any] = {kind: {"all": {"current": size, "peak": 99}} for kind, size in kinds.items()}
        return {**stats, "reserved_bytes_by_private_pools": pool_sizes}

    def host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        return {"allocated_bytes": {"current": 7, "peak": 99}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.driver_calls += 1
        self.at += self.takes_ns
        return 50, 100

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid="8786edde")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    return cuda


def test_sampled_at_most_once_per_second_by_uuid(cuda: Cuda) -> None:
    samples: list[events.MemorySeen] = []
    memory = DeviceMemorySampler(0, samples.append, cuda.now)
    for at in (1 * S, 1 * S + 1, 2 * S):
        cuda.at = at
        memory.record_sample()
    assert samples == [
        events.MemorySeen(at, "GPU-8786edde", 10, 20, 12, 3, 50, 100, 5, 7) for at in (1 * S, 2 * S)
    ]


def test_slow_driver_is_polled_rarely_reusing_last_value(cuda: Cuda) -> None:
    samples: list[events.MemorySeen] = []
    memory = DeviceMemorySampler(0, samples.append, cuda.now)
    for at, takes_ns in ((1, 8_000_000), (3, 0), (5, 0), (9, 0), (10, 0)):
        cuda.at, cuda.takes_ns = at * S, takes_ns
        memory.record_sample()
    assert cuda.driver_calls == 3  # 8 s after the first call, then at each sample
    assert [(sample.free, sample.total) for sample in samples] == [(50, 100)] * 5


def test_missing_torch_statistics_are_zero_or_minus_one(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[events.MemorySeen] = []
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda device: {})
    monkeypatch.delattr(Cuda, "host_memory_stats_as_nested_dict")
    cuda.at = S
    DeviceMemorySampler(0, samples.append, cuda.now).record_sample()
    assert samples[0][2:6] == (0, 0, 0, 0)
    assert samples[0][-2:] == (-1, -1)


def test_out_of_memory_event_is_recorded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_infer.gpu import memory
    from otel_infer.instrumentation.torch import cuda_graphs as integration

    attached: list[Any] = []
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attached.append))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "_oom_callbacks", [])
    for _ in range(2):
        memory.attach_oom_observer(integration._record_oom)
    (observer,) = attached  # torch cannot detach an observer
    recording = Recording()
    try:
        observer(0, 512, 1000, 90)  # outside any request
        with otel_infer.request():
            observer(0, 512, 1000, 90)
        (record,) = recording.records()
    finally:
        recording.stop()
    ((name, attributes),) = [(event.name, event.attributes) for event in record.events]
    assert name == "infer.out_of_memory"
    assert attributes == {
        "infer.device.memory.wanted": 512,
        "infer.device.memory.limit": 1000,
        "infer.device.memory.free": 90,
    }


def test_other_devices_do_not_query_cuda_memory(cuda: Cuda) -> None:
    from otel_infer.instrumentation.torch import cuda_graphs as integration
    from tests.support.fake_device import FakeDevice

    integration._watch_memory(FakeDevice())()
    assert cuda.driver_calls == 0


def test_missing_statistics_are_absent_from_metrics_not_zero() -> None:
    metrics: dict[tuple[str, str], float] = {}

    def set_value(metric: semconv.Metric, attributes: dict[str, Any], value: float) -> None:
        metrics[metric.name, str(attributes.get(semconv.MEMORY_KIND, ""))] = value

    known, unknown = (
        events.MemorySeen(1, "GPU-a", 30, 60, 32, 2, 700, 1000, *last) for last in ((5, 7), (-1, -1))
    )
    usage = semconv.DEVICE_MEMORY.name
    always = {
        (usage, "allocated"): 30, (usage, "reserved"): 60, (usage, "active"): 32, (usage, "inactive_split"): 2,
        (usage, "outside"): 240, (usage, "free"): 700,
    }  # fmt: skip
    gpus.set_memory_metrics([(77, unknown)], set_value)
    assert metrics == always
    gpus.set_memory_metrics([(77, known)], set_value)
    assert metrics == {**always, (usage, "private_pools"): 5, (semconv.PINNED_MEMORY.name, ""): 7}


def test_request_has_free_memory_at_arrival_and_end() -> None:
    recording = Recording()
    try:
        with otel_infer.request():
            pass
        recorder.record_process(events.MemorySeen(_clock.now(), "GPU-a", 1, 2, 1, 0, 700, 1000, -1, -1))
        recorder.record_process(events.MemorySeen(_clock.now(), "GPU-b", 1, 2, 1, 0, 600, 1000, -1, -1))
        with otel_infer.request() as request:
            recorder.record_process(events.MemorySeen(_clock.now(), "GPU-b", 1, 2, 1, 0, 300, 1000, -1, -1))
            request.token_reached()
            recorder.record_process(events.MemorySeen(_clock.now(), "GPU-b", 1, 2, 1, 0, 90, 1000, -1, -1))
        first, second = recording.records()
    finally:
        recording.stop()
    assert first.memory_free == (0, 0, 0)
    assert second.memory_free == (600, 300, 90)
