"""Time on a real device: who launches is timed, on the stages and steps of its request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_infer
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.torch import cuda_graphs
from tests.support.rings import Recording

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu


@pytest.fixture
def recording() -> Iterator[Recording]:
    torch.cuda.init()
    recording = Recording()
    installed = [
        one for one in registry.load_instrumentors() if one.name in ("transformers", "cuda", "torch")
    ]
    for integration in installed:
        integration.install()
    assert cuda_graphs.instrumentor.status.state == "active", cuda_graphs.instrumentor.status.drift
    yield recording
    for integration in installed:
        integration.remove()
    recording.stop()


def timed_from_now_on() -> None:
    """The tender makes its events at the first begin."""
    timing.begin()
    deadline = time.monotonic() + 5
    while (
        timing._thread.slot is None or timing._thread.slot.timeline is None
    ) and time.monotonic() < deadline:
        timing._thread.checked_at = 0
        timing.begin()
        time.sleep(0.05)
    assert timing._thread.slot is not None
    assert timing._thread.slot.timeline is not None


def test_a_stage_is_timed_on_the_device_that_the_host_only_launches_for(recording: Recording) -> None:
    timed_from_now_on()
    with otel_infer.request():
        with otel_infer.stage("embed", gpu=True):
            torch.cuda._sleep(100_000_000)  # some 50 ms, of which the host sees nothing
        torch.cuda.synchronize()
    (record,) = recording.records()
    stage = record.find_stage("embed")
    assert stage is not None
    assert stage.ended_at - stage.started_at < 10_000_000
    assert 0.03 < float(stage.attributes["infer.device.duration"]) < 0.1
    assert float(stage.attributes["infer.device.clock_error"]) < 0.001
    assert dict(record.device_ns)["embed"] > 30_000_000


def test_prefill_and_decode_of_generate_are_timed_step_by_step(
    recording: Recording, tiny_llama: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    timed_from_now_on()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    for _ in range(2):  # the first is cold
        model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    record = recording.records()[-1]
    prefill, decode = record.find_stage("prefill"), record.find_stage("decode")
    assert prefill is not None
    assert decode is not None
    assert prefill.attributes["infer.device.method"] == "event"
    assert decode.attributes["infer.device.method"] == "event"
    # A tiny model's steps are short: some of them are marked.
    assert 1 <= int(decode.attributes["infer.device.steps"]) <= 23
    length = (decode.ended_at - decode.started_at) / 1e9
    each = float(decode.attributes["infer.device.duration"]) / int(decode.attributes["infer.device.steps"])
    assert 0 < each <= 1.5 * length / 23
    assert decode.attributes["infer.device.bottleneck"] == "launch-bound"


def test_a_model_that_keeps_the_device_busy_is_not_said_to_be_held_back_by_launching(
    recording: Recording,
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    timed_from_now_on()
    # One layer of 20 GB: some 7 ms to read for each token, and no more to launch than 1 ms, or 3 where the host has neighbours.
    wide = {"hidden_size": 12288, "intermediate_size": 262144, "num_attention_heads": 96}
    config = transformers.LlamaConfig(vocab_size=1024, num_hidden_layers=1, **wide)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    for _ in range(2):  # the first is cold
        model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    decode = recording.records()[-1].find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "event"
    launched, span = (float(decode.attributes[f"infer.device.{name}"]) for name in ("launch", "duration"))
    assert launched < 0.8 * span
    assert decode.attributes["infer.device.bottleneck"] in ("gpu-bound", "host-stalled")


def test_steps_of_continuous_batching_are_timed_on_the_stream_of_their_own(
    recording: Recording, tiny_llama: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    timed_from_now_on()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation="sdpa")
    model = model.to("cuda", torch.bfloat16).eval()
    config = transformers.GenerationConfig(
        max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        for load in range(2):
            for number in range(8):
                manager.add_request([5, 6, 7, 8 + number], request_id=f"r{load}{number}", max_new_tokens=40)
            found = [manager.get_result(timeout=60) for _ in range(8)]
            assert all(one is not None for one in found)
            time.sleep(1.2)  # the tender has been by
    finally:
        manager.stop(block=True, timeout=30)
    records = [record for record in recording.records() if record.find_stage("decode") is not None]
    assert len(records) == 16
    decode = records[-1].find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "event", decode.attributes
    assert decode.attributes["infer.device.bottleneck"] in (
        "launch-bound",
        "host-stalled",
        "gpu-bound",
        "back-pressured",
    )
