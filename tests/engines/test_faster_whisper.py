"""faster-whisper: the audio is prepared and encoded, and each window that is decoded is a step, as the reader asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.instrumentation import ctranslate2 as ctranslate2_hooks
from otel_infer.instrumentation import faster_whisper as hooks
from otel_infer.ringbuffer import events
from tests.engines.conftest import Serve, describe, install
from tests.engines.whisper_models import make_audio, make_whisper
from tests.support.rings import Recording, stages_of

faster_whisper = pytest.importorskip("faster_whisper", reason="faster-whisper is not installed")
INSTRUMENTORS = ctranslate2_hooks.instrumentor, hooks.instrumentor
SETTINGS: dict[str, Any] = {"language": "en", "max_new_tokens": 8, "temperature": 0.0}
SECONDS = 70


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with install(*INSTRUMENTORS):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def model(folder: Path) -> Any:
    return faster_whisper.WhisperModel(str(folder), device="cpu", cpu_threads=1)


def count_windows(segments: Any) -> int:
    return len({segment.seek for segment in segments})


def test_each_window_is_a_step(model: Any, recording: Recording, serve: Serve) -> None:
    with serve():
        segments, info = model.transcribe(make_audio(SECONDS), **SETTINGS)
        windows = count_windows(segments)
    (record,) = recording.records()
    assert describe(record) == ("transcription", "faster-whisper", "tiny-whisper")
    assert record.attributes[semconv.AUDIO_DURATION] == info.duration == SECONDS
    assert len(record.steps) == windows == 3
    rest = [name for name in stages_of(record) if name != "encode"]
    assert rest == ["ingress", "prepare media", "prefill", "decode"]
    assert stages_of(record).count("encode") == windows


def test_a_transcription_without_a_request_is_one(model: Any, recording: Recording) -> None:
    segments, _ = model.transcribe(make_audio(5), **SETTINGS)
    assert recording.records() == []
    list(segments)
    (record,) = recording.records()
    assert (record.name, record.outcome) == ("transcription tiny-whisper", events.OK)


def test_a_transcription_that_is_left_is_aborted(model: Any, recording: Recording) -> None:
    segments, _ = model.transcribe(make_audio(SECONDS), **SETTINGS)
    next(segments)
    segments.close()
    (record,) = recording.records()
    assert (record.outcome, len(record.steps)) == (events.ABORTED, 1)


def test_segments_that_are_never_read_end_the_request(model: Any, recording: Recording) -> None:
    segments, _ = model.transcribe(make_audio(5), **SETTINGS)
    del segments
    (record,) = recording.records()
    assert (record.outcome, record.steps) == (events.ABORTED, None)


def test_silence_is_prepared_and_not_decoded(model: Any, recording: Recording) -> None:
    segments, _ = model.transcribe(make_audio(0), **SETTINGS)
    assert list(segments) == []
    (record,) = recording.records()
    assert (record.outcome, stages_of(record)) == (events.OK, ["prepare media"])


def test_a_batch_of_windows_is_one_step(model: Any, recording: Recording) -> None:
    pipeline = faster_whisper.BatchedInferencePipeline(model)
    clips = [{"start": 20.0 * number, "end": 20.0 * number + 20} for number in range(3)]
    segments, _ = pipeline.transcribe(make_audio(60), batch_size=2, clip_timestamps=clips, **SETTINGS)
    list(segments)
    (record,) = recording.records()
    assert (record.model, len(record.steps), stages_of(record).count("encode")) == ("tiny-whisper", 2, 2)


def test_a_failed_transcription_keeps_its_exception(model: Any, recording: Recording) -> None:
    with pytest.raises(ValueError, match="max_length"):
        list(model.transcribe(make_audio(5), language="en", max_new_tokens=9000)[0])
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "ValueError")
