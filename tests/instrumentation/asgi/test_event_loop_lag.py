"""An endpoint blocks the event loop of a real server: the traces of the other requests in flight attribute it."""

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
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.ringbuffer.events import EngineFinished
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.instrumentation.asgi.test_servers import hooked, infer, posted, serve, until
from tests.unit.instrumentation.asgi.test_asgi import Watched, watched

__all__ = ["hooked", "serve", "watched"]

BLOCKED_S = 0.2


class Blocking:
    """An application with one endpoint that blocks the loop while other requests are in flight."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.in_flight = threading.Event()
        self.is_blocked = asyncio.Event()
        self.app.post("/looks-up")(self.looks_up)
        self.app.post("/streams")(self.streams)
        self.app.post("/blocks")(self.blocks)

    async def looks_up(self) -> dict[str, bool]:
        """Waits for another event before it submits to the engine."""
        self.in_flight.set()
        await self.wait_while_blocked()
        infer(start.current_request())
        return {}

    async def streams(self) -> StreamingResponse:
        """The engine finishes before the last chunk is sent."""
        request = start.current_request()
        infer(request)

        async def events() -> AsyncIterator[bytes]:
            yield b"data: x\n\n"
            assert request is not None
            request.record_event(EngineFinished(_clock.now(), "stop", 2))
            self.in_flight.set()
            await self.wait_while_blocked()
            yield b"data: y\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def wait_while_blocked(self) -> None:
        """Waits while the loop is blocked, then takes one turn of the loop."""
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
    """Returns the records of a request to `path` and of the request that blocks the loop meanwhile, by route."""
    blocking = Blocking()
    port = serve(blocking.app, loop=loop)
    waiting_client = threading.Thread(target=posted, args=(port, path))
    waiting_client.start()
    assert blocking.in_flight.wait(5)
    posted(port, "/blocks")
    waiting_client.join(5)
    requests = recorder.requests
    assert requests is not None
    until(lambda: requests.in_flight == 0)
    time.sleep(0.1)  # the timer runs once more
    assembler = Assembler()
    assembler.feed_events(
        sorted(
            RequestReader(watched.arena.buffers[0][1], 1).poll(_clock.now(), final=True),
            key=lambda recorded: recorded.event.at,
        )
    )
    records = assembler.drain_records(_clock.now() + GRACE_NS)
    attribute_latency(records)
    return {str(record.attributes["http.route"]): record for record in records}


def cause_seconds(record: RequestRecord, cause: str) -> float:
    """Returns the seconds attributed to `cause`; checks that all causes add up to the duration."""
    assert record.breakdown is not None
    assert sum(record.breakdown.causes.values()) == record.duration_ns
    return record.breakdown.causes.get(cause, 0) / 1e9


@pytest.mark.parametrize(("path", "stage"), [("/looks-up", "ingress"), ("/streams", "postprocess")])
def test_requests_waiting_on_blocked_loop_attribute_event_loop(
    watched: Watched, serve: Callable[..., int], path: str, stage: str, loop: str
) -> None:
    records = served(watched, serve, path, loop)
    waiting_stage = records[path].find_stage(stage)
    assert waiting_stage is not None and waiting_stage.ended_at - waiting_stage.started_at >= BLOCKED_S * 1e9
    # The timer was due at most 50 ms after the loop was blocked.
    assert cause_seconds(records[path], "event_loop") >= BLOCKED_S - 0.075
    assert [pause.cause for pause in records[path].loop_pauses]
    assert records[path].pauses == ()


def test_blocking_request_itself_has_no_event_loop_wait(
    watched: Watched, serve: Callable[..., int], loop: str
) -> None:
    record = served(watched, serve, "/looks-up", loop)["/blocks"]
    assert cause_seconds(record, "ingress") >= BLOCKED_S
    assert cause_seconds(record, "event_loop") <= 0.02
