"""Captures and short memory on a real device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.gpu import memory
from otel_infer.instrumentation.torch import cuda_graphs as ours
from otel_infer.tracing import request_span, start
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def recording() -> Iterator[Recording]:
    torch.cuda.init()
    recording = Recording()
    ours.instrumentor.install()
    assert ours.instrumentor.status.state == "active", ours.instrumentor.status.drift
    yield recording
    ours.instrumentor.remove()
    recording.stop()


def opened() -> request_span.RequestSpan:
    request = start.open_request("POST", owner="test")
    assert request is not None
    return request


def test_a_graph_that_is_captured_holds_up_who_is_in_flight_and_its_replay_nobody(
    recording: Recording,
) -> None:
    layer, data = torch.nn.Linear(64, 64).cuda(), torch.ones(8, 64, device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(data)
        torch.cuda.current_stream().wait_stream(side)
        request, graph = opened(), torch.cuda.CUDAGraph()
        began = _clock.now()
        with torch.cuda.graph(graph):
            out = layer(data)
        ended = _clock.now()
        request.close()
        request = opened()
        graph.replay()
        request.close()
        torch.cuda.synchronize()
        assert torch.allclose(out, layer(data))
    first, second = recording.records()
    ((since, until, cause),) = first.pauses
    assert cause == "capture"
    assert began <= since < until <= ended
    assert second.pauses == ()


def test_an_allocation_that_was_retried_and_one_that_failed_are_marks(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SAMPLE_INTERVAL_NS", 0)
    opened().close()
    recording.records()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = (
        torch.cuda.memory_reserved() + 256 * MIB
    )  # what others hold stays theirs: a cuBLAS workspace, graphs
    torch.cuda.set_per_process_memory_fraction(room / total)
    kept: list[Any] = []
    try:
        request = opened()
        kept += [torch.empty(25 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        kept.clear()  # the allocator keeps 200 MiB, in pieces
        kept.append(torch.empty(150 * MIB, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        request.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        kept.clear()
        torch.cuda.empty_cache()
    (record,) = recording.records()
    marks = {mark.name: mark.times for mark in record.marks}
    assert marks["allocator_retry"] >= 1
    assert marks["allocator_oom"] == 1


def test_a_look_at_the_allocator_is_cheap_and_does_not_wait_for_the_device(recording: Recording) -> None:
    watched = memory.AllocatorCounters(lambda *said: None, now=iter(range(0, 1 << 60, 1 << 40)).__next__)
    torch.cuda._sleep(2_000_000_000)  # about a second of work in the queue
    began = _clock.now()
    for _ in range(100):
        watched.record_increments()
    taken = _clock.now() - began
    is_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    print(f"{taken / 100 / 1000:.1f} us a look")
    assert is_busy
