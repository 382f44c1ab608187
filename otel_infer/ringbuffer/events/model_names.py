"""Names that instrumentations of models record: providers, operations, parts of a model's call, and attributes of requests."""

from __future__ import annotations

from otel_infer import semconv

TORCH = "torch"
"""Provider of models that no engine claims; such a model is named after its class, never by a caller."""
PYTRITON = "pytriton"
"""Provider of models that the server has named with `Triton.bind`."""
ONNXRUNTIME, OPENVINO, CTRANSLATE2, FASTER_WHISPER = (
    "onnxruntime",
    "openvino",
    "ctranslate2",
    "faster-whisper",
)
SENTENCE_TRANSFORMERS, DIFFUSERS, LLAMA_CPP = "sentence-transformers", "diffusers", "llama-cpp-python"
LMDEPLOY, TENSORRT_LLM = "lmdeploy", "tensorrt-llm"
ONNXRUNTIME_GENAI, OPENVINO_GENAI = "onnxruntime-genai", "openvino-genai"
SCIKIT_LEARN, XGBOOST, LIGHTGBM = "scikit-learn", "xgboost", "lightgbm"
"""Providers whose models are named by the server that loads them."""
NAMING_PROVIDERS = frozenset(
    (
        TORCH, PYTRITON, LMDEPLOY, TENSORRT_LLM, ONNXRUNTIME, OPENVINO, CTRANSLATE2, FASTER_WHISPER, SENTENCE_TRANSFORMERS, DIFFUSERS, LLAMA_CPP, ONNXRUNTIME_GENAI, OPENVINO_GENAI, SCIKIT_LEARN, XGBOOST, LIGHTGBM,
    )
)  # fmt: skip
"""Providers whose names of models are labels of metrics."""

OPERATION_INFERENCE, OPERATION_EMBEDDINGS = semconv.OPERATION_INFERENCE, semconv.OPERATION_EMBEDDINGS
OPERATION_RERANK, OPERATION_TRANSCRIPTION = semconv.OPERATION_RERANK, semconv.OPERATION_TRANSCRIPTION
OPERATION_CHAT, OPERATION_TEXT_COMPLETION = semconv.OPERATION_CHAT, semconv.OPERATION_TEXT_COMPLETION
OPERATION_GENERATE_CONTENT = semconv.OPERATION_GENERATE_CONTENT
"""Operations of requests."""
ENCODE, ENCODE_PROMPT = semconv.SPAN_ENCODE, semconv.SPAN_ENCODE_PROMPT
DENOISE_STEP, DECODE_IMAGE = semconv.SPAN_DENOISE_STEP, semconv.SPAN_DECODE_IMAGE
"""Parts of a model's call: stages inside of `forward` or `prefill`."""
EXECUTION_PROVIDER = semconv.EXECUTION_PROVIDER
BATCHES_ACTIVE, BATCHES_QUEUED = semconv.BATCHES_ACTIVE, semconv.BATCHES_QUEUED
AUDIO_DURATION, DIFFUSION_STEPS = semconv.AUDIO_DURATION, semconv.DIFFUSION_STEPS
IMAGE_WIDTH, IMAGE_HEIGHT = semconv.IMAGE_WIDTH, semconv.IMAGE_HEIGHT
"""Attributes of requests."""
