"""How large the blocks of an engine's KV cache are: said when its first step is made, and now and then when its batch has changed,
since readers come and go."""

from __future__ import annotations

import functools
import os
import re

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

EVERY = 64
"""As how many times it could be said it is said once."""


class Blocks:
    """Of `tokens` each, 0 = not known: nothing is said. `log`: the number of the engine's step log."""

    def __init__(self, engine: str, log: int, tokens: int) -> None:
        self._of = engine, os.getpid(), log, tokens
        self._times = -1

    def say(self) -> None:
        """States it, the first time."""
        self._times += 1
        if self._of[-1] and self._times % EVERY == 0:
            recorder.stated(events.BlocksSized(_clock.now(), *self._of))


_SEPARATORS = re.compile(r"[/\\]")


@functools.lru_cache(256)
def name_of(said: str) -> str:
    """A model's hub id as it is; of a folder or a file its own name, never its path."""
    is_path = os.path.isabs(said) or said.startswith((".", "~")) or said.count("/") > 1 or "\\" in said
    if is_path or os.path.exists(said):
        return _SEPARATORS.split(said.rstrip("/\\"))[-1]
    return said
