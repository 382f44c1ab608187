"""Asynchronous batching: two steps in flight, and tokens computed for requests that have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

import otel_infer
from otel_infer import _clock, semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.assembly.records.request import Stage
from otel_infer.gpu.timing import DeviceTiming
from otel_infer.instrumentation.transformers import instrumentor, transfers
from otel_infer.ringbuffer import events
from tests.instrumentation.transformers.recorded import Recorded, prefilled, sizes
from tests.support.fake_device import OnHostClock

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.instrumentation.transformers import pairs  # noqa: E402
from tests.instrumentation.transformers.engine import PAGE, Engine, prompt  # noqa: E402

pytestmark = pytest.mark.real

Make = Callable[..., Engine]
COPY_NS = 1_000_000
MOVES = {semconv.SPAN_H2D, semconv.SPAN_D2H}


@pytest.fixture
def make(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Creates engines that schedule a step while the previous step runs."""
    engines: list[Engine] = []
    attention = model.config._attn_implementation

    def engine(generation: Any = None, **wanted: Any) -> Engine:
        pairs.pairs_on_the_host(monkeypatch)
        engines.append(Engine(model, monkeypatch, generation, **wanted))
        engines[-1].manager.continuous_batching_config.use_async_batching = True
        return engines[-1]

    yield engine
    for made in engines:
        if made.manager.is_running():
            made.stop()
    model.set_attn_implementation(attention)


def run(engine: Engine, *prompts: tuple[int, int]) -> dict[str, list[int]]:
    """Runs these (prompt tokens, new tokens) in the engine's own thread; returns the generated tokens."""
    ids = [
        engine.add(prompt(tokens, 100 + 40 * n), max_new_tokens=new)
        for n, (tokens, new) in enumerate(prompts)
    ]
    engine.start()
    results = engine.wait(len(ids))
    engine.stop()
    assert not any(result.error for result in results.values())
    return {request_id: list(results[request_id].generated_tokens) for request_id in ids}


def test_two_steps_in_flight_deliver_the_same_tokens(make: Make, recorded: Recorded) -> None:
    prompts = [(5, 4), (17, 9), (30, 6)]
    tokens_by_id = run(make(), *prompts)
    records, steps = recorded.by_id(), recorded.steps()
    instrumentor.remove()
    assert run(make(), *prompts) == tokens_by_id
    engine = make()
    engine.manager.continuous_batching_config.use_async_batching = False
    assert run(engine, *prompts) == tokens_by_id
    for (request_id, tokens), (length, new) in zip(tokens_by_id.items(), prompts):
        record = records[request_id]
        assert (len(tokens), record.output_tokens, sizes(record)) == (new, new, [1] * new)
        assert (record.outcome, record.finish_reasons, prefilled(record)[0]) == (
            events.OK,
            ("length",),
            length,
        )
        # Each request ran in one step more, scheduled before its last token was known.
        assert record.discarded == 1
    overlaps = [after.started_at < before.ended_at for before, after in pairwise(steps)]
    assert sum(overlaps) >= len(steps) - 3, "never two steps in flight"


def test_every_step_has_its_members_and_end(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=24)
    run(engine, (7, 5), (40, 3), (3, 8), (19, 2))
    records, steps = recorded.by_id(), recorded.steps()
    assert [step.step for step in steps] == list(range(1, len(engine.batches) + 1))
    assert [step.size for step in steps] == [len(batch.members) for batch in engine.batches]
    for request_id, record in records.items():
        delivering = [number for number, member in engine.steps_of(request_id) if member.delivers]
        assert record.steps is not None
        assert record.steps.step.tolist() == delivering[: record.output_tokens]
        assert len(delivering) - record.output_tokens == record.discarded
    assert all(before.ended_at <= after.ended_at for before, after in pairwise(steps))


def test_unread_last_step_ends_with_its_last_request(make: Make, recorded: Recorded) -> None:
    """The library fetches the result when the next request arrives, perhaps an hour later."""
    engine = make()
    engine.add(6, max_new_tokens=3)
    engine.start()
    engine.wait(1)
    time.sleep(0.4)
    engine.add(prompt(6, 300), max_new_tokens=3)
    engine.wait(1)
    engine.stop()
    first, second = recorded.records()
    steps = recorded.steps()
    assert (sizes(first), sizes(second)) == ([1] * 3, [1] * 3)
    assert [step.step for step in steps] == list(range(1, len(engine.batches) + 1))
    assert max(step.ended_at - step.started_at for step in steps) < 300_000_000


def test_request_cancelled_in_flight_gets_no_more_tokens(make: Make, recorded: Recorded) -> None:
    engine = make()
    cancelled = engine.add(6, max_new_tokens=1000)
    running = engine.add(prompt(6, 300), max_new_tokens=40)
    engine.start()
    engine.wait_for_steps(6)
    engine.manager.cancel_request(cancelled)
    engine.wait(1)
    engine.stop()
    records, steps = recorded.by_id(), recorded.steps()
    record = records[cancelled]
    assert (record.outcome, record.error_type) == (events.ABORTED, "")
    assert record.steps is not None and len(record.steps) < len(engine.steps_of(cancelled))
    assert int(record.steps.ended_at[-1]) <= record.ended_at
    assert sizes(records[running]) == [1] * 40
    assert [step.size for step in steps] == [len(batch.members) for batch in engine.batches]


@pytest.mark.parametrize("space", [0.0, 0.05])
def test_a_request_preempted_in_flight_completes(
    space: float, make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **kwargs: empty(*args, **{**kwargs, "pin_memory": False})
    )
    engine = make(num_blocks=6, safety_margin=0.0, cpu_offload_space=space)
    if space and not hasattr(engine.manager.continuous_batching_config, "cpu_offload_space"):
        pytest.skip("this release cannot offload to the host")
    tokens_by_id = run(engine, *[(PAGE - 2, 2 * PAGE + number) for number in range(4)])
    records = recorded.by_id()
    assert sum(record.preemptions for record in records.values()) > 0, "no request was preempted"
    for number, (request_id, tokens) in enumerate(tokens_by_id.items()):
        assert sum(sizes(records[request_id])) == len(tokens) == 2 * PAGE + number
        assert records[request_id].outcome == events.OK


def test_transfers_belong_to_requests_with_a_prompt_chunk(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=16)
    run(engine, (30, 3), (5, 3))
    for request_id, record in recorded.by_id().items():
        names = [stage.name for stage in record.stages]
        chunks = [member for _, member in engine.steps_of(request_id) if member.tokens > 1]
        assert names.count("h2d") == names.count("d2h") == len(chunks) > 0
        for stage in record.stages:
            assert record.arrived_at <= stage.started_at <= stage.ended_at <= record.ended_at


class Copies:
    """Logs every copy (time, bytes, ns on the fake device); each of the next `timed` copies takes `COPY_NS`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self.timed = 0
        self.device = OnHostClock()
        self.device.main = pairs.Stream()
        monkeypatch.setattr(pairs, "Stream", lambda: self.device.main)
        self.timing = DeviceTiming(lambda: self.device)
        monkeypatch.setattr(transfers, "timing", self.timing)
        copy = torch.Tensor.copy_

        def copy_(into: Any, other: Any, *args: Any, **more: Any) -> Any:
            length = COPY_NS if self.timed > 0 else 0
            self.timed -= 1
            self.seen.append((_clock.now(), other.nbytes, length))
            if length:  # a fake device that running behind would be measured too late
                self.device.launch(length)
            return copy(into, other, *args, **more)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    def within(self, stage: Stage) -> list[list[int]]:
        """Returns the bytes and ns of each copy within the stage."""
        return [copied for at, *copied in self.seen if stage.started_at <= at <= stage.ended_at]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    copies = Copies(monkeypatch)
    yield copies
    copies.timing.stop()


def test_each_transfer_has_its_size_and_device_time(copies: Copies, make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=16)
    engine.start()
    found: list[Stage] = []
    timed: list[Stage] = []
    for turn in range(40):  # the device is found some ms after its first use, and polled ten times a second
        copies.timed = 20
        engine.add(prompt(30, 100 + 40 * turn), max_new_tokens=150)
        engine.wait(1)
        found = [stage for record in recorded.records() for stage in record.stages if stage.name in MOVES]
        timed = [stage for stage in found if stage.attributes.get(semconv.DEVICE_METHOD) == BY_EVENT]
        if {stage.name for stage in timed} == MOVES:
            break
        time.sleep(0.05)
    engine.stop()
    assert {stage.name for stage in timed} == MOVES
    for stage in found:
        assert stage.attributes[semconv.TRANSFER_SIZE] == sum(size for size, _ in copies.within(stage)) > 0
        assert stage.attributes[semconv.TRANSFER_PINNED] is False
    for stage in timed:
        took = sum(length for _, length in copies.within(stage)) / 1e9
        assert stage.attributes[semconv.DEVICE_DURATION] == pytest.approx(took, abs=1e-4)
        assert semconv.DEVICE_BOTTLENECK not in stage.attributes


def test_moving_inputs_to_a_device_is_a_stage(recorded: Recorded) -> None:
    inputs = transformers.BatchEncoding(
        {"input_ids": torch.zeros(2, 5, dtype=torch.long), "words": "unchanged"}
    )
    with otel_infer.request():
        inputs.to("cpu")
        inputs.to(torch.float16)  # refused with a warning
        assert inputs.to("meta") is inputs
        inputs.to("meta")
        with pytest.raises(RuntimeError, match="no such device"):
            transformers.BatchEncoding({"input_ids": torch.zeros(1)}).to("no such device")
    (record,) = recorded.records()
    assert [(stage.name, stage.attributes) for stage in record.stages] == [
        ("h2d", {semconv.TRANSFER_SIZE: 2 * 5 * 8, semconv.TRANSFER_PINNED: False})
    ]


@pytest.mark.gpu
def test_on_gpu_two_steps_in_flight_deliver_same(
    model: Any, monkeypatch: pytest.MonkeyPatch, recorded: Recorded
) -> None:
    model.to("cuda")
    try:
        found = []
        for asynchronous in (True, False):
            engine = Engine(model, monkeypatch, use_async_batching=asynchronous)
            found.append(run(engine, (5, 4), (17, 9), (30, 6)))
        assert found[0] == found[1]
    finally:
        model.to("cpu")
    for record in recorded.records():
        assert sizes(record) == [1] * record.output_tokens
        assert record.outcome == events.OK
