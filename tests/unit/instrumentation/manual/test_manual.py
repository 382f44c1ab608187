"""Manual `request`, `stage` and `step`: their records, and no effect of errors on the server."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace

import otel_infer
from otel_infer import semconv
from otel_infer.assembly.engine import step_log
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import tenancy
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import caller as caller_module
from otel_infer.tracing import request_span, span_ids, start, user_mistakes
from otel_infer.tracing.context import detach
from tests.support.rings import Recording, stages_of


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()
    user_mistakes._reported.clear()


def read_single_record(recording: Recording) -> RequestRecord:
    records = recording.records()
    assert len(records) == 1
    return records[0]


def stage_ms(record: RequestRecord, name: str) -> float:
    stage = record.find_stage(name)
    assert stage is not None
    return (stage.ended_at - stage.started_at) / 1e6


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stage_duration_is_that_of_its_block(recording: Recording) -> None:
    with otel_infer.request():
        with otel_infer.stage("database"):
            time.sleep(0.02)
    record = read_single_record(recording)
    assert stages_of(record) == ["database"]
    assert 20 <= stage_ms(record, "database") < 40


async def test_stage_works_as_an_async_context_manager(recording: Recording) -> None:
    async with otel_infer.request():
        async with otel_infer.stage("rerank"):
            await asyncio.sleep(0.02)
    assert 20 <= stage_ms(read_single_record(recording), "rerank") < 40


async def test_decorated_function_is_a_stage_at_each_call(
    recording: Recording,
) -> None:
    @otel_infer.stage("plain")
    def plain(x: int) -> int:
        """Doc."""
        return x + 1

    @otel_infer.stage("awaited")
    async def awaited(x: int) -> int:
        return x + 1

    with otel_infer.request():
        assert [plain(1), plain(2), await awaited(3)] == [2, 3, 4]
    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    assert inspect.iscoroutinefunction(awaited)
    assert stages_of(read_single_record(recording)) == ["plain", "plain", "awaited"]


def test_decorated_generator_is_a_stage_until_its_end(recording: Recording) -> None:
    @otel_infer.stage("stream")
    def stream() -> Iterator[int]:
        sent = yield 1
        time.sleep(0.02)
        yield sent

    with otel_infer.request():
        items = stream()
        assert [next(items), items.send(5)] == [1, 5]
        assert list(items) == []
    assert inspect.isgeneratorfunction(stream)
    assert stage_ms(read_single_record(recording), "stream") >= 20


async def test_decorated_async_generator_closes_immediately(
    recording: Recording,
) -> None:
    closed: list[int] = []

    @otel_infer.stage("stream")
    async def stream() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(1)

    with otel_infer.request():
        items = stream()
        assert await items.__anext__() == 1
        await items.aclose()  # type: ignore[attr-defined]
        assert closed == [1]
    assert inspect.isasyncgenfunction(stream)
    assert stages_of(read_single_record(recording)) == ["stream"]


def test_failing_stage_is_recorded_and_reraises(recording: Recording) -> None:
    raised = ValueError("secret")
    with pytest.raises(ValueError) as caught:
        with otel_infer.request():
            with otel_infer.stage("database"):
                raise raised
    assert caught.value is raised
    record = read_single_record(recording)
    assert (record.outcome, record.error_type, record.failed_stage) == (
        events.ERROR,
        "ValueError",
        "database",
    )
    assert stages_of(record) == ["database"]


def test_nested_stage_lies_within_its_outer_stage(recording: Recording) -> None:
    with otel_infer.request():
        with otel_infer.stage("retrieve"):
            with otel_infer.stage("database"):
                pass
    record = read_single_record(recording)
    outer, inner = record.find_stage("retrieve"), record.find_stage("database")
    assert outer is not None and inner is not None
    assert outer.started_at <= inner.started_at <= inner.ended_at <= outer.ended_at


def test_stage_without_a_request_records_nothing(recording: Recording) -> None:
    with otel_infer.stage("database"):
        pass
    assert recording.records() == []


def test_manual_api_does_nothing_without_a_recorder() -> None:
    assert not recorder.active
    with otel_infer.request("chat", model="tiny") as request:
        request.submitted(input_tokens=3)
        request.received()
        with otel_infer.stage("database"), otel_infer.step([request]) as step:
            step.delivered[request] = 0
        request.preempted()
        request.set_attribute("a", 1)
        request.finished()
    assert not torch_suppressed.get()


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_manual_request_records_its_given_values(recording: Recording) -> None:
    with otel_infer.request("chat", model="tiny") as request:
        request.submitted(input_tokens=7, max_tokens=9)
        request.set_attribute("tenant.tier", "gold")
        request.finished("stop", 4)
    record = read_single_record(recording)
    assert (record.operation, record.model, record.provider) == ("chat", "tiny", "custom")
    assert (record.input_tokens, record.max_tokens, record.output_tokens) == (7, 9, 4)
    assert (record.finish_reasons, record.outcome) == (("stop",), events.OK)
    assert record.attributes == {"tenant.tier": "gold"}
    assert record.server_span_id == b""


def test_token_reached_sets_the_first_token_time(recording: Recording) -> None:
    with otel_infer.request("chat") as request:
        with otel_infer.step([request]):
            pass
        time.sleep(0.02)
        request.token_reached()
        request.token_reached()
    record = read_single_record(recording)
    assert record.steps is not None
    assert record.first_token_at - int(record.steps.ended_at[0]) >= 20_000_000


@pytest.mark.parametrize(
    ("tracestate", "expected"),
    [
        ("ot=th:8;rv:6e6d1a75832a2f,vendor=user-7", "ot=th:8;rv:6e6d1a75832a2f"),
        ("ot=th:8;id:user-7", "ot=th:8"),
        ("vendor=user-7", ""),
        ("", ""),
    ],
)
def test_only_the_sampling_part_of_tracestate_is_recorded(
    recording: Recording, tracestate: str, expected: str
) -> None:
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with otel_infer.request(headers={"traceparent": caller, "tracestate": tracestate}):
        pass
    assert read_single_record(recording).tracestate == expected


def test_request_is_the_current_span_inside_its_block(recording: Recording) -> None:
    before = trace.get_current_span()
    with otel_infer.request() as request:
        assert trace.get_current_span() is request._live
    assert trace.get_current_span() is before
    assert start.current_request() is None


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_request_with_headers_is_a_child_server_span(recording: Recording, name: str) -> None:
    headers = {name: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with otel_infer.request(headers=headers):
        pass
    record = read_single_record(recording)
    assert record.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert record.parent_span_id.hex() == "b7ad6b7169203331"
    assert record.remote_parent and record.server_span_id


def test_request_under_a_server_joins_its_request(recording: Recording) -> None:
    server = start.open_request("POST", owner="asgi", server=True)
    assert server is not None
    token = server.attach()
    with otel_infer.request("chat", model="tiny"):
        with otel_infer.stage("database"):
            pass
    assert not server.ended
    detach(token)
    server.close()
    record = read_single_record(recording)
    assert (record.operation, record.model) == ("chat", "tiny")
    assert stages_of(record) == ["ingress", "database"]


def test_error_under_a_server_keeps_the_server_outcome(recording: Recording) -> None:
    server = start.open_request("POST", owner="asgi", server=True)
    assert server is not None
    token = server.attach()
    with pytest.raises(KeyError):
        with otel_infer.request():
            raise KeyError
    detach(token)
    server.close()
    assert read_single_record(recording).outcome == events.OK


def test_request_without_an_operation_is_not_named(recording: Recording) -> None:
    with otel_infer.request("chat", model="outer") as outer:
        with otel_infer.request():
            pass
        assert outer._live is not None and outer._live.is_named
    with otel_infer.request() as plain:
        assert plain._live is not None and not plain._live.is_named
    first, second = recording.records()
    assert (first.operation, first.model) == ("chat", "outer")
    assert second.operation == "inference"


CALLER = {
    "X-Tenant": "blue",
    "x-class": "batch",
    "baggage": "tenant=red",
    "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
}


@pytest.mark.parametrize(
    ("tenant", "headers", "expected"),
    [
        ("header:x-tenant", CALLER, ("blue", "batch")),
        ("baggage:tenant", CALLER, ("red", "batch")),
        ("header:x-tenant", {}, (None, "interactive")),
        ("header:x-tenant", None, (None, None)),
        ("", CALLER, (None, None)),
    ],
)
def test_tenant_and_class_are_read_from_given_headers(
    recording: Recording,
    monkeypatch: pytest.MonkeyPatch,
    tenant: str,
    headers: dict[str, str] | None,
    expected: tuple[str | None, str | None],
) -> None:
    caller_settings = tenancy.parse_caller_settings(tenant, "", "header:X-Class" if tenant else "")
    monkeypatch.setattr(
        caller_module, "caller_settings", caller_settings if tenant else tenancy.NO_CALLER_SETTINGS
    )
    with otel_infer.request(headers=headers):
        with otel_infer.request(headers=CALLER):
            pass
    attributes = read_single_record(recording).attributes
    assert (attributes.get(semconv.TENANT), attributes.get(semconv.TRAFFIC_CLASS)) == expected


def test_non_text_headers_do_not_fail_the_request(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        caller_module, "caller_settings", tenancy.parse_caller_settings("header:x-tenant", "", "")
    )
    odd: Any = {7: None, "\udcff": "\udcff", "x-tenant": 7}
    with otel_infer.request(headers=odd):
        pass
    assert read_single_record(recording).attributes[semconv.TENANT] == "7"
    assert recording.in_flight == 0


@pytest.mark.parametrize(
    ("error", "outcome", "error_type"),
    [
        (ValueError("secret"), events.ERROR, "ValueError"),
        (TimeoutError(), events.ABORTED, "timeout"),
        (asyncio.CancelledError(), events.ABORTED, "cancelled"),
        (GeneratorExit(), events.ABORTED, "cancelled"),
        (KeyboardInterrupt(), events.ABORTED, "cancelled"),
    ],
)
def test_exception_type_determines_the_outcome(
    recording: Recording, error: BaseException, outcome: int, error_type: str
) -> None:
    with pytest.raises(type(error)) as caught:
        with otel_infer.request():
            raise error
    assert caught.value is error
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == (outcome, error_type)


@pytest.mark.parametrize(
    ("reason", "outcome", "error_type"),
    [("abort", events.ABORTED, ""), ("error", events.ERROR, "_OTHER"), ("stop", events.OK, "")],
)
def test_finish_reason_determines_the_outcome(
    recording: Recording, reason: str, outcome: int, error_type: str
) -> None:
    with otel_infer.request() as request:
        request.submitted()
        with otel_infer.step([request]):
            pass
        request.finished(reason)
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == (outcome, error_type)
    assert record.failed_stage == ("" if reason == "stop" else "decode")


async def test_decorated_function_is_a_request_at_each_call(recording: Recording) -> None:
    @otel_infer.request("embeddings", model="tiny")
    def embed(x: int) -> int:
        return x

    @otel_infer.request("chat")
    async def chat(x: int) -> int:
        await asyncio.sleep(0)
        return x

    assert [embed(1), embed(2), await chat(3)] == [1, 2, 3]
    assert [r.operation for r in recording.records()] == ["embeddings", "embeddings", "chat"]


def test_decorated_generator_is_one_request_until_its_end(recording: Recording) -> None:
    @otel_infer.request("chat")
    def stream() -> Iterator[int]:
        yield from range(3)

    assert list(stream()) == [0, 1, 2]
    assert read_single_record(recording).operation == "chat"
    items = stream()
    next(items)
    items.close()  # type: ignore[attr-defined]
    record = read_single_record(recording)
    assert (record.outcome, record.error_type) == (events.ABORTED, "cancelled")
    assert start.current_request() is None


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode(batch: list[Any], steps: int, **first: Any) -> None:
    for number in range(steps):
        with otel_infer.step(batch, **(first if number == 0 else {})):
            pass


def test_steps_record_prefill_then_decode_tokens(recording: Recording) -> None:
    with otel_infer.request("chat") as request:
        request.submitted(input_tokens=5)
        request.received()
        decode([request], 4, prompt_tokens={request: 5}, waiting=3, kv_used=1, kv_total=10)
        request.finished("length")
    record = read_single_record(recording)
    assert stages_of(record) == ["queue", "prefill", "decode"]
    assert record.steps is not None
    assert record.steps.tokens.tolist() == [1, 1, 1, 1]
    assert record.output_tokens == 4
    assert [(chunk.tokens, chunk.batch_size) for chunk in record.prefill_steps] == [(5, 1)]
    queue, prefill, decoding = (record.find_stage(name) for name in ("queue", "prefill", "decode"))
    assert queue is not None and prefill is not None and decoding is not None
    assert queue.ended_at == prefill.started_at <= prefill.ended_at == decoding.started_at
    assert "infer.queue.hidden" in queue.attributes


def open_request() -> Any:
    """Opens a request outside the current context; `close_request` closes it."""
    request = otel_infer.request()
    contextvars.Context().run(request.__enter__)
    return request


def close_request(request: Any) -> None:
    request._live.close()


def test_shared_steps_record_batch_size_and_other_prefills(recording: Recording) -> None:
    first, second = open_request(), open_request()
    decode([first], 2)
    decode([first, second], 3, prompt_tokens={second: 9})
    close_request(first)
    decode([second], 1)
    close_request(second)
    first_record, second_record = recording.records()
    assert first_record.steps is not None and second_record.steps is not None
    assert first_record.steps.batch_size.tolist() == [1, 1, 2, 2, 2]
    assert second_record.steps.batch_size.tolist() == [2, 2, 2, 1]
    assert first_record.steps.others_prefill_tokens.tolist()[1:] == [0, 9, 0, 0]
    assert first_record.steps.step.tolist()[2:] == second_record.steps.step.tolist()[:3]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 4), max_size=5, unique=True), min_size=1, max_size=30))
def test_every_member_of_a_step_gets_its_token(recording: Recording, batches: list[list[int]]) -> None:
    requests = [open_request() for _ in range(5)]
    for batch in batches:
        decode([requests[number] for number in batch], 1)
    handles = [request._live.handle for request in requests]
    for request in requests:
        close_request(request)
    records = {record.handle: record for record in recording.records()}
    for number, handle in enumerate(handles):
        rows = records[handle].steps
        sizes = rows.batch_size.tolist() if rows is not None else []
        assert sizes == [len(batch) for batch in batches if number in batch]


def test_prompt_chunk_delivers_no_tokens(recording: Recording) -> None:
    with otel_infer.request() as request:
        for tokens, got in ((8, 0), (3, 1)):
            with otel_infer.step([request], prompt_tokens={request: tokens}) as step:
                step.delivered = {request: got}
        with otel_infer.step([request]) as step:
            step.delivered[request] = 3  # speculative decoding
    record = read_single_record(recording)
    assert record.steps is not None
    assert [chunk.tokens for chunk in record.prefill_steps] == [8, 3]
    assert record.steps.tokens.tolist() == [1, 3]
    assert record.output_tokens == 4


def test_failing_step_delivers_nothing_and_reraises(recording: Recording) -> None:
    raised = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught:
        with otel_infer.request() as request:
            decode([request], 2)
            with otel_infer.step([request]) as step:
                step.delivered[request] = 2
                raise raised
    assert caught.value is raised
    record = read_single_record(recording)
    assert record.steps is not None
    assert record.steps.tokens.tolist() == [1, 1]


def test_preempted_request_is_prefilled_again(recording: Recording) -> None:
    with otel_infer.request() as request:
        decode([request], 2)
        request.preempted()
        decode([], 1)
        decode([request], 2)
    record = read_single_record(recording)
    assert record.preemptions == 1
    assert record.output_tokens == 4


def test_step_suppresses_torch_in_its_own_thread(recording: Recording) -> None:
    with otel_infer.request() as request, otel_infer.step([request]):
        assert torch_suppressed.get()
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch_suppressed.get()))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    assert not torch_suppressed.get()


async def test_concurrent_tasks_may_await_inside_steps(recording: Recording) -> None:
    async def loop(turns: int) -> None:
        async with otel_infer.request() as request:
            for _ in range(turns):
                with otel_infer.step([request]):
                    await asyncio.sleep(0.001)

    await asyncio.gather(loop(3), loop(5), loop(8))
    records = recording.records()
    assert sorted(record.output_tokens for record in records) == [3, 5, 8]
    assert not torch_suppressed.get()


def test_steps_do_not_retain_their_requests(recording: Recording) -> None:
    with otel_infer.request() as request:
        decode([request], 2)
    seen = weakref.ref(request)
    decode([], 1)
    del request
    gc.collect()
    assert seen() is None


def test_finished_thread_releases_its_step_ring(recording: Recording) -> None:
    def loop() -> None:
        with otel_infer.request() as request:
            decode([request], 2)

    for _ in range(24):
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    records = recording.records()
    assert [record.output_tokens for record in records] == [2] * 24
    assert sum(name.endswith(".steps") for name, _ in recording.arena.buffers) == 1


# ── errors do not reach the caller ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch", [None, 5, ["no request"], [None]])
def test_invalid_batch_is_logged_once_and_skipped(
    recording: Recording, batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "otel_infer"), otel_infer.request() as request:
        decode([request], 1)
        for _ in range(2):
            with otel_infer.step(batch):
                pass
        decode([request], 2)
    assert len(caplog.messages) == 1
    assert read_single_record(recording).output_tokens == 3


@pytest.mark.parametrize("number", [-1, 1 << 70, 1.5, float("nan"), "seven", None])
def test_invalid_numbers_do_not_stop_recording(recording: Recording, number: Any) -> None:
    with otel_infer.request() as request:
        request.submitted(input_tokens=number, max_tokens=number)
        with otel_infer.step(
            [request], prompt_tokens={request: number}, waiting=number, kv_used=number
        ) as step:
            step.delivered[request] = number
        decode([request], 1)
        request.finished("stop", number)
    assert recorder.active
    assert stages_of(read_single_record(recording))[:2] == ["queue", "prefill"]


def test_failing_span_factory_loses_only_the_record(
    recording: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        limits = span_ids.Limits()
        plain_sampler = None

        def create_span(self, *args: Any) -> span_ids.SpanIds:
            raise RuntimeError("secret")

    request_span.span_factory = Broken()
    with caplog.at_level(logging.WARNING, "otel_infer"), otel_infer.request() as request:
        with otel_infer.stage("database"), otel_infer.step([request]):
            pass
    assert "secret" not in caplog.text
    assert "RuntimeError" in caplog.text
    assert recording.records() == []


async def test_concurrent_tasks_keep_separate_requests(recording: Recording) -> None:
    async def handle(number: int) -> None:
        async with otel_infer.request("chat", model=f"m{number}"):
            for _ in range(number + 1):
                async with otel_infer.stage(f"stage {number}"):
                    await asyncio.sleep(0.001)
            await asyncio.to_thread(in_thread, number)

    def in_thread(number: int) -> None:
        with otel_infer.stage(f"thread {number}"):
            time.sleep(0.001)

    await asyncio.gather(*(handle(number) for number in range(8)))
    records = recording.records()
    assert len({record.trace_id for record in records}) == 8
    for record in records:
        number = int(record.model[1:])
        assert stages_of(record) == [f"stage {number}"] * (number + 1) + [f"thread {number}"]
    assert start.current_request() is None
    assert recording.in_flight == 0


def test_interleaved_generators_are_separate_requests(recording: Recording) -> None:
    @otel_infer.request("chat")
    def answer(prompt: str) -> Generator[str, str, int]:
        received = None
        for word in prompt.split():
            with otel_infer.stage("look up"):
                received = yield f"{word} {received}"
        return 7

    rows = list(zip(answer("a b"), answer("c d")))
    assert rows == [("a None", "c None"), ("b None", "d None")]
    assert start.current_request() is None
    records = recording.records()
    assert [[stage.name for stage in record.stages].count("look up") for record in records] == [2, 2]
    assert len({record.trace_id for record in records}) == 2


async def test_interleaved_async_generators_are_separate_requests(recording: Recording) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")

    @otel_infer.request("chat")
    async def answer(prompt: str) -> AsyncGenerator[str, None]:
        variable.set(prompt)
        for word in prompt.split():
            async with otel_infer.stage("look up"):
                await asyncio.sleep(0)
                yield word
            assert variable.get() == prompt

    first, second = answer("a b"), answer("c d")
    rows = [(await anext(first), await anext(second)) for _ in "xx"]
    assert rows == [("a", "c"), ("b", "d")]
    assert start.current_request() is None and variable.get() == ""
    for stream in (first, second):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    early, failing = answer("e f"), answer("g h")
    await anext(early)
    await early.aclose()
    await anext(failing)
    with pytest.raises(KeyError):
        await failing.athrow(KeyError())
    records = recording.records()
    assert [[stage.name for stage in record.stages].count("look up") for record in records] == [2, 2, 1, 1]
    assert [record.outcome for record in records] == [events.OK, events.OK, events.ABORTED, events.ERROR]
    assert len({record.trace_id for record in records}) == 4


@pytest.mark.parametrize("decorator", [otel_infer.request("chat"), otel_infer.stage("answer")])
async def test_async_generator_receives_send_and_throw(recording: Recording, decorator: Any) -> None:
    seen: list[Any] = []

    @decorator  # type: ignore[untyped-decorator]
    async def answer() -> AsyncGenerator[str, Any]:
        try:
            seen.append((yield "first"))
            yield "second"
        except KeyError as reason:
            seen.append(reason.args)
            yield "mended"
        finally:
            seen.append("closed")

    stream = answer()
    assert await anext(stream) == "first"
    assert (await stream.asend("hello"), await stream.athrow(KeyError("k"))) == ("second", "mended")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert seen == ["hello", ("k",), "closed"]
    assert {record.outcome for record in recording.records()} <= {events.OK}


async def test_async_generator_timeout_and_cancellation_are_recorded(recording: Recording) -> None:
    @otel_infer.request("chat")
    async def answer() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.wait_for(asyncio.sleep(60), 0.01)

    async def read() -> None:
        async for _ in answer():
            pass

    with pytest.raises(asyncio.TimeoutError):
        await read()

    @otel_infer.request("chat")
    async def waiting() -> AsyncGenerator[int, None]:
        await asyncio.sleep(60)
        yield 1

    task = asyncio.ensure_future(anext(waiting()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.error_type for record in recording.records()] == ["timeout", "cancelled"]


def test_failing_device_timing_keeps_the_stage(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        assert not kwargs.get("is_step", False), "a stage must not be timed as a step"
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("otel_infer.gpu.timing.timing.begin", broken)
    with otel_infer.request("embed"), otel_infer.stage("rerank", gpu=True):
        pass
    monkeypatch.setattr("otel_infer.gpu.timing.timing.begin", lambda **_: object())
    monkeypatch.setattr("otel_infer.gpu.timing.timing.end", broken)
    with otel_infer.request("embed"), otel_infer.stage("rerank", gpu=True):
        pass
    assert [stages_of(record) for record in recording.records()] == [["rerank"], ["rerank"]]


def test_generator_receives_send_throw_and_close(recording: Recording) -> None:
    seen: list[Any] = []

    @otel_infer.request("chat")
    def answer() -> Generator[str, str, int]:
        try:
            seen.append((yield "first"))
            yield "second"
        except KeyError as reason:
            seen.append(reason.args)
            yield "mended"
        finally:
            seen.append("closed")
        return 7

    stream = answer()
    assert (next(stream), stream.send("hello"), stream.throw(KeyError("k"))) == ("first", "second", "mended")
    with pytest.raises(StopIteration) as over:
        next(stream)
    assert over.value.value == 7
    assert seen == ["hello", ("k",), "closed"]
    early = answer()
    assert next(early) == "first"
    early.close()
    assert seen[-1] == "closed"
    failing = answer()
    next(failing)
    with pytest.raises(ZeroDivisionError):
        failing.throw(ZeroDivisionError())
    assert [record.outcome for record in recording.records()] == [events.OK, events.ABORTED, events.ERROR]


def test_context_set_in_a_stage_generator_is_visible() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")

    @contextlib.contextmanager
    @otel_infer.stage("load")
    def session() -> Generator[None, None, None]:
        token = variable.set("inside")
        yield
        variable.reset(token)

    with session():
        assert variable.get() == "inside"
    assert variable.get() == ""


# ── overlapping steps ────────────────────────────────────────────────────────────────────────────────────────────


async def decode_concurrently(requests: int, steps: int, fails: bool = False) -> None:
    """Each task has a request and a loop of its own; all steps of one round overlap on this thread."""
    round_over = [asyncio.Event() for _ in range(steps)]
    left = [requests] * steps

    async def decode() -> None:
        with otel_infer.request("chat", model="tiny") as request:
            request.submitted(input_tokens=4)
            for number in range(steps):
                with otel_infer.step([request], prompt_tokens={} if number else {request: 4}):
                    left[number] -= 1
                    if not left[number]:
                        round_over[number].set()
                    await round_over[number].wait()
            if fails:
                raise asyncio.CancelledError
            request.finished("stop")

    await asyncio.gather(*(decode() for _ in range(requests)), return_exceptions=True)


@pytest.mark.parametrize("requests", [100, 500])
async def test_overlapping_steps_of_one_thread_keep_their_tokens(recording: Recording, requests: int) -> None:
    await decode_concurrently(requests, steps=3)
    records = recording.records()
    assert len(records) == requests
    assert {(record.output_tokens, record.telemetry_lost) for record in records} == {(3, False)}


async def test_an_abort_between_overlapping_steps_is_one_of_decode(recording: Recording) -> None:
    await decode_concurrently(100, steps=2, fails=True)
    assert {record.failed_stage for record in recording.records()} == {"decode"}


async def test_more_overlapping_steps_than_are_remembered_are_a_counted_loss(recording: Recording) -> None:
    requests = step_log.MAX_UNFINISHED_STEPS + 100
    await decode_concurrently(requests, steps=1)
    records = recording.records()
    lost = [record for record in records if record.telemetry_lost]
    assert recording.events_lost == len(lost) == 100
    assert {record.output_tokens for record in records if not record.telemetry_lost} == {1}
