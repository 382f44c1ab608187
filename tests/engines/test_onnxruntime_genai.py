"""onnxruntime-genai: each token that is asked for is a step, and each run of an engine is one step of all its requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_infer.instrumentation import onnxruntime_genai as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.engines.genai_models import make_genai
from tests.support.rings import Recording, stages_of

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
PROMPT = "why is the sky blue? "


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return make_genai(tmp_path_factory.mktemp("genai"), tiny_llama)


@pytest.fixture
def model(folder: Path) -> Any:
    return og.Model(str(folder))


def make_generator(model: Any, most: int = 64) -> Any:
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=most)
    return og.Generator(model, settings)


def make_turn(engine: Any, tokens: Any, most: int) -> Any:
    request = engine.create_request()
    options = og.TurnOptions(request)
    options.set_max_generated_tokens(most)
    request.begin_turn(tokens, turn_options=options)
    return request


def run_all(engine: Any) -> int:
    """Returns the number of runs until no request is left."""
    buffer, runs = engine.create_event_buffer(16), 0
    while engine.has_pending_requests():
        engine.run(buffer)
        runs += 1
    return runs


def test_each_token_is_a_step(model: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        tokens = og.Tokenizer(model).encode(PROMPT)
        generator = make_generator(model, len(tokens) + 6)
        generator.append_tokens(tokens)
        while not generator.is_done():
            generator.generate_next_token()
    (record,) = recording.records()
    assert describe(record) == ("text_completion", "onnxruntime-genai", "genai-llama")
    assert stages_of(record) == ["ingress", "tokenize", "queue", "prefill", "decode"]
    assert (record.input_tokens, record.output_tokens, len(record.steps)) == (len(tokens), 6, 6)
    assert record.finish_reasons == ("length",)


def test_a_generator_that_is_dropped_has_ended(model: Any, recording: Recording) -> None:
    generator = make_generator(model)
    generator.append_tokens(og.Tokenizer(model).encode(PROMPT))
    for _ in range(3):
        generator.generate_next_token()
    assert recording.records() == []
    del generator
    (record,) = recording.records()
    assert (record.name, record.output_tokens, record.finish_reasons) == (
        "text_completion genai-llama", 3, ("stop",),
    )  # fmt: skip


def test_a_generator_serves_one_request_after_another(model: Any, recording: Recording, serve: Serve) -> None:
    tokens = og.Tokenizer(model).encode(PROMPT)
    generator = make_generator(model, 200)
    for _ in range(2):
        with serve():
            generator.append_tokens(tokens)
            for _ in range(3):
                generator.generate_next_token()
    for _ in range(2):
        generator.append_tokens(tokens)
        generator.generate_next_token()
    del generator
    records = recording.records()
    assert [record.name.split()[0] for record in records] == ["POST", "POST"] + ["text_completion"] * 2
    assert [(record.input_tokens, record.output_tokens) for record in records] == [
        (len(tokens), 3), (len(tokens), 3), (len(tokens), 1), (len(tokens), 1),
    ]  # fmt: skip


def test_each_prompt_and_each_row_is_counted(folder: Path, recording: Recording) -> None:
    model = og.Model(og.Config(str(folder)))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=20, batch_size=3)
    generator = og.Generator(model, settings)
    generator.append_tokens(np.full((3, 5), 7, np.int32))
    for _ in range(2):
        generator.generate_next_token()
    del generator
    (record,) = recording.records()
    assert (record.model, record.input_tokens, record.output_tokens) == ("genai-llama", 15, 6)


def test_tokens_after_a_rewind_are_a_generation(model: Any, recording: Recording) -> None:
    tokens = og.Tokenizer(model).encode(PROMPT)
    generator = make_generator(model, len(tokens) + 4)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    generator.rewind_to(len(tokens) + 1)
    again = 0
    while not generator.is_done():
        generator.generate_next_token()
        again += 1
    assert [record.output_tokens for record in recording.records()] == [4, again]


def test_a_request_that_is_dropped_leaves_the_batch(model: Any, recording: Recording) -> None:
    engine, tokens = og.Engine(model), og.Tokenizer(model).encode(PROMPT)
    dropped = make_turn(engine, tokens, 20)
    engine.run(engine.create_event_buffer(16))
    del dropped
    kept = make_turn(engine, tokens, 3)
    run_all(engine)
    first, second = recording.records()
    assert (first.outcome, second.outcome) == (events.ABORTED, events.OK)
    assert second.steps.batch_size.tolist() == [1, 1, 1]
    kept.close()


def test_a_run_of_an_engine_is_a_step_of_all_its_requests(model: Any, recording: Recording) -> None:
    engine, tokens = og.Engine(model), og.Tokenizer(model).encode(PROMPT)
    turns = [make_turn(engine, tokens, 3), make_turn(engine, [*tokens, *tokens], 5)]
    runs = run_all(engine)
    first, second = recording.records()
    assert [len(turns), runs] == [2, 5]
    assert [(record.input_tokens, record.output_tokens, len(record.steps)) for record in (first, second)] == [
        (len(tokens), 3, 3), (2 * len(tokens), 5, 5),
    ]  # fmt: skip
    assert second.steps.batch_size.tolist() == [2, 2, 2, 1, 1]
    assert first.finish_reasons == second.finish_reasons == ("length",)


def test_a_turn_waits_for_the_engine(model: Any, recording: Recording, serve: Serve) -> None:
    engine = og.Engine(model)
    with serve():
        request = make_turn(engine, og.Tokenizer(model).encode(PROMPT), 2)
        run_all(engine)
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "tokenize", "queue", "prefill", "decode"]
    request.close()


def test_a_turn_that_is_cancelled_is_aborted(model: Any, recording: Recording) -> None:
    engine = og.Engine(model)
    request = make_turn(engine, og.Tokenizer(model).encode(PROMPT), 20)
    engine.run(engine.create_event_buffer(16))
    request.cancel_turn(1)
    (record,) = recording.records()
    assert (record.outcome, len(record.steps)) == (events.ABORTED, 1)


def test_a_turn_that_is_refused_keeps_its_exception(model: Any, recording: Recording, serve: Serve) -> None:
    request = og.Engine(model).create_request()
    for block in (contextlib.nullcontext, serve):
        with block(), pytest.raises(RuntimeError):
            request.begin_turn([])
    alone, served = recording.records()
    assert (alone.outcome, alone.error_type) == (events.ERROR, "RuntimeError")
    assert describe(served)[0] == "text_completion"


def test_a_prompt_that_is_too_long_keeps_its_exception(model: Any, recording: Recording) -> None:
    generator = make_generator(model, 4)
    with pytest.raises(Exception) as raised:
        generator.append_tokens(og.Tokenizer(model).encode(PROMPT * 3))
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_the_load_of_a_model_is_a_phase_of_the_start(folder: Path, recording: Recording) -> None:
    recorder.ensure_rings()
    og.Model(str(folder))
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "onnxruntime-genai", "genai-llama", "")
