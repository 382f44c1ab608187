"""OpenVINO: each inference is a stage: a call, a request that is waited for or calls back, and a queue of requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.instrumentation import openvino as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.engines.onnx_models import COLUMNS, make_rows
from tests.support.rings import Recording, stages_of

ov = pytest.importorskip("openvino", reason="openvino is not installed")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


def make_model() -> Any:
    from openvino import opset13 as ops

    rows = ops.parameter([-1, COLUMNS], np.float32, name="rows")
    weights = ops.constant(np.ones((COLUMNS, 4), np.float32))
    return ov.Model([ops.matmul(rows, weights, False, False)], [rows], "classifier")


_kept: list[Any] = []
"""Compiled models. OpenVINO 2026.4 hangs if one is deleted right after a callback, whose thread then waits for the interpreter."""


def compile_model(model: Any) -> Any:
    _kept.append(ov.Core().compile_model(model, "CPU"))
    return _kept[-1]


@pytest.fixture
def compiled() -> Any:
    return compile_model(make_model())


def call(compiled: Any, rows: np.ndarray) -> None:
    assert compiled(rows)[0].shape == (len(rows), 4)


def infer(compiled: Any, rows: np.ndarray) -> None:
    compiled.create_infer_request().infer({0: rows})


def infer_new(compiled: Any, rows: np.ndarray) -> None:
    compiled.infer_new_request({0: rows})


def wait(compiled: Any, rows: np.ndarray) -> None:
    request = compiled.create_infer_request()
    request.start_async({0: rows})
    request.wait()


def call_back(compiled: Any, rows: np.ndarray) -> None:
    request, done = compiled.create_infer_request(), threading.Event()
    request.set_callback(lambda data: done.set(), "mine")
    request.start_async({0: rows})
    assert done.wait(10)


def call_back_by_name(compiled: Any, rows: np.ndarray) -> None:
    request, done = compiled.create_infer_request(), threading.Event()
    request.set_callback(callback=lambda data: done.set(), userdata="mine")
    request.start_async({0: rows})
    assert done.wait(10)
    request.wait()


def queue(compiled: Any, rows: np.ndarray) -> None:
    jobs = ov.AsyncInferQueue(compiled, 2)
    jobs.start_async({0: rows}, "mine")
    jobs.wait_all()


def queue_with_callback(compiled: Any, rows: np.ndarray) -> None:
    jobs, got = ov.AsyncInferQueue(compiled, 2), []
    jobs.set_callback(lambda request, data: got.append((data, request.get_output_tensor(0).data.shape)))
    jobs.start_async({0: rows}, "mine")
    jobs.wait_all()
    assert got == [("mine", (len(rows), 4))]


WAYS = (call, infer, infer_new, wait, call_back, call_back_by_name, queue, queue_with_callback)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_inference_is_a_stage_of_its_request(
    way: Any, compiled: Any, recording: Recording, serve: Serve
) -> None:
    with serve():
        way(compiled, make_rows(3))
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward"]
    assert describe(record) == ("inference", "openvino", "classifier")
    assert record.stages[1].attributes[semconv.ITEMS] == 3
    assert record.attributes[semconv.EXECUTION_PROVIDER] == "CPU"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_inference_without_a_request_is_one(way: Any, compiled: Any, recording: Recording) -> None:
    way(compiled, make_rows(3))
    (record,) = recording.records()
    assert (record.name, stages_of(record)) == ("inference classifier", ["forward"])


def test_a_queue_without_an_idle_request_is_waited_for(
    compiled: Any, recording: Recording, serve: Serve
) -> None:
    jobs = ov.AsyncInferQueue(compiled, 1)
    jobs.set_callback(lambda request, data: time.sleep(0.05))
    with serve():
        for number in range(3):
            jobs.start_async({0: make_rows(1)}, number)
        jobs.wait_all()
    (record,) = recording.records()
    assert sorted(stages_of(record)) == ["forward"] * 3 + ["ingress"] + ["queue wait"] * 2
    waits = [stage.ended_at - stage.started_at for stage in record.stages if stage.name == "queue wait"]
    assert min(waits) > 40e6


def test_an_inference_that_a_callback_starts_is_of_the_same_request(
    compiled: Any, recording: Recording, serve: Serve
) -> None:
    done = threading.Event()
    first, second = compiled.create_infer_request(), compiled.create_infer_request()
    second.set_callback(lambda data: done.set(), None)
    first.set_callback(lambda data: second.start_async({0: make_rows(2)}), None)
    with serve():
        first.start_async({0: make_rows(1)})
        assert done.wait(10)
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward", "forward"]
    for request in (first, second):
        request.wait()


def make_slow() -> Any:
    """Returns a compiled model whose inference of many rows takes some ms."""
    from openvino import opset13 as ops

    given = ops.parameter([-1, 512], np.float32, name="rows")
    computed = given
    for _ in range(4):
        computed = ops.matmul(computed, ops.constant(np.ones((512, 512), np.float32)), False, False)
    return compile_model(ov.Model([computed], [given], "slow"))


def test_a_request_that_is_cancelled_ends_and_the_next_is_its_own(recording: Recording) -> None:
    request = make_slow().create_infer_request()
    request.start_async({0: np.ones((4000, 512), np.float32)})
    request.cancel()
    with contextlib.suppress(RuntimeError):
        request.wait()
    request.start_async({0: np.ones((1, 512), np.float32)})
    request.wait()
    cancelled, last = recording.records()
    assert (cancelled.outcome, last.outcome) == (events.ABORTED, events.OK)
    assert last.stages[0].started_at >= cancelled.ended_at


def test_a_job_that_cannot_start_is_the_one_that_failed(recording: Recording) -> None:
    jobs = ov.AsyncInferQueue(make_slow(), 2)
    jobs.start_async({0: np.ones((4000, 512), np.float32)})
    with pytest.raises(Exception) as raised:
        jobs.start_async({"nope": np.ones((1, 512), np.float32)})
    jobs.wait_all()
    by_outcome = {record.outcome: record for record in recording.records()}
    assert by_outcome[events.ERROR].error_type == type(raised.value).__qualname__
    assert by_outcome[events.OK].stages[0].attributes[semconv.ITEMS] == 4000


def test_a_job_that_fails_is_no_success(recording: Recording) -> None:
    from openvino import opset13 as ops

    given = ops.parameter([-1, 4], np.float32, name="rows")
    shape = ops.parameter([2], np.int64, name="shape")
    model = ov.Model([ops.reshape(given, shape, False)], [given, shape], "reshaper")
    jobs = ov.AsyncInferQueue(compile_model(model), 1)
    jobs.start_async({0: make_rows(3), 1: np.array([5, 5])})
    with pytest.raises(RuntimeError):
        jobs.wait_all()
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "RuntimeError")


def test_a_callback_that_is_none_is_refused(compiled: Any) -> None:
    with pytest.raises(TypeError):
        compiled.create_infer_request().set_callback(5, "mine")
    with pytest.raises(TypeError):
        ov.AsyncInferQueue(compiled, 1).set_callback(None)


def test_a_failed_inference_keeps_its_exception(compiled: Any, recording: Recording) -> None:
    with pytest.raises(Exception) as raised:
        compiled(np.ones((1, 3), np.float32))
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_the_compilation_of_a_model_is_a_phase_of_the_start(recording: Recording) -> None:
    recorder.ensure_rings()
    ov.Core().compile_model(make_model(), "CPU")
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "openvino", "classifier", "")
