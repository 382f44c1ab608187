"""A call of a model is a stage of its request: the same by compiled and by Python code."""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.instrumentation import model_calls
from otel_infer.instrumentation.hooks import context_hooks
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.model_calls import ModelLibrary, count_rows, forget_model, wrap_call
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording

ARRAY = SimpleNamespace(shape=(3, 7))


class Session:
    """A model. `place`: where it runs, which is read `reads` times."""

    def __init__(self, place: str = "CPUExecutionProvider") -> None:
        self.place, self.reads, self.suppressed = place, 0, False

    def run(self, *values: Any, **named: Any) -> str:
        self.suppressed = torch_suppressed.get()
        if values[:1] == ("fail",):
            raise ValueError("no such input")
        return "scores"


def read_place(session: Session) -> str:
    session.reads += 1
    return session.place


LIBRARY = ModelLibrary("onnxruntime", lambda session: "classifier", read_place=read_place, keeps_names=True)


@pytest.fixture(params=["compiled", "python"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a session below the hook."""
    if request.param == "python":
        monkeypatch.setattr(context_hooks, "_known", None)
    return wrap_call(LIBRARY, count_rows)(Session.run, Hook("run"))


def list_forwards(record: Any) -> list[Any]:
    """Returns the rows of each call."""
    return [stage.attributes.get(semconv.ITEMS) for stage in record.stages if stage.name == "forward"]


def open_request() -> request_span.RequestSpan:
    request = start.open_request("POST /classify", owner="asgi")
    assert request is not None
    return request


def run_in_request(run: Callable[..., Any], session: Session, *values: Any, **named: Any) -> None:
    request = open_request()
    token = request.attach()
    try:
        assert run(session, *values, **named) == "scores"
    finally:
        detach(token)
        request.close()


def test_calls_are_stages_with_model_and_place(run: Callable[..., Any], recording: Recording) -> None:
    session = Session()
    for _ in range(3):
        run_in_request(run, session, None, {"ids": ARRAY})
    assert session.suppressed and not torch_suppressed.get()
    records = recording.records()
    assert len(records) == 3
    for record in records:
        assert list_forwards(record) == [3]
        assert (record.operation, record.provider, record.model) == ("inference", "onnxruntime", "classifier")
        assert record.attributes[semconv.EXECUTION_PROVIDER] == "CPUExecutionProvider"
    assert session.reads == 1


@pytest.mark.parametrize(
    ("values", "named", "rows"),
    [
        ((), {}, 0),
        ((["scores"], {"ids": ARRAY}), {}, 3),
        ((None,), {"input_feed": {"mask": None, "ids": ARRAY}}, 3),
        (([ARRAY],), {}, 3),
        ((["scores"], OrderedDict(ids=ARRAY)), {}, 3),
        ((None, UserDict(ids=ARRAY)), {}, 3),  # what a tokenizer returns
        ((), {"rows": ARRAY}, 3),
        ((SimpleNamespace(shape=lambda: (5, 2)),), {}, 5),
        ((SimpleNamespace(shape=(9,)), object(), ARRAY), {}, 3),
        ((SimpleNamespace(shape=[4, 4]),), {}, 4),
        ((SimpleNamespace(shape=("batch", 4)), ARRAY), {}, 3),
    ],
)
def test_rows_are_those_of_the_first_array(
    values: tuple[Any, ...],
    named: dict[str, Any],
    rows: int,
    run: Callable[..., Any],
    recording: Recording,
) -> None:
    session = Session()
    for _ in range(2):
        run_in_request(run, session, *values, **named)
    for record in recording.records():
        assert list_forwards(record) == [rows or None]


def test_a_call_that_fails_is_a_stage_and_keeps_its_exception(
    run: Callable[..., Any], recording: Recording
) -> None:
    session = Session()
    run_in_request(run, session)
    request = open_request()
    token = request.attach()
    with pytest.raises(ValueError, match="no such input"):
        run(session, "fail")
    detach(token)
    request.close(events.ERROR, "ValueError")
    assert not torch_suppressed.get()
    _, failed = recording.records()
    assert (list_forwards(failed), failed.failed_stage) == ([None], "forward")


def test_what_a_model_calls_is_part_of_its_call(run: Callable[..., Any], recording: Recording) -> None:
    session = Session()
    run_in_request(run, session)
    request = open_request()
    token, flag = request.attach(), torch_suppressed.set(True)
    run(session)
    torch_suppressed.reset(flag)
    detach(token)
    request.close()
    assert [len(list_forwards(record)) for record in recording.records()] == [1, 0]


def test_a_call_without_a_request_is_one(run: Callable[..., Any], recording: Recording) -> None:
    session = Session()
    run(session, ARRAY)
    run(session, ARRAY)
    assert [record.name for record in recording.records()] == ["inference classifier"] * 2


def test_the_place_is_read_again_after_a_change(run: Callable[..., Any], recording: Recording) -> None:
    session = Session()
    run_in_request(run, session)
    session.place = "NvTensorRTRTXExecutionProvider on a device with a long name"
    forget_model(session)
    run_in_request(run, session)
    run_in_request(run, session)
    places = [record.attributes[semconv.EXECUTION_PROVIDER] for record in recording.records()]
    assert places == ["CPUExecutionProvider", session.place, session.place]


def test_a_model_that_is_gone_is_forgotten(run: Callable[..., Any], recording: Recording) -> None:
    session = Session()
    run_in_request(run, session)
    key = id(session)
    assert key in model_calls._known_models
    del session
    gc.collect()
    assert key not in model_calls._known_models


def test_a_removed_hook_records_nothing(recording: Recording) -> None:
    hook = Hook("run")
    run = wrap_call(LIBRARY, count_rows)(Session.run, hook)
    session = Session()
    run_in_request(run, session)
    hook.alive = False
    run_in_request(run, session)
    assert [len(list_forwards(record)) for record in recording.records()] == [1, 0]
