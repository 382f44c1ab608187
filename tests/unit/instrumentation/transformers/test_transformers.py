"""The transformers instrumentation, tested with stand-ins; transformers need not be installed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.probe import Call, Hook, count_errors
from otel_infer.instrumentation.transformers import (
    cancellation,
    continuous_batching,
    generate,
    generation_arguments,
    generation_run,
    instrumentor,
    kv_cache,
    sequence_group,
    sequences,
    serve,
    tokenization,
    transfers,
)
from otel_infer.instrumentation.transformers._instrumentor import wrap_in_empty_context
from otel_infer.instrumentation.transformers.tokenization import _token_count, _wrap_tokenize
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress
from otel_infer.tracing.context import detach
from tests.support.rings import Recording


def request_of(name: str = "asgi") -> request_span.RequestSpan:
    request = ingress.open_request("POST /", owner=name)
    assert request is not None
    return request


# ── an engine ────────────────────────────────────────────────────────────────────────────────────────────────────


class State:
    """Stand-in for the scheduler's state of a sequence."""

    def __init__(self, request_id: str = "r", prompt: int = 4) -> None:
        self.request_id = request_id
        self.initial_tokens, self.generated_tokens = [1] * prompt, []
        self.tokens_to_process: list[int] = [1] * prompt
        self._true_initial_tokens = self.num_children = 0
        self._eos_token_ids = {2}
        self.status = SimpleNamespace(name="DECODING")


class Future:
    def __init__(self, state: State, query_length: int = 1, has_new_token: bool = True) -> None:
        self.state, self.query_length, self.has_new_token = state, query_length, has_new_token


class Cache:
    """A KV cache of 20 blocks, `free` of them unused."""

    num_blocks, free = 20, 5

    def get_num_free_blocks(self) -> int:
        return self.free


class Engine:
    """Stand-in for a scheduler and its processor; `batch` is scheduled next."""

    def __init__(self) -> None:
        self.hook = Hook("stand-in")
        self.cache: Any = Cache()
        self.active_requests: dict[str, State] = {}
        self.waiting_requests: dict[str, State] = {}
        self._requests_to_fork: list[State] = []
        self._requests_to_cancel: set[str] = set()
        self.scheduler = self
        self.batch: list[Future] = []
        self.result: list[Future] = []
        self._schedule = continuous_batching._wrap_schedule_batch(self._next, self.hook)
        self._update = continuous_batching.wrap_prepare_batch_update(
            lambda ios: (self.result, [], None), self.hook
        )

    def _next(self, scheduler: Any) -> Any:
        return self.batch, False, sum(future.query_length for future in self.batch), 0

    def admit(self, tokens: int = 4, request_id: str = "r") -> tuple[request_span.RequestSpan, State]:
        """Opens a request and its sequence and marks the sequence as running."""
        request = request_of("batching")
        request.record_submitted("transformers", 1, tokens)
        state = State(request_id, tokens)
        state.otel_infer = sequence_group.SequenceGroup(request, own=True, left=1)  # type: ignore[attr-defined]
        state.otel_infer_handle = state.otel_infer.packed  # type: ignore[attr-defined]
        self.active_requests[request_id] = state
        return request, state

    def schedule(self, *futures: Future) -> list[Future]:
        self.batch = list(futures)
        assert self._schedule(self)[0] is self.batch
        return self.batch

    def update(self, futures: list[Future]) -> None:
        """Processes the results of this batch."""
        self.result = futures
        self._update(self)

    def finish(self, state: State, status: str = "FINISHED") -> None:
        state.status.name = status
        pop = sequences.wrap_finish_request(
            lambda self, request_id: self.active_requests.pop(request_id), self.hook
        )
        pop(self, state.request_id)


def tokens_by_step(record: RequestRecord) -> dict[int, int]:
    """Returns the output tokens of the request by step number."""
    assert record.steps is not None
    return dict(zip(record.steps.step.tolist(), record.steps.tokens.tolist()))


def test_step_records_its_tokens_and_scheduler_state(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit(tokens=6)
    engine.update(engine.schedule(Future(state, 4, has_new_token=False)))
    engine.update(engine.schedule(Future(state, 2)))
    engine.update(engine.schedule(Future(state)))
    state.generated_tokens = [7, 2]
    engine.finish(state)
    (record,) = recording.records()
    assert tokens_by_step(record) == {2: 1, 3: 1}
    assert [chunk.tokens for chunk in record.prefill_steps] == [4, 2]
    assert (record.finish_reasons, record.output_tokens, record.outcome) == (("stop",), 2, events.OK)
    steps = recording._assembler.drain_steps()
    assert [(step.kv_used, step.kv_total, step.running, step.waiting) for step in steps] == [
        (15, 20, 1, 0)
    ] * 3
    assert engine.hook.alive


def test_query_length_falls_back_to_the_sequence_state(recording: Recording) -> None:
    class Bare:
        def __init__(self, state: State) -> None:
            self.state, self.has_new_token = state, True

    engine = Engine()
    _, state = engine.admit(tokens=6)
    futures: Any = [Bare(state)]
    result = (futures, False, 6, 0)
    continuous_batching._wrap_schedule_batch(lambda scheduler: result, engine.hook)(engine)
    engine.update(futures)
    engine.finish(state)
    (record,) = recording.records()
    assert [chunk.tokens for chunk in record.prefill_steps] == [6]


@pytest.mark.parametrize(("share", "used"), [(1.0, 0), (0.95, 1), (0.35, 13), (0.0, 20)])
def test_cache_usage_by_share_is_converted_to_blocks(share: float, used: int) -> None:
    cache = SimpleNamespace(num_blocks=20, compute_free_capacity=lambda: share)
    read_free, scale, total = kv_cache.find_free_blocks(cache)
    assert (total - round(read_free() * scale), total) == (used, 20)
    read_free, scale, total = kv_cache.find_free_blocks(SimpleNamespace())
    assert (read_free() * scale, total) == (0, 0)


def test_block_size_comes_from_cache_or_allocator() -> None:
    allocator = SimpleNamespace(tokens_per_page=16)
    caches = [
        SimpleNamespace(block_size=32),
        SimpleNamespace(cache_allocators={"full_attention": allocator}),
        SimpleNamespace(cache_allocators={}),
        SimpleNamespace(),
    ]
    assert [kv_cache.tokens_per_block(cache) for cache in caches] == [32, 16, 0, 0]


def test_scheduled_tokens_of_a_finished_request_are_discarded(recording: Recording) -> None:
    engine = Engine()
    _, finished = engine.admit(request_id="finished")
    _, running = engine.admit(request_id="running")
    first = engine.schedule(Future(finished), Future(running))
    second = engine.schedule(Future(finished), Future(running))
    engine.update(first)
    engine.finish(finished)
    continuous_batching.remove_from_batch(engine, finished)  # a second time, as a soft reset does
    third = engine.schedule(Future(running))
    engine.update(second)
    engine.update(third)
    engine.finish(running)
    by_size = {len(tokens_by_step(record)): record for record in recording.records()}
    assert tokens_by_step(by_size[1]) == {1: 1} and by_size[1].discarded == 1
    assert tokens_by_step(by_size[3]) == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("in_next_batch", [True, False])
def test_prefill_continues_when_another_request_finishes(in_next_batch: bool, recording: Recording) -> None:
    engine = Engine()
    _, finished = engine.admit(request_id="finished")
    _, running = engine.admit(tokens=8, request_id="running")
    first = engine.schedule(Future(finished))
    second = engine.schedule(*[Future(finished)] * in_next_batch, Future(running, 4, has_new_token=False))
    engine.update(first)
    engine.finish(finished)
    recording.records()
    assert [step.step for step in recording._assembler.drain_steps()] == [1]
    engine.update(second)
    recording.records()
    assert [step.step for step in recording._assembler.drain_steps()] == [2]


def test_results_of_a_step_before_install_are_ignored(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    unseen = [Future(state)]
    seen = engine.schedule(Future(state))
    engine.update(unseen)
    engine.update([])
    engine.update(seen)
    engine.finish(state)
    assert tokens_by_step(recording.records()[0]) == {1: 1}


def test_two_schedulers_on_one_thread_keep_separate_steps(recording: Recording) -> None:
    first, second = Engine(), Engine()
    (_, first_state), (_, second_state) = first.admit(), second.admit()
    first_batch, second_batch = first.schedule(Future(first_state)), second.schedule(Future(second_state))
    second.update(second_batch)
    second.schedule(Future(second_state))
    first.update(first_batch)
    first.finish(first_state)
    second.update(second.batch)
    second.finish(second_state)
    assert [tokens_by_step(record) for record in recording.records()] == [{1: 1}, {1: 1, 2: 1}]


def test_unprocessed_results_are_not_assigned_to_later_steps(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    engine.schedule(Future(state))
    later = engine.schedule(Future(state))
    engine.update(later)
    engine.finish(state)
    assert tokens_by_step(recording.records()[0]) == {2: 1}


def test_changed_scheduler_disables_the_hook_and_keeps_running(recording: Recording) -> None:
    engine = Engine()
    del engine.waiting_requests
    state = State()
    assert engine.schedule(Future(state))[0].state is state
    assert not engine.hook.alive
    engine.schedule(Future(state))
    engine.update(engine.batch)


def test_idle_scheduler_retains_no_batches(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    engine.update(engine.schedule(Future(state)))
    engine.finish(state)
    batches: Any = engine._otel_infer_batches  # type: ignore[attr-defined]
    assert batches.writer._members == [] and batches.removed == [] and not batches.in_flight


def test_finished_loop_releases_its_step_ring_for_reuse(recording: Recording) -> None:
    def loop() -> None:
        engine = Engine()
        _, state = engine.admit()
        engine.schedule(Future(state))  # the forward fails: this step has no end
        raise MemoryError

    run = continuous_batching.wrap_run_generation_loop(lambda: loop(), Hook("loop"))
    for _ in range(20):
        with pytest.raises(MemoryError):
            run()
    assert len([name for name, _ in recording.arena.buffers if name.endswith(".steps")]) == 1


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────────


class CancellingEngine(Engine):
    """A scheduler that cancels; newer releases of transformers return the cleared states."""

    def __init__(self, returns_list: bool = True) -> None:
        super().__init__()
        self.returns_list = returns_list
        self.cancel = partial(
            cancellation.wrap_set_request_cancellation(
                lambda scheduler, request_id: scheduler._requests_to_cancel.add(request_id), self.hook
            ),
            self,
        )

    def clear_cancelled_requests(self) -> list[State] | None:
        gone = [self.active_requests.pop(name) for name in self._requests_to_cancel]
        self._requests_to_cancel = set()
        return gone if self.returns_list else None


@pytest.mark.parametrize("returns_list", [True, False])
def test_cancelled_requests_are_found_without_the_returned_list(
    returns_list: bool, recording: Recording
) -> None:
    engine = CancellingEngine(returns_list)
    _, state = engine.admit()
    engine.update(engine.schedule(Future(state)))
    engine.cancel("r")
    assert engine.clear_cancelled_requests() == ([state] if returns_list else None)
    assert "clear_cancelled_requests" not in vars(engine)
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.finish_reasons) == (events.ABORTED, "", ("abort",))


def test_failure_is_recorded_before_the_result_is_delivered(recording: Recording) -> None:
    """The consumer of the stream may close the request successfully on delivery."""
    engine = Engine()
    request, state = engine.admit()
    state.otel_infer.owns_request = False  # type: ignore[attr-defined]
    deliver = sequences.wrap_fail_and_deliver(lambda router, state, error: request.close(), engine.hook)
    deliver(None, state, MemoryError())
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


def test_failure_reported_twice_is_recorded_once(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    deliver = sequences.wrap_fail_and_deliver(lambda router, state, error: None, engine.hook)
    handle = sequences.wrap_handle_request_error(
        lambda self, error, state: deliver(None, state, error), engine.hook
    )
    handle(engine, MemoryError("private text"), state)
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.finish_reasons) == (
        events.ERROR,
        "MemoryError",
        ("error",),
    )


def test_request_outcome_is_the_worst_of_its_sequences(recording: Recording) -> None:
    request = request_of("batching")
    group = sequence_group.SequenceGroup(request, own=True, left=4)
    for reason, error in (("length", ""), ("abort", ""), ("error", "MemoryError"), ("abort", "")):
        assert not request.ended
        group.finish_sequence(State(), reason, error)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


def test_sequence_continued_in_a_new_state_is_preempted(recording: Recording) -> None:
    engine = Engine()
    request, state = engine.admit()
    engine.update(engine.schedule(Future(state)))
    state.generated_tokens = [5]
    again = sequences.wrap_create_equivalent(lambda self: State(self.request_id, 5), engine.hook)(state)
    engine.finish(state)
    sequences.wrap_add_waiting_request(lambda self, state: None, engine.hook)(engine, again)
    assert not request.ended
    engine.active_requests["r"] = again
    again._true_initial_tokens = 4
    engine.update(engine.schedule(Future(again, 5)))
    again.generated_tokens = [6, 7]
    engine.finish(again)
    (record,) = recording.records()
    assert (record.preemptions, record.output_tokens, record.finish_reasons) == (1, 3, ("length",))
    assert tokens_by_step(record) == {1: 1, 2: 1}


def test_waiting_fork_is_not_a_preemption(recording: Recording) -> None:
    engine = Engine()
    _, parent = engine.admit()
    child = sequences.wrap_create_equivalent(lambda self: State(self.request_id), engine.hook)(parent)
    child.request_id = "r__child#0"
    sequences.wrap_add_waiting_request(lambda self, state: None, engine.hook)(engine, child)
    parent.generated_tokens = [2]
    engine.finish(parent)
    (record,) = recording.records()
    assert (record.preemptions, record.finish_reasons) == (0, ("stop",))


def test_sequence_group_is_neither_copied_nor_pickled(recording: Recording) -> None:
    group = sequence_group.SequenceGroup(request_of(), own=True, left=1)
    assert copy.deepcopy(group) is group and copy.deepcopy(group.packed) is group.packed
    assert pickle.loads(pickle.dumps([group, group.packed])) == [None, bytes(4)]


class SlottedState:
    """A sequence state that accepts no further attributes."""

    __slots__ = ("request_id",)

    def __init__(self) -> None:
        self.request_id = "r"


def test_state_with_slots_is_not_recorded(recording: Recording) -> None:
    made, forked, again = Hook("made"), Hook("forked"), Hook("again")
    sequence_group.adding.group = sequence_group.SequenceGroup(request_of(), own=True, left=1)
    try:
        state = SlottedState()
        sequences.wrap_post_init(lambda self: None, made)(state)
    finally:
        sequence_group.adding.group = None
    assert isinstance(
        sequences.wrap_fork(lambda self, name: SlottedState(), forked)(state, "r__child#0"), SlottedState
    )
    assert isinstance(
        sequences.wrap_create_equivalent(lambda self: SlottedState(), again)(state), SlottedState
    )
    assert not (made.alive or forked.alive or again.alive)
    engine = CancellingEngine()
    engine.cancel("r")
    engine.active_requests = {"r": state}  # type: ignore[dict-item]
    engine.clear_cancelled_requests()
    assert engine.hook.alive


class Manager:
    """Stand-in for a manager: `answer` is the returned request id or the raised exception."""

    def __init__(self, answer: Any = "req_0", **more: Any) -> None:
        self.answer = answer
        self.model = SimpleNamespace(config=SimpleNamespace(_name_or_path="org/tiny"))
        self.generation_config = SimpleNamespace(max_new_tokens=7)
        self.__dict__.update(more)

    def add(self, prompt: Any) -> Any:
        """Calls the hooked `add_request`."""

        def add_request(self: Any, input_ids: Any, max_new_tokens: Any = None) -> Any:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

        hooked = sequences.wrap_add_request(add_request, Hook("add_request"))
        if isinstance(self.answer, BaseException):
            with pytest.raises(type(self.answer)):
                hooked(self, prompt)
        else:
            assert hooked(self, prompt) == self.answer


@pytest.mark.parametrize(("answer", "error"), [(None, "rejected"), (OSError(), "OSError")])
def test_rejected_request_ends_with_an_error(answer: Any, error: str, recording: Recording) -> None:
    Manager(answer).add([1, 2, 3])
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, error, "queue")
    assert (record.input_tokens, record.max_tokens, record.model) == (3, 7, "org/tiny")


def test_invalid_prompt_and_limit_are_left_to_transformers(recording: Recording) -> None:
    failures = count_errors()
    Manager(TypeError(), generation_config=SimpleNamespace(max_new_tokens="lots")).add(None)
    assert count_errors() == failures
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "TypeError")
    assert (record.input_tokens, record.max_tokens) == (0, 0)


def test_rank_that_is_not_the_driver_records_nothing(recording: Recording) -> None:
    Manager(None, is_tp_driver=False).add([1, 2, 3])
    assert recording.records() == [] and recording.in_flight == 0


# ── generate, text, serve ────────────────────────────────────────────────────────────────────────────────────────


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


GENERATE: Any = {"inputs": (0, None), "generation_config": (1, None)}


@pytest.mark.parametrize(
    ("args", "kwargs", "shape"),
    [
        ((Tensor(2, 7),), {}, (2, 7)),
        ((), {"input_ids": Tensor(3, 5)}, (3, 5)),
        ((), {"inputs_embeds": Tensor(2, 6, 64)}, (2, 6)),
        ((Tensor(4, 80, 3000),), {}, (4, 0)),
        ((), {"pixel_values": Tensor(2, 3, 224, 224)}, (2, 0)),
        ((), {}, (1, 0)),
        ((SimpleNamespace(shape=3),), {"input_ids": Tensor(3, 5)}, (1, 0)),
    ],
)
def test_prompt_shape_is_sequences_and_tokens(args: Any, kwargs: Any, shape: tuple[int, int]) -> None:
    assert generation_arguments.read_prompt_shape(Call(None, args, kwargs, GENERATE)) == shape


def test_setting_is_read_from_call_config_then_model() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(max_new_tokens=3, num_return_sequences=2))
    config = SimpleNamespace(max_new_tokens=2, num_return_sequences=None)
    assert (
        generation_arguments.get_setting(
            Call(model, (None, config), {"max_new_tokens": 1}, GENERATE), "max_new_tokens"
        )
        == 1
    )
    assert generation_arguments.get_setting(Call(model, (None, config), {}, GENERATE), "max_new_tokens") == 2
    assert (
        generation_arguments.get_setting(Call(model, (None, config), {}, GENERATE), "num_return_sequences")
        == 2
    )
    assert generation_arguments.get_setting(Call(None, (), {}, GENERATE), "max_new_tokens") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/tiny", "org/tiny"),
        ("/models/tiny/", "tiny"),
        ("./tiny", "tiny"),
        ("~/models/tiny", "tiny"),
        ("checkpoints/acme-corp/run-7", "run-7"),
        ("tests/unit", "unit"),
        ("C:\\models\\tiny\\", "tiny"),
        ("", "SimpleNamespace"),
    ],
)
def test_model_name_omits_a_local_path(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory contains the folder `tests/unit`."""
    monkeypatch.chdir(Path(__file__).parents[4])
    assert read_model_name(SimpleNamespace(config=SimpleNamespace(_name_or_path=path))) == name
    assert read_model_name(object()) == "object"


@pytest.mark.parametrize(
    ("result", "tokens"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": [[1, 2], [3]]}, 3),
        ({"input_ids": Tensor(2, 5)}, 10),
        ([1, 2], 2),
        ([], 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_tokens_are_counted_in_every_result_shape(result: Any, tokens: int) -> None:
    assert _token_count(result) == tokens


def test_nested_tokenizer_calls_are_one_stage(recording: Recording) -> None:
    hook = Hook("tokenizer")
    inner = _wrap_tokenize(lambda words: {"input_ids": words.split()}, hook)
    outer = _wrap_tokenize(lambda words: inner(words), hook)
    request = request_of()
    assert outer("no request") == {"input_ids": ["no", "request"]}
    token = request.attach()
    outer("in a request")
    with pytest.raises(AttributeError):
        outer(None)
    outer("again")
    detach(token)
    request.close()
    (record,) = recording.records()
    assert [(stage.name, stage.attributes) for stage in record.stages if stage.name == "tokenize"] == [
        ("tokenize", {"infer.items": 3}),
        ("tokenize", {}),  # it raised
        ("tokenize", {"infer.items": 1}),
    ]
    assert hook.alive


def test_shared_server_thread_starts_with_an_empty_context(recording: Recording) -> None:
    seen: list[Any] = []
    start = wrap_in_empty_context(
        lambda: seen.append((ingress.current_request(), baggage.get_baggage("user"))), Hook("start")
    )
    request = request_of()
    token = request.attach()
    inner = otel_context.attach(baggage.set_baggage("user", "alice"))
    start()
    assert (ingress.current_request(), baggage.get_baggage("user")) == (request, "alice")
    otel_context.detach(inner)
    detach(token)
    assert seen == [(None, None)]


def test_prompt_in_a_streamer_is_no_first_token(recording: Recording) -> None:
    class Streamer:
        total_tokens = 0

        def put(self, value: int) -> None:
            self.total_tokens += value

    init, put = (
        serve._wrap_streamer_init(lambda self: None, Hook("init")),
        serve._wrap_streamer_put(Streamer.put, Hook("put")),
    )
    streamer = Streamer()
    request = request_of()
    token = request.attach()
    init(streamer)
    detach(token)
    put(streamer, 0)
    assert not request.tokens_reached
    put(streamer, 1)
    assert request.tokens_reached
    end = serve._wrap_streamer_end(lambda self: None, Hook("end"))
    end(streamer)
    assert request.detokenize_ns > 0


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("private text"), (events.ERROR, "ValueError")),
        (type("_GenerationCancelled", (Exception,), {})(), (events.OK, "")),
    ],
)
def test_detokenization_error_fails_the_request(
    failure: Exception, expected: tuple[int, str], recording: Recording
) -> None:
    """transformers answers the error with an event in a stream that ends normally."""

    def put(streamer: Any, value: int) -> None:
        raise failure

    request = request_of()
    with pytest.raises(type(failure)) as raised:
        serve._wrap_streamer_put(put, Hook("put"))(SimpleNamespace(_otel_infer=request), 1)
    assert raised.value is failure
    request.close(status_code=200)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == expected


class BrokenStreamer:
    """A streamer whose number of tokens cannot be read."""

    @property
    def total_tokens(self) -> int:
        raise ValueError

    def put(self, value: int) -> int:
        return value


def test_unreadable_streamer_disables_the_hook(recording: Recording) -> None:
    streamer, hook = BrokenStreamer(), Hook("put")
    streamer._otel_infer = request_of()  # type: ignore[attr-defined]
    assert serve._wrap_streamer_put(BrokenStreamer.put, hook)(streamer, 7) == 7
    assert not hook.alive


def test_removed_streamer_hooks_record_nothing(recording: Recording) -> None:
    init, put = Hook("init"), Hook("put")
    init.alive = put.alive = False
    streamer, request = SimpleNamespace(total_tokens=1), request_of()
    token = request.attach()
    serve._wrap_streamer_init(lambda self: None, init)(streamer)
    detach(token)
    assert not hasattr(streamer, "_otel_infer")
    streamer._otel_infer = request
    serve._wrap_streamer_put(lambda self, value: None, put)(streamer, 1)
    assert not request.tokens_reached and request.detokenize_ns == 0


def test_unrecordable_submission_still_submits(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError

    request, hook = request_of(), Hook("submit")
    monkeypatch.setattr(request_span.RequestSpan, "record_submitted", fail)
    token = request.attach()
    assert serve._wrap_submit(lambda self, fn: fn(), hook)(None, lambda: 7) == 7
    detach(token)
    assert not hook.alive


def test_request_that_cannot_be_made_current_still_generates(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError

    hook, run = Hook("generate"), make_run(request_of())
    run.owns_request, generation_run.thread_state.next_run = True, run
    monkeypatch.setattr(request_span.RequestSpan, "attach", fail)
    assert generate.wrap_generate(lambda: 7, hook)() == 7
    assert not hook.alive and generation_run.thread_state.run is None


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError(), (events.ERROR, "ValueError")),
        (TimeoutError(), (events.ABORTED, "timeout")),
        (KeyboardInterrupt(), (events.ABORTED, "cancelled")),
        (type("_GenerationCancelled", (Exception,), {})(), (events.ABORTED, "cancelled")),
    ],
)
def test_exception_determines_the_outcome_of_generate(
    failure: BaseException, expected: tuple[int, str], recording: Recording
) -> None:
    run = make_run(request_of())
    run.owns_request = True
    run.record_failure(failure)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == expected


def test_non_numeric_token_limit_is_passed_through(recording: Recording) -> None:
    hook, request = Hook("hand over"), request_of()
    hand_over = serve._wrap_manager_generate(lambda *args: args[-1], hook)
    token = request.attach()
    config = SimpleNamespace(max_new_tokens="lots")
    assert hand_over(None, None, None, {"input_ids": Tensor(1, 5)}, config) is config
    detach(token)
    request.close()
    (record,) = recording.records()
    assert (hook.alive, record.engine, record.input_tokens, record.max_tokens) == (
        True,
        "transformers",
        5,
        0,
    )


def make_run(request: request_span.RequestSpan) -> generation_run.GenerationRun:
    return generation_run.GenerationRun(request, own=False, writer=None, rows=1, prompt=4)


@pytest.fixture
def generating(recording: Recording) -> Iterator[generation_run.GenerationRun]:
    """A request that this thread generates for."""
    request = request_of()
    request.record_submitted("transformers", 1, 4)
    generation_run.thread_state.run = make_run(request)
    yield generation_run.thread_state.run
    generation_run.thread_state.run = None


def test_streamer_backpressure_is_not_detokenization_time(
    generating: generation_run.GenerationRun,
) -> None:
    generating.iterations = 1
    tokenization.wrap_streamer_put(lambda self, value: None, Hook("put"))(None, 1)
    assert generating.request.tokens_reached
    assert generating.request.detokenize_ns == 0


@pytest.mark.parametrize("state", [generation_run.compiled_state, None], ids=["compiled", "python"])
def test_detokenization_is_timed_for_a_current_request_only(
    state: object, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "compiled_state", state)
    decode = tokenization._wrap_decode(lambda tokens: f"{tokens} words", Hook("decode"))
    request = request_of()
    assert decode(3) == "3 words"
    assert request.detokenize_ns == 0
    token = request.attach()
    assert decode(3) == "3 words"
    detach(token)
    assert request.detokenize_ns > 0


@pytest.mark.parametrize(
    ("given", "supports", "ends"),
    [({"pixel_values": 1}, True, True), ({"pixel_values": 1}, False, False), ({"input_ids": 1}, True, False)],
)
def test_multimodal_encoder_ends_the_queue_stage(
    given: dict[str, int],
    supports: bool,
    ends: bool,
    generating: generation_run.GenerationRun,
    recording: Recording,
) -> None:
    hook, request = Hook("encoder"), generating.request
    config = SimpleNamespace(is_encoder_decoder=False)
    model = SimpleNamespace(config=config, _supports_mm_encoder_outputs=lambda: supports)
    generate._wrap_encoder(lambda self, *args: None, hook)(model, None, given)
    request.close(events.ERROR, "MemoryError")
    (record,) = recording.records()
    assert (hook.alive, record.failed_stage) == (True, "prefill" if ends else "queue")


@pytest.mark.parametrize(("device", "timed"), [("cuda", "cuda"), ("meta", "cpu")])
def test_steps_are_timed_on_the_model_device(device: str, timed: str, recording: Recording) -> None:
    on_host = SimpleNamespace(shape=(1, 4), device=SimpleNamespace(type="cpu"))
    model = SimpleNamespace(config=SimpleNamespace(), device=SimpleNamespace(type=device))
    config = SimpleNamespace(num_return_sequences=1, num_beams=1, max_length=9)
    generating = make_run(request_of())
    generating.begin_loop(model, on_host, {"generation_config": config})
    assert generating.device.type == timed


def test_transfer_of_several_prompts_is_recorded_once(recording: Recording) -> None:
    request = request_of()
    request.record_submitted("transformers", 3)
    states = [State(str(number)) for number in range(3)]
    for state in states:
        state.otel_infer = sequence_group.SequenceGroup(request, own=False, left=1)  # type: ignore[attr-defined]
    host = SimpleNamespace(
        requests_in_batch=[Future(state, 4) for state in states],
        total_seqlen_q=12,
        cumulative_seqlens_q=np.array([0, 4, 8, 12]),
    )
    transfer = transfers._begin_transfer("h2d", host, None)
    assert transfer is not None
    transfer.record_end([])
    request.close()
    (record,) = recording.records()
    assert [stage.name for stage in record.stages].count("h2d") == 1


@pytest.mark.parametrize(
    ("target", "timed"), [("cuda", True), ("cuda:1", True), (1, True), ("cuda:0", False), ("meta", False)]
)
def test_transfer_is_timed_on_its_target_device(
    target: Any, timed: bool, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has used another device before."""
    begun: list[tuple[str, int]] = []

    class Timing:
        def begin(self, stream: Any, is_step: bool, on: Any) -> int:
            begun.append((on.type, on.index))
            return 0

        def cancel(self, begun: Any) -> None: ...

    class Inputs(dict[str, Any]):
        """Inputs that stay on their device when they are moved."""

    monkeypatch.setattr(transfers, "timing", Timing())
    monkeypatch.setattr(transfers, "current_device", lambda: SimpleNamespace(kind="cuda", index=1))
    inputs = Inputs(input_ids=SimpleNamespace(device=SimpleNamespace(type="cpu")))
    token = request_of().attach()
    probe = transfers.trace_to_device(Call(inputs, (target,), {}, {"device": (0, None)}))
    next(probe)
    with pytest.raises(StopIteration):
        probe.send(inputs)
    detach(token)
    assert begun == [("cuda", 1)] * timed


def test_instrumentor_parts_are_the_documented_ones() -> None:
    parts = instrumentor.parts
    assert set(parts) == {
        "continuous batching", "generate", "processor", "serve", "streamers", "tokenizer", "transfers", "weights",
    }  # fmt: skip


def test_counters_of_a_thread_are_recorded_before_its_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(tokenization, "record_thread_run", lambda *arguments: order.append(arguments))
    monkeypatch.setattr(tokenization.thread_state, "run", SimpleNamespace(writer="writer"))
    hook: Any = SimpleNamespace(alive=True)
    end = tokenization.wrap_streamer_end(lambda streamer: order.append("end"), hook)
    end(SimpleNamespace())
    assert order == [("writer", "transformers"), "end"]
