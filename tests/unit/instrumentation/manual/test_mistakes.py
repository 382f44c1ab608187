"""Wrong and hostile arguments of the public API: none raises into the caller; each kind is logged once, all are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace

import otel_infer
from otel_infer._bootstrap.install import installation
from otel_infer.tracing import user_mistakes
from tests.support.rings import Recording


class Hostile:
    """An object that raises in every method that anyone may call."""

    def fail(self, *_: Any) -> Any:
        raise RuntimeError("canary")

    __str__ = __repr__ = __bool__ = __len__ = __iter__ = __eq__ = __hash__ = __int__ = __float__ = fail
    __getitem__ = __getattr__ = __index__ = __lt__ = fail


class HostileText(str):
    """A string that raises where it is used as a key or as a condition."""

    __str__ = __bool__ = __hash__ = Hostile.fail  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES = {
    "none": None, "hostile": Hostile(), "hostile text": HostileText("x"), "huge": 10**5000, "bytes": b"\xff",
    "number": 5, "negative": -1, "nan": float("nan"), "list": [1], "unhashable": {1: [2]}, "cycle": CYCLE,
    "deep": nested(500), "surrogate": "\udce9", "empty": "", "class": int, "exception": ValueError("x"),
}  # fmt: skip
Use = Callable[[otel_infer.request, Any], object]


def use_scope(scope: Any) -> None:
    with scope:
        pass


def set_delivered(request: otel_infer.request, value: Any, whole: bool) -> None:
    with otel_infer.step([request]) as step:
        if whole:
            step.delivered = value
        else:
            step.delivered[request] = value


def span() -> trace.Span:
    return trace.get_current_span()


OTHER_SPAN = trace.SpanContext(1, 2, is_remote=False)
CALLS: dict[str, Use] = {
    "request operation": lambda request, value: use_scope(otel_infer.request(value)),
    "request model": lambda request, value: use_scope(otel_infer.request("chat", model=value)),
    "request headers": lambda request, value: use_scope(otel_infer.request("chat", headers=value)),
    "request header": lambda request, value: use_scope(
        otel_infer.request("chat", headers={"traceparent": value})
    ),
    "request decorator": lambda request, value: otel_infer.request(value)(lambda: 1)(),
    "stage name": lambda request, value: use_scope(otel_infer.stage(value)),
    "stage gpu": lambda request, value: use_scope(otel_infer.stage("a", gpu=value)),
    "stage decorator": lambda request, value: otel_infer.stage(value)(lambda: 1)(),
    "step batch": lambda request, value: use_scope(otel_infer.step(value)),
    "step member": lambda request, value: use_scope(otel_infer.step([value])),
    "step prompts": lambda request, value: use_scope(otel_infer.step([request], prompt_tokens=value)),
    "step prompt": lambda request, value: use_scope(
        otel_infer.step([request], prompt_tokens={request: value})
    ),
    "step waiting": lambda request, value: use_scope(otel_infer.step([request], waiting=value)),
    "step kv": lambda request, value: use_scope(otel_infer.step([request], kv_used=value, kv_total=value)),
    "step gpu": lambda request, value: use_scope(otel_infer.step([request], gpu=value)),
    "step delivered": lambda request, value: set_delivered(request, value, whole=True),
    "step tokens": lambda request, value: set_delivered(request, value, whole=False),
    "submitted": lambda request, value: request.submitted(input_tokens=value, max_tokens=value),
    "finished reason": lambda request, value: request.finished(value),
    "finished tokens": lambda request, value: request.finished("stop", value),
    "set_attribute key": lambda request, value: request.set_attribute(value, 1),
    "set_attribute value": lambda request, value: request.set_attribute("a", value),
    "span set_attribute key": lambda request, value: span().set_attribute(value, 1),
    "span set_attribute value": lambda request, value: span().set_attribute("a", value),
    "span set_attributes": lambda request, value: span().set_attributes(value),
    "span add_event": lambda request, value: span().add_event(value),
    "span add_event attributes": lambda request, value: span().add_event("a", value),
    "span add_event attribute": lambda request, value: span().add_event("a", {"b": value}),
    "span add_event time": lambda request, value: span().add_event("a", {}, value),
    "span add_link": lambda request, value: span().add_link(value),
    "span add_link attributes": lambda request, value: span().add_link(OTHER_SPAN, value),
    "span update_name": lambda request, value: span().update_name(value),
    "span set_status": lambda request, value: span().set_status(value),
    "span record_exception": lambda request, value: span().record_exception(value),
    "span record_exception time": lambda request, value: span().record_exception(ValueError(), {}, value),
    "span end": lambda request, value: span().end(value),
}


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    user_mistakes._reported.clear()
    yield recording
    recording.stop()
    user_mistakes._reported.clear()


@pytest.mark.parametrize("call", CALLS)
def test_no_argument_raises_into_the_caller(
    recording: Recording, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The request is recorded nevertheless, and no log line quotes the argument or repeats."""
    with caplog.at_level(logging.WARNING), otel_infer.request("outer", model="tiny") as request:
        request.submitted()
        for value in VALUES.values():
            CALLS[call](request, value)
    assert len(recording.records()) == 1
    assert "canary" not in caplog.text
    messages = [entry.getMessage() for entry in caplog.records if "is not recorded" in entry.getMessage()]
    items = [message.partition(" is not recorded")[0] for message in messages]
    assert len(items) == len(set(items))


def test_each_mistake_is_counted(recording: Recording, caplog: pytest.LogCaptureFixture) -> None:
    with otel_infer.request("chat"):
        before = user_mistakes.count_mistakes()
        for _ in range(3):
            span().add_link(None)  # type: ignore[arg-type]
        assert user_mistakes.count_mistakes() - before == 3
    assert [entry.getMessage() for entry in caplog.records] == ["a link is not recorded: AttributeError"]


def test_a_name_without_text_has_a_default(recording: Recording) -> None:
    with otel_infer.request(Hostile(), model=Hostile()), otel_infer.stage(Hostile()):  # type: ignore[arg-type]
        pass
    (record,) = recording.records()
    assert not record.telemetry_lost
    assert (record.operation, record.model) == ("inference", "_OTHER")
    assert [stage.name for stage in record.stages] == ["_OTHER"]


@pytest.mark.parametrize("timeout", VALUES.values(), ids=VALUES)
def test_flush_takes_any_timeout(timeout: Any) -> None:
    assert installation.reader is None
    assert otel_infer.flush(timeout)
