"""The transformers integration against stand-ins for its objects: what they need not be installed for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.hooks.probe import Call, Hook, count_errors
from otel_infer.instrumentation.transformers import (
    continuous_batching,
    generate,
    generation_arguments,
    generation_run,
    instrumentor,
    kv_cache,
    sequences,
    serve,
    tokenization,
    transfers,
)
from otel_infer.instrumentation.transformers._instrumentor import model_name, wrap_in_empty_context
from otel_infer.instrumentation.transformers.tokenization import _token_count, _wrap_tokenize
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress
from tests.support.rings import Recording


def request_of(name: str = "asgi") -> request_span.RequestSpan:
    request = ingress.open_request("POST /", owner=name)
    assert request is not None
    return request


# ── an engine ────────────────────────────────────────────────────────────────────────────────────────────────────


class State:
    """A sequence as the scheduler knows it."""

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
    """20 blocks, of which so many are free."""

    num_blocks, free = 20, 5

    def get_num_free_blocks(self) -> int:
        return self.free


class Engine:
    """A scheduler, its processor and its inputs and outputs; what is in `batch` runs next."""

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
        """A request of its own and its sequence, running."""
        request = request_of("batching")
        request.record_submitted("transformers", 1, tokens)
        state = State(request_id, tokens)
        state.otel_infer = sequences._SequenceGroup(request, own=True, left=1)  # type: ignore[attr-defined]
        state.otel_infer_handle = state.otel_infer.packed  # type: ignore[attr-defined]
        self.active_requests[request_id] = state
        return request, state

    def schedule(self, *futures: Future) -> list[Future]:
        self.batch = list(futures)
        assert self._schedule(self)[0] is self.batch
        return self.batch

    def update(self, futures: list[Future]) -> None:
        """The results of this batch are taken in."""
        self.result = futures
        self._update(self)

    def finish(self, state: State, status: str = "FINISHED") -> None:
        state.status.name = status
        pop = sequences.wrap_finish_request(
            lambda self, request_id: self.active_requests.pop(request_id), self.hook
        )
        pop(self, state.request_id)


def own(record: RequestRecord) -> dict[int, int]:
    """Own tokens by step."""
    assert record.steps is not None
    return dict(zip(record.steps.step.tolist(), record.steps.tokens.tolist()))


def test_a_step_is_scheduled_and_done_with_its_members(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit(tokens=6)
    engine.update(engine.schedule(Future(state, 4, has_new_token=False)))
    engine.update(engine.schedule(Future(state, 2)))
    engine.update(engine.schedule(Future(state)))
    state.generated_tokens = [7, 2]
    engine.finish(state)
    (record,) = recording.records()
    assert own(record) == {2: 1, 3: 1}
    assert [chunk.tokens for chunk in record.prefill_steps] == [4, 2]
    assert (record.finish_reasons, record.output_tokens, record.outcome) == (("stop",), 2, events.OK)
    steps = recording._assembler.drain_steps()
    assert [(step.kv_used, step.kv_total, step.running, step.waiting) for step in steps] == [
        (15, 20, 1, 0)
    ] * 3
    assert engine.hook.alive


def test_a_release_whose_futures_do_not_say_their_length_is_read_from_the_state(recording: Recording) -> None:
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
def test_a_cache_that_counts_by_share_is_told_in_blocks(share: float, used: int) -> None:
    cache = SimpleNamespace(num_blocks=20, compute_free_capacity=lambda: share)
    assert kv_cache.make_usage_reader(cache)() == (used, 20)
    nothing = SimpleNamespace()
    assert kv_cache.make_usage_reader(nothing)() == (0, 0)


def test_how_large_blocks_are_is_said_by_the_cache_or_by_its_allocators_or_by_nobody() -> None:
    allocator = SimpleNamespace(tokens_per_page=16)
    said = [
        SimpleNamespace(block_size=32),
        SimpleNamespace(cache_allocators={"full_attention": allocator}),
        SimpleNamespace(cache_allocators={}),
        SimpleNamespace(),
    ]
    assert [kv_cache.tokens_per_block(cache) for cache in said] == [32, 16, 0, 0]


def test_with_two_in_flight_what_was_scheduled_for_the_gone_is_discarded(recording: Recording) -> None:
    engine = Engine()
    _, goes = engine.admit(request_id="goes")
    _, stays = engine.admit(request_id="stays")
    first = engine.schedule(Future(goes), Future(stays))
    second = engine.schedule(Future(goes), Future(stays))
    engine.update(first)
    engine.finish(goes)
    continuous_batching._remove_from_batch(engine, goes)  # a second time, as a soft reset does
    third = engine.schedule(Future(stays))
    engine.update(second)
    engine.update(third)
    engine.finish(stays)
    by_size = {len(own(record)): record for record in recording.records()}
    assert own(by_size[1]) == {1: 1} and by_size[1].discarded == 1
    assert own(by_size[3]) == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("is_in_it", [True, False])
def test_a_prompt_in_flight_goes_on_when_somebody_else_leaves(is_in_it: bool, recording: Recording) -> None:
    engine = Engine()
    _, goes = engine.admit(request_id="goes")
    _, stays = engine.admit(tokens=8, request_id="stays")
    first = engine.schedule(Future(goes))
    second = engine.schedule(*[Future(goes)] * is_in_it, Future(stays, 4, has_new_token=False))
    engine.update(first)
    engine.finish(goes)
    recording.records()
    assert [step.step for step in recording._assembler.drain_steps()] == [1]
    engine.update(second)
    recording.records()
    assert [step.step for step in recording._assembler.drain_steps()] == [2]


def test_results_of_a_step_that_began_before_us_are_nobodys(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    unseen = [Future(state)]
    seen = engine.schedule(Future(state))
    engine.update(unseen)
    engine.update([])
    engine.update(seen)
    engine.finish(state)
    assert own(recording.records()[0]) == {1: 1}


def test_two_schedulers_on_one_thread_keep_their_steps_apart(recording: Recording) -> None:
    one, other = Engine(), Engine()
    (_, here), (_, there) = one.admit(), other.admit()
    mine, theirs = one.schedule(Future(here)), other.schedule(Future(there))
    other.update(theirs)
    other.schedule(Future(there))
    one.update(mine)
    one.finish(here)
    other.update(other.batch)
    other.finish(there)
    assert [own(record) for record in recording.records()] == [{1: 1}, {1: 1, 2: 1}]


def test_results_that_are_never_taken_in_are_no_later_steps(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    engine.schedule(Future(state))
    later = engine.schedule(Future(state))
    engine.update(later)
    engine.finish(state)
    assert own(recording.records()[0]) == {2: 1}


def test_a_scheduler_that_changed_disables_the_hook_and_runs_on(recording: Recording) -> None:
    engine = Engine()
    del engine.waiting_requests
    state = State()
    assert engine.schedule(Future(state))[0].state is state
    assert not engine.hook.alive
    engine.schedule(Future(state))
    engine.update(engine.batch)


def test_nothing_runs_and_nothing_is_kept(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    engine.update(engine.schedule(Future(state)))
    engine.finish(state)
    batches: Any = engine._otel_infer_batches  # type: ignore[attr-defined]
    assert batches.writer._members == [] and batches.removed == [] and not batches.in_flight


def test_a_loop_that_ends_gives_its_log_to_the_next(recording: Recording) -> None:
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


def clear(engine: Engine, says: bool) -> None:
    """What the library does with those who are to be cancelled; newer releases say who they were."""

    def original(scheduler: Any) -> Any:
        gone = [scheduler.active_requests.pop(name) for name in scheduler._requests_to_cancel]
        scheduler._requests_to_cancel = set()
        return gone if says else None

    sequences.wrap_clear_cancelled_requests(original, engine.hook)(engine)


@pytest.mark.parametrize("says", [True, False])
def test_cancelled_requests_are_found_whether_or_not_the_library_says_who(
    says: bool, recording: Recording
) -> None:
    engine = Engine()
    _, state = engine.admit()
    engine.update(engine.schedule(Future(state)))
    engine._requests_to_cancel = {"r"}
    clear(engine, says)
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.finish_reasons) == (events.ABORTED, "", ("abort",))


def test_a_failure_is_known_before_anybody_is_told_of_it(recording: Recording) -> None:
    """Whoever streams the answer may end the request at once, and well."""
    engine = Engine()
    request, state = engine.admit()
    state.otel_infer.owns_request = False  # type: ignore[attr-defined]
    deliver = sequences.wrap_fail_and_deliver(lambda router, state, error: request.close(), engine.hook)
    deliver(None, state, MemoryError())
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


def test_a_failure_that_is_told_twice_is_one(recording: Recording) -> None:
    engine = Engine()
    _, state = engine.admit()
    deliver = sequences.wrap_fail_and_deliver(lambda router, state, error: None, engine.hook)
    handle = sequences.wrap_handle_request_error(
        lambda self, error, state: deliver(None, state, error), engine.hook
    )
    handle(engine, MemoryError("text that no telemetry may show"), state)
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.finish_reasons) == (
        events.ERROR,
        "MemoryError",
        ("error",),
    )


def test_the_worst_of_several_sequences_is_the_requests_end(recording: Recording) -> None:
    request = request_of("batching")
    of = sequences._SequenceGroup(request, own=True, left=4)
    for reason, error in (("length", ""), ("abort", ""), ("error", "MemoryError"), ("abort", "")):
        assert not request.ended
        of.finish_sequence(State(), reason, error)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


def test_a_sequence_that_goes_on_in_another_state_is_preempted_and_not_over(recording: Recording) -> None:
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
    assert own(record) == {1: 1, 2: 1}


def test_a_fork_that_did_not_fit_waits_and_is_not_preempted(recording: Recording) -> None:
    engine = Engine()
    _, parent = engine.admit()
    child = sequences.wrap_create_equivalent(lambda self: State(self.request_id), engine.hook)(parent)
    child.request_id = "r__child#0"
    sequences.wrap_add_waiting_request(lambda self, state: None, engine.hook)(engine, child)
    parent.generated_tokens = [2]
    engine.finish(parent)
    (record,) = recording.records()
    assert (record.preemptions, record.finish_reasons) == (0, ("stop",))


def test_a_state_means_something_in_this_process_only(recording: Recording) -> None:
    of = sequences._SequenceGroup(request_of(), own=True, left=1)
    assert copy.deepcopy(of) is of and copy.deepcopy(of.packed) is of.packed
    assert pickle.loads(pickle.dumps([of, of.packed])) == [None, bytes(4)]


class Fixed:
    """A state of a release that takes no attributes of others."""

    __slots__ = ("request_id",)

    def __init__(self) -> None:
        self.request_id = "r"


def test_a_state_that_takes_no_attributes_is_left_alone(recording: Recording) -> None:
    made, forked, again = Hook("made"), Hook("forked"), Hook("again")
    sequences._adding.group = sequences._SequenceGroup(request_of(), own=True, left=1)
    try:
        state = Fixed()
        sequences.wrap_post_init(lambda self: None, made)(state)
    finally:
        sequences._adding.group = None
    assert isinstance(sequences.wrap_fork(lambda self, name: Fixed(), forked)(state, "r__child#0"), Fixed)
    assert isinstance(sequences.wrap_create_equivalent(lambda self: Fixed(), again)(state), Fixed)
    assert not (made.alive or forked.alive or again.alive)
    engine = Engine()
    engine._requests_to_cancel = {"r"}
    engine.active_requests = {"r": state}  # type: ignore[dict-item]
    clear(engine, says=True)
    assert engine.hook.alive


class Manager:
    """A manager that takes a prompt and answers with its id, or does whatever the test wants instead."""

    def __init__(self, answer: Any = "req_0", **more: Any) -> None:
        self.answer = answer
        self.model = SimpleNamespace(config=SimpleNamespace(_name_or_path="org/tiny"))
        self.generation_config = SimpleNamespace(max_new_tokens=7)
        self.__dict__.update(more)

    def add(self, prompt: Any) -> Any:
        """`add_request` with our probe around it."""
        parameters: Any = {"input_ids": (0, None), "max_new_tokens": (1, None)}
        probe = sequences.trace_add_request(Call(self, (prompt,), {}, parameters))
        next(probe)
        if isinstance(self.answer, BaseException):
            with pytest.raises(type(self.answer)):
                probe.throw(self.answer)
        else:
            with pytest.raises(StopIteration):
                probe.send(self.answer)


@pytest.mark.parametrize(("answer", "error"), [(None, "rejected"), (TimeoutError(), "TimeoutError")])
def test_a_request_that_is_not_taken_is_over(answer: Any, error: str, recording: Recording) -> None:
    Manager(answer).add([1, 2, 3])
    (record,) = recording.records()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, error, "queue")
    assert (record.input_tokens, record.max_tokens, record.model) == (3, 7, "org/tiny")


def test_what_is_no_prompt_and_no_limit_is_the_librarys_to_refuse(recording: Recording) -> None:
    failures = count_errors()
    Manager(TypeError(), generation_config=SimpleNamespace(max_new_tokens="lots")).add(None)
    assert count_errors() == failures
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "TypeError")
    assert (record.input_tokens, record.max_tokens) == (0, 0)


def test_a_rank_that_adds_nothing_has_no_requests(recording: Recording) -> None:
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
def test_a_prompt_is_counted_in_tokens_or_not_at_all(args: Any, kwargs: Any, shape: tuple[int, int]) -> None:
    assert generation_arguments.prompt_shape(Call(None, args, kwargs, GENERATE)) == shape


def test_a_setting_is_the_calls_then_the_configurations_then_the_models() -> None:
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
def test_a_model_is_named_without_its_path(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of `tests/unit` is there."""
    monkeypatch.chdir(Path(__file__).parents[4])
    assert model_name(SimpleNamespace(config=SimpleNamespace(_name_or_path=path))) == name
    assert model_name(object()) == "object"


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
def test_tokens_are_counted_in_every_shape_they_come_in(result: Any, tokens: int) -> None:
    assert _token_count(result) == tokens


def test_a_tokenizer_inside_a_tokenizer_is_one_stage(recording: Recording) -> None:
    hook = Hook("tokenizer")
    inner = _wrap_tokenize(lambda words: {"input_ids": words.split()}, hook)
    outer = _wrap_tokenize(lambda words: inner(words), hook)
    request = request_of()
    assert outer("nobody asks") == {"input_ids": ["nobody", "asks"]}
    token = request.attach()
    outer("somebody asks here")
    with pytest.raises(AttributeError):
        outer(None)
    outer("again")
    ingress.detach(token)
    request.close()
    (record,) = recording.records()
    assert [(stage.name, stage.attributes) for stage in record.stages if stage.name == "tokenize"] == [
        ("tokenize", {"infer.items": 3}),
        ("tokenize", {"infer.items": 1}),
    ]
    assert hook.alive


def test_what_serves_everybody_starts_outside_of_any_request(recording: Recording) -> None:
    seen: list[Any] = []
    start = wrap_in_empty_context(
        lambda: seen.append((ingress.current_request(), baggage.get_baggage("user"))), Hook("start")
    )
    request = request_of()
    token = request.attach()
    inner = otel_context.attach(baggage.set_baggage("user", "somebody"))
    start()
    assert (ingress.current_request(), baggage.get_baggage("user")) == (request, "somebody")
    otel_context.detach(inner)
    ingress.detach(token)
    assert seen == [(None, None)]


def test_a_streamer_that_got_the_prompt_has_reached_nobody(recording: Recording) -> None:
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
    ingress.detach(token)
    put(streamer, 0)
    assert not request.tokens_reached
    put(streamer, 1)
    assert request.tokens_reached and request.detokenize_ns > 0


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ValueError("text that no telemetry may show"), (events.ERROR, "ValueError")),
        (type("_GenerationCancelled", (Exception,), {})(), (events.OK, "")),
    ],
)
def test_a_token_that_cannot_be_made_into_text_fails_its_request(
    failure: Exception, expected: tuple[int, str], recording: Recording
) -> None:
    """The library answers it with an event of a stream that ends well."""

    def put(streamer: Any, value: int) -> None:
        raise failure

    request = request_of()
    with pytest.raises(type(failure)) as raised:
        serve._wrap_streamer_put(put, Hook("put"))(SimpleNamespace(_otel_infer=request), 1)
    assert raised.value is failure
    request.close(status_code=200)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == expected


def test_a_limit_that_is_no_number_is_handed_over_all_the_same(recording: Recording) -> None:
    hook, request = Hook("hand over"), request_of()
    hand_over = serve._wrap_manager_generate(lambda *args: args[-1], hook)
    token = request.attach()
    config = SimpleNamespace(max_new_tokens="lots")
    assert hand_over(None, None, None, {"input_ids": Tensor(1, 5)}, config) is config
    ingress.detach(token)
    request.close()
    (record,) = recording.records()
    assert (hook.alive, record.engine, record.input_tokens, record.max_tokens) == (
        True,
        "transformers",
        5,
        0,
    )


def running(request: request_span.RequestSpan) -> generation_run.GenerationRun:
    return generation_run.GenerationRun(request, own=False, log=None, rows=1, prompt=4)


@pytest.fixture
def generating(recording: Recording) -> Iterator[generation_run.GenerationRun]:
    """A request for which this thread generates."""
    request = request_of()
    request.record_submitted("transformers", 1, 4)
    generation_run.thread_state.run = running(request)
    yield generation_run.thread_state.run
    generation_run.thread_state.run = None


def test_what_the_reader_of_a_streamer_waits_for_is_not_the_time_to_make_text(
    generating: generation_run.GenerationRun,
) -> None:
    generating.iterations = 1
    tokenization.wrap_streamer_put(lambda self, value: None, Hook("put"))(None, 1)
    assert generating.request.tokens_reached
    assert generating.request.detokenize_ns == 0


@pytest.mark.parametrize(
    ("given", "supports", "ends"),
    [({"pixel_values": 1}, True, True), ({"pixel_values": 1}, False, False), ({"input_ids": 1}, True, False)],
)
def test_a_model_that_looks_before_it_reads_has_begun(
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
def test_steps_are_timed_where_the_model_is_though_its_inputs_are_on_the_host(
    device: str, timed: str, recording: Recording
) -> None:
    on_host = SimpleNamespace(shape=(1, 4), device=SimpleNamespace(type="cpu"))
    model = SimpleNamespace(config=SimpleNamespace(), device=SimpleNamespace(type=device))
    config = SimpleNamespace(num_return_sequences=1, num_beams=1, max_length=9)
    generating = running(request_of())
    generating.begin_loop(model, on_host, {"generation_config": config})
    assert generating.device.type == timed


def test_a_transfer_is_said_once_of_a_request_with_several_prompts(recording: Recording) -> None:
    request = request_of()
    request.record_submitted("transformers", 3)
    states = [State(str(number)) for number in range(3)]
    for state in states:
        state.otel_infer = sequences._SequenceGroup(request, own=False, left=1)  # type: ignore[attr-defined]
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
def test_a_transfer_is_timed_on_the_device_that_it_goes_to(
    target: Any, timed: bool, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that used another device first has its marks on that one's streams."""
    begun: list[tuple[str, int]] = []

    class Marks:
        def begin(self, stream: Any, is_step: bool, on: Any) -> int:
            begun.append((on.type, on.index))
            return 0

        def cancel(self, begun: Any) -> None: ...

    class Inputs(dict[str, Any]):
        """Whatever it is sent to, it stays where it is."""

    monkeypatch.setattr(transfers, "timing", Marks())
    monkeypatch.setattr(transfers, "current_device", lambda: SimpleNamespace(kind="cuda", index=1))
    inputs = Inputs(input_ids=SimpleNamespace(device=SimpleNamespace(type="cpu")))
    token = request_of().attach()
    probe = transfers.trace_to_device(Call(inputs, (target,), {}, {"device": (0, None)}))
    next(probe)
    with pytest.raises(StopIteration):
        probe.send(inputs)
    ingress.detach(token)
    assert begun == [("cuda", 1)] * timed


def test_every_part_has_a_name_and_hooks_what_one_process_imports() -> None:
    parts = instrumentor.parts
    assert set(parts) == {
        "continuous batching", "generate", "processor", "serve", "streamers", "tokenizer", "transfers", "weights",
    }  # fmt: skip
