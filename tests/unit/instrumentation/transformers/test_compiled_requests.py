"""Compiled code records a request of transformers' servers as the Python hooks do, whatever its parts are."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from enum import IntEnum
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import _clock
from otel_infer.instrumentation.hooks import detokenize_sample
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers import (
    batch_tracker,
    compiled_requests,
    generate,
    generation_run,
    sequence_group,
    sequences,
    serve,
    tokenization,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.ringbuffer.string_table import StringTable
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is not built")

Cancelled = type("_GenerationCancelled", (Exception,), {})


class Status(IntEnum):
    DECODING = 1
    FINISHED = 2
    FAILED = 3


class Served(NamedTuple):
    """One request and its sequence. `outputs`: tokens of each output, or the exception of the last one."""

    current: str = "request"
    request_id: Any = "chatcmpl-1"
    prompt: Any = (1, 2, 3)
    limit: Any = 9
    by_name: bool = True
    model: str = "org/tiny"
    is_known: bool = True
    sequences: Any = 1
    is_driver: Any = True
    answer: Any = "req_1"
    state: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[Any, ...] = (1, 1, 2)
    dead: str = ""
    has_sample: bool = True
    is_recreated: bool = False
    keeps_id: bool = True


class Library:
    """The functions that are hooked, as in transformers; `hooks` are by name."""

    def __init__(self, served: Served) -> None:
        self.served, self.made = served, []
        self.hooks = {
            name: Hook(name)
            for name in ("handle", "add", "state", "again", "wait", "finish", "init", "put", "end")
        }
        hooks, made = self.hooks, self.made

        class Handler:
            def handle_request(self, body: Any, request_id: Any) -> Any:
                return "handled", body, request_id

        class State:
            def __init__(self, request_id: Any, prompt: Any) -> None:
                self.request_id, self.num_children, self.is_cpu_offloaded = request_id, 0, False
                self.initial_tokens, self.generated_tokens = list(prompt or ()), [5, 2]
                self._true_initial_tokens, self._eos_token_ids, self.status = 0, {2}, Status.FINISHED
                self.__post_init__()

            def __post_init__(self) -> None:
                made.append(self)

            def create_equivalent_initial_request(self) -> Any:
                return State(self.request_id if served.keeps_id else "child", self.initial_tokens)

        class Manager:
            def add_request(self, input_ids: Any, request_id: Any = None, max_new_tokens: Any = None) -> Any:
                State(request_id, input_ids)
                if isinstance(served.answer, BaseException):
                    raise served.answer
                return served.answer

        class Scheduler:
            def __init__(self) -> None:
                self.active_requests: dict[Any, Any] = {}

            def add_waiting_request(self, state: Any) -> str:
                return "waiting"

            def finish_request(self, request_id: Any) -> Any:
                return self.active_requests.pop(request_id, None)

        class Streamer:
            def __init__(self) -> None:
                self.total_tokens = 0

            def put(self, value: Any) -> Any:
                if isinstance(value, BaseException):
                    raise value
                self.total_tokens += value
                return value

            def end(self) -> str:
                return "ended"

        for owner, name, hook, wrap in (
            (Handler, "handle_request", "handle", serve._make_handler_wrapper("chat", "resp_")),
            (Manager, "add_request", "add", sequences.wrap_add_request),
            (State, "__post_init__", "state", sequences.wrap_post_init),
            (State, "create_equivalent_initial_request", "again", sequences.wrap_create_equivalent),
            (Scheduler, "add_waiting_request", "wait", sequences.wrap_add_waiting_request),
            (Scheduler, "finish_request", "finish", sequences.wrap_finish_request),
            (Streamer, "__init__", "init", serve._wrap_streamer_init),
            (Streamer, "put", "put", serve._wrap_streamer_put),
            (Streamer, "end", "end", serve._wrap_streamer_end),
        ):
            original: Any = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(wrap(original, hooks[hook])))
        self.handler, self.manager, self.scheduler, self.streamer = (
            Handler(),
            Manager(),
            Scheduler(),
            Streamer,
        )
        manager: Any = self.manager
        manager.model = Status
        manager.is_tp_driver, manager.num_return_sequences = served.is_driver, served.sequences
        manager.generation_config = None
        if served.is_known:
            manager._otel_infer_model = served.model
        if served.dead:
            hooks[served.dead].alive = False

    def serve(self) -> list[Any]:
        """Calls the functions in the order of the library; returns their results."""
        served, seen = self.served, []
        seen.append(attempt(self.handler.handle_request, "body", served.request_id))
        names = {
            "request_id": served.request_id,
            **({"max_new_tokens": served.limit} if served.by_name else {}),
        }
        prompt = list(served.prompt) if type(served.prompt) is tuple else served.prompt
        seen.append(attempt(self.manager.add_request, prompt, **names))
        streamer: Any = self.streamer()
        if not served.has_sample:
            vars(streamer).pop("_otel_infer_sample", None)
        seen.extend(attempt(streamer.put, output) for output in served.outputs)
        seen.append("put" in vars(streamer))
        seen.append(attempt(streamer.end))
        seen.append("put" in vars(streamer))
        if served.is_recreated and self.made:
            seen.append(attempt(self.scheduler.add_waiting_request, self.made[0]))
            self.made[0].create_equivalent_initial_request()
        for state in self.made:
            vars(state).update({name: copy.copy(value) for name, value in served.state})
            seen.append(attempt(self.scheduler.add_waiting_request, state))
            self.scheduler.active_requests[state.request_id] = state
            seen.append(attempt(self.scheduler.finish_request, state.request_id) == ("returned", repr(state)))
            group = getattr(state, "otel_infer", None)
            seen.append(
                (type(group).__name__, bytes(getattr(state, "otel_infer_handle", b"")) != b"\xff" * 4)
            )
        return [*seen, attempt(self.scheduler.finish_request, "unknown"), sequence_group.adding.group]


def attempt(function: Any, *args: Any, **named: Any) -> Any:
    try:
        return "returned", repr(function(*args, **named))
    except BaseException as exc:
        return "raised", repr(exc), repr(exc.__context__)


class Reader:
    """Reads the events of requests, without instants and handles."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.reader: RequestReader | None = None

    def read(self) -> list[Any]:
        if not self.recording.arena.buffers:
            return []
        self.reader = self.reader or RequestReader(self.recording.arena.buffers[0][1], 1)
        entries = [entry for entry in self.reader.poll(_clock.now(), final=True) if entry.handle]
        return [describe(entry.event) for entry in entries]


def describe(event: Any) -> Any:
    if isinstance(event, events.RequestArrived):
        return "RequestArrived", event.name
    if isinstance(event, (events.RequestEnded, events.ExchangeEnded)):
        return type(event).__name__, event.outcome, event.error_type
    return type(event).__name__, *(() if isinstance(event, events.SpanLinked) else event[1:])


def serve_in_context(reader: Reader, served: Served) -> Any:
    """Returns what the callers, the recording and the request show of one request."""
    request = None if served.current == "none" else start.open_request("POST /", owner="asgi")
    token = None if request is None else request.attach()
    try:
        if request is not None and served.current == "ended":
            request.close()
        if request is not None and served.current == "named":
            request.is_named = True
        if request is not None and served.current == "operation":
            request.operation = "o" * 40
        library = Library(served)
        seen = library.serve()
    finally:
        if token is not None:
            detach(token)
    shown: Any = None
    if request is not None:
        shown = [
            getattr(request, name)
            for name in ("operation", "engine", "is_named", "_request_id", "_response_id", "_operation_names",
                         "_engine_error", "tokens_reached", "inspect_next_chunk")
        ] + [request.detokenize_ns > 0]  # fmt: skip
        request.close()
    return seen, shown, {name: hook.alive for name, hook in library.hooks.items()}, reader.read()


@contextlib.contextmanager
def python_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(compiled_requests, "_requests", None)
        yield


TEXTS = st.sampled_from(("chatcmpl-1", "", 'a"b', "ä", "a" * 190, "x" * 5000, "\ud800", None, 7))
STATES = st.lists(
    st.sampled_from(
        (
            ("num_children", 2),
            ("num_children", None),
            ("is_cpu_offloaded", True),
            ("generated_tokens", []),
            ("generated_tokens", [1, 1]),
            ("generated_tokens", (1, 2)),
            ("_true_initial_tokens", 1),
            ("_eos_token_ids", frozenset({2})),
            ("_eos_token_ids", [2]),
            ("status", Status.DECODING),
            ("status", Status.FAILED),
            ("status", None),
            ("initial_tokens", None),
        )
    ),
    max_size=3,
).map(tuple)
OUTPUTS = st.lists(
    st.one_of(
        st.integers(0, 3), st.sampled_from((ValueError("reason"), Cancelled("left"), KeyboardInterrupt()))
    ),
    max_size=12,
).map(tuple)
SERVED = st.builds(
    Served,
    current=st.sampled_from(("request", "request", "none", "ended", "named", "operation")),
    request_id=TEXTS,
    prompt=st.sampled_from(((1, 2, 3), (), [4], "text", None)),
    limit=st.sampled_from((9, 0, -1, 2**32 - 1, 2**40, None, "lots", True)),
    by_name=st.booleans(),
    model=st.sampled_from(("org/tiny", "m" * 31, "ä", "")),
    is_known=st.booleans(),
    sequences=st.sampled_from((1, 1, 1, 2, None, "1")),
    is_driver=st.sampled_from((True, True, True, False, 1)),
    answer=st.sampled_from(("req_1", None, OSError("full"), KeyboardInterrupt())),
    state=STATES,
    outputs=OUTPUTS,
    dead=st.sampled_from(("", "", "", "handle", "add", "state", "wait", "finish", "init", "put", "end")),
    has_sample=st.sampled_from((True, True, True, False)),
    is_recreated=st.booleans(),
    keeps_id=st.booleans(),
)


@settings(deadline=None, max_examples=500)
@given(served=SERVED)
def test_request_is_recorded_as_by_python_hooks(served: Served) -> None:
    recording = Recording()
    try:
        reader = Reader(recording)
        with python_only():
            expected = serve_in_context(reader, served)
        assert serve_in_context(reader, served) == expected
    finally:
        recording.stop()


def test_frequent_request_enters_no_python_hook(recording: Recording) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # A Python hook that ran would fail, and disable itself.
        for module, name in ((serve.start, "current_request"), (sequences, "_begin_group")):
            monkeypatch.setattr(module, name, None)
        _, shown, alive, _ = serve_in_context(Reader(recording), Served(outputs=(1,) * 10))
    assert all(alive.values())
    assert shown[1] == "transformers" and shown[7] is True


def test_events_of_a_frequent_request(recording: Recording) -> None:
    *_, recorded = serve_in_context(Reader(recording), Served())
    assert recorded == [
        ("RequestArrived", "POST /"),
        ("AttributeSet", "gen_ai.response.id", "resp_chatcmpl-1"),
        ("OperationNamed", "chat", "transformers", "org/tiny"),
        ("RequestSubmitted", 1, 3, 9, "transformers"),
        ("AttributeSet", "infer.request.id", "chatcmpl-1"),
        ("TokenReached",),
        ("RequestReceived",),
        ("EngineFinished", "stop", 2),
        ("RequestEnded", events.OK, ""),
    ]


def test_without_a_live_slot_the_python_hooks_run(recording: Recording) -> None:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    request.handle = 0
    token = request.attach()
    library = Library(Served())
    library.serve()
    detach(token)
    assert all(hook.alive for hook in library.hooks.values())


def test_hook_behaves_as_a_function() -> None:
    library = Library(Served())
    hooked = type(library.handler).handle_request
    assert isinstance(hooked, native.CompiledHook)
    assert copy.copy(library.handler.handle_request)("b", "r") == ("handled", "b", "r")
    assert inspect.ismethod(library.handler.handle_request)
    with pytest.raises(RuntimeError):
        native.CompiledHook.__new__(native.CompiledHook)()
    with pytest.raises(ValueError, match="no hook has the place"):
        native.CompiledHook("nowhere", None, print, print, Hook("h"), type, None)
    with pytest.raises(AttributeError):
        pickle.dumps(native.CompiledHook.__new__(native.CompiledHook))


def test_hook_may_die_while_a_callback_collects_garbage() -> None:
    for _ in range(10):
        hook = native.CompiledHook("end", (1, 2, 3), print, print, Hook("h"), MethodType, None)
        reference = weakref.ref(hook, lambda _: gc.collect())
        del hook
        assert reference() is None


def test_what_a_signal_handler_raises_while_a_name_is_stored_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts: list[BaseException] = []
    store_text = StringTable.intern

    def intern(self: StringTable, text: str) -> int:
        if interrupts:
            raise interrupts.pop()
        return store_text(self, text)

    monkeypatch.setattr(StringTable, "intern", intern)
    recording = Recording()
    try:
        request = start.open_request("POST /", owner="asgi")
        assert request is not None
        token, library = request.attach(), Library(Served())
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            library.manager.add_request([1, 2, 3], max_new_tokens=9)
        detach(token)
        assert library.hooks["add"].alive
    finally:
        recording.stop()


# ── generate ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Stands for the writer of steps; `steps` are the numbers that it returns, 0 = a keyframe is due."""

    number, alive = 1, True

    def __init__(self, steps: list[Any]) -> None:
        self.steps, self.calls = steps, []  # type: ignore[var-annotated]

    def write_single_tokens(self, step: int, at: int) -> None:
        self.calls.append(("done", step, at > 0))

    def write_unchanged(self, *load: int) -> Any:
        self.calls.append(("unchanged", load[:-1], load[-1] > 0))
        step = self.steps.pop(0) if self.steps else 7
        if isinstance(step, BaseException):
            raise step
        return step

    def write_scheduled(self, *args: Any, **load: int) -> int:
        self.calls.append(("scheduled", len(args), load))
        return 99

    def write_done(self, *args: Any) -> None:
        self.calls.append(("ended", args))


def step_through(results: list[Any], steps: list[Any], state: dict[str, Any], compiled: bool) -> Any:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    writer: Any = Writer(list(steps))
    run = generation_run.GenerationRun(request, False, writer, 1, 3)
    run.stepping = run.has_plain_steps = True
    run.iterations = 2
    for name, value in state.items():
        setattr(run, name, value)
    returned = iter(results)

    def check(*args: Any, **named: Any) -> Any:
        result = next(returned)
        if isinstance(result, BaseException):
            raise result
        return result

    hook = Hook("check")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not compiled:
            monkeypatch.setattr(generate, "compiled_state", None)
        hooked = generate.wrap_has_unfinished_sequences(check, hook)
    generation_run.thread_state.run = run
    try:
        seen = [attempt(hooked, False, device="cpu") for _ in results]
    finally:
        generation_run.thread_state.run = None
        request.close()
    return seen, writer.calls, hook.alive, run.iterations, run.tokens, run.step, run.timing_handle != 0


class NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("no truth value")

    def __repr__(self) -> str:
        return "NoTruth"


@settings(deadline=None, max_examples=200)
@given(
    results=st.lists(
        st.sampled_from((True, True, True, False, 1, 0, NoTruth(), ValueError("x"))), min_size=1, max_size=8
    ),
    steps=st.lists(st.sampled_from((3, 4, 0, OSError("ring"))), max_size=8),
    state=st.fixed_dictionaries(
        {},
        optional={
            "iterations": st.integers(0, 3),
            "has_plain_steps": st.booleans(),
            "stepping": st.booleans(),
            "timing_due_at": st.just(2**62),
            "timing_handle": st.sampled_from((5, "no handle")),
        },
    ),
)
def test_steps_are_recorded_as_by_the_python_hook(
    results: list[Any], steps: list[Any], state: dict[str, Any]
) -> None:
    recording = Recording()
    try:
        generation_run.timing.thread.host_due_at = 2**62
        expected = step_through(results, steps, state, compiled=False)
        assert step_through(results, steps, state, compiled=True) == expected
    finally:
        generation_run.timing.thread.host_due_at = 0
        recording.stop()


@pytest.mark.parametrize("compiled", [True, False])
def test_outputs_of_a_stream_are_timed_until_enough_are(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(tokenization, "compiled_state", None)
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    run = generation_run.GenerationRun(request, False, None, 1, 3)
    run.iterations = 1
    hook = Hook("decode")
    decode = tokenization._wrap_decode(lambda ids: f"text of {ids}", hook)
    token = request.attach()
    generation_run.thread_state.run = run
    try:
        assert [decode(ids=number) for number in range(9)] == [f"text of {number}" for number in range(9)]
    finally:
        generation_run.thread_state.run = None
        detach(token)
        request.close()
    assert run.detokenize_sample.tokens == detokenize_sample.SAMPLED_OUTPUTS and run.is_detokenizing_sampled
    assert type(decode) is (native.CompiledHook if compiled else FunctionType) and hook.alive


def test_limits_are_those_of_the_python_hooks() -> None:
    assert native.SAMPLED_OUTPUTS == detokenize_sample.SAMPLED_OUTPUTS
    assert native.MAX_SHORT_NAME == request_span.MAX_SHORT_NAME
    assert native.MAX_FLIGHTS == batch_tracker.MAX_FLIGHTS


def test_codes_and_fields_are_those_of_the_events() -> None:
    """As `_requests.c` and `_request_state.c` write them."""
    known = {
        events.RequestSubmitted: (3, "<qIIII"),
        events.RequestReceived: (4, "<q"),
        events.TokenReached: (7, "<q"),
        events.EngineFinished: (10, "<qII"),
        events.OperationNamed: (43, "<qIII"),
    }
    for event, layout in known.items():
        found = events.LAYOUT_BY_EVENT[event]
        assert (found.code, found.packed.format) == layout
    assert events.TEXT_CODES[events.AttributeSet] == 32
    assert request_span.MAX_SHORT_NAME == 30 and recorder is not None
