"""Startup of an ASGI application: its start, its end and the exception of a failed startup."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.asgi import lifespan
from otel_infer.instrumentation.asgi.entry_point import INSTRUMENTED_ATTRIBUTE, AsgiEntryPoint
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder

Message = dict[str, Any]
STARTUP: Message = {"type": "lifespan.startup"}
COMPLETE: Message = {"type": "lifespan.startup.complete"}
FAILED: Message = {"type": "lifespan.startup.failed", "message": "private text"}
SHUTDOWN: Message = {"type": "lifespan.shutdown.complete"}


@pytest.fixture
def arena() -> Iterator[MemoryArena]:
    arena = MemoryArena()
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    recorder.ensure_rings()
    yield arena
    recorder.stop()


def read_events(arena: MemoryArena) -> list[Any]:
    return [entry.event for entry in RequestReader(arena.buffers[0][1], 1).poll(0, final=True)]


async def run_lifespan(*messages: Message, raises: BaseException | None = None) -> tuple[list[Message], Any]:
    """Returns the messages sent to the server and the exception raised by the application, or None."""
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


async def test_startup_complete_marks_the_application_ready(arena: MemoryArena) -> None:
    before = _clock.now()
    assert await run_lifespan(COMPLETE, SHUTDOWN) == ([COMPLETE, SHUTDOWN], None)
    began, ended = read_events(arena)
    assert before <= began.at == ended.started_at < ended.at <= _clock.now()
    assert began.phase == "ready"
    assert ended[2:] == ("ready", "lifespan", "", "")


async def test_a_shutdown_is_an_orderly_exit(arena: MemoryArena) -> None:
    """uvicorn ends by the signal that stopped it, so that no exit function of the process runs."""
    stop = {"type": "lifespan.shutdown"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() is stop

    async def receive() -> Message:
        return stop

    async def send(message: Message) -> None:
        """Sends nothing."""

    await asgi.wrap(app)({"type": "lifespan", "state": {}}, receive, send)
    assert isinstance(read_events(arena)[-1], events.ProcessLeft)


async def test_failed_startup_records_the_exception_type(
    arena: MemoryArena,
) -> None:
    failure = OSError("private text")
    assert await run_lifespan(FAILED, raises=failure) == ([FAILED], failure)
    assert read_events(arena)[1][2:] == ("ready", "lifespan", "", "OSError")
    assert b"private text" not in arena.buffers[0][1][:]


async def test_failed_startup_without_exception_has_type_other(arena: MemoryArena) -> None:
    assert await run_lifespan(FAILED) == ([FAILED], None)
    assert read_events(arena)[1].error_type == events.OTHER


async def test_application_without_lifespan_is_not_a_failure(arena: MemoryArena) -> None:
    failure = AssertionError("only http here")
    assert await run_lifespan(raises=failure) == ([], failure)
    assert [type(event) for event in read_events(arena)] == [events.PhaseBegan]


async def test_error_at_shutdown_leaves_startup_successful(arena: MemoryArena) -> None:
    failure = OSError()
    assert await run_lifespan(COMPLETE, raises=failure) == ([COMPLETE], failure)
    assert [event.error_type for event in read_events(arena)[1:]] == [""]


async def test_startup_before_the_rings_is_recorded_later() -> None:
    arena = MemoryArena()
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    try:
        await run_lifespan(COMPLETE)
        assert arena.buffers == []
        recorder.ensure_rings()
        assert [type(event) for event in read_events(arena)] == [events.PhaseBegan, events.PhaseEnded]
    finally:
        recorder.stop()


async def test_instrumentation_error_does_not_reach_the_application(
    arena: MemoryArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifespan.events, "PhaseEnded", None)
    assert await run_lifespan(COMPLETE) == ([COMPLETE], None)


async def test_starlette_lifespan_error_is_recorded_and_reraised(
    arena: MemoryArena,
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
    ends = [event for event in read_events(arena) if isinstance(event, events.PhaseEnded)]
    assert [event.error_type for event in ends] == ["OSError"]


@pytest.mark.parametrize("is_instrumented", [False, True])
def test_lifespan_shows_an_instrumented_application(is_instrumented: bool) -> None:
    app, entry_point = type("App", (), {})(), AsgiEntryPoint()
    setattr(app, INSTRUMENTED_ATTRIBUTE, is_instrumented)
    entry_point.enter_application(app)
    assert (entry_point.reached_app, entry_point.has_tracer) == (True, is_instrumented)
