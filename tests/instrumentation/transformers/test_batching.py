"""The installed continuous batching: every step with all its members, and every way a request starts and ends."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.transformers import instrumentor
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.instrumentation.transformers.recorded import (
    Recorded,
    check_stages,
    open_server_request,
    prefilled,
    sizes,
)

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.instrumentation.transformers.engine import PAGE, Engine, prompt  # noqa: E402

pytestmark = pytest.mark.real

Make = Callable[..., Engine]


@pytest.fixture
def make(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Creates engines on the tiny model; stops those still running at the end."""
    engines: list[Engine] = []
    attention = model.config._attn_implementation

    def engine(generation: Any = None, **wanted: Any) -> Engine:
        engines.append(Engine(model, monkeypatch, generation, **wanted))
        return engines[-1]

    yield engine
    for made in engines:
        if made.manager.is_running():
            made.stop()
    model.destroy_cached_continuous_batching_manager()
    model.set_attn_implementation(attention)


def check(
    engine: Engine, records: dict[str, RequestRecord], steps: list[StepRecord], before: int = 0
) -> None:
    """Compares the records with the engine's batches; `before` counts earlier steps of the same log."""
    assert [step.size for step in steps] == [len(batch.members) for batch in engine.batches]
    assert [step.step for step in steps] == [before + number for number in range(1, len(steps) + 1)]
    for request_id, record in records.items():
        delivered: dict[int, int] = {}
        for number, member in engine.steps_of(request_id):
            delivered[before + number] = delivered.get(before + number, 0) + member.delivers
        expected = {step: tokens for step, tokens in delivered.items() if tokens}
        assert record.steps is not None
        assert dict(zip(record.steps.step.tolist(), record.steps.tokens.tolist())) == expected
        assert record.steps.batch_size.tolist() == [
            len(engine.batches[step - before - 1].members) for step in expected
        ]
        assert not record.telemetry_lost and not record.steps_evicted


def check_loads(engine: Engine, steps: list[StepRecord]) -> None:
    """Checks that running, waiting and KV usage of every step are the scheduler's and the cache's own."""
    assert [(step.running, step.waiting) for step in steps] == [
        (b.running, b.waiting) for b in engine.batches
    ]
    assert [step.kv_used for step in steps] == [batch.kv_used for batch in engine.batches]
    assert {step.kv_total for step in steps} == {engine.cache.num_blocks}
    assert 0 < max(step.kv_used for step in steps) <= engine.cache.num_blocks
    assert {step.block_tokens for step in steps} == {PAGE}


def outputs(results: dict[str, Any]) -> dict[str, list[int]]:
    return {request_id: list(result.generated_tokens) for request_id, result in results.items()}


# ── every step ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_returns_same_tokens_and_records_every_step(model: Any, make: Make, recorded: Recorded) -> None:
    prompts = [prompt(tokens) for tokens in (5, 17, 30, 9)]

    def call() -> Any:
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=6, eos_token_id=-1, pad_token_id=0
        )
        engine = make()
        return model.generate_batch(
            prompts,
            generation_config=config,
            continuous_batching_config=engine.manager.continuous_batching_config,
        )

    results = call()
    records = recorded.by_id()
    instrumentor.remove()
    assert outputs(results) == outputs(call())
    assert sorted(records) == sorted(results)
    for number, tokens in enumerate(prompts):
        record = records[f"req_{number}"]
        check_stages(record, "queue", "prefill", "decode")
        assert (record.input_tokens, record.output_tokens, record.max_tokens) == (len(tokens), 6, 6)
        assert sizes(record) == [1] * 6
        assert (record.operation, record.model, record.engine) == (
            "text_completion",
            "tiny-llama",
            "transformers",
        )
        assert (record.outcome, record.finish_reasons) == (events.OK, ("length",))
        assert prefilled(record) == [len(tokens)]


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
def test_every_step_has_the_schedulers_members(scheduler: str, make: Make, recorded: Recorded) -> None:
    engine = make(scheduler_type=scheduler, max_batch_tokens=24)
    ids = [engine.add(tokens, max_new_tokens=3 + tokens % 5) for tokens in (7, 40, 3, 19)]
    for _ in range(3):
        engine.step()
    ids += [engine.add(tokens, max_new_tokens=4) for tokens in (33, 2)]
    engine.run()
    records, steps = recorded.by_id(), recorded.steps()
    assert list(records) != [] and sorted(records) == sorted(ids)
    check(engine, records, steps)
    check_loads(engine, steps)
    for request_id in ids:
        record = records[request_id]
        chunks = [member.tokens for _, member in engine.steps_of(request_id)]
        prompt_chunks = chunks[: len(chunks) - len(sizes(record)) + 1]
        assert prefilled(record) == prompt_chunks and sum(prompt_chunks) == record.input_tokens
    assert any(len(record.prefill_steps) > 1 for record in records.values()), "no prompt was split"
    assert [step.prefill_tokens + step.decode_tokens for step in steps] == [
        sum(member.tokens for member in batch.members) for batch in engine.batches
    ]


def test_a_shared_prefix_is_not_computed_again(make: Make, recorded: Recorded) -> None:
    engine = make(allow_block_sharing=True)
    first = engine.add(3 * PAGE, max_new_tokens=2 * PAGE)
    engine.run()
    again = engine.add(3 * PAGE + 4, max_new_tokens=3)
    engine.run()
    records, steps = recorded.by_id(), recorded.steps()
    check(engine, records, steps)
    check_loads(engine, steps)
    assert prefilled(records[first]) == [3 * PAGE]
    assert sum(prefilled(records[again])) < records[again].input_tokens == 3 * PAGE + 4


def test_forked_sequences_are_one_request(make: Make, recorded: Recorded) -> None:
    engine = make({"num_return_sequences": 3, "do_sample": True})
    request_id = engine.add(10, max_new_tokens=5)
    other = engine.add(6, max_new_tokens=2)
    engine.run()
    assert len(engine.results()) == 6
    records, steps = recorded.by_id(), recorded.steps()
    check(engine, records, steps)
    assert recorded.in_flight == 0
    record = records[request_id]
    assert (record.sequences, record.input_tokens, record.output_tokens) == (3, 10, 15)
    assert sizes(record) == [3] * 5
    assert (records[other].output_tokens, sizes(records[other])) == (6, [3] * 2)


def test_an_end_of_sequence_token_is_a_stop(make: Make, recorded: Recorded) -> None:
    engine = make()
    engine.add(5, max_new_tokens=4)
    engine.run()
    (result,) = engine.results().values()
    engine.add(5, max_new_tokens=4, eos_token_id=int(result.generated_tokens[1]))
    engine.run()
    before, after = recorded.records()
    assert (before.finish_reasons, before.output_tokens) == (("length",), 4)
    assert (after.finish_reasons, after.output_tokens) == (("stop",), 2)


def test_one_token_is_a_prefill_and_no_decode(make: Make, recorded: Recorded) -> None:
    engine = make()
    engine.add(5, max_new_tokens=1)
    engine.run()
    record = recorded.only_record()
    check_stages(record, "queue", "prefill")
    assert sizes(record) == [1]


def test_queue_time_splits_at_the_schedulers_first_sight(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=16)
    engine.add(16, max_new_tokens=2)
    late = engine.add(16, max_new_tokens=2)
    engine.run()
    queue = recorded.by_id()[late].find_stage("queue")
    assert queue is not None
    hidden, known = queue.attributes["infer.queue.hidden"], queue.attributes["infer.queue.scheduler"]
    assert hidden > 0 and known > 0
    assert hidden + known == pytest.approx((queue.ended_at - queue.started_at) / 1e9)


# ── preemption ───────────────────────────────────────────────────────────────────────────────────────────────────


def overfull_engine(make: Make, **more: Any) -> Engine:
    """An engine whose cache is too small for its running requests."""
    engine = make(num_blocks=6, safety_margin=0.0, **more)
    for number in range(4):
        engine.add(prompt(PAGE - 2, 100 + 50 * number), max_new_tokens=2 * PAGE + number)
    return engine


def test_soft_reset_is_preemption_and_the_request_completes(make: Make, recorded: Recorded) -> None:
    engine = overfull_engine(make)
    engine.run()
    outputs_before = outputs(engine.results())
    records, steps = recorded.by_id(), recorded.steps()
    check(engine, records, steps)
    assert sum(record.preemptions for record in records.values()) > 0, "no request was preempted"
    for number, (request_id, record) in enumerate(sorted(records.items())):
        assert (record.outcome, record.output_tokens) == (events.OK, 2 * PAGE + number)
        assert sum(sizes(record)) == len(outputs_before[request_id]) == 2 * PAGE + number
        assert record.finish_reasons == ("length",)
    instrumentor.remove()
    again = overfull_engine(make)
    again.run()
    assert outputs(again.results()) == outputs_before


class PageableMemory:
    """Replaces pinned memory, which needs an accelerator."""

    @staticmethod
    def install(patch: pytest.MonkeyPatch) -> None:
        empty = torch.empty

        def pageable(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return empty(*args, **kwargs)

        patch.setattr(torch, "empty", pageable)


def test_an_offload_is_a_preemption_without_recomputation(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    PageableMemory.install(monkeypatch)
    engine = overfull_engine(make, cpu_offload_space=0.05)
    if not hasattr(engine.manager.continuous_batching_config, "cpu_offload_space"):
        pytest.skip("this release cannot offload to the host")
    engine.run()
    records, steps = recorded.by_id(), recorded.steps()
    check(engine, records, steps)
    assert sum(record.preemptions for record in records.values()) > 0, "no request was preempted"
    for number, (_, record) in enumerate(sorted(records.items())):
        assert (record.outcome, sum(sizes(record))) == (events.OK, 2 * PAGE + number)
        assert prefilled(record) == [PAGE - 2]


# ── cancellation ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_waiting_request_can_be_cancelled(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=8)
    running = engine.add(20, max_new_tokens=2)
    waiting = engine.add(6, max_new_tokens=5)
    engine.step()
    engine.manager.cancel_request(waiting)
    engine.run()
    records = recorded.by_id()
    record = records[waiting]
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ABORTED, "", "queue")
    assert (record.finish_reasons, record.output_tokens, record.steps) == (("abort",), 0, None)
    assert records[running].outcome == events.OK


def test_a_request_cancelled_in_prefill_has_no_output(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=8)
    request_id = engine.add(20, max_new_tokens=2)
    engine.step()
    engine.manager.cancel_request(request_id)
    engine.run()
    record = recorded.only_record()
    assert (record.outcome, record.failed_stage, record.output_tokens) == (events.ABORTED, "prefill", 0)
    assert prefilled(record) == [8]


def test_request_cancelled_in_decode_is_in_no_later_step(make: Make, recorded: Recorded) -> None:
    engine = make()
    cancelled = engine.add(6, max_new_tokens=20)
    running = engine.add(9, max_new_tokens=20)
    for _ in range(4):
        engine.step()
    engine.manager.cancel_request(cancelled)
    engine.run()
    records, steps = recorded.by_id(), recorded.steps()
    check(engine, records, steps)
    record = records[cancelled]
    assert (record.outcome, record.error_type, record.finish_reasons) == (events.ABORTED, "", ("abort",))
    assert (sizes(record), record.output_tokens, record.failed_stage) == ([1] * 4, 4, "decode")
    assert sizes(records[running]) == [1] * 20


def test_cancelling_before_the_fork_ends_all_sequences(make: Make, recorded: Recorded) -> None:
    engine = make({"num_return_sequences": 3, "do_sample": True}, max_batch_tokens=8)
    request_id = engine.add(20, max_new_tokens=4)
    engine.step()
    engine.manager.cancel_request(request_id)
    engine.run()
    assert recorded.only_record().outcome == events.ABORTED
    assert recorded.in_flight == 0


def test_cancelling_one_sequence_leaves_the_others(make: Make, recorded: Recorded) -> None:
    engine = make({"num_return_sequences": 3, "do_sample": True})
    request_id = engine.add(6, max_new_tokens=6)
    for _ in range(3):
        engine.step()
    engine.manager.cancel_request(f"{request_id}__child#0")
    engine.run()
    record, steps = recorded.only_record(), recorded.steps()
    check(engine, {request_id: record}, steps)
    assert (record.outcome, sorted(record.finish_reasons)) == (events.OK, ["abort", "length", "length"])
    assert sizes(record) == [3, 3, 2, 2, 2, 2]


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_refused_request_fails_alone(make: Make, recorded: Recorded) -> None:
    engine = make()
    if not hasattr(engine.manager.logit_processor, "check_kwargs"):
        pytest.skip("this release passes no request arguments to its logits processors")
    good = engine.add(6, max_new_tokens=3)
    bad = engine.add(6, max_new_tokens=3, temperature="warm")
    engine.run()
    assert engine.results()[bad].error
    records = recorded.by_id()
    record = records[bad]
    assert (record.outcome, record.failed_stage, record.finish_reasons) == (events.ERROR, "queue", ("error",))
    assert record.error_type not in ("", "_OTHER")
    assert records[good].outcome == events.OK


def break_forward(engine: Engine, patch: pytest.MonkeyPatch, after: int) -> None:
    """Makes this engine's forward fail after `after` steps."""
    calls = iter(range(1000))
    step = engine.manager._generation_step

    def broken() -> None:
        if next(calls) >= after:
            raise MemoryError("text that no telemetry may show")
        step()

    patch.setattr(engine.manager, "_generation_step", broken)


def test_fatal_error_in_the_loop_fails_all_requests(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_batch_tokens=24)
    break_forward(engine, monkeypatch, after=3)
    ids = [engine.add(20, max_new_tokens=8) for _ in range(3)]
    engine.start()
    results = engine.wait(3)
    assert all(result.error for result in results.values())
    engine.manager._generation_thread.join(20)
    records = recorded.by_id()
    assert sorted(records) == sorted(ids)
    for record in records.values():
        assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")
        assert record.finish_reasons == ("error",)
        assert "no telemetry" not in repr(record)
    assert recorded.in_flight == 0
    assert len(recorded.steps()) == 4, "the failed step is missing"
    assert sum(record.output_tokens for record in records.values()) == sum(
        member.delivers for batch in engine.batches[:3] for member in batch.members
    )


def test_an_engine_that_cannot_start_fails_waiting_requests(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    if not hasattr(engine.manager.output_router, "fail_and_deliver"):
        pytest.skip("this release does not report the failure")

    def impossible() -> Any:
        raise MemoryError

    monkeypatch.setattr(engine.manager, "_create_batch_processor", impossible)
    engine.add(5)
    engine.start()
    engine.wait(1)
    record = recorded.only_record()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, "MemoryError", "queue")


def test_full_queue_is_an_error_of_the_request(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import queue

    engine = make()

    def full(*_: Any, **__: Any) -> None:
        raise queue.Full

    monkeypatch.setattr(engine.manager.input_queue, "put", full)
    with pytest.raises(queue.Full):
        engine.add(5)
    record = recorded.only_record()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, "Full", "queue")


def test_a_stopped_manager_rejects_requests(make: Make, recorded: Recorded) -> None:
    engine = make()
    engine.start()
    engine.add(5, max_new_tokens=2)
    engine.wait(1)
    engine.stop()
    assert recorded.only_record().outcome == events.OK
    if engine.manager.add_request(prompt(5)) is not None:
        pytest.skip("this release accepts requests after the stop")
    record = recorded.only_record()
    assert (record.outcome, record.error_type) == (events.ERROR, "rejected")


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_manager_completes_and_records_its_work(make: Make, recorded: Recorded) -> None:
    engine = make().start()
    ids = [engine.add(8, max_new_tokens=12) for _ in range(4)]
    engine.wait(1)
    engine.stop()
    records = recorded.by_id()
    assert sorted(records) == sorted(ids)
    assert {record.outcome for record in records.values()} == {events.OK}
    check(engine, records, recorded.steps())


def test_a_hard_stop_fails_running_requests(make: Make, recorded: Recorded) -> None:
    engine = make().start()
    if not hasattr(engine.manager, "background_thread_status"):
        pytest.skip("this release has no hard stop")
    ids = [engine.add(8, max_new_tokens=1000) for _ in range(4)]
    engine.wait_for_steps(1)
    engine.stop(hard_stop=True)
    records = recorded.by_id()
    assert sorted(records) == sorted(ids) and recorded.in_flight == 0
    assert {(record.outcome, record.error_type) for record in records.values()} == {
        (events.ERROR, "RuntimeError")
    }


def test_two_managers_at_once_have_separate_steps(make: Make, recorded: Recorded) -> None:
    engines = [make().start(), make().start()]
    ids = [[engine.add(5 + number, max_new_tokens=9) for number in range(3)] for engine in engines]
    for engine in engines:
        engine.wait(3)
        engine.stop()
    records = recorded.records()
    assert len(records) == 6 and ids[0] == ids[1], "both managers must use the same request ids"
    for record in records:
        assert (sizes(record), record.outcome) == ([1] * 9, events.OK)
        assert record.steps is not None and int(record.steps.batch_size.max()) <= 3


def test_successive_managers_share_one_step_log(model: Any, make: Make, recorded: Recorded) -> None:
    for _ in range(3):
        engine = make().start()
        engine.add(5, max_new_tokens=2)
        engine.wait(1)
        engine.stop()
        model.generate(torch.tensor([prompt(5)]), max_new_tokens=2, pad_token_id=0)
    assert len([name for name, _ in recorded.arena.buffers if name.endswith(".steps")]) == 1
    assert [sizes(record) for record in recorded.records()] == [[1, 1]] * 6


def test_a_manager_restarted_after_a_failure_records_again(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    with monkeypatch.context() as broken:
        break_forward(engine, broken, after=2)
        engine.add(6, max_new_tokens=5)
        engine.start()
        engine.wait(1)
        engine.manager._generation_thread.join(20)
    recorded.records(), recorded.steps(), engine.batches.clear()
    if hasattr(engine.manager, "stop_event"):
        engine.manager.stop_event.clear()
    engine.start()
    request_id = engine.add(6, max_new_tokens=5)
    engine.wait(1)
    engine.stop()
    record = recorded.only_record()
    check(engine, {request_id: record}, recorded.steps(), before=3)


def test_a_warm_up_is_no_step(make: Make, recorded: Recorded) -> None:
    engine = make()
    engine.manager.warmup()
    assert recorded.records() == [] and recorded.steps() == []
    engine.start()
    engine.add(5, max_new_tokens=2)
    engine.wait(1)
    engine.stop()
    assert sizes(recorded.only_record()) == [1, 1]


def test_the_batching_loop_has_no_current_request(make: Make, recorded: Recorded) -> None:
    seen: list[Any] = []
    engine = make()
    step = engine.manager._generation_step

    def checked_step() -> None:
        seen.append(start.current_request())
        step()

    engine.manager._generation_step = checked_step
    request = open_server_request()
    token = request.attach()
    engine.start()
    engine.add(5, max_new_tokens=2)
    engine.wait(1)
    detach(token)
    request.close()
    engine.stop()
    assert seen and set(seen) == {None}


# ── the owner of a request ───────────────────────────────────────────────────────────────────────────────────────


def test_sequences_in_a_servers_request_are_its_stages(make: Make, recorded: Recorded) -> None:
    engine = make()
    request = open_server_request()
    token = request.attach()
    request_id = engine.add(7, max_new_tokens=4)
    detach(token)
    engine.run()
    assert recorded.records() == [], "the server must close the request"
    request.close(status_code=200)
    record = recorded.only_record()
    check_stages(record, "ingress", "queue", "prefill", "decode", "postprocess")
    check(engine, {request_id: record}, recorded.steps())
    assert (record.input_tokens, record.output_tokens, record.model) == (7, 4, "tiny-llama")


def test_prompts_of_one_servers_request_are_added_up(make: Make, recorded: Recorded) -> None:
    engine = make()
    request = open_server_request()
    token = request.attach()
    ids = [engine.add(prompt(tokens), max_new_tokens=new) for tokens, new in ((7, 4), (5, 2))]
    detach(token)
    engine.run()
    request.close(status_code=200)
    record = recorded.only_record()
    assert (record.sequences, record.input_tokens, record.output_tokens) == (2, 12, 6)
    delivered = [
        number for request_id in ids for number, member in engine.steps_of(request_id) if member.delivers
    ]
    assert sum(sizes(record)) == len(delivered) == 6


def test_a_failed_sequence_fails_the_servers_request(
    make: Make, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    break_forward(engine, monkeypatch, after=2)
    request = open_server_request()
    token = request.attach()
    engine.add(7, max_new_tokens=4)
    detach(token)
    engine.start()
    engine.wait(1)
    request.close(status_code=200)
    record = recorded.only_record()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


def test_requests_from_many_threads_keep_their_own_records(make: Make, recorded: Recorded) -> None:
    engine = make(max_batch_tokens=32).start()

    def work(number: int) -> None:
        for turn in range(4):
            engine.add(prompt(3 + number), max_new_tokens=2 + turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.wait(16)
    engine.stop()
    records = recorded.by_id()
    check(engine, records, recorded.steps())
    assert sorted((record.input_tokens, record.output_tokens) for record in records.values()) == sorted(
        (3 + number, 2 + turn) for number in range(4) for turn in range(4)
    )


def test_add_requests_keeps_the_librarys_request_ids(make: Make, recorded: Recorded) -> None:
    engine = make(allow_block_sharing=True)
    engine.manager.add_requests([prompt(4), prompt(6, 300)], max_new_tokens=2)
    engine.run()
    assert sorted(engine.results()) == ["req_0", "req_1"]
    assert {name: record.input_tokens for name, record in recorded.by_id().items()} == {
        "req_0": 4,
        "req_1": 6,
    }


def test_streaming_yields_each_token(make: Make, recorded: Recorded) -> None:
    engine = make().start()
    request_id = engine.add(6, max_new_tokens=5, streaming=True)
    lengths = [len(output.generated_tokens) for output in engine.manager.request_id_iter(request_id)]
    engine.stop()
    assert lengths[-1] == 5 and lengths == sorted(set(lengths))
    assert sizes(recorded.only_record()) == [1] * 5


def test_a_result_handler_is_called_for_each_token(make: Make, recorded: Recorded) -> None:
    engine = make().start()

    async def run() -> list[int]:
        got: list[int] = []
        over = asyncio.Event()

        def take(output: Any) -> None:
            got.append(len(output.generated_tokens))
            if output.is_finished():
                over.set()

        engine.manager.register_result_handler("mine", take)
        engine.add(6, request_id="mine", max_new_tokens=3, streaming=True)
        await asyncio.wait_for(over.wait(), 20)
        return got

    assert asyncio.run(run()) == [1, 2, 3]
    engine.stop()
    assert recorded.by_id()["mine"].output_tokens == 3


def test_generate_on_a_paged_cache_records_its_batch(
    model: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.instrumentation.transformers.engine import settings

    init = type(model).init_continuous_batching

    def small(self: Any, *args: Any, **kwargs: Any) -> Any:
        return init(self, *args, **{**kwargs, "continuous_batching_config": settings()})

    monkeypatch.setattr(type(model), "init_continuous_batching", small)
    ids = torch.tensor([prompt(5), prompt(5, 300)])
    options = {"cache_implementation": "paged", "max_new_tokens": 3, "eos_token_id": -1, "pad_token_id": 0}
    try:
        result = model.generate(ids, **options)
    except Exception as reason:
        pytest.skip(f"this release cannot do it without otel_infer either: {type(reason).__name__}")
    assert result.numel() == 2 * 8
    records = recorded.by_id()
    assert sorted(records) == ["req_0", "req_1"]
    assert [sizes(record) for record in records.values()] == [[1] * 3] * 2


# ── attributes left on the library's objects ─────────────────────────────────────────────────────────────────────


def test_copied_state_keeps_its_request_pickled_does_not(make: Make, recorded: Recorded) -> None:
    engine = make()
    engine.add(5, max_new_tokens=2)
    state = engine.manager.input_queue.get_nowait()
    assert copy.deepcopy(state).otel_infer is state.otel_infer is not None
    elsewhere = pickle.loads(pickle.dumps(state))
    assert elsewhere.otel_infer is None
    assert elsewhere.otel_infer_handle == bytes(4) != state.otel_infer_handle
    assert elsewhere == state


def test_requests_begun_before_install_count_in_the_batch(make: Make, recorded: Recorded) -> None:
    instrumentor.remove()
    engine = make()
    before = engine.add(5, max_new_tokens=6)
    engine.step()
    instrumentor.install()
    after = engine.add(5, max_new_tokens=3)
    engine.batches.clear()
    engine.run()
    records, steps = recorded.by_id(), recorded.steps()
    assert before not in records
    check(engine, records, steps)
    assert records[after].steps is not None and records[after].steps.batch_size.tolist() == [2, 2, 2]
    assert len(engine.results()[before].generated_tokens) == 6


def test_remove_in_mid_request_leaves_the_engine_working(make: Make, recorded: Recorded) -> None:
    engine = make()
    request_id = engine.add(5, max_new_tokens=6)
    engine.step()
    instrumentor.remove()
    engine.run()
    assert len(engine.results()[request_id].generated_tokens) == 6


def test_nothing_is_recorded_without_a_recording(make: Make, recorded: Recorded) -> None:
    Recorded.stop(recorded)
    instrumentor.install()
    engine = make()
    request_id = engine.add(5, max_new_tokens=3)
    engine.run()
    assert len(engine.results()[request_id].generated_tokens) == 3
