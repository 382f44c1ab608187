"""ONNX Runtime: each run of a session is a stage, whatever function runs it; its model and provider name the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.instrumentation import onnxruntime as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.engines.onnx_models import make_classifier, make_rows
from tests.support.rings import Recording, stages_of

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("models") / "tiny-classifier" / "model.onnx")


@pytest.fixture
def session(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run_bound(session: Any, rows: np.ndarray) -> None:
    binding = session.io_binding()
    binding.bind_cpu_input("rows", rows)
    binding.bind_output("scores")
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].shape == (len(rows), 4)


def run_values(session: Any, rows: np.ndarray) -> None:
    session.run_with_ort_values(["scores"], {"rows": ort.OrtValue.ortvalue_from_numpy(rows)})


def run_async(session: Any, rows: np.ndarray) -> None:
    done, errors = threading.Event(), []

    def note(results: Any, data: Any, error: str) -> None:
        errors.append((error, data, results[0].shape))
        done.set()

    session.run_async(["scores"], {"rows": rows}, note, "mine")
    assert done.wait(10)
    assert errors == [("", "mine", (len(rows), 4))]


def run(session: Any, rows: np.ndarray) -> None:
    session.run(None, {"rows": rows})


WAYS = {"run": (run, 3), "ort values": (run_values, 3), "async": (run_async, 3), "binding": (run_bound, None)}
"""A function that runs the session on rows, and the number of rows that is known of it."""


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_a_stage_of_its_request(way: str, session: Any, recording: Recording, serve: Serve) -> None:
    call, rows = WAYS[way]
    with serve():
        call(session, make_rows(3))
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward"]
    assert describe(record) == ("inference", "onnxruntime", "tiny-classifier")
    assert record.stages[1].attributes.get(semconv.ITEMS) == rows
    assert record.attributes[semconv.EXECUTION_PROVIDER] == "CPUExecutionProvider"


@pytest.mark.parametrize("way", WAYS)
def test_a_run_without_a_request_is_one(way: str, session: Any, recording: Recording) -> None:
    WAYS[way][0](session, make_rows(3))
    (record,) = recording.records()
    assert (record.name, stages_of(record), record.generative) == (
        "inference tiny-classifier",
        ["forward"],
        False,
    )


def test_a_failed_run_keeps_its_exception(session: Any, recording: Recording) -> None:
    with pytest.raises(Exception, match="rows") as raised:
        session.run(None, {"rows": np.ones((1, 3), dtype="float32")})
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)
    assert stages_of(record) == ["forward"]


def test_a_failed_asynchronous_run_is_an_error(session: Any, recording: Recording) -> None:
    done = threading.Event()
    session.run_async(None, {"rows": np.ones((2, 3), np.float32)}, lambda *_: done.set(), None)
    assert done.wait(10)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (
        events.ERROR,
        "RuntimeError",
    )  # the library tells only a text


def test_a_callback_runs_in_the_context_of_its_call(session: Any, recording: Recording, serve: Serve) -> None:
    done = threading.Event()

    def run_again(results: Any, data: Any, error: str) -> None:
        session.run(None, {"rows": make_rows(2)})
        done.set()

    with serve():
        session.run_async(None, {"rows": make_rows(3)}, run_again, None)
        assert done.wait(10)
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward", "forward"]


def test_a_wrong_call_ends_no_recording(session: Any, recording: Recording) -> None:
    with pytest.raises(TypeError):
        session.run_async(None, {"rows": make_rows(2)}, 5, None)
    with pytest.raises(AttributeError):
        ort.InferenceSession.run(None, None, {"rows": make_rows(2)})
    session.run(None, {"rows": make_rows(2)})
    assert recording.records()[-1].outcome == events.OK


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("encoder.onnx", "encoder"),
        ("decoder_model_merged.onnx", "v1.5-base"),
        ("model_churn.onnx", "model_churn"),
    ],
)
def test_a_model_is_named_by_its_file_or_by_a_folder_with_dots(
    tmp_path: Path, recording: Recording, file: str, name: str
) -> None:
    session = ort.InferenceSession(str(make_classifier(tmp_path / "v1.5-base" / file)))
    session.run(None, {"rows": make_rows(1)})
    assert recording.records()[-1].model == name


def test_a_session_of_bytes_is_named_by_its_graph(path: Path, recording: Recording) -> None:
    run(ort.InferenceSession(path.read_bytes()), make_rows(1))
    (record,) = recording.records()
    assert record.model == "classifier"


def test_two_runs_of_a_request_are_two_stages(session: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        run(session, make_rows(1))
        run(session, make_rows(2))
    (record,) = recording.records()
    assert [stage.attributes.get(semconv.ITEMS) for stage in record.stages] == [None, 1, 2]


def test_the_load_of_a_model_is_a_phase_of_the_start(path: Path, recording: Recording) -> None:
    recorder.ensure_rings()
    ort.InferenceSession(str(path))
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "onnxruntime", "tiny-classifier", "")


def test_hooks_that_are_removed_leave_the_classes_as_they_were() -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    hooks.instrumentor.remove()
    before = Session.run
    hooks.instrumentor.install()
    assert Session.run is not before
    hooks.instrumentor.remove()
    assert Session.run is before


class _DeviceValue:
    """A value on a GPU, which is not here: at the lowest seam, the compiled value."""

    def device_name(self) -> str:
        return "Cuda"

    def tensor_size_in_bytes(self) -> int:
        return 64

    def numpy(self) -> np.ndarray:
        return np.zeros(16, dtype="float32")


def test_a_value_that_leaves_a_device_is_copied(recording: Recording, serve: Serve) -> None:
    with serve():
        value = ort.OrtValue.__new__(ort.OrtValue)
        value._ortvalue, value._session = _DeviceValue(), None
        value.numpy()
    (record,) = recording.records()
    (copied,) = [stage for stage in record.stages if stage.name == "d2h"]
    assert copied.attributes[semconv.TRANSFER_SIZE] == 64
