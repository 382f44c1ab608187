"""How large the blocks of an engine's KV cache are: said when its first step is made, and now and then when its batch has changed,
since readers come and go."""

from __future__ import annotations

import os

from otel_infer import clock, facts
from otel_infer.ring.recorder import recorder

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
            recorder.stated(facts.BlocksSized(clock.now(), *self._of))
