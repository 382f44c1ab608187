"""`transformers serve` whose stages can be held or made to fail over HTTP; independent of otel_infer.

    GET /arm/decode/hold/2      the third pass through this place waits until it is released; `fail` raises instead
    GET /held/decode            whether a request waits there
    GET /release/decode
    GET /computed/ID            whether the engine is done with this request
    GET /stop/ID                a stop by the client: the engine drops the request, and its stream ends normally
    GET /revive                 creates a new engine after the old one died

A request sets further behaviour by headers. `x-deadline`: seconds until the server cancels it. `x-pad`: extra bytes per
piece of its response, so that a client that does not read blocks the sender.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ENDING = b'"finish_reason":"'
streams: dict[str, tuple[Any, Any, asyncio.AbstractEventLoop]] = {}
"""By request id: the manager that generates, its streamer, and that streamer's event loop."""
states: list[Any] = []
"""The server's generation states, which hold the engine."""


class FailurePoint:
    """A place in the engine where a request can be held or made to fail."""

    def __init__(self) -> None:
        self.action, self.left = "", 0
        self.held, self.open = threading.Event(), threading.Event()

    def arm(self, action: str, after: int) -> None:
        self.held.clear()
        self.open.clear()
        self.action, self.left = action, after

    def release(self) -> None:
        self.action = ""
        self.open.set()

    def take_action(self) -> str:
        """Returns the action that is due now."""
        if not self.action or self.left:
            self.left = max(self.left - 1, 0)
            return ""
        action, self.action = self.action, ""
        return action

    def apply_action(self) -> None:
        action = self.take_action()
        if action == "fail":
            raise MemoryError("on purpose")
        if action == "hold":
            self.held.set()
            self.open.wait(30)


places = {name: FailurePoint() for name in ("queue", "prefill", "decode", "text", "egress")}


def intercept_calls(owner: Any, name: str, place: Callable[..., str]) -> None:
    """Makes every call of `owner.name` pass the place that `place` returns for its arguments, if any."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if where := place(*args, **kwargs):
            places[where].apply_action()
        return original(*args, **kwargs)

    setattr(owner, name, function)


def _computing(runner: Any, model: Any, batch: Any) -> str:
    return "prefill" if batch["input_ids"].shape[-1] > 8 else "decode"


def _engine() -> None:
    from transformers.cli.serving import utils
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.generation.continuous_batching import model_runner, scheduler

    intercept_calls(scheduler.Scheduler, "add_waiting_request", lambda *_: "queue")
    intercept_calls(model_runner.ModelRunner, "compute_batch", _computing)
    intercept_calls(utils.CBStreamer, "put", lambda *_: "text")
    intercept_calls(ChatCompletionHandler, "_build_chunk_sse", _failing_at_the_end)
    generate = utils.CBGenerateManager.generate_streaming

    def generate_streaming(self: Any, *args: Any, request_id: str, **kwargs: Any) -> Any:
        made = generate(self, *args, request_id=request_id, **kwargs)
        streams[request_id] = self, made[1], asyncio.get_running_loop()
        return made

    utils.CBGenerateManager.generate_streaming = generate_streaming


def _failing_at_the_end(*args: Any, finish_reason: str | None = None, **_: Any) -> str:
    return "egress" if finish_reason and places["egress"].action == "fail" else ""


def is_known(request_id: str) -> bool:
    """Returns whether the engine has the request or is about to."""
    manager = streams[request_id][0]
    waits = not (manager._cb.input_queue.empty() and manager._cb.cancel_queue.empty())
    return waits or request_id in {**manager.scheduler.active_requests, **manager.scheduler.waiting_requests}


class DeadlineMiddleware:
    """An application with request deadlines and padded responses."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        pad = b":" + b" " * int(headers.get(b"x-pad", 0)) + b"\n\n"
        begun = False

        async def padded(message: Any) -> None:
            nonlocal begun
            begun = True
            if ENDING in message.get("body", b"") and places["egress"].take_action() == "hold":
                places["egress"].held.set()
                await asyncio.to_thread(places["egress"].open.wait, 30)
            if len(pad) > 3 and message.get("body"):
                message = {**message, "body": message["body"] + pad}
            await send(message)

        deadline = headers.get(b"x-deadline")
        try:
            await asyncio.wait_for(self.app(scope, receive, padded), float(deadline) if deadline else None)
        except TimeoutError:
            if begun:
                raise
            from starlette.responses import JSONResponse

            await JSONResponse({"error": "too late"}, 504)(scope, receive, send)


def _routes() -> None:
    from transformers.cli.serving import server

    build = server.build_server

    def build_server(*args: Any, generation_state: Any, **kwargs: Any) -> Any:
        states.append(generation_state)
        app = build(*args, generation_state=generation_state, **kwargs)
        app.add_middleware(DeadlineMiddleware)
        for path, action in (
            ("/arm/{place}/{action}/{after}", arm),
            ("/held/{place}", lambda place: places[place].held.is_set()),
            ("/release/{place}", lambda place: places[place].release()),
            ("/computed/{request_id}", lambda request_id: not is_known(request_id)),
            ("/stop/{request_id}", stop),
            ("/revive", revive),
        ):
            app.get(path)(action)
        return app

    server.build_server = build_server


def arm(place: str, action: str, after: int) -> None:
    places[place].arm(action, after)


def stop(request_id: str) -> None:
    _, streamer, loop = streams[request_id]
    streamer.cancel()
    for place in places.values():
        place.release()
    while is_known(request_id):
        time.sleep(0.005)
    loop.call_soon_threadsafe(streamer.end)


def revive() -> None:
    states[0].shutdown()


if __name__ == "__main__":
    _engine()
    _routes()
    from transformers.cli.transformers import main

    sys.exit(main())
