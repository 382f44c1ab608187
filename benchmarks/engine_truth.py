"""Adds 50 ms to each stage of the engines of `make test-engines`, below our hooks, and measures which stages grow.

One request at a time, in this process, with the real library and a tiny model. Needs `.venv-engines`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer.instrumentation.registry import load_instrumentors
from tests.support.rings import Recording

CALLS, QUICK_CALLS, WARM_UP = 20, 5, 3
DELAY_MS, TOLERANCE_MS = 50.0, 5.0
PROMPT = "why is the sky blue? because of the air in between us and the sun. " * 4


class Place(NamedTuple):
    """Where the delay is added: before a call of `owner.name`, if `when` holds for its arguments. `stage`: that grows."""

    stage: str
    owner: Any
    name: str
    when: Callable[..., bool] = lambda *args, **kwargs: True


class Engine(NamedTuple):
    """An engine. `call`: one request. `outer`: stages that contain others, so they grow as well.

    `steps`: passes over the model of a request. `instrumentors`: that record it, by their names.
    """

    title: str
    call: Callable[[], Any]
    places: tuple[Place, ...]
    instrumentors: tuple[str, ...]
    outer: tuple[str, ...] = ()
    steps: int = 1


def measure(quick: bool) -> list[Line]:
    """Returns the rows: for each stage, how far its growth, and that of any other stage, is off."""
    for instrumentor in load_instrumentors():
        instrumentor.install()
    recording = Recording()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for make in ENGINES:
            engine = make(Path(folder))
            print(f"  {engine.title} …", file=sys.stderr, flush=True)
            lines += _compare_stages(engine, recording, QUICK_CALLS if quick else CALLS)
    recording.stop()
    return lines


def _compare_stages(engine: Engine, recording: Recording, calls: int) -> list[Line]:
    _measure_stages(engine, recording, calls)  # the first calls of a library are slower
    usual = _measure_stages(engine, recording, calls)
    lines = []
    for place in engine.places:
        with _delay(place):
            delayed = _measure_stages(engine, recording, calls)
        growth = {
            name: delayed.get(name, 0.0) - usual.get(name, 0.0)
            for name in sorted({*usual, *delayed, place.stage})
        }
        off = max(
            abs(length - DELAY_MS * (name == place.stage))
            for name, length in growth.items()
            if name == place.stage or name not in engine.outer
        )
        note = ", ".join(f"{name} {length:+.1f}" for name, length in growth.items()) + " ms"
        claim = f"truth: {engine.title}, {DELAY_MS:.0f} ms added to {place.stage}: largest error of any stage"
        lines.append(make_line(claim, "ms", make_exact(off), Gate(TOLERANCE_MS), note=note))
    return lines


@contextlib.contextmanager
def _delay(place: Place) -> Iterator[None]:
    original = getattr(place.owner, place.name)

    @functools.wraps(original)
    def delayed(*args: Any, **kwargs: Any) -> Any:
        if place.when(*args, **kwargs):
            time.sleep(DELAY_MS / 1000)
        return original(*args, **kwargs)

    with mock.patch.object(place.owner, place.name, delayed):
        yield


def _measure_stages(engine: Engine, recording: Recording, calls: int) -> dict[str, float]:
    """Returns the median length of each stage of a request, ms: the sum of those with one name."""
    for _ in range(WARM_UP):
        engine.call()
    recording.records()
    lengths: dict[str, list[float]] = {}
    for number in range(calls):
        engine.call()
        for record in recording.records():
            for stage in record.stages:
                column = lengths.setdefault(stage.name, [0.0] * calls)
                column[number] += (stage.ended_at - stage.started_at) / 1e6
    return {name: float(np.median(column)) for name, column in lengths.items()}


class Once:
    """Holds for the `number`th call since the last reset, which the engine's call makes."""

    def __init__(self, number: int = 1) -> None:
        self.number, self.calls = number, 0

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls == self.number


# ── the engines ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_llama_cpp(folder: Path) -> Engine:
    import llama_cpp
    from llama_cpp import llama_cpp as compiled

    from tests.engines.gguf_models import make_gguf
    from tests.support.tiny import make_model

    path = make_gguf(folder / "tiny-llama.gguf", make_model(folder / "tiny-llama"))
    llama = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, verbose=False)
    passes = Once(4)

    def complete() -> None:
        llama.reset()
        passes.calls = 0
        llama.create_completion(PROMPT, max_tokens=8, temperature=0)

    return Engine(
        "llama-cpp-python",
        complete,
        (
            Place("tokenize", llama._model, "tokenize"),
            Place("prefill", compiled, "llama_decode", lambda context, batch: batch.n_tokens > 1),
            Place("decode", compiled, "llama_decode", passes),
        ),
        ("llama_cpp",),
        steps=8,
    )


def make_onnxruntime(folder: Path) -> Engine:
    import onnxruntime

    from tests.engines.onnx_models import make_classifier, make_rows

    session = onnxruntime.InferenceSession(str(make_classifier(folder / "tiny" / "model.onnx")))
    rows = make_rows(4)
    return Engine(
        "ONNX Runtime",
        lambda: session.run(None, {"rows": rows}),
        (Place("forward", session, "_validate_input"),),
        ("onnxruntime",),
    )


def make_openvino(folder: Path) -> Engine:
    import openvino
    from openvino import _ov_api, opset13

    from tests.engines.onnx_models import COLUMNS, make_rows

    rows = opset13.parameter([-1, COLUMNS], np.float32, name="rows")
    weights = opset13.constant(np.ones((COLUMNS, 4), np.float32))
    model = openvino.Model([opset13.matmul(rows, weights, False, False)], [rows], "classifier")
    compiled = openvino.Core().compile_model(model, "CPU")
    data = make_rows(4)
    return Engine(
        "OpenVINO", lambda: compiled(data), (Place("forward", _ov_api, "_data_dispatch"),), ("openvino",)
    )


def make_sentence_transformers(folder: Path) -> Engine:
    from sentence_transformers import SentenceTransformer

    from tests.support.tiny import make_encoder

    model = SentenceTransformer(str(make_encoder(folder / "tiny-encoder")), device="cpu")
    inner = model[0]
    return Engine(
        "sentence-transformers",
        lambda: model.encode(["why is the sky blue", "because of the air"]),
        (
            Place("tokenize", type(model.tokenizer), "_encode_plus"),
            Place("forward", type(inner), "forward"),
        ),
        ("torch", "transformers", "sentence_transformers"),
    )


def make_sklearn(folder: Path) -> Engine:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.random.default_rng(0).normal(size=(40, 4))
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, rows[:, 0] > 0)
    place = Place("forward", StandardScaler, "transform")
    return Engine("scikit-learn", lambda: model.predict(rows), (place,), ("sklearn",))


def make_faster_whisper(folder: Path) -> Engine:
    import faster_whisper

    from tests.engines.whisper_models import make_audio, make_whisper

    model = faster_whisper.WhisperModel(str(make_whisper(folder / "whisper")), device="cpu", cpu_threads=1)
    audio, windows = make_audio(50), Once(2)

    def transcribe() -> None:
        windows.calls = 0
        list(model.transcribe(audio, language="en", max_new_tokens=4, temperature=0.0)[0])

    return Engine(
        "faster-whisper",
        transcribe,
        (
            Place("prepare media", model, "feature_extractor"),
            Place("decode", model, "get_prompt", windows),
        ),
        ("ctranslate2", "faster_whisper"),
        steps=2,
    )


def make_diffusers(folder: Path) -> Engine:
    import diffusers

    from tests.engines.test_diffusers import make_parts

    pipeline = diffusers.StableDiffusionPipeline(**make_parts(), requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    steps, prompts = Once(2), Once()

    def draw() -> None:
        steps.calls = prompts.calls = 0
        pipeline("sky", num_inference_steps=3)

    return Engine(
        "diffusers",
        draw,
        (
            Place("encode prompt", type(pipeline.text_encoder), "forward", prompts),
            Place("denoise step", type(pipeline.unet), "forward", steps),
            Place("decode image", type(pipeline.vae.decoder), "forward"),
        ),
        ("torch", "transformers", "diffusers"),
        outer=("forward",),
        steps=3,
    )


ENGINES: tuple[Callable[[Path], Engine], ...] = (
    make_llama_cpp,
    make_onnxruntime,
    make_openvino,
    make_sentence_transformers,
    make_sklearn,
    make_faster_whisper,
    make_diffusers,
)
