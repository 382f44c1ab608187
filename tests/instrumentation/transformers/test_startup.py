"""Loading a model with the installed library: the result is unchanged, and the time is recorded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing.context import detach
from tests.instrumentation.transformers.recorded import Recorded, open_server_request
from tests.support.rings import stages_of

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.real


@pytest.fixture
def phases(recorded: Recorded) -> Any:
    """Returns a function that reads the recorded phases, in order."""
    recorder.ensure_rings()

    def read_phases() -> list[Any]:
        recorded_events = RequestReader(recorded.arena.buffers[0][1], 1).poll(_clock.now(), final=True)
        return [
            recorded_event.event
            for recorded_event in recorded_events
            if isinstance(recorded_event.event, (events.PhaseBegan, events.PhaseEnded))
        ]

    return read_phases


@pytest.mark.parametrize("via", ["AutoModelForCausalLM", "LlamaForCausalLM"])
def test_loading_a_model_is_a_phase(tiny_llama: Path, phases: Any, via: str) -> None:
    before = _clock.now()
    model = getattr(transformers, via).from_pretrained(tiny_llama)
    assert type(model).__name__ == "LlamaForCausalLM"
    began, ended = phases()
    assert before <= began.at == ended.started_at < ended.at <= _clock.now()
    assert ended[2:] == ("weights", "transformers", "tiny-llama", "")


def test_other_return_values_of_loading_are_unchanged(tiny_llama: Path, phases: Any) -> None:
    result = transformers.LlamaForCausalLM.from_pretrained(tiny_llama, output_loading_info=True)
    assert type(result) is tuple and "missing_keys" in result[1]
    assert phases()[1].model == "tiny-llama"


def test_a_failed_load_is_a_failed_phase(tmp_path: Path, phases: Any) -> None:
    with pytest.raises(OSError) as error:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    _, ended = phases()
    assert ended[2:] == ("weights", "transformers", "", type(error.value).__qualname__)


def test_nested_loading_is_one_phase(tiny_llama: Path, phases: Any) -> None:
    class Outer(transformers.LlamaForCausalLM):
        def eval(self) -> Any:  # called last during loading
            transformers.LlamaForCausalLM.from_pretrained(tiny_llama)
            return super().eval()

    Outer.from_pretrained(tiny_llama)
    assert len(phases()) == 2


def test_model_loaded_in_a_request_is_a_stage(tiny_llama: Path, recorded: Recorded, phases: Any) -> None:
    request = open_server_request()
    token = request.attach()
    transformers.LlamaForCausalLM.from_pretrained(tiny_llama)
    detach(token)
    request.close()
    assert phases() == []
    assert "weights" in stages_of(recorded.only_record())


def test_from_pretrained_keeps_its_signature(recorded: Recorded) -> None:
    loads = transformers.PreTrainedModel.from_pretrained
    assert inspect.ismethod(loads) and loads.__self__ is transformers.PreTrainedModel
    assert "pretrained_model_name_or_path" in inspect.signature(loads).parameters


def test_starting_continuous_batching_is_a_ready_phase(model: Any, phases: Any) -> None:
    manager = model.init_continuous_batching()
    manager.start()
    manager.stop(block=True)
    (ended,) = phases()
    assert ended[2:] == ("ready", "engine", "", "")
    assert ended.started_at < ended.at
