"""A compiled hook on an engine's step records and returns what the Python hook in its place does."""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers import continuous_batching, kv_cache
from otel_infer.instrumentation.vllm import scheduler as vllm_scheduler
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.step_reader import StepReader
from tests.support.rings import Recording
from tests.unit.instrumentation.transformers import test_transformers as batching
from tests.unit.instrumentation.vllm import test_usual_steps as vllm
from tests.unit.instrumentation.vllm.test_vllm import open_server_request

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is not built")

NEVER = 1 << 62


class Pool:
    """The blocks of a cache, as transformers 5.18 and later count them."""

    def __init__(self) -> None:
        self.free_sectors = list(range(5))
        self._free_blocks = [[1, 2, 3]]

    def count_free_blocks(self, index: int) -> int:
        return len(self._free_blocks[index])


class Tree:
    """Free blocks of an allocator."""

    def __init__(self) -> None:
        self._length = 3


class PooledCache:
    """A KV cache of transformers 5.18 and later."""

    num_blocks, num_sectors, bytes_per_sector = 40, 10, 400

    def __init__(self) -> None:
        self.pool: Any = Pool()
        self.pool._free_blocks = [Tree()]
        self.pool.count_free_blocks = lambda index: self.pool._free_blocks[index]._length
        allocator: Any = type("Allocator", (), {"pool": self.pool, "index": 0, "bytes_per_block": 100})
        self.cache_allocators = {"full": allocator}

    def compute_free_capacity(self) -> float:
        free = len(self.pool.free_sectors) * self.bytes_per_sector
        for allocator in self.cache_allocators.values():
            free += allocator.pool.count_free_blocks(allocator.index) * allocator.bytes_per_block
        return free / (self.num_sectors * self.bytes_per_sector)


def without_instants(memory: Any) -> list[Any]:
    """Returns the step events of a ring without their instants, and with handles in order of appearance."""
    events_read, numbers = [], {0: 0}
    for recorded in StepReader(memory, 1).poll(0, final=True):
        event = recorded.event._replace(at=0)
        if isinstance(event, events.StepScheduled):
            event = event._replace(
                joined=tuple(numbers.setdefault(handle, len(numbers)) for handle in event.joined)
            )
        events_read.append(event)
    return events_read


def use_python_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (continuous_batching, vllm_scheduler):
        monkeypatch.setattr(module, "compile_hook", lambda place, known, original, hook, call, record: call)


class BatchingRun:
    """A random run of transformers' continuous batching."""

    def __init__(self) -> None:
        self.engine = batching.Engine()
        self.cache = self.engine.cache = PooledCache()
        self.states: list[Any] = []
        self.batches: list[list[Any]] = []
        self.results: list[Any] = []

    @property
    def tracker(self) -> Any:
        return getattr(self.engine, "_otel_infer_batches", None)

    def admit(self, number: int) -> None:
        self.states.append(self.engine.admit(request_id=f"r{len(self.states)}.{number}")[1])

    def schedule(self, number: int) -> None:
        states = list(self.engine.active_requests.values())[: None if number % 4 else number % 3]
        self.batches.append(self.engine.schedule(*map(batching.Future, states)))
        if self.tracker is not None:
            self.tracker.ring.next_check_at = NEVER

    def prefill(self, number: int) -> None:
        futures = [batching.Future(state) for state in self.engine.active_requests.values()]
        if futures:
            futures[-1].query_length = 1 + number % 3
            futures[-1].has_new_token = bool(number % 2)
        self.batches.append(self.engine.schedule(*futures))

    def update(self, number: int) -> None:
        if self.batches:
            self.engine.update(self.batches.pop(0 if number % 5 else -1))

    def finish(self, number: int) -> None:
        active = list(self.engine.active_requests.values())
        if active:
            self.engine.finish(active[number % len(active)])

    def wait(self, number: int) -> None:
        self.engine.waiting_requests = dict.fromkeys(range(number % 3))
        self.cache.pool.free_sectors = list(range(number % 9))
        self.cache.pool._free_blocks[0]._length = number % 7

    def fork(self, number: int) -> None:
        self.engine._requests_to_fork = [None] * (number % 2)

    def break_engine(self, number: int) -> None:
        if number == 17:
            del self.engine.waiting_requests

    def read(self) -> Any:
        steps = [] if self.tracker is None else without_instants(self.tracker.writer._writer.memory)
        in_flight = [] if self.tracker is None else [flight.step for flight in self.tracker.in_flight]
        writer: Any = None if self.tracker is None else self.tracker.writer
        batch = writer and (
            writer._ordinals,
            len(writer._packed_handles),
            len(writer._ordinal_of),
            writer._next_ordinal,
        )
        return steps, in_flight, self.engine.hook.alive, batch


BATCHING = (
    "admit",
    "schedule",
    "schedule",
    "schedule",
    "prefill",
    "update",
    "update",
    "finish",
    "wait",
    "fork",
    "break_engine",
)
OPERATIONS = st.lists(st.tuples(st.sampled_from(BATCHING), st.integers(0, 20)), max_size=60)


def run_batching(operations: list[tuple[str, int]]) -> Any:
    recording = Recording()
    try:
        run = BatchingRun()
        for name, number in operations:
            if run.engine.hook.alive or name != "break_engine":
                try:
                    getattr(run, name)(number)
                except AttributeError:  # of the broken engine, in its own code
                    assert not hasattr(run.engine, "waiting_requests")
        return run.read()
    finally:
        continuous_batching._close_trackers()
        recording.stop()


@settings(deadline=None, max_examples=150)
@given(operations=OPERATIONS)
def test_compiled_hooks_on_continuous_batching_record_the_same(operations: list[tuple[str, int]]) -> None:
    compiled = run_batching(operations)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_python_hooks(monkeypatch)
        assert run_batching(operations) == compiled


class VllmRun:
    """A random run of vLLM's scheduler."""

    def __init__(self) -> None:
        self.engine = vllm.Engine()
        self.outputs: list[Any] = []
        self.created = 0

    def schedule(self, number: int) -> None:
        running = self.engine.running[: None if number % 4 else number % 3]
        self.outputs.append(self.engine.schedule(dict.fromkeys(running, 1)))
        if hasattr(self.engine, "otel_infer_batches"):
            self.engine.steps.ring.next_check_at = NEVER

    def admit(self, number: int) -> None:
        self.created += 1
        self.engine.running = [*self.engine.running, f"r{self.created}"]
        tokens = dict.fromkeys(self.engine.running, 1) | {f"r{self.created}": 1 + number % 3}
        self.outputs.append(self.engine.schedule(tokens, new=(f"r{self.created}",)))

    def update(self, number: int) -> None:
        if self.outputs:
            output = self.outputs.pop(0)
            tokens = dict.fromkeys(dict.keys(output.num_scheduled_tokens), 0 if number == 3 else 1)
            self.engine.update(output, pooled=[1] if number == 4 else None, **tokens)

    def leave(self, number: int) -> None:
        if self.engine.running:
            left = self.engine.running[number % len(self.engine.running)]
            self.engine.running = [key for key in self.engine.running if key != left]
            self.engine.free_request(left, "stop" if number % 2 else "error")

    def wait(self, number: int) -> None:
        self.engine.waiting = [""] * (number % 3)
        self.engine.free.num_free_blocks = number
        if hasattr(self.engine, "otel_infer_batches"):
            self.engine.steps.update_waiting(self.engine)

    def break_engine(self, number: int) -> None:
        if number == 17:
            vars(self.engine.free).pop("num_free_blocks", None)

    def read(self) -> Any:
        if not hasattr(self.engine, "otel_infer_batches"):
            return self.engine.hook.alive
        steps = self.engine.steps
        return (
            without_instants(steps.writer._writer.memory), steps.scheduled, steps.done, steps.size, self.engine.hook.alive,
        )  # fmt: skip


VLLM = (
    "admit",
    "schedule",
    "schedule",
    "schedule",
    "update",
    "update",
    "update",
    "leave",
    "wait",
    "break_engine",
)


def run_vllm(operations: list[tuple[str, int]]) -> Any:
    recording = Recording()
    try:
        open_server_request()
        run = VllmRun()
        for name, number in operations:
            if run.engine.hook.alive:
                getattr(run, name)(number)
        return run.read()
    finally:
        recording.stop()


@settings(deadline=None, max_examples=150)
@given(operations=st.lists(st.tuples(st.sampled_from(VLLM), st.integers(0, 20)), max_size=60))
def test_compiled_hooks_on_vllm_record_the_same(operations: list[tuple[str, int]]) -> None:
    compiled = run_vllm(operations)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_python_hooks(monkeypatch)
        assert run_vllm(operations) == compiled


def test_frequent_steps_enter_no_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the members of the last one, one of which some left and joined with their prompts, and their ends."""
    recording = Recording()
    run = BatchingRun()
    for name in ("admit", "admit", "admit", "schedule", "update", "schedule", "update"):
        getattr(run, name)(1)
    record: Callable[..., Any] = lambda *arguments: pytest.fail("Python code records a frequent step")  # noqa: E731
    monkeypatch.setattr(continuous_batching, "_record_schedule", record)
    monkeypatch.setattr(continuous_batching, "_record_update", record)
    engine = run.engine
    engine._schedule = continuous_batching._wrap_schedule_batch(engine._next, engine.hook)
    engine._update = continuous_batching.wrap_prepare_batch_update(
        lambda ios: (engine.result, [], None), engine.hook
    )
    for name, number in (
        ("schedule", 1),
        ("update", 1),
        ("finish", 1),
        ("admit", 1),
        ("prefill", 5),
        ("update", 1),
    ):
        getattr(run, name)(number)
    steps, in_flight, is_alive, _ = run.read()
    scheduled = [event for event in steps if isinstance(event, events.StepScheduled)]
    assert [(event.left, len(event.joined), event.tokens) for event in scheduled[-2:]] == [
        ((), 0, ()),
        ((1,), 1, ((2, 3),)),
    ]
    assert type(steps[-1]) is events.StepDone and not in_flight and is_alive
    recording.stop()


# ── the hook as an attribute of a class ──────────────────────────────────────────────────────────────────────────

PLACES = ["schedule batch", "batch update", "vllm schedule", "vllm eviction"]


def make_hook(place: str, original: Any, calls: list[Any]) -> Any:
    def record(*arguments: Any) -> None:
        calls.append(arguments)

    return compile_hook(place, native, original, Hook("a test"), record, record)


@pytest.mark.parametrize("place", PLACES)
def test_exceptions_and_results_of_the_original_pass(place: str) -> None:
    calls: list[Any] = []
    error = KeyError("original")

    def original(self: Any, *arguments: Any, **named: Any) -> Any:
        if arguments:
            raise error
        return named

    owner = type("Owner", (), {"hooked": make_hook(place, original, calls)})()
    named = {"a": 1}
    assert owner.hooked(**named) == named
    with pytest.raises(KeyError) as raised:
        owner.hooked(1)
    assert raised.value is error and raised.value.__context__ is None


def test_a_bound_hook_records_with_its_owner() -> None:
    calls: list[Any] = []
    owner = type("Owner", (), {"hooked": make_hook("schedule batch", lambda self: 7, calls)})()
    bound = owner.hooked
    assert bound() == 7 and calls[0][:2] == (owner, 7) and inspect.ismethod(bound)
    with pytest.raises(TypeError):
        type(owner).hooked()


def test_what_a_signal_handler_raises_in_a_record_passes() -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook: Any = compile_hook("schedule batch", native, lambda self: 7, Hook("a test"), interrupt, interrupt)
    with pytest.raises(KeyboardInterrupt):
        hook(object())


def test_hook_is_freed_with_its_class() -> None:
    hook = make_hook("schedule batch", lambda self: 7, [])
    hook.itself = hook
    reference = weakref.ref(hook)
    del hook
    gc.collect()
    assert reference() is None


def test_hook_without_state_is_refused() -> None:
    with pytest.raises(TypeError, match="has no compiled state"):
        native.CompiledHook("schedule batch", native, print, print, object(), MethodType, print)


def test_pool_with_other_counts_is_not_read() -> None:
    """A release that counts otherwise is noticed, and its own function is called instead."""

    class Tracker:
        pool: Any = "bound"

        def __init__(self, free: int) -> None:
            self.free, self.free_scale = free, 40

        def use_pool(self, *arguments: Any) -> int:
            return self.free

        def read_free(self) -> float:
            return 0.5

    right, wrong = Tracker(20), Tracker(21)
    for tracker in (right, wrong):
        kv_cache.bind_pool(tracker, PooledCache())
    assert (right.pool, wrong.pool) == ("bound", None)


def test_pool_without_counts_is_refused() -> None:
    with pytest.raises(AttributeError, match="free_sectors"):
        native.StepTracker().use_pool(object(), 1, 1, [])


def test_pickled_hook_is_named_like_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = make_hook("schedule batch", lambda self: 7, [])
    hook.__qualname__, hook.__module__ = "a_hook", __name__
    monkeypatch.setattr(sys.modules[__name__], "a_hook", hook, raising=False)
    assert pickle.loads(pickle.dumps(hook)) is hook


@pytest.fixture(autouse=True)
def no_trackers() -> Iterator[None]:
    yield
    continuous_batching._close_trackers()
