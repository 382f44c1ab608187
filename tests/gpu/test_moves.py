"""What goes to a real device and comes from it, what it holds of a request, and what it had nothing to do in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import otel_infer
from otel_infer import semconv
from otel_infer.analysis.attribution import request as blame
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.gpu.memory import DeviceMemorySampler
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.ringbuffer import events
from tests.gpu.test_device_time import timed_from_now_on
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CYCLES_A_MS = 1_800_000
"""Of `torch.cuda._sleep`, roughly."""


@pytest.fixture
def recording() -> Iterator[Recording]:
    torch.cuda.init()
    recording = Recording()
    installed = [one for one in registry.load_instrumentors() if one.name in ("transformers", "cuda")]
    for integration in installed:
        integration.install()
    yield recording
    for integration in installed:
        integration.remove()
    recording.stop()


def inputs_moved(recording: Recording, tensor: Any) -> Stage:
    """The stage of one request that takes this to the device."""
    with otel_infer.request():
        transformers.BatchEncoding({"input_ids": tensor}).to("cuda")
        torch.cuda.synchronize()
    record = recording.records()[-1]
    moved = record.find_stage(semconv.SPAN_H2D)
    assert moved is not None
    return moved


def test_inputs_on_their_way_to_the_device_have_its_time_and_their_bytes(recording: Recording) -> None:
    timed_from_now_on()
    tensor = torch.ones(128 * MIB // 8, dtype=torch.long)
    inputs_moved(recording, tensor)
    moved = inputs_moved(recording, tensor)
    assert moved.attributes[semconv.TRANSFER_SIZE] == 128 * MIB
    assert moved.attributes[semconv.TRANSFER_PINNED] is False
    assert moved.attributes[semconv.DEVICE_METHOD] == BY_EVENT
    length = (moved.ended_at - moved.started_at) / 1e9
    # From memory that is not page-locked: the host waits for it, at no more than PCIe's 64 GB/s.
    assert 0.002 < float(moved.attributes[semconv.DEVICE_DURATION]) <= length + 0.001


def test_page_locked_inputs_are_said_to_be(recording: Recording) -> None:
    timed_from_now_on()
    moved = inputs_moved(recording, torch.ones(4 * MIB, dtype=torch.long).pin_memory())
    assert moved.attributes[semconv.TRANSFER_PINNED] is True
    assert moved.attributes[semconv.DEVICE_METHOD] == BY_EVENT


def test_asynchronous_batching_moves_on_streams_of_its_own(recording: Recording, tiny_llama: Path) -> None:
    timed_from_now_on()
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
            time.sleep(1.2)  # the tender has been by
    finally:
        manager.stop(block=True, timeout=30)
    stages = [stage for record in recording.records() for stage in record.stages]
    for name in (semconv.SPAN_H2D, semconv.SPAN_D2H):
        moved = [stage for stage in stages if stage.name == name]
        timed = [one for one in moved if one.attributes.get(semconv.DEVICE_METHOD) == BY_EVENT]
        assert timed, f"none of {len(moved)} {name} was timed by the device"
        for stage in moved:
            assert stage.attributes[semconv.TRANSFER_PINNED] is True
            assert int(stage.attributes[semconv.TRANSFER_SIZE]) > 0
        for stage in timed:
            assert 0 < float(stage.attributes[semconv.DEVICE_DURATION]) < 0.01


def test_the_cache_of_a_generate_is_as_large_as_what_it_has_torch_hold(tiny_llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((4, 600), dtype=torch.long, device="cuda")
    with torch.no_grad():
        del model(ids, use_cache=True).past_key_values
        before = torch.cuda.memory_allocated()
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    size = kv_cache.cache_bytes(cache)
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert size == 2 * layers * heads * model.config.head_dim * 600 * 4 * 4
    assert size <= held < 1.2 * size + MIB


def test_a_request_says_how_much_memory_was_free_and_what_its_cache_took(
    recording: Recording, tiny_llama: Path
) -> None:
    timed_from_now_on()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    found, kept = [], []
    for _ in range(3):
        model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        found.append(recording.records()[-1])
        torch.cuda.empty_cache()
        kept.append(torch.ones(1024 * MIB, dtype=torch.uint8, device="cuda"))
        time.sleep(1.3)  # memory is looked at once a second, from the first request on
    for record in found[1:]:
        assert all(0 < free < total for free in record.memory_free), record.memory_free
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert int(decode.attributes[semconv.KV_SIZE]) > 0
    before, after = found[1].memory_free[0], found[2].memory_free[0]
    assert before - after == pytest.approx(1024 * MIB, rel=0.1)


def test_what_is_page_locked_and_what_pools_hold_is_said_where_torch_says_it() -> None:
    kept = torch.ones(32 * MIB, dtype=torch.uint8).pin_memory()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    said: list[events.MemorySeen] = []
    DeviceMemorySampler(torch.cuda.current_device(), said.append).record_sample()
    (seen,) = said
    assert seen.pinned >= kept.nbytes or seen.pinned == -1
    assert seen.private_pools >= held.nbytes or seen.private_pools == -1
    stats = torch.cuda.memory_stats_as_nested_dict()
    assert (seen.private_pools == -1) == ("reserved_bytes_by_private_pools" not in stats)
    assert (seen.pinned == -1) == (not hasattr(torch.cuda, "host_memory_stats_as_nested_dict"))


def held_up(recording: Recording, pause_s: float) -> RequestRecord:
    """A request of 40 steps of some 5 ms, before the 20th of which the host does something else for so long."""
    with otel_infer.request() as request:
        request.submitted()
        for number in range(40):
            if number == 20:
                time.sleep(pause_s)
            with otel_infer.step({request: 1}, gpu=True) as step:
                torch.cuda._sleep(5 * CYCLES_A_MS)
                step.launched()
                torch.cuda.synchronize()
            request.token_reached()
        request.finished(output_tokens=40)
    time.sleep(0.3)  # what the device said is read by then
    (record,) = recording.records()
    blame.attribute_latency([record])
    return record


def test_what_the_device_had_nothing_to_do_in_is_blamed_on_the_host(recording: Recording) -> None:
    timed_from_now_on()
    held_up(recording, 0)
    usual = held_up(recording, 0)
    held = held_up(recording, 0.060)
    for record in (usual, held):
        decode = record.find_stage(semconv.SPAN_DECODE)
        assert decode is not None
        assert decode.attributes[semconv.DEVICE_METHOD] == BY_EVENT
    added = held.breakdown.causes.get(semconv.CAUSE_HOST_BUBBLE, 0) - usual.breakdown.causes.get(
        semconv.CAUSE_HOST_BUBBLE, 0
    )
    assert 0.8 * 60e6 < added < 1.2 * 60e6, (usual.breakdown.causes, held.breakdown.causes)
