"""What a server does before it serves, with the real library: a model is loaded as it was, and it is told how long it took."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.instrumentation.transformers.recorded import Recorded, served
from tests.support.rings import stages_of

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.real


@pytest.fixture
def phases(recorded: Recorded) -> Any:
    """What was told of phases, in order."""
    recorder.ensure_rings()

    def told() -> list[Any]:
        said = RequestReader(recorded.arena.buffers[0][1], 1).poll(_clock.now(), final=True)
        return [one.event for one in said if isinstance(one.event, (events.PhaseBegan, events.PhaseEnded))]

    return told


@pytest.mark.parametrize("via", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_a_model_that_is_loaded_is_a_phase(tiny_llama: Path, phases: Any, via: str) -> None:
    before = _clock.now()
    model = getattr(transformers, via).from_pretrained(tiny_llama)
    assert type(model).__name__ == "LlamaForCausalLM"
    began, ended = phases()
    assert before <= began.at == ended.started_at < ended.at <= _clock.now()
    assert ended[2:] == ("weights", "transformers", "tiny-llama", "")


def test_what_else_is_returned_is_returned(tiny_llama: Path, phases: Any) -> None:
    result = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, output_loading_info=True)
    assert type(result) is tuple and "missing_keys" in result[1]
    assert phases()[1].model == "tiny-llama"


def test_one_that_cannot_be_loaded_is_a_phase_that_failed(tmp_path: Path, phases: Any) -> None:
    with pytest.raises(OSError) as refused:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    _, ended = phases()
    assert ended[2:] == ("weights", "transformers", "", type(refused.value).__qualname__)


def test_models_that_are_made_of_others_are_loaded_once(tiny_llama: Path, phases: Any) -> None:
    class Outer(transformers.LlamaForCausalLM):
        def eval(self) -> Any:  # the last that is called while it is loaded
            transformers.LlamaForCausalLM.from_pretrained(tiny_llama)
            return super().eval()

    Outer.from_pretrained(tiny_llama)
    assert len(phases()) == 2


def test_a_model_that_a_request_waits_for_is_a_stage_of_it(
    tiny_llama: Path, recorded: Recorded, phases: Any
) -> None:
    request = served()
    token = request.attach()
    transformers.LlamaForCausalLM.from_pretrained(tiny_llama)
    start.detach(token)
    request.close()
    assert phases() == []
    assert "weights" in stages_of(recorded.one())


def test_it_looks_as_it_did(recorded: Recorded) -> None:
    loads = transformers.PreTrainedModel.from_pretrained
    assert inspect.ismethod(loads) and loads.__self__ is transformers.PreTrainedModel
    assert "pretrained_model_name_or_path" in inspect.signature(loads).parameters


def test_a_batching_that_is_started_is_ready(model: Any, phases: Any) -> None:
    manager = model.init_continuous_batching()
    manager.start()
    manager.stop(block=True)
    (ended,) = phases()
    assert ended[2:] == ("ready", "engine", "", "")
    assert ended.started_at < ended.at
