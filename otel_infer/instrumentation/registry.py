"""Loads the instrumentors: built-in ones, and entry points of the group `otel_infer_instrumentor`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from otel_infer.config import tenancy
from otel_infer.config.environment import Config
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.tracing import caller

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "otel_infer_instrumentor"
BUILTIN = {
    "asgi": "asgi",
    "wsgi": "wsgi",
    "aiohttp": "aiohttp",
    "tornado": "tornado",
    "sanic": "sanic",
    "grpc": "grpc",
    "gradio": "gradio",
    "bentoml": "bentoml",
    "ray": "ray",
    "mlserver": "mlserver",
    "kserve": "kserve",
    "pytriton": "pytriton",
    "celery": "celery",
    "rq": "rq",
    "arq": "arq",
    "dramatiq": "dramatiq",
    "threading": "threading",
    "multiprocessing": "multiprocessing",
    "waits": "waits",
    "other_instrumentations": "other_instrumentations",
    "queues": "queues",
    "batch_windows": "batch_windows",
    "signals": "signals",
    "gc": "garbage_collector",
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "lmdeploy": "lmdeploy",
    "tensorrt_llm": "tensorrt_llm",
    "llama_cpp": "llama_cpp",
    "sentence_transformers": "sentence_transformers",
    "onnxruntime": "onnxruntime",
    "onnxruntime_genai": "onnxruntime_genai",
    "openvino": "openvino",
    "openvino_genai": "openvino_genai",
    "ctranslate2": "ctranslate2",
    "faster_whisper": "faster_whisper",
    "diffusers": "diffusers",
    "sklearn": "sklearn",
    "xgboost": "xgboost",
    "lightgbm": "lightgbm",
    "torch": "torch.loaded_models",
    "torch_compile": "torch.compile",
    "cuda_graphs": "torch.cuda_graphs",
}
"""Instrumentor name → the module below this package that defines it as `instrumentor`."""

_on_change: Callable[[Instrumentor], None] | None = None


def configure_instrumentors(settings: Config, on_change: Callable[[Instrumentor], None]) -> None:
    """Applies the settings, and sets the callback that runs after hooks were installed."""
    global _on_change
    _on_change = on_change
    caller.caller_settings = tenancy.parse_caller_settings(
        settings.tenant, settings.tenant_hash_key, settings.traffic_class
    )
    asgi.configure_asgi(settings.excluded_urls, settings.response_headers)


def load_instrumentors() -> list[Instrumentor]:
    """Returns all instrumentors, built-in ones first.

    An entry point that fails to load is logged and skipped.
    """
    instrumentors = [
        importlib.import_module(f"otel_infer.instrumentation.{name}").instrumentor
        for name in BUILTIN.values()
    ]
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            instrumentor = entry_point.load()
            if not isinstance(instrumentor, Instrumentor):
                raise TypeError(f"{entry_point.value} is not an Instrumentor")
            instrumentors.append(instrumentor)
        except Exception as exc:  # an error in another distribution must not stop the server
            log.warning("instrumentor %s is not loaded: %s", entry_point.name, type(exc).__name__)
    for instrumentor in instrumentors:
        if _on_change is not None:
            instrumentor.on_change = _on_change
    return instrumentors


def runs_as_helper(instrumentors: Iterable[Instrumentor]) -> bool:
    """Returns whether this process was started as a helper program of a library, before `sys.argv` shows it."""
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1 :][:1] if "-m" in arguments else []
    script = "/" + next((part for part in arguments[1:] if not part.startswith("-")), "")
    return any(
        [helper] == module or script.endswith(f"/{helper.replace('.', '/')}.py")
        for instrumentor in instrumentors
        for helper in instrumentor.helpers
    )
