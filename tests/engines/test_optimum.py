"""optimum-onnx: its generation is one of transformers, whose steps are runs of an ONNX session; other models are runs alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation import onnxruntime as sessions
from otel_infer.instrumentation.transformers import instrumentor as transformers_hooks
from otel_infer.ringbuffer import events
from tests.engines.conftest import Serve, describe
from tests.support.rings import Recording, stages_of

optimum = pytest.importorskip("optimum.onnxruntime", reason="optimum-onnx is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
TOKENS = 6


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Installs the hooks. Of transformers 4, which optimum-onnx asks for, only those of `generate` fit."""
    for instrumentor in (transformers_hooks, sessions.instrumentor):
        instrumentor.install()
    yield
    for instrumentor in (sessions.instrumentor, transformers_hooks):
        instrumentor.remove()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Any:
    folder = tmp_path_factory.mktemp("models") / "onnx-llama"
    optimum.ORTModelForCausalLM.from_pretrained(tiny_llama, export=True).save_pretrained(folder)
    return optimum.ORTModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tiny_encoder: Path) -> Any:
    folder = tmp_path_factory.mktemp("models") / "onnx-encoder"
    optimum.ORTModelForFeatureExtraction.from_pretrained(tiny_encoder, export=True).save_pretrained(folder)
    return optimum.ORTModelForFeatureExtraction.from_pretrained(folder)


@pytest.fixture
def runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the passes over the model, as they are counted at its own function."""
    counted: list[int] = []
    forward = type(model).forward

    @functools.wraps(forward)  # transformers reads its parameters
    def count(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(int(input_ids.shape[-1]))
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", count)
    return counted


def generate(model: Any, **more: Any) -> Any:
    return model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=TOKENS, pad_token_id=0, **more)


def test_each_pass_of_a_generation_is_a_step(
    model: Any, runs: list[int], recording: Recording, serve: Serve
) -> None:
    with serve():
        generate(model, min_new_tokens=TOKENS)
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue", "prefill", "decode"]
    assert describe(record) == ("text_completion", "transformers", "onnx-llama")
    assert record.steps is not None
    assert (len(record.steps), record.output_tokens) == (len(runs), TOKENS) == (TOKENS, TOKENS)
    assert (runs[0], record.input_tokens) == (4, 4)


def test_generation_in_a_thread_keeps_its_request(model: Any, recording: Recording, serve: Serve) -> None:
    with serve() as request:
        thread = threading.Thread(target=lambda: request.attach() and generate(model))
        thread.start()
        thread.join()
    (record,) = recording.records()
    assert "decode" in stages_of(record)


def test_generation_without_a_request_is_one(model: Any, recording: Recording) -> None:
    generate(model)
    (record,) = recording.records()
    assert stages_of(record) == ["queue", "prefill", "decode"]


def test_failed_generation_keeps_its_exception(
    model: Any, monkeypatch: pytest.MonkeyPatch, recording: Recording
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(type(model), "_prepare_onnx_inputs", fail)
    with pytest.raises(OSError, match="the device is gone"):
        generate(model)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "OSError")


def test_a_model_that_generates_nothing_is_a_run_of_its_session(
    classifier: Any, recording: Recording, serve: Serve
) -> None:
    with serve():
        ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
        classifier(input_ids=ids, attention_mask=torch.ones_like(ids))
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "forward"]
    assert describe(record) == ("inference", "onnxruntime", "onnx-encoder")
    assert record.stages[-1].attributes["infer.items"] == 2
