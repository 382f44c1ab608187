"""Helpers that several engine instrumentors share: the KV block size event and the served name of a model."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

RECORD_INTERVAL_NS = 1_000_000_000


class KvBlockSizeRecorder:
    """Records the size of an engine's KV blocks: at its first step, then at most once a second when its batch changes.

    It is repeated because a sidecar that was restarted may find the first event overwritten.
    `block_tokens`: tokens per block; 0 = unknown, nothing is recorded. `ring_number`: the number of the
    engine's step ring. `due_at`: the instant from which it is repeated.
    """

    def __init__(self, engine: str, ring_number: int, block_tokens: int) -> None:
        self._event_fields = engine, os.getpid(), ring_number, block_tokens
        self.due_at = 0

    def record_if_due(self, at: int) -> None:
        """Records the block size, at most once per `RECORD_INTERVAL_NS`. `at`: now (monotonic ns)."""
        if at >= self.due_at:
            self.due_at = at + RECORD_INTERVAL_NS
            if self._event_fields[-1]:
                recorder.record_process(events.BlocksSized(at, *self._event_fields))


_SEPARATORS = re.compile(r"[/\\]")


def read_model_name(model: Any) -> str:
    """Returns the served name of a model: hub id, last component of its folder (never a path), or class."""
    model = getattr(model, "_orig_mod", model)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        return str(getattr(model, "original_name", "") or type(model).__name__)
    return strip_model_path(str(name))


@functools.lru_cache(256)
def read_file_name(path: str) -> str:
    """Returns the name of a model by the path of its file or folder: a file without its suffix; its folder's name if exporters
    give that name to every model: `model_quantized.onnx`, `openvino_model.xml`, `decoder_with_past_model.onnx`.
    """
    *folders, name = [part for part in _SEPARATORS.split(path) if part] or [""]
    stem, _, suffix = name.rpartition(".")
    if not stem or suffix.lower() not in _SUFFIXES:
        return find_hub_id(path) or name
    words = set(re.split(r"[_.-]", stem.lower()))
    if folders and "model" in words and words <= _GENERIC_WORDS:
        return find_hub_id(path) or folders[-1]
    return stem


_SUFFIXES = frozenset(
    "bin engine ggml gguf h5 json keras mlmodel onnx ort pb pkl plan pt pt2 pte pth safetensors so tflite trt ubj xml zip".split()
)
_GENERIC_WORDS = frozenset(
    "model openvino encoder decoder with past merged text language prefill lm head tokenizer detokenizer embeddings vision "
    "quantized optimized fp16 fp32 bf16 int4 int8 uint8 q4 q4f16 q8 bnb4 o1 o2 o3 o4 1 2".split()
)


_SNAPSHOT = re.compile(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\]")


def find_hub_id(path: str) -> str:
    """Returns the hub id of a file or folder in the hub's cache, whose folder's name is a commit; "" = it is not there.

    Source: huggingface_hub 2.4, file_download.py, `repo_folder_name`.
    """
    found = _SNAPSHOT.search(path)
    return found[1].replace("--", "/") if found else ""


@functools.lru_cache(256)
def strip_model_path(name: str) -> str:
    """Returns a hub id unchanged, and of a file or folder only the last component, never its path."""
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name
    if hub_id := find_hub_id(name):
        return hub_id
    if is_path or os.path.exists(name):
        return _SEPARATORS.split(name.rstrip("/\\"))[-1]
    return name
