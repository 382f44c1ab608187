"""The engines of `engine_truth`: each with a request, and the places below our hooks where a delay grows one stage."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from otel_infer.tracing import context, start

PROMPT = "why is the sky blue? because of the air in between us and the sun. " * 4
GENAI, OPENVINO_GENAI = "onnxruntime_genai.onnxruntime_genai", "openvino_genai.py_openvino_genai"


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


class Once:
    """Holds for the `number`th call since the last reset, which the engine's call makes."""

    def __init__(self, number: int = 1) -> None:
        self.number, self.calls = number, 0

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls == self.number


COMPILED = {
    f"{GENAI}:Tokenizer": ("encode",),
    f"{GENAI}:Generator": ("append_tokens", "generate_next_token"),
    f"{OPENVINO_GENAI}:ContinuousBatchingPipeline": ("step",),
    "ctranslate2._ext:Generator": ("generate_batch",),
}
"""Methods of compiled classes, which call nothing that Python could delay."""


@functools.cache
def lay_beneath(path: str) -> SimpleNamespace:
    """Puts a Python function around each compiled method of a class, and returns the methods that those call."""
    module, _, name = path.partition(":")
    owner, beneath = getattr(importlib.import_module(module), name), SimpleNamespace()

    def make_call(method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(beneath, method)(*args, **kwargs)

    for method in COMPILED[path]:
        setattr(beneath, method, getattr(owner, method))
        setattr(owner, method, make_call(method))
    return beneath


def lay_all_beneath() -> None:
    """Does so with all of them, before our hooks are installed."""
    for path in COMPILED:
        lay_beneath(path)


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


def make_onnxruntime_genai(folder: Path) -> Engine:
    import onnxruntime_genai

    from tests.engines.genai_models import make_genai
    from tests.support.tiny import make_model

    model = onnxruntime_genai.Model(str(make_genai(folder, make_model(folder / "tiny-genai"))))
    tokenizer, passes = onnxruntime_genai.Tokenizer(model), Once(4)

    def generate() -> None:
        passes.calls = 0
        settings = onnxruntime_genai.GeneratorParams(model)
        settings.set_search_options(max_length=40, min_length=40)
        generator = onnxruntime_genai.Generator(model, settings)
        generator.append_tokens(tokenizer.encode(PROMPT[:60]))
        for _ in range(8):
            generator.generate_next_token()

    def serve() -> None:  # a tokenizer's call belongs to the request of a server
        request = start.open_request("POST /generate", owner="asgi")
        if request is None:
            raise RuntimeError("nothing is recorded")
        token = request.attach()
        generate()
        context.detach(token)
        request.close()

    generator = lay_beneath(f"{GENAI}:Generator")
    return Engine(
        "onnxruntime-genai",
        serve,
        (
            Place("tokenize", lay_beneath(f"{GENAI}:Tokenizer"), "encode"),
            Place("prefill", generator, "append_tokens"),
            Place("decode", generator, "generate_next_token", passes),
        ),
        ("onnxruntime_genai",),
        steps=8,
    )


def make_openvino_genai(folder: Path) -> Engine:
    import openvino_genai

    from tests.engines.gguf_models import make_gguf
    from tests.support.tiny import make_model

    path = make_gguf(folder / "tiny-openvino.gguf", make_model(folder / "tiny-openvino"))
    cache, settings = openvino_genai.SchedulerConfig(), openvino_genai.GenerationConfig()
    cache.cache_size, settings.max_new_tokens, settings.ignore_eos = 1, 8, True
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(path), cache, "CPU")
    first, later = Once(), Once(4)

    def generate() -> None:
        first.calls = later.calls = 0
        handle = pipeline.add_request(0, PROMPT, settings)  # without a handle the library computes nothing
        while pipeline.has_non_finished_requests():
            pipeline.step()
        handle.read_all()

    beneath = lay_beneath(f"{OPENVINO_GENAI}:ContinuousBatchingPipeline")
    return Engine(
        "OpenVINO GenAI",
        generate,
        (Place("prefill", beneath, "step", first), Place("decode", beneath, "step", later)),
        ("openvino_genai",),
        steps=8,
    )


def make_ctranslate2(folder: Path) -> Engine:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    from tests.support.tiny import make_model

    source = make_model(folder / "tiny-ct2")
    path = TransformersConverter(str(source)).convert(str(folder / "ct2-llama"))
    generator = ctranslate2.Generator(path, intra_threads=1)
    place = Place("decode", lay_beneath("ctranslate2._ext:Generator"), "generate_batch")
    return Engine(
        "CTranslate2",
        lambda: generator.generate_batch([["<s>", "a", "b"]], max_length=8, min_length=8),
        (place,),
        ("ctranslate2",),
    )


ENGINES: tuple[Callable[[Path], Engine], ...] = (
    make_llama_cpp,
    make_onnxruntime,
    make_openvino,
    make_sentence_transformers,
    make_sklearn,
    make_faster_whisper,
    make_diffusers,
    make_onnxruntime_genai,
    make_openvino_genai,
    make_ctranslate2,
)
