"""CTranslate2: encoders and scores are a stage, generations a decode; a callback for each token shows their steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.instrumentation import ctranslate2 as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.support.rings import Recording, stages_of

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
PROMPT = ["<s>", "a", "b", "c"]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    from ctranslate2.converters import TransformersConverter

    return Path(
        TransformersConverter(str(tiny_llama)).convert(str(tmp_path_factory.mktemp("models") / "ct2-llama"))
    )


@pytest.fixture
def generator(folder: Path) -> Any:
    return ctranslate2.Generator(str(folder), intra_threads=1)


def generate(generator: Any, **settings: Any) -> Any:
    return generator.generate_batch(
        [PROMPT, PROMPT], max_length=5, min_length=5, include_prompt_in_result=False, **settings
    )


def test_a_batch_is_one_decode(generator: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        results = generate(generator)
    (record,) = recording.records()
    assert describe(record) == ("text_completion", "ctranslate2", "ct2-llama")
    assert stages_of(record) == ["ingress", "decode"]
    assert record.output_tokens == sum(len(result.sequences_ids[0]) for result in results) == 10
    assert record.attributes[semconv.BATCHES_QUEUED] == 0
    assert record.attributes[semconv.EXECUTION_PROVIDER] == "cpu"


def test_a_batch_with_a_callback_has_steps(generator: Any, recording: Recording) -> None:
    seen: list[int] = []
    generate(generator, callback=lambda result: seen.append(result.step) and False)
    (record,) = recording.records()
    assert stages_of(record)[-2:] == ["prefill", "decode"]
    assert (len(record.steps), record.output_tokens, len(seen)) == (5, 10, 10)


def test_a_stream_of_tokens_has_steps(generator: Any, recording: Recording) -> None:
    tokens = list(generator.generate_tokens(PROMPT, max_length=5, min_length=5))
    (record,) = recording.records()
    assert (record.output_tokens, len(record.steps)) == (len(tokens), len(tokens)) == (5, 5)


def test_an_asynchronous_batch_ends_with_its_result(generator: Any, recording: Recording) -> None:
    results = generate(generator, asynchronous=True)
    assert recording.records() == []
    tokens = [len(result.result().sequences_ids[0]) for result in results]
    (record,) = recording.records()
    assert (stages_of(record), record.output_tokens) == (["decode"], sum(tokens))


def test_an_asynchronous_batch_that_is_dropped_is_aborted(generator: Any, recording: Recording) -> None:
    generate(generator, asynchronous=True)
    gc.collect()
    (record,) = recording.records()
    assert record.outcome == events.ABORTED


def test_scores_are_a_stage(generator: Any, recording: Recording) -> None:
    generator.score_batch([PROMPT, PROMPT, PROMPT])
    (record,) = recording.records()
    assert (record.name, stages_of(record)) == ("inference ct2-llama", ["forward"])
    assert record.stages[0].attributes[semconv.ITEMS] == 3


def test_scores_of_an_asynchronous_batch_end_with_their_results(generator: Any, recording: Recording) -> None:
    results = generator.score_batch([PROMPT, PROMPT], asynchronous=True)
    assert recording.records() == []
    assert len([result.result() for result in results]) == 2
    (record,) = recording.records()
    assert (record.outcome, stages_of(record)) == (events.OK, ["forward"])


def test_the_prompt_is_no_part_of_the_output(generator: Any, recording: Recording) -> None:
    (result,) = generator.generate_batch(max_length=9, min_length=9, start_tokens=[PROMPT])
    (record,) = recording.records()
    assert result.sequences[0][:3] == PROMPT[1:]
    assert (record.input_tokens, record.output_tokens) == (4, len(result.sequences[0]) - 3)


def test_a_failed_batch_keeps_its_exception(generator: Any, recording: Recording) -> None:
    with pytest.raises(ValueError, match="beam") as raised:
        generate(generator, beam_size=0)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_a_batch_of_a_wrong_kind_ends_no_recording(generator: Any, recording: Recording) -> None:
    with pytest.raises(TypeError):
        generator.generate_batch(3)
    generate(generator)
    assert [record.outcome for record in recording.records()] == [events.ERROR, events.OK]


def test_the_load_of_a_model_is_a_phase_of_the_start(folder: Path, recording: Recording) -> None:
    recorder.ensure_rings()
    ctranslate2.Generator(str(folder))
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "ctranslate2", "ct2-llama", "")


def test_results_are_read_in_threads_at_the_same_time(generator: Any, recording: Recording) -> None:
    """A result that two threads wait for crashes the process: it is read by its caller only."""
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            results = generator.generate_batch(
                [PROMPT] * 4, max_length=4, max_batch_size=1, asynchronous=True
            )
            assert len(list(pool.map(lambda result: result.result(), results))) == 4
            del results
    records = recording.records()
    assert [record.outcome for record in records] == [events.OK] * 50
    assert recording.in_flight == 0


def test_an_asynchronous_batch_without_rows_ends_at_once(generator: Any, recording: Recording) -> None:
    assert generator.score_batch([], asynchronous=True) == []
    assert generator.generate_batch([], asynchronous=True) == []
    assert ([record.outcome for record in recording.records()], recording.in_flight) == ([events.OK] * 2, 0)


@pytest.mark.parametrize("kind", [list, tuple])
def test_prompts_are_lists_or_tuples(generator: Any, recording: Recording, kind: Any) -> None:
    results = generator.generate_batch(kind([kind(PROMPT)] * 2), max_length=6, min_length=6)
    (record,) = recording.records()
    generated = sum(len(result.sequences[0]) - len(PROMPT[1:]) for result in results)
    assert (record.input_tokens, record.output_tokens) == (2 * len(PROMPT), generated)
