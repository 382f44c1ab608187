"""The hooks of KServe's models, on a stand-in for `kserve.model` with the same functions."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.context import Context

from otel_infer.instrumentation import kserve
from otel_infer.tracing import start
from otel_infer.tracing.context import attach, detach
from tests.support.rings import Recording, stages_of

SOURCE = """
def get_latency_ms(start, end):
    return end - start

class Model:
    async def __call__(self, body, headers=None, verb=None):
        payload = self.preprocess(body)
        get_latency_ms(0, 1)
        work = self.explain if getattr(verb, "name", "") == "EXPLAIN" else self.predict
        result = work(payload)
        get_latency_ms(0, 1)
        result = self.postprocess(result)
        get_latency_ms(0, 1)
        return result

    def preprocess(self, payload):
        return payload

    def postprocess(self, result):
        return result
"""


@pytest.fixture
def model_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType(kserve.MODULE)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, "kserve", ModuleType("kserve"))
    monkeypatch.setitem(sys.modules, kserve.MODULE, module)
    kserve.instrumentor.install()
    assert kserve.instrumentor.status.drift is None
    yield module.Model
    kserve.instrumentor.remove()


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    token = attach(Context())
    yield recording
    detach(token)
    recording.stop()


def make_model(base: Any, **methods: Any) -> Any:
    def predict(self: Any, payload: Any) -> Any:
        time.sleep(0.001)
        return payload + 1

    return type("Scorer", (base,), {"predict": predict, "explain": predict, **methods})()


def call(model: Any, body: Any = 1, verb: Any = None) -> tuple[Any, list[str]]:
    """Calls a model as a request. Returns its result, or the type of its error."""
    request = start.open_request("a", owner="test", operation="inference")
    assert request is not None
    token = request.attach()
    try:
        return asyncio.run(model(body, None, verb))
    except Exception as exc:
        return type(exc)
    finally:
        detach(token)
        request.close()


def wait(self: Any, payload: Any) -> Any:
    time.sleep(0.001)
    return payload


def test_only_hooks_of_the_user_are_stages(model_class: Any, recording: Recording) -> None:
    assert call(make_model(model_class)) == 2
    assert call(make_model(model_class, preprocess=wait, postprocess=wait)) == 2
    assert call(make_model(model_class), verb=SimpleNamespace(name="EXPLAIN")) == 2
    assert [stages_of(record) for record in recording.records()] == [
        ["predict"], ["preprocess", "predict", "postprocess hook"], ["explain"],
    ]  # fmt: skip


def test_a_hook_that_raises_ends_its_stage(model_class: Any, recording: Recording) -> None:
    assert call(make_model(model_class, preprocess=wait), "text") is TypeError
    (record,) = recording.records()
    assert stages_of(record) == ["preprocess", "predict"]


def test_an_error_of_our_own_changes_no_result(
    model_class: Any, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kserve.ModelCall, "end_stage", lambda *_: 1 / 0)
    assert call(make_model(model_class, preprocess=wait)) == 2
    assert call(make_model(model_class), "text") is TypeError
    monkeypatch.setattr(kserve.ModelCall, "__init__", lambda *_: 1 / 0)
    assert call(make_model(model_class)) == 2


def test_calls_without_a_request_are_not_recorded(model_class: Any, recording: Recording) -> None:
    assert asyncio.run(make_model(model_class)(1)) == 2
    assert recording.records() == []
