"""Memory of a device, from a stand-in for `torch.cuda`; and where it stands on requests."""

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
    """`asked`: how often the driver was. `takes_ns`: how long that is."""

    def __init__(self) -> None:
        self.asked = self.at = self.takes_ns = 0

    def now(self) -> int:
        return self.at

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        kinds = {"allocated_bytes": 10, "reserved_bytes": 20, "active_bytes": 12, "inactive_split_bytes": 3}
        pools = {(0, 1): 4, (0, 2): 1}
        of_pools = {pool: {"all": {"current": size, "peak": 99}} for pool, size in pools.items()}
        found: dict[str, Any] = {kind: {"all": {"current": size, "peak": 99}} for kind, size in kinds.items()}
        return {**found, "reserved_bytes_by_private_pools": of_pools}

    def host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        return {"allocated_bytes": {"current": 7, "peak": 99}}

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.asked += 1
        self.at += self.takes_ns
        return 50, 100

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(uuid="8786edde")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    return cuda


def test_once_a_second_at_most_everything_is_said_by_the_devices_uuid(cuda: Cuda) -> None:
    told: list[events.MemorySeen] = []
    memory = DeviceMemorySampler(0, told.append, cuda.now)
    for at in (1 * S, 1 * S + 1, 2 * S):
        cuda.at = at
        memory.record_sample()
    assert told == [
        events.MemorySeen(at, "GPU-8786edde", 10, 20, 12, 3, 50, 100, 5, 7) for at in (1 * S, 2 * S)
    ]


def test_a_driver_that_takes_long_is_asked_seldom_and_its_last_word_holds(cuda: Cuda) -> None:
    told: list[events.MemorySeen] = []
    memory = DeviceMemorySampler(0, told.append, cuda.now)
    for at, takes_ns in ((1, 8_000_000), (3, 0), (5, 0), (9, 0), (10, 0)):
        cuda.at, cuda.takes_ns = at * S, takes_ns
        memory.record_sample()
    assert cuda.asked == 3  # 8 s after the first, and then each time
    assert [(fact.free, fact.total) for fact in told] == [(50, 100)] * 5


def test_figures_that_this_release_of_torch_does_not_have_are_0_or_not_said(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[events.MemorySeen] = []
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", lambda device: {})
    monkeypatch.delattr(Cuda, "host_memory_stats_as_nested_dict")
    cuda.at = S
    DeviceMemorySampler(0, told.append, cuda.now).record_sample()
    assert told[0][2:6] == (0, 0, 0, 0)
    assert told[0][-2:] == (-1, -1)


def test_who_runs_out_of_memory_has_the_state_of_it_on_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from otel_infer.gpu import memory
    from otel_infer.instrumentation.torch import cuda_graphs as integration

    attached: list[Any] = []
    torch = SimpleNamespace(_C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attached.append))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(memory, "_oom_callbacks", [])
    for _ in range(2):
        memory.attach_oom_observer(integration._record_oom)
    (observer,) = attached  # torch lets nobody be taken off again
    recording = Recording()
    try:
        observer(0, 512, 1000, 90)  # nobody's
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


def test_of_a_device_that_is_not_cudas_nothing_of_cudas_is_asked(cuda: Cuda) -> None:
    from otel_infer.instrumentation.torch import cuda_graphs as integration
    from tests.support.fake_device import FakeDevice

    integration._watch_memory(FakeDevice())()
    assert cuda.asked == 0


def test_what_a_release_of_torch_does_not_say_is_no_metric_and_never_0() -> None:
    said: dict[tuple[str, str], float] = {}

    def set_value(metric: semconv.Metric, attributes: dict[str, Any], value: float) -> None:
        said[metric.name, str(attributes.get(semconv.MEMORY_KIND, ""))] = value

    known, unknown = (
        events.MemorySeen(1, "GPU-a", 30, 60, 32, 2, 700, 1000, *last) for last in ((5, 7), (-1, -1))
    )
    usage = semconv.DEVICE_MEMORY.name
    always = {
        (usage, "allocated"): 30, (usage, "reserved"): 60, (usage, "active"): 32, (usage, "inactive_split"): 2,
        (usage, "outside"): 240, (usage, "free"): 700,
    }  # fmt: skip
    gpus.set_memory_metrics([(77, unknown)], set_value)
    assert said == always
    gpus.set_memory_metrics([(77, known)], set_value)
    assert said == {**always, (usage, "private_pools"): 5, (semconv.PINNED_MEMORY.name, ""): 7}


def test_a_request_says_how_much_memory_was_free_when_it_came_when_it_had_a_token_and_when_it_went() -> None:
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
