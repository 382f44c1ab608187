"""Compiled code records a forward pass as the Python code does, whatever the model and its caller do."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.torch import call_descriptor
from otel_infer.instrumentation.torch import forward as forward_hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.frames import list_own_frames
from tests.support.rings import Recording
from tests.unit.instrumentation.torch import test_forward
from tests.unit.instrumentation.torch.test_forward import Encoder, FakeTorch, Tensor, watch_module

pytestmark = pytest.mark.skipif(not call_descriptor.is_compiled, reason="the compiled module is not built")
torch, recording = test_forward.torch, test_forward.recording  # fixtures


class ThroughPython:
    """A descriptor that calls the Python code where the compiled one would be called."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return call_descriptor.get_call(forward_hooks._call_descriptor, module, owner)


class Model(Encoder):
    """Returns what is current inside its forward pass, or raises `fail`."""

    def forward(self, *args: Any, fail: Any = None, **kwargs: Any) -> Any:
        for child in self._modules.values():
            child(Tensor(1, 1))
        if fail is not None:
            raise fail
        request = start.current_request()
        return request is not None, torch_suppressed.get(), request is trace.get_current_span()


class PythonModel(Model):
    _compiled_call_impl = ThroughPython()


PythonModel.__name__ = Model.__name__


class OddShape:
    @property
    def shape(self) -> Any:
        raise RuntimeError("lazy")


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((Tensor(3, 7),), {}),
    ((), {"input_ids": Tensor(5, 7), "attention_mask": Tensor(5, 7)}),
    (({"input_ids": Tensor(2, 7)},), {}),
    ((None, 4), {"pixel_values": Tensor(8, 3, 2, 2)}),
    ((Tensor(9),), {}),
    ((OddShape(),), {}),
    ((), {}),
]
FAILURES: list[Any] = [None, None, ValueError("x"), StopIteration(3), TimeoutError(), KeyboardInterrupt()]
CALLS = st.tuples(
    st.sampled_from(("nothing", "request", "named request", "ended request", "context")),
    st.sampled_from(ARGUMENTS),
    st.sampled_from(FAILURES),
    st.sampled_from(("grad", "tracing", "_is_compiling_flag", "", "", "")),
    st.integers(1, 3),
)


@contextlib.contextmanager
def current(where: str) -> Iterator[None]:
    """Makes a request current, or another context."""
    if where == "nothing":
        yield
        return
    request = start.open_request("POST", owner="asgi", server=True) if where != "context" else None
    if request is None:
        token = start.context.attach(trace.set_span_in_context(trace.INVALID_SPAN))
    else:
        request.is_named = where == "named request"
        token = request.attach()
        if where == "ended request":
            request.close()
    try:
        yield
    finally:
        detach(token)
        if request is not None:
            request.close()


class Calls:
    """Calls models, and reads what each call has recorded."""

    def __init__(self, recording: Recording, torch: FakeTorch) -> None:
        self._recording, self._torch = recording, torch
        self._reader: RequestReader | None = None

    def call(self, model: Any, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes the call, as often as it says. Returns results, exceptions and events."""
        where, (args, kwargs), fail, state, times = call
        results: list[Any] = []
        with current(where):
            setattr(self._torch, state or "unused", True)
            for _ in range(times):
                try:
                    results.append(model(*args, fail=fail, **kwargs))
                except BaseException as exc:
                    results.append((repr(exc), exc is fail))
                assert not torch_suppressed.get()
            setattr(self._torch, state or "unused", False)
        assert forward_hooks._call_descriptor.hook.alive
        return results, self.read_events()

    def read_events(self) -> list[Any]:
        if not self._recording.arena.buffers:
            return []
        self._reader = self._reader or RequestReader(self._recording.arena.buffers[0][1], 1)
        entries = self._reader.poll(_clock.now(), final=True)
        return [describe(entry.event) for entry in entries if entry.handle]


def describe(event: Any) -> tuple[Any, ...]:
    """Returns an event without instants and ids."""
    if isinstance(event, events.RequestArrived):
        parents = event.parent_span_id != bytes(8), event.server_span_id != bytes(8)
        return "RequestArrived", event.flags, *event[7:], *parents
    if isinstance(event, events.StageEnded):
        assert event.started_at <= event.at
        return "StageEnded", *event[2:]
    if isinstance(event, events.SpanLinked):
        return ("SpanLinked",)
    return type(event).__name__, *event[1:]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(CALLS, min_size=1, max_size=6))
def test_compiled_call_records_what_python_records(
    recording: Recording, torch: FakeTorch, calls: list[Any]
) -> None:
    both = Calls(recording, torch)
    compiled, python = watch_module(Model(Encoder())), watch_module(PythonModel(Encoder()))
    for model in (compiled, python):  # which makes their names known
        both.call(model, ("nothing", ARGUMENTS[0], None, "", 2))
    for call in calls:
        assert both.call(compiled, call) == both.call(python, call)


@pytest.mark.parametrize("where", ["nothing", "request"])
def test_usual_forward_enters_no_python_code_of_the_hook(recording: Recording, where: str) -> None:
    model = watch_module(Encoder())
    for _ in range(2):  # the first call creates the rings, the second one is the first of a second
        model(Tensor(2, 2))
    assert recorder.requests is not None
    recorder.requests.defer_until(_clock.now() + 60_000_000_000)
    with current(where):
        assert list_own_frames(lambda: model(Tensor(2, 2))) == []
        assert list_own_frames(lambda: model(x=Tensor(2, 2))) == []


def test_compiled_separate_request_has_the_ids_of_its_span(recording: Recording) -> None:
    seen: list[Any] = []

    class Asking(Encoder):
        def forward(self, x: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            seen.append(trace.get_current_span().get_span_context())

    model = watch_module(Asking())
    for _ in range(3):
        model(Tensor(2, 2))
    records = recording.records()
    assert [record.span_id for record in records] == [each.span_id.to_bytes(8, "big") for each in seen]
    assert [record.trace_id for record in records] == [each.trace_id.to_bytes(16, "big") for each in seen]
    assert all(each.trace_flags.sampled and not each.is_remote for each in seen)


def test_failed_hook_passes_calls_through(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    model = watch_module(Encoder())
    model(Tensor(2, 2))
    recording.records()
    monkeypatch.setattr(forward_hooks._call_descriptor, "hook", Hook("stand-in"))
    forward_hooks._call_descriptor.hook.alive = False
    assert model(1) == 1
    assert recording.records() == []


def test_bound_call_is_freed_with_its_model(recording: Recording) -> None:
    model: Any = watch_module(Encoder())
    model.kept = model._compiled_call_impl
    assert model.kept.__self__ is model and model.kept(1) == 1
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
