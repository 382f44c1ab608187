"""Graph captures and allocator marks on a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.gpu import memory
from otel_infer.instrumentation.torch import cuda_graphs
from otel_infer.ringbuffer import recorder
from otel_infer.tracing import request_span, start
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def recording() -> Iterator[Recording]:
    torch.cuda.init()
    recording = Recording()
    cuda_graphs.instrumentor.install()
    assert cuda_graphs.instrumentor.status.state == "active", cuda_graphs.instrumentor.status.drift
    yield recording
    cuda_graphs.instrumentor.remove()
    recording.stop()


def open_request() -> request_span.RequestSpan:
    request = start.open_request("POST", owner="test")
    assert request is not None
    return request


def test_graph_captures_are_pauses_and_replays_are_not(recording: Recording) -> None:
    layer, data = torch.nn.Linear(64, 64).cuda(), torch.ones(8, 64, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(data)
        torch.cuda.current_stream().wait_stream(side)
        request, graph = open_request(), torch.cuda.CUDAGraph()
        capture_started_at = _clock.now()
        with torch.cuda.graph(graph):
            out = layer(data)
        capture_ended_at = _clock.now()
        request.close()
        request = open_request()
        graph.replay()
        request.close()
        torch.cuda.synchronize()
        assert torch.allclose(out, layer(data))
    first, second = recording.records()
    ((started_at, ended_at, cause),) = first.pauses
    assert cause == "capture"
    assert capture_started_at <= started_at < ended_at <= capture_ended_at
    assert second.pauses == ()


def test_retried_and_failed_allocations_are_marks(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "COUNTER_INTERVAL_NS", 0)
    monkeypatch.setattr(recorder, "DEFERRED_NS", 0)
    open_request().close()
    recording.records()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # cuBLAS workspaces and graphs remain reserved, therefore the limit is relative to the reserved memory.
    limit = torch.cuda.memory_reserved() + 256 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    tensors: list[Any] = []
    try:
        request = open_request()
        tensors += [torch.empty(25 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        tensors.clear()  # the allocator keeps 200 MiB, in pieces
        tensors.append(torch.empty(150 * MIB, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        request.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        tensors.clear()
        torch.cuda.empty_cache()
    (record,) = recording.records()
    marks = {mark.name: mark.times for mark in record.marks}
    assert marks["allocator_retry"] >= 1
    assert marks["allocator_oom"] == 1


def test_reading_allocator_counters_does_not_synchronise(recording: Recording) -> None:
    counters = memory.AllocatorCounters(lambda *event: None, now=iter(range(0, 1 << 60, 1 << 40)).__next__)
    torch.cuda._sleep(2_000_000_000)  # about a second of work in the queue
    started_at = _clock.now()
    for _ in range(100):
        counters.record_increments()
    taken_ns = _clock.now() - started_at
    is_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    print(f"{taken_ns / 100 / 1000:.1f} us per read")
    assert is_busy
