"""Records long runs of Python's garbage collector, during which no other Python code of this process runs.

    gc ─ start ─ stop      the next start, or the next end of a request ─▶ a pause, if it was longer than 1 ms

A signal that arrives during a collection is handled in the first bytecode after it. If that bytecode belonged
to a gc callback, an exception of the signal handler would be lost: a KeyboardInterrupt, or the SystemExit of
a SIGTERM. So the stop callback runs no Python bytecode. It only stores the instant; the pause is recorded
later. The start callback does run bytecode. A signal pending at that point arrived within the last C call.
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
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

MIN_PAUSE_NS = 1_000_000
"""Collections up to this length are not recorded: they are frequent and delay no request noticeably."""


class _GcInstrumentor(Instrumentor):
    """The instrumentor for gc, which also removes its deferred recorder."""

    def remove(self) -> None:
        recorder.deferred_recorders.pop(events.PAUSE_GC, None)
        super().remove()


# gc is a built-in module, so importing it costs nothing.
instrumentor = _GcInstrumentor("gc", "python", (gc.__name__,))


class _GcPauseRecorder(defaultdict[str, int]):
    """The object behind the gc callback, which is `getattr(this, phase, info)`.

    The phases `start` and `stop` are therefore properties. `stop` runs in C only: it looks up the missing key
    `stopped_at`, and the default factory stores the current instant under it.
    """

    def __init__(self, hook: Hook) -> None:
        super().__init__(_clock.now)
        self._hook = hook
        self._started_at = 0

    @property
    def start(self) -> None:
        """Records the previous collection and stores the start of this one."""
        self.record_last_pause()
        self._started_at = _clock.now()

    stop = property(itemgetter("stopped_at"))

    def record_last_pause(self) -> None:
        """Records the last collection as a pause, if it has ended and exceeded `MIN_PAUSE_NS`.

        Each collection is recorded once, also when several threads call this.
        """
        started_at, stopped_at = self._started_at, self.pop("stopped_at", 0)
        if started_at and stopped_at - started_at > MIN_PAUSE_NS and self._hook.alive:
            try:
                recorder.record_pause(events.PAUSE_GC, started_at, stopped_at)
            except Exception as exc:
                self._hook.mark_failed(exc)


@instrumentor.add_callback("gc:callbacks")
def make_gc_callback(hook: Hook) -> Callable[..., Any]:
    pause_recorder = _GcPauseRecorder(hook)
    recorder.deferred_recorders[events.PAUSE_GC] = pause_recorder.record_last_pause
    return functools.partial(getattr, pause_recorder)
