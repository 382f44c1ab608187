"""Collections of garbage: while one runs, no other Python of this process does.

    gc ─ start ─ stop      the next start, or the next end of a request ─▶ a pause, if it was longer than 1 ms

A signal that arrives during a collection is handled in the first bytecode after it. Were that in a callback of the
collector, whatever the handler raises would be lost: a Ctrl-C, or the SystemExit of a SIGTERM. So at the stop no
bytecode of ours runs, it is only noted when it was, and what is to be said of it is said when Python runs anyway. At the
start some does: a signal that is still to be handled by then came within the last call of C, if at all.
"""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.recorder import recorder

CAUSE = "gc"
MIN_PAUSE_NS = 1_000_000
"""Of shorter ones there are thousands, and nobody waits for them."""

instrumentor = Instrumentor("gc", "python", (gc.__name__,))  # built in: to import it costs nothing


class _GcPauseRecorder(defaultdict[str, int]):
    """The collector calls `getattr(this, phase, info)`: so the phases are properties, and one of them is all C.

    A key that is missing becomes the instant at which it was asked for.
    """

    def __init__(self, hook: Hook) -> None:
        super().__init__(_clock.now)
        self._hook = hook
        self._started_at = 0

    @property
    def start(self) -> None:
        """A collection begins."""
        self.record_last_pause()
        self._started_at = _clock.now()

    stop = property(itemgetter("stopped_at"))

    def record_last_pause(self) -> None:
        """States the last collection, if it is over and was long; once, whoever asks."""
        started_at, stopped_at = self._started_at, self.pop("stopped_at", 0)
        if started_at and stopped_at - started_at > MIN_PAUSE_NS and self._hook.alive:
            try:
                recorder.record_pause(CAUSE, started_at, stopped_at)
            except Exception as exc:
                self._hook.mark_failed(exc)


@instrumentor.add_callback("gc:callbacks")
def make_gc_callback(hook: Hook) -> Callable[..., Any]:
    seen = _GcPauseRecorder(hook)
    recorder.deferred_recorders[CAUSE] = seen.record_last_pause
    return functools.partial(getattr, seen)
