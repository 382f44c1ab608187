"""A followed generator behaves as the generator itself, and its work ends once."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from otel_infer.instrumentation.followed_streams import StreamWork, follow_stream
from otel_infer.instrumentation.hooks.probe import Hook


class NotedWork(StreamWork):
    """Work that notes what it is told. `broken`: each note raises as well."""

    def __init__(self, broken: bool = False) -> None:
        self.items: list[Any] = []
        self.ends: list[type | None] = []
        self.broken = broken

    def note_item(self, item: Any) -> None:
        self.items.append(item)
        if self.broken:
            raise RuntimeError

    def end(self, exc: BaseException | None) -> None:
        self.ends.append(None if exc is None else type(exc))


def count(closed: list[str]) -> Generator[Any, Any, str]:
    """Yields 1, then what it is sent or the name of what is thrown into it."""
    try:
        try:
            sent = yield 1
        except KeyError as exc:
            sent = type(exc).__name__
        yield sent
        return "done"
    finally:
        closed.append("closed")


def follow(work: StreamWork) -> tuple[Generator[Any, Any, Any], list[str]]:
    closed: list[str] = []
    return follow_stream(count(closed), work, Hook("test")), closed


def test_what_is_sent_and_returned_passes() -> None:
    work = NotedWork()
    stream, closed = follow(work)
    assert (next(stream), stream.send(2)) == (1, 2)
    with pytest.raises(StopIteration) as stopped:
        next(stream)
    assert (stopped.value.value, work.items, work.ends, closed) == ("done", [1, 2], [None], ["closed"])


def test_what_is_thrown_in_reaches_the_stream() -> None:
    work = NotedWork()
    stream, _ = follow(work)
    next(stream)
    assert (stream.throw(KeyError()), work.ends) == ("KeyError", [])
    with pytest.raises(ValueError, match="thrown"):
        stream.throw(ValueError("thrown"))
    assert work.ends == [ValueError]


def test_a_stream_that_is_left_is_closed() -> None:
    work = NotedWork()
    stream, closed = follow(work)
    next(stream)
    stream.close()
    assert (work.ends, closed) == ([GeneratorExit], ["closed"])


def test_work_that_raises_leaves_the_stream_alone() -> None:
    stream, _ = follow(NotedWork(broken=True))
    assert list(stream) == [1, None]
