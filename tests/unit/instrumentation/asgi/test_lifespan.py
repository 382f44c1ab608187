"""The startup of an ASGI application: when it began, when it was ready, or of what it failed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.asgi import lifespan
from otel_infer.ringbuffer import events, writer
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder

Message = dict[str, Any]
STARTUP: Message = {"type": "lifespan.startup"}
COMPLETE: Message = {"type": "lifespan.startup.complete"}
FAILED: Message = {"type": "lifespan.startup.failed", "message": "what no telemetry may show"}
SHUTDOWN: Message = {"type": "lifespan.shutdown.complete"}


@pytest.fixture
def arena() -> Iterator[writer.MemoryArena]:
    arena = writer.MemoryArena()
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    recorder.ensure_rings()
    yield arena
    recorder.stop()


def said(arena: writer.MemoryArena) -> list[Any]:
    return [one.event for one in RequestReader(arena.buffers[0][1], 1).poll(0, final=True)]


async def started(*messages: Message, raises: BaseException | None = None) -> tuple[list[Message], Any]:
    """What the server was sent, and what left the application."""
    sent: list[Message] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() is STARTUP
        for message in messages:
            await send(message)
        if raises is not None:
            raise raises

    async def receive() -> Message:
        return STARTUP

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await asgi.wrap(app)({"type": "lifespan", "state": {}}, receive, send)
    except BaseException as exc:
        return sent, exc
    return sent, None


async def test_an_application_that_says_it_takes_requests_is_ready(arena: writer.MemoryArena) -> None:
    before = _clock.now()
    assert await started(COMPLETE, SHUTDOWN) == ([COMPLETE, SHUTDOWN], None)
    began, ended = said(arena)
    assert before <= began.at == ended.started_at < ended.at <= _clock.now()
    assert began.phase == "ready"
    assert ended[2:] == ("ready", "lifespan", "", "")


async def test_one_that_says_it_failed_is_told_with_the_type_of_what_it_raised(
    arena: writer.MemoryArena,
) -> None:
    failure = OSError("what no telemetry may show")
    assert await started(FAILED, raises=failure) == ([FAILED], failure)
    assert said(arena)[1][2:] == ("ready", "lifespan", "", "OSError")
    assert b"telemetry may" not in arena.buffers[0][1][:]


async def test_one_that_failed_and_raised_nothing_failed_of_something(arena: writer.MemoryArena) -> None:
    assert await started(FAILED) == ([FAILED], None)
    assert said(arena)[1].error_type == events.OTHER


async def test_an_application_without_a_lifespan_raises_and_is_no_failure(arena: writer.MemoryArena) -> None:
    failure = AssertionError("only http here")
    assert await started(raises=failure) == ([], failure)
    assert [type(fact) for fact in said(arena)] == [events.PhaseBegan]


async def test_one_that_raises_when_it_is_shut_down_was_ready(arena: writer.MemoryArena) -> None:
    failure = OSError()
    assert await started(COMPLETE, raises=failure) == ([COMPLETE], failure)
    assert [fact.error_type for fact in said(arena)[1:]] == [""]


async def test_before_there_are_rings_it_is_kept_for_them_and_starts_nothing() -> None:
    arena = writer.MemoryArena()
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    try:
        await started(COMPLETE)
        assert arena.buffers == []
        recorder.ensure_rings()
        assert [type(fact) for fact in said(arena)] == [events.PhaseBegan, events.PhaseEnded]
    finally:
        recorder.stop()


async def test_code_of_ours_that_raises_costs_the_application_nothing(
    arena: writer.MemoryArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifespan.events, "PhaseEnded", None)
    assert await started(COMPLETE) == ([COMPLETE], None)


async def test_behind_an_application_that_we_hook_what_its_lifespan_raised_is_what_leaves_it(
    arena: writer.MemoryArena,
) -> None:
    starlette = pytest.importorskip("starlette.applications", reason="starlette is not installed")
    failure = OSError()

    @contextlib.asynccontextmanager
    async def broken(app: Any) -> AsyncIterator[None]:
        raise failure
        yield

    sent: list[Message] = []

    async def receive() -> Message:
        return STARTUP

    async def send(message: Message) -> None:
        sent.append(message)

    asgi.instrumentor.install()
    try:
        with pytest.raises(OSError) as raised:
            await asgi.wrap(starlette.Starlette(lifespan=broken))({"type": "lifespan"}, receive, send)
    finally:
        asgi.instrumentor.remove()
    assert raised.value is failure
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    ends = [fact for fact in said(arena) if isinstance(fact, events.PhaseEnded)]
    assert [fact.error_type for fact in ends] == ["OSError"]
