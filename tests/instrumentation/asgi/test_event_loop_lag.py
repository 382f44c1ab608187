"""An endpoint that blocks the event loop of a real server, and what the traces of the others in flight say of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from otel_infer import _clock
from otel_infer.analysis.attribution import request as blame
from otel_infer.assembly.assembler import GRACE_NS, Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer.events import EngineFinished
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.instrumentation.asgi.test_servers import hooked, infer, posted, serve, until
from tests.unit.instrumentation.asgi.test_asgi import Watched, watched

__all__ = ["hooked", "serve", "watched"]

BLOCKED_S = 0.2


class Blocking:
    """An application of which one endpoint blocks the loop while others are in flight."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.is_there = threading.Event()
        self.is_blocked = asyncio.Event()
        self.app.post("/looks-up")(self.looks_up)
        self.app.post("/streams")(self.streams)
        self.app.post("/blocks")(self.blocks)

    async def looks_up(self) -> dict[str, bool]:
        """Waits for something else before it goes to the engine."""
        self.is_there.set()
        await self.others()
        infer(start.current_request())
        return {}

    async def streams(self) -> StreamingResponse:
        """The engine is done before the last chunk is sent."""
        request = start.current_request()
        infer(request)

        async def events() -> AsyncIterator[bytes]:
            yield b"data: x\n\n"
            assert request is not None
            request.record_event(EngineFinished(_clock.now(), "stop", 2))
            self.is_there.set()
            await self.others()
            yield b"data: y\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def others(self) -> None:
        """Something that is there while the loop is blocked, and takes a turn of the loop once it goes on."""
        await self.is_blocked.wait()
        await asyncio.sleep(0.01)

    async def blocks(self) -> dict[str, bool]:
        self.is_blocked.set()
        time.sleep(BLOCKED_S)
        infer(start.current_request())
        return {}


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    if request.param == "uvloop":
        pytest.importorskip("uvloop", reason="uvloop is not installed")
    return str(request.param)


def served(watched: Watched, serve: Callable[..., int], path: str, loop: str) -> dict[str, RequestRecord]:
    """What is concluded of a request to `path`, and of the one that blocks the loop meanwhile; by route."""
    blocking = Blocking()
    port = serve(blocking.app, loop=loop)
    victim = threading.Thread(target=posted, args=(port, path))
    victim.start()
    assert blocking.is_there.wait(5)
    posted(port, "/blocks")
    victim.join(5)
    requests = recorder.requests
    assert requests is not None
    until(lambda: requests.in_flight == 0)
    time.sleep(0.1)  # the timer runs once more
    assembler = Assembler()
    assembler.feed_events(
        sorted(
            RequestReader(watched.arena.buffers[0][1], 1).poll(_clock.now(), final=True),
            key=lambda said: said.event.at,
        )
    )
    records = assembler.drain_records(_clock.now() + GRACE_NS)
    blame.attribute_latency(records)
    return {str(record.attributes["http.route"]): record for record in records}


def blamed(record: RequestRecord, cause: str) -> float:
    """s."""
    assert record.breakdown is not None
    assert sum(record.breakdown.causes.values()) == record.duration_ns
    return record.breakdown.causes.get(cause, 0) / 1e9


@pytest.mark.parametrize(("path", "stage"), [("/looks-up", "ingress"), ("/streams", "postprocess")])
def test_a_blocked_loop_is_blamed_for_what_the_others_wait(
    watched: Watched, serve: Callable[..., int], path: str, stage: str, loop: str
) -> None:
    records = served(watched, serve, path, loop)
    held_up = records[path].find_stage(stage)
    assert held_up is not None and held_up.ended_at - held_up.started_at >= BLOCKED_S * 1e9
    # The timer was due up to 50 ms after the loop was blocked.
    assert blamed(records[path], "event_loop") >= BLOCKED_S - 0.075
    assert [pause.cause for pause in records[path].loop_pauses]
    assert records[path].pauses == ()


def test_who_blocks_the_loop_did_not_wait_for_it(
    watched: Watched, serve: Callable[..., int], loop: str
) -> None:
    record = served(watched, serve, "/looks-up", loop)["/blocks"]
    assert blamed(record, "ingress") >= BLOCKED_S
    assert blamed(record, "event_loop") <= 0.02
