"""Follows a generator of a library, whose items are computed one by one, each perhaps in another thread.

stream.send ─ begins ─▶ work.enter ─ the library computes ─ work.leave ─▶ work.note_item ─▶ the item is yielded
it ends, raises, or is left before its end ─▶ work.end
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory


class StreamWork:
    """What a stream computes. None of its methods affects the stream, also if it raises."""

    def enter(self) -> Any:
        """Begins work on the next item in this thread; what it returns is passed to `leave`."""

    def leave(self, entered: Any) -> None:
        """Ends work on an item in this thread."""

    def note_item(self, item: Any) -> None:
        """Notes an item, which is yielded next."""

    def end(self, exc: BaseException | None) -> None:
        """Ends the work. `exc`: what left the stream; `GeneratorExit` = its reader left it; None = it is exhausted."""


def call_safely(hook: Hook, function: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function of ours returns; None if it raises. The user's call gets no exception of ours."""
    try:
        return function(*args)
    except Exception as exc:
        hook.mark_failed(exc)
        return None


def call_before(note: Callable[[Any, Any], Any]) -> WrapperFactory:
    """Returns the hook of a method before which `note` is called, with the object and the method's first argument."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hook.alive:
                call_safely(hook, lambda: note(self, args[0] if args else next(iter(kwargs.values()))))
            return original(self, *args, **kwargs)

        return method

    return make_wrapper


def follow_stream(stream: Any, work: StreamWork, hook: Hook) -> Generator[Any, Any, Any]:
    """Yields what the stream yields, and passes on what it is sent."""
    sent = None
    try:
        while True:
            entered = call_safely(hook, work.enter)
            try:
                item = stream.send(sent) if sent is not None else next(stream)
            finally:
                call_safely(hook, work.leave, entered)
            call_safely(hook, work.note_item, item)
            sent = yield item
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
