"""OpenVINO GenAI: tokens at the library's own instants, the steps of continuous batching, and streamers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation import openvino_genai as hooks
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from tests.engines.conftest import Serve, describe, install
from tests.support.rings import Recording, stages_of

genai = pytest.importorskip("openvino_genai", reason="openvino-genai is not installed")
PROMPT = "why is the sky blue? "


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(hooks.instrumentor):
        yield


@pytest.fixture
def pipeline(gguf_path: Path) -> Any:
    return genai.LLMPipeline(str(gguf_path), "CPU")


@pytest.fixture
def batching(gguf_path: Path) -> Any:
    settings = genai.SchedulerConfig()
    settings.cache_size = 1
    return genai.ContinuousBatchingPipeline(str(gguf_path), settings, "CPU")


def make_settings(tokens: int) -> Any:
    settings = genai.GenerationConfig()
    settings.max_new_tokens, settings.ignore_eos = tokens, True
    return settings


def test_tokens_have_the_instants_of_the_library(pipeline: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        result = pipeline.generate([PROMPT], make_settings(5))
    (record,) = recording.records()
    metrics = result.perf_metrics
    assert describe(record) == ("text_completion", "openvino-genai", "tiny-llama")
    assert stages_of(record) == ["ingress", "tokenize", "queue", "prefill", "decode"]
    counted = metrics.get_num_input_tokens(), metrics.get_num_generated_tokens()
    assert (record.input_tokens, record.output_tokens) == counted
    times = [at * 1e6 for at in metrics.raw_metrics.m_new_token_times]
    assert [record.first_token_at, record.last_token_at] == pytest.approx([times[0], times[-1]], abs=2)
    assert len(record.steps) == 5


def test_a_text_is_one_decode(pipeline: Any, recording: Recording) -> None:
    assert isinstance(pipeline.generate(PROMPT, make_settings(5)), str)
    (record,) = recording.records()
    assert (record.name, stages_of(record)) == ("text_completion tiny-llama", ["decode"])


def test_the_calls_of_a_streamer_are_steps(pipeline: Any, recording: Recording) -> None:
    texts: list[str] = []
    pipeline.generate(PROMPT, make_settings(8), texts.append)
    pipeline.generate(PROMPT, generation_config=make_settings(8), streamer=texts.append)
    for record in recording.records():
        assert len(record.steps) == record.output_tokens == len(texts) / 2


def test_a_streamer_does_not_hide_the_librarys_counts(pipeline: Any, recording: Recording) -> None:
    result = pipeline.generate([PROMPT], make_settings(8), lambda text: False)
    (record,) = recording.records()
    metrics = result.perf_metrics
    assert (record.input_tokens, record.output_tokens) == (
        metrics.get_num_input_tokens(), metrics.get_num_generated_tokens(),
    )  # fmt: skip


def test_a_model_that_is_loaded_by_name_works(gguf_path: Path, recording: Recording) -> None:
    made = genai.LLMPipeline(models_path=str(gguf_path), device="CPU")
    made.generate([PROMPT], make_settings(2))
    (record,) = recording.records()
    assert record.model == gguf_path.stem


def test_a_step_is_one_of_all_its_requests(batching: Any, recording: Recording) -> None:
    handles = [
        batching.add_request(0, PROMPT, make_settings(3)),
        batching.add_request(1, PROMPT * 2, make_settings(5)),
    ]
    steps = 0
    while batching.has_non_finished_requests():
        batching.step()
        steps += 1
    first, second = recording.records()
    assert (len(first.steps), len(second.steps), steps) == (3, 5, 5)
    assert second.steps.batch_size.tolist() == [2, 2, 2, 1, 1]
    for record, handle in zip((first, second), handles):
        metrics = handle.get_perf_metrics()
        assert record.input_tokens == metrics.get_num_input_tokens()
        assert record.output_tokens == len(metrics.raw_metrics.m_new_token_times)
        assert len(handle.read_all()[0].generated_ids) == record.output_tokens


@pytest.mark.parametrize(
    ("way", "outcome", "reason"), [("cancel", events.ABORTED, "abort"), ("stop", events.OK, "stop")]
)
def test_a_request_that_is_cancelled_or_stopped_ends(
    batching: Any, recording: Recording, way: str, outcome: int, reason: str
) -> None:
    handle = batching.add_request(0, PROMPT, make_settings(50))
    batching.step()
    getattr(handle, way)()
    batching.step()
    (record,) = recording.records()
    assert (record.outcome, record.finish_reasons) == (outcome, (reason,))
    assert (record.output_tokens, len(record.steps)) == (1, 1)


def test_a_handle_that_is_dropped_cancels_its_request(batching: Any, recording: Recording) -> None:
    handle = batching.add_request(0, PROMPT, make_settings(50))
    batching.step()
    del handle
    steps = 0
    while batching.has_non_finished_requests():
        batching.step()
        steps += 1
    (record,) = recording.records()
    assert (record.outcome, steps <= 2) == (events.ABORTED, True)


def test_tokens_that_another_thread_reads_are_steps(batching: Any, recording: Recording) -> None:
    """It reads them while the step still runs, and drops the handle when it is finished."""
    waiting, stopped = queue.SimpleQueue[Any](), threading.Event()

    def read() -> None:
        while (handle := waiting.get()) is not None:
            while handle.get_status().name == "RUNNING" or handle.can_read():
                if handle.can_read():
                    handle.read()
            del handle
            stopped.set()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        stopped.clear()
        waiting.put(batching.add_request(number, PROMPT, make_settings(6)))
        while batching.has_non_finished_requests():
            batching.step()
        assert stopped.wait(10)
    waiting.put(None)
    reader.join()
    records = recording.records()
    assert [(record.outcome, len(record.steps)) for record in records] == [(events.OK, 6)] * 20
    assert recording.in_flight == 0


def test_steps_of_an_answer_with_stop_strings_are_seen(batching: Any, recording: Recording) -> None:
    """The library holds back tokens that may be the begin of a stop string."""
    settings = make_settings(8)
    settings.stop_strings = {"zzzzzzzz"}
    handle = batching.add_request(0, PROMPT, settings)
    while batching.has_non_finished_requests():
        batching.step()
    (record,) = recording.records()
    assert (len(record.steps), record.output_tokens) == (8, 8)
    assert handle.get_status().name == "FINISHED"


def test_finish_reasons_are_the_librarys(pipeline: Any, batching: Any, recording: Recording) -> None:
    pipeline.generate([PROMPT], make_settings(3))
    handle = batching.add_request(0, PROMPT, make_settings(3))
    while batching.has_non_finished_requests():
        batching.step()
    assert handle.read_all()[0].finish_reason.name == "LENGTH"
    assert [record.finish_reasons for record in recording.records()] == [("length",)] * 2


def test_each_prompt_of_a_list_is_counted(batching: Any, recording: Recording) -> None:
    results = batching.generate([PROMPT, PROMPT * 2], [make_settings(3), make_settings(6)])
    (record,) = recording.records()
    assert record.input_tokens == sum(each.perf_metrics.get_num_input_tokens() for each in results)
    assert record.output_tokens == 9 == sum(record.steps.tokens)


def test_steps_of_several_sequences_are_seen(batching: Any, recording: Recording) -> None:
    settings = make_settings(5)
    settings.num_beams, settings.num_return_sequences = 3, 2
    handle = batching.add_request(0, PROMPT, settings)
    steps = 0
    while batching.has_non_finished_requests():
        batching.step()
        steps += 1
    (record,) = recording.records()
    assert len(record.steps) == steps
    assert record.output_tokens == handle.get_perf_metrics().get_num_generated_tokens()
    assert stages_of(record)[-2:] == ["prefill", "decode"]


def test_a_batch_of_texts_has_the_instants_of_its_first(batching: Any, recording: Recording) -> None:
    batching.generate([PROMPT], [make_settings(4)])
    (record,) = recording.records()
    assert (len(record.steps), record.output_tokens) == (4, 4)


def test_a_failed_call_keeps_its_exception(pipeline: Any, recording: Recording) -> None:
    settings = make_settings(4)
    settings.num_beams, settings.num_return_sequences = 2, 3
    with pytest.raises(RuntimeError) as raised:
        pipeline.generate([PROMPT], settings)
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, type(raised.value).__qualname__)


def test_the_load_of_a_model_is_a_phase_of_the_start(gguf_path: Path, recording: Recording) -> None:
    recorder.ensure_rings()
    genai.LLMPipeline(str(gguf_path), "CPU")
    (phase,) = [event for event in recording.events() if type(event) is events.PhaseEnded]
    assert phase[2:] == ("weights", "openvino-genai", "tiny-llama", "")
