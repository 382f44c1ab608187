"""How large the blocks of an engine's KV cache are: said when its first step is made, and now and then when its batch has changed,
since readers come and go."""

from __future__ import annotations

import functools
import os
import re

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

RECORD_INTERVAL = 64
"""As how many times it could be said it is said once."""


class KvBlockSizeRecorder:
    """Of `tokens` each, 0 = not known: nothing is said. `log`: the number of the engine's step log."""

    def __init__(self, engine: str, log: int, tokens: int) -> None:
        self._event_fields = engine, os.getpid(), log, tokens
        self._call_count = -1

    def record_block_size(self) -> None:
        """States it, the first time."""
        self._call_count += 1
        if self._event_fields[-1] and self._call_count % RECORD_INTERVAL == 0:
            recorder.record_process(events.BlocksSized(_clock.now(), *self._event_fields))


_SEPARATORS = re.compile(r"[/\\]")


@functools.lru_cache(256)
def strip_model_path(said: str) -> str:
    """A model's hub id as it is; of a folder or a file its own name, never its path."""
    is_path = os.path.isabs(said) or said.startswith((".", "~")) or said.count("/") > 1 or "\\" in said
    if is_path or os.path.exists(said):
        return _SEPARATORS.split(said.rstrip("/\\"))[-1]
    return said
