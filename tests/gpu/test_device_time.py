"""Device time of stages and steps on a real device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_infer
from otel_infer.assembly.records.request import RequestRecord
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
        instrumentor
        for instrumentor in registry.load_instrumentors()
        if instrumentor.name in ("transformers", "cuda_graphs", "torch")
    ]
    for instrumentor in installed:
        instrumentor.install()
    assert cuda_graphs.instrumentor.status.state == "active", cuda_graphs.instrumentor.status.drift
    yield recording
    for instrumentor in installed:
        instrumentor.remove()
    recording.stop()


def start_device_timing() -> None:
    """Waits until the timing thread has created its CUDA events, which it does at the first `begin`."""
    timing.begin()
    deadline = time.monotonic() + 5
    while (timing.thread.slot is None or timing.thread.slot.timeline is None) and time.monotonic() < deadline:
        timing.thread.check_due_at = 0
        timing.begin()
        time.sleep(0.05)
    assert timing.thread.slot is not None
    assert timing.thread.slot.timeline is not None


def test_a_launching_stage_has_the_device_time(recording: Recording) -> None:
    """The host only launches the work, and does not wait for the device within the stage."""
    start_device_timing()
    with otel_infer.request():
        with otel_infer.stage("embed", gpu=True):
            torch.cuda._sleep(100_000_000)  # about 50 ms on the device only
        torch.cuda.synchronize()
    (record,) = recording.records()
    stage = record.find_stage("embed")
    assert stage is not None
    assert stage.ended_at - stage.started_at < 10_000_000
    assert 0.03 < float(stage.attributes["infer.device.duration"]) < 0.1
    assert float(stage.attributes["infer.device.clock_error"]) < 0.001
    assert dict(record.device_ns)["embed"] > 30_000_000


def test_prefill_and_decode_of_generate_have_device_time(recording: Recording, tiny_llama: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    start_device_timing()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama).to("cuda").eval()
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    for _ in range(2):  # the first call is a warmup
        model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    record = recording.records()[-1]
    prefill, decode = record.find_stage("prefill"), record.find_stage("decode")
    assert prefill is not None
    assert decode is not None
    assert prefill.attributes["infer.device.method"] == "event"
    assert decode.attributes["infer.device.method"] == "event"
    # The steps of a tiny model are short, therefore only some of them are timed.
    assert 1 <= int(decode.attributes["infer.device.steps"]) <= 23
    length = (decode.ended_at - decode.started_at) / 1e9
    mean_step = float(decode.attributes["infer.device.duration"]) / int(
        decode.attributes["infer.device.steps"]
    )
    assert 0 < mean_step <= 1.5 * length / 23
    assert decode.attributes["infer.device.bottleneck"] == "launch-or-sync"


def test_a_busy_device_is_gpu_bound(recording: Recording) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    start_device_timing()
    # One layer of 20 GB takes about 7 ms to read for each token. Its launch takes about 1 ms, or 3 ms on a shared host.
    wide = {"hidden_size": 12288, "intermediate_size": 262144, "num_attention_heads": 96}
    config = transformers.LlamaConfig(vocab_size=1024, num_hidden_layers=1, **wide)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    ids = torch.ones((1, 16), dtype=torch.long, device="cuda")
    for _ in range(2):  # the first call is a warmup
        model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    decode = recording.records()[-1].find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "event"
    launched, span = (float(decode.attributes[f"infer.device.{name}"]) for name in ("launch", "duration"))
    assert launched < 0.8 * span
    assert decode.attributes["infer.device.bottleneck"] in ("gpu-bound", "host-stalled")


def test_continuous_batching_is_timed_on_its_stream(recording: Recording, tiny_llama: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    start_device_timing()
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
            results = [manager.get_result(timeout=60) for _ in range(8)]
            assert all(result is not None for result in results)
            time.sleep(1.2)  # the timing thread has polled by then
    finally:
        manager.stop(block=True, timeout=30)
    records = [record for record in recording.records() if record.find_stage("decode") is not None]
    assert len(records) == 16
    decode = records[-1].find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "event", decode.attributes
    assert decode.attributes["infer.device.bottleneck"] in (
        "launch-or-sync",
        "host-stalled",
        "gpu-bound",
        "back-pressured",
    )


class Sleeper(torch.nn.Module):
    """A model whose `forward` keeps the device busy for about `us` µs at 2 GHz."""

    def __init__(self, us: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        self.cycles = 2000 * us

    def forward(self) -> None:
        torch.cuda._sleep(self.cycles)


def run_forwards(model: Sleeper, calls: int) -> None:
    """Calls the model as requests of their own, and waits for each on the calling thread's stream."""
    with torch.inference_mode():
        for _ in range(calls):
            model()
            torch.cuda.current_stream().synchronize()


def count_device_times(records: list[RequestRecord]) -> int:
    """Returns how many of these requests have a `forward` that the device timed."""
    stages = [record.find_stage("forward") for record in records]
    return sum(
        stage is not None and stage.attributes.get("infer.device.method") == "event" for stage in stages
    )


def test_long_calls_after_many_short_ones_are_timed(recording: Recording) -> None:
    start_device_timing()
    short, long = Sleeper(30).eval(), Sleeper(20_000).eval()
    run_forwards(short, 1800)
    recording.records()
    run_forwards(long, 66)
    time.sleep(0.5)  # the timing thread has polled by then
    assert count_device_times(recording.records()) >= 55


def test_each_of_six_threads_has_device_times(recording: Recording) -> None:
    start_device_timing()
    timed: list[int] = []

    def run(number: int) -> None:
        start_device_timing()
        model = Sleeper(4000).eval()
        with torch.cuda.stream(torch.cuda.Stream()):
            run_forwards(model, 200)
            assert timing.thread.slot is not None
            assert timing.thread.slot.timeline is not None
            timed.append(timing.thread.slot.timeline.begun)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(timed) == 6
    assert min(timed) >= 20
    time.sleep(0.5)
    assert count_device_times(recording.records()) >= 60
