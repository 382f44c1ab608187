"""Follows a generator of a library, whose items are computed one by one, each perhaps in another thread.

stream.send ─ begins ─▶ work.enter ─ the library computes ─ work.leave ─▶ work.note_item ─▶ the item is yielded
it ends, raises, or is left before its end ─▶ work.end
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import ModelLibrary, open_request
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach
from otel_infer.tracing.outcome import classify_exception


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


class RequestWork(StreamWork):
    """Work of a generative model, for the current request, or for one that is opened for it. `request`: None = not recorded.

    `owns_request`: it was opened for this work, and is current while that runs. `has_finished`: the reader has got all, and may
    leave the stream.
    """

    request: request_span.RequestSpan | None = None
    owns_request = has_begun = has_finished = False

    def __init__(self, library: ModelLibrary, model: Any) -> None:
        self.library, self.model = library, model

    def enter(self) -> Any:
        if not self.has_begun:
            self.has_begun, self.request = True, start.current_request()
            if start.find_request() is None:
                self.request = open_request(self.library, self.model, generative=True)
                self.owns_request = self.request is not None
        return self.request.attach() if self.request is not None and self.owns_request else None

    def leave(self, entered: Any) -> None:
        if entered is not None:
            detach(entered)

    def note_item(self, item: Any) -> None:
        self.has_finished = self.has_finished or bool(read_finish_reason(item))

    def end(self, exc: BaseException | None) -> None:
        request, self.request = self.request, None
        if request is not None and self.owns_request:
            is_complete = self.has_finished and isinstance(exc, GeneratorExit)
            request.close(*classify_exception(None if is_complete else exc))


def read_finish_reason(chunk: Any) -> str:
    """Returns the finish reason of a chunk as OpenAI's API has it; "" = it has none, or is of another kind."""
    try:
        return chunk["choices"][0]["finish_reason"] or ""
    except (TypeError, LookupError):
        return ""


def call_at_work(
    work: StreamWork, hook: Hook, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a function of the library returns, which is called at work. What it raises ends the work."""
    entered = call_safely(hook, work.enter)
    try:
        return original(*args, **kwargs)
    except BaseException as exc:
        call_safely(hook, work.end, exc)
        raise
    finally:
        call_safely(hook, work.leave, entered)


def follow_call(
    work: StreamWork, hook: Hook, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a function of the library returns: a stream, which is followed, or the result of the work."""
    result = call_at_work(work, hook, original, args, kwargs)
    # An iterator of the user's own class may have more than an iterator's methods.
    if isinstance(result, Iterator) and not hasattr(result, "__dict__"):
        return follow_stream(result, work, hook)
    call_safely(hook, work.end, None)
    return result


def follow_stream(stream: Any, work: StreamWork, hook: Hook) -> Generator[Any, Any, Any]:
    """Returns a generator that yields what the stream yields, and passes on what it is sent, and what is thrown into it."""
    works = [work]  # until its end, so that an exhausted stream does not keep a model
    followed = _follow(stream, works, hook)
    # A generator that is left before its first item never runs.
    weakref.finalize(followed, _end_work, works, hook, GeneratorExit())
    return followed


def _end_work(works: list[StreamWork], hook: Hook, exc: BaseException | None) -> None:
    if works:
        call_safely(hook, works.pop().end, exc)


def _follow(stream: Any, works: list[StreamWork], hook: Hook) -> Generator[Any, Any, Any]:
    work = works[0]
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
        _end_work(works, hook, None)
        return stop.value
    except GeneratorExit as exc:
        _end_work(works, hook, exc)
        getattr(stream, "close", lambda: None)()
        raise
    except BaseException as exc:
        _end_work(works, hook, exc)
        raise
