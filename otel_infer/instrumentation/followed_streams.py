"""Follows a generator of a library, whose items are computed one by one, each perhaps in another thread.

stream.send ─ begins ─▶ work.enter ─ the library computes ─ work.leave ─▶ work.note_item ─▶ the item is yielded
it ends, raises, or is left before its end ─▶ work.end
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any

from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook


class StreamWork:
    """What a stream computes. None of its methods affects the stream, also if it raises."""

    def enter(self) -> Any:
        """Begins work on the next item in this thread; what it returns is passed to `leave`."""

    def leave(self, entered: Any) -> None:
        """Ends work on an item in this thread."""

    def note_item(self, item: Any) -> None:
        """Notes an item, which is yielded next."""

    def end(self, exc: BaseException | None) -> None:
        """Ends the work, once. `exc`: what left the stream; `GeneratorExit` = its reader left it; None = it is exhausted."""


def follow_stream(stream: Any, work: StreamWork, hook: Hook) -> Generator[Any, Any, Any]:
    """Returns a generator that yields what the stream yields, and passes on what it is sent, and what is thrown into it."""
    followed = _follow(stream, work, hook)
    # A generator that is left before its first item never runs.
    weakref.finalize(followed, call_safely, hook, work.end, GeneratorExit())
    return followed


def _follow(stream: Any, work: StreamWork, hook: Hook) -> Generator[Any, Any, Any]:
    sent, thrown = None, None
    try:
        while True:
            entered = call_safely(hook, work.enter)
            try:
                if thrown is not None:
                    item = stream.throw(thrown)
                else:
                    item = stream.send(sent) if sent is not None else next(stream)
            finally:
                thrown = None
                call_safely(hook, work.leave, entered)
            call_safely(hook, work.note_item, item)
            try:
                sent = yield item
            except GeneratorExit:
                raise
            except BaseException as exc:
                thrown = exc
    except StopIteration as stop:
        call_safely(hook, work.end, None)
        return stop.value
    except GeneratorExit as exc:
        call_safely(hook, work.end, exc)
        getattr(stream, "close", lambda: None)()
        raise
    except BaseException as exc:
        call_safely(hook, work.end, exc)
        raise
