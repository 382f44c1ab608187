"""`transformers serve` with a delay in one place, set by a request to /stall; independent of otel_infer.

    GET /stall/tokenize/50/0    the next pass through this place (after `0` others) sleeps 50 ms, once
    GET /stalled                the measured length of each delay, in ms

A place is a function that the library's own code calls inside that stage.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

armed: dict[str, list[float]] = {}
slept: list[float] = []


def stall(place: str) -> None:
    """Sleeps if this place is armed and its turn has come."""
    waiting = armed.get(place)
    if waiting is None:
        return
    if waiting[1] > 0:
        waiting[1] -= 1
        return
    del armed[place]
    began = time.monotonic()
    time.sleep(waiting[0])
    slept.append((time.monotonic() - began) * 1e3)


def stalling(owner: Any, name: str, place: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Adds a possible delay before `owner.name`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            stall(place)
        return original(*args, **kwargs)

    setattr(owner, name, function)


def _places() -> None:
    import tokenizers.decoders
    import transformers.utils.chat_template_utils as templates
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.generation.continuous_batching import model_runner, scheduler

    stalling(ChatCompletionHandler, "_validate_request", "ingress")
    import transformers.tokenization_utils_base as base

    stalling(templates, "render_jinja_template", "tokenize")
    if hasattr(base, "render_jinja_template"):
        base.render_jinja_template = templates.render_jinja_template
    stalling(scheduler.Scheduler, "_try_to_meet_safety_margin", "queue")
    runner = model_runner.ModelRunner
    stalling(runner, "compute_batch", "prefill", lambda self, model, batch: batch["input_ids"].shape[-1] > 8)
    stalling(runner, "compute_batch", "decode", lambda self, model, batch: batch["input_ids"].shape[-1] <= 8)

    class DecodeStream:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._inner = original_stream(*args, **kwargs)

        def step(self, *args: Any) -> Any:
            stall("detokenize")
            return self._inner.step(*args)

    original_stream = tokenizers.decoders.DecodeStream
    tokenizers.decoders.DecodeStream = DecodeStream


def _routes() -> None:
    from transformers.cli.serving import server

    build = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)

        @app.get("/stall/{place}/{milliseconds}/{after}")
        def arm(place: str, milliseconds: int, after: int) -> dict[str, Any]:
            armed[place] = [milliseconds / 1000, after]
            return {"armed": place}

        @app.get("/stalled")
        def stalled() -> list[float]:
            return slept

        return app

    server.build_server = build_server


def _egress() -> None:
    """Pauses the transport, as it does while its client reads slowly: uvicorn's `send` waits until it resumes."""
    from uvicorn.protocols.http import h11_impl

    protocols = [h11_impl.RequestResponseCycle]
    try:
        from uvicorn.protocols.http import httptools_impl

        protocols.append(httptools_impl.RequestResponseCycle)
    except ImportError:
        pass
    for cycle in protocols:
        _slow_send(cycle)


def _slow_send(cycle: Any) -> None:
    import asyncio

    original = cycle.send

    async def send(self: Any, message: Any) -> None:
        waiting = armed.get("egress")
        if (
            waiting is not None
            and message["type"] == "http.response.body"
            and b'"content"' in message.get("body", b"")
        ):
            if waiting[1] > 0:
                waiting[1] -= 1
            else:
                del armed["egress"]
                began = time.monotonic()
                self.flow.pause_writing()
                asyncio.get_running_loop().call_later(waiting[0], self.flow.resume_writing)
                await original(self, message)
                slept.append((time.monotonic() - began) * 1e3)
                return
        await original(self, message)

    cycle.send = send


if __name__ == "__main__":
    _places()
    _routes()
    _egress()
    from transformers.cli.transformers import main

    sys.exit(main())
