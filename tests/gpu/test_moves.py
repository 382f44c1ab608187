"""Transfers to and from a real device, its memory per request, and its idle time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import otel_infer
from otel_infer import semconv
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.gpu.memory import DeviceMemorySampler
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.ringbuffer import events
from tests.gpu.test_device_time import start_device_timing
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CYCLES_PER_MS = 1_800_000
"""Cycles of `torch.cuda._sleep`, roughly."""


@pytest.fixture
def recording() -> Iterator[Recording]:
    torch.cuda.init()
    recording = Recording()
    installed = [
        loaded for loaded in registry.load_instrumentors() if loaded.name in ("transformers", "cuda_graphs")
    ]
    for instrumentor in installed:
        instrumentor.install()
    yield recording
    for instrumentor in installed:
        instrumentor.remove()
    recording.stop()


def record_transfer(recording: Recording, tensor: Any) -> Stage:
    """Returns the transfer stage of a request that moves a tensor to the device."""
    with otel_infer.request():
        transformers.BatchEncoding({"input_ids": tensor}).to("cuda")
        torch.cuda.synchronize()
    time.sleep(0.3)  # the timing thread has polled by then
    record = recording.records()[-1]
    transfer = record.find_stage(semconv.SPAN_H2D)
    assert transfer is not None
    return transfer


def test_input_transfers_have_device_time_and_size(recording: Recording) -> None:
    start_device_timing()
    tensor = torch.ones(128 * MIB // 8, dtype=torch.long)
    record_transfer(recording, tensor)
    transfer = record_transfer(recording, tensor)
    assert transfer.attributes[semconv.TRANSFER_SIZE] == 128 * MIB
    assert transfer.attributes[semconv.TRANSFER_PINNED] is False
    assert transfer.attributes[semconv.DEVICE_METHOD] == BY_EVENT
    length = (transfer.ended_at - transfer.started_at) / 1e9
    # A transfer from memory that is not page-locked blocks the host, at 64 GB/s (PCIe) or less.
    assert 0.002 < float(transfer.attributes[semconv.DEVICE_DURATION]) <= length + 0.001


def test_transfers_of_page_locked_inputs_are_marked(recording: Recording) -> None:
    start_device_timing()
    transfer = record_transfer(recording, torch.ones(4 * MIB, dtype=torch.long).pin_memory())
    assert transfer.attributes[semconv.TRANSFER_PINNED] is True
    assert transfer.attributes[semconv.DEVICE_METHOD] == BY_EVENT


def test_asynchronous_batching_transfers_on_separate_streams(recording: Recording, tiny_llama: Path) -> None:
    start_device_timing()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="sdpa")
    model = model.to("cuda", torch.bfloat16).eval()
    greedy = transformers.GenerationConfig(
        max_new_tokens=30, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        use_async_batching=True, num_blocks=64, max_batch_tokens=256
    )
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)
    manager.start()
    try:
        for load in range(4):
            for number in range(4):
                manager.add_request([5, 6, 7, 8 + number], request_id=f"r{load}{number}", max_new_tokens=30)
            assert all(manager.get_result(timeout=60) is not None for _ in range(4))
            time.sleep(1.2)  # the timing thread has polled by then
    finally:
        manager.stop(block=True, timeout=30)
    stages = [stage for record in recording.records() for stage in record.stages]
    for name in (semconv.SPAN_H2D, semconv.SPAN_D2H):
        transfers = [stage for stage in stages if stage.name == name]
        timed = [stage for stage in transfers if stage.attributes.get(semconv.DEVICE_METHOD) == BY_EVENT]
        assert timed, f"none of {len(transfers)} {name} stages has device time"
        for stage in transfers:
            assert stage.attributes[semconv.TRANSFER_PINNED] is True
            assert int(stage.attributes[semconv.TRANSFER_SIZE]) > 0
        for stage in timed:
            assert 0 < float(stage.attributes[semconv.DEVICE_DURATION]) < 0.01


def test_the_cache_size_of_generate_is_torch_memory(tiny_llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((4, 600), dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids, use_cache=True)  # reserves the workspaces
        before = torch.cuda.memory_allocated()
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - before
    size = kv_cache.count_cache_bytes(cache)
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert size == 2 * layers * heads * model.config.head_dim * 600 * 4 * 4
    assert size <= allocated < 1.2 * size + MIB


def test_a_request_has_free_memory_and_cache_size(recording: Recording, tiny_llama: Path) -> None:
    start_device_timing()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    records, tensors = [], []
    for _ in range(3):
        model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        records.append(recording.records()[-1])
        torch.cuda.empty_cache()
        tensors.append(torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda"))
        time.sleep(1.3)  # memory is sampled once a second, from the first request on
    for record in records[1:]:
        assert all(0 < free < total for free in record.memory_free), record.memory_free
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert int(decode.attributes[semconv.KV_SIZE]) > 0
    before, after = records[1].memory_free[0], records[2].memory_free[0]
    assert before - after == pytest.approx(1024 * MIB, rel=0.1)


def test_pinned_and_pool_memory_need_statistics_of_torch() -> None:
    """-1 means that this torch release has no such statistics."""
    pinned = torch.ones(32 * MIB, dtype=torch.uint8).pin_memory()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    samples: list[events.MemorySeen] = []
    DeviceMemorySampler(torch.cuda.current_device(), samples.append).record_sample()
    (sample,) = samples
    assert sample.pinned >= pinned.nbytes or sample.pinned == -1
    assert sample.private_pools >= pooled.nbytes or sample.private_pools == -1
    stats = torch.cuda.memory_stats_as_nested_dict()
    assert (sample.private_pools == -1) == ("reserved_bytes_by_private_pools" not in stats)
    assert (sample.pinned == -1) == (not hasattr(torch.cuda, "host_memory_stats_as_nested_dict"))


def record_with_pause(recording: Recording, pause_s: float) -> RequestRecord:
    """Returns the record of 40 steps of about 5 ms, with a host pause before the 20th."""
    with otel_infer.request() as request:
        request.submitted()
        for number in range(40):
            if number == 20:
                time.sleep(pause_s)
            with otel_infer.step([request], gpu=True) as step:
                torch.cuda._sleep(5 * CYCLES_PER_MS)
                step.launched()
                torch.cuda.synchronize()
            request.token_reached()
        request.finished(output_tokens=40)
    time.sleep(0.3)  # the device times are read by then
    (record,) = recording.records()
    attribute_latency([record])
    return record


def test_idle_device_time_is_attributed_to_the_host(recording: Recording) -> None:
    start_device_timing()
    record_with_pause(recording, 0)
    usual = record_with_pause(recording, 0)
    paused = record_with_pause(recording, 0.060)
    for record in (usual, paused):
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert decode.attributes[semconv.DEVICE_METHOD] == BY_EVENT
    added = paused.breakdown.causes.get(semconv.CAUSE_HOST_BUBBLE, 0) - usual.breakdown.causes.get(
        semconv.CAUSE_HOST_BUBBLE, 0
    )
    assert 0.8 * 60e6 < added < 1.2 * 60e6, (usual.breakdown.causes, paused.breakdown.causes)
