"""Helpers that several engine instrumentors share: the KV block size event and the served name of a model."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

RECORD_INTERVAL = 64
"""Calls per recorded event: the first call records one, then every 64th."""


class KvBlockSizeRecorder:
    """Records the size of an engine's KV blocks: at its first step, then now and then when its batch changes.

    It is repeated because a sidecar that was restarted may find the first event overwritten.
    `block_tokens`: tokens per block; 0 = unknown, nothing is recorded. `ring_number`: the number of the
    engine's step ring.
    """

    def __init__(self, engine: str, ring_number: int, block_tokens: int) -> None:
        self._event_fields = engine, os.getpid(), ring_number, block_tokens
        self._call_count = -1

    def record_block_size(self) -> None:
        """Records the block size at the first call and at every `RECORD_INTERVAL`-th call after it."""
        self._call_count += 1
        if self._event_fields[-1] and self._call_count % RECORD_INTERVAL == 0:
            recorder.record_process(events.BlocksSized(_clock.now(), *self._event_fields))


_SEPARATORS = re.compile(r"[/\\]")


def read_model_name(model: Any) -> str:
    """Returns the served name of a model: hub id, last component of its folder (never a path), or class."""
    model = getattr(model, "_orig_mod", model)
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not isinstance(name, (str, os.PathLike)) or not str(name):
        return str(getattr(model, "original_name", "") or type(model).__name__)
    return strip_model_path(str(name))


@functools.lru_cache(256)
def strip_model_path(name: str) -> str:
    """Returns a hub id unchanged, and of a file or folder only the last component, never its path."""
    is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name
    if is_path or os.path.exists(name):
        return _SEPARATORS.split(name.rstrip("/\\"))[-1]
    return name
