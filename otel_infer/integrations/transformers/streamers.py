"""Streamers of `generate`: tokens become text in the generating thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import clock
from otel_infer.integrations.transformers._integration import integration
from otel_infer.integrations.transformers.run import thread
from otel_infer.integrations.transformers.text import inside
from otel_infer.patching import Hook


@integration.step_hook("transformers.generation.streamers:TextStreamer.put", part="streamers")
def put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """The first `put` is the prompt."""

    def put(self: Any, value: Any) -> Any:
        run = thread.run
        if run is None or not hook.alive:
            return original(self, value)
        started_at = clock.now()
        inside.busy = True  # the tokenizer's own part is in it
        try:
            result = original(self, value)
        finally:
            inside.busy = False
            run.request.detokenize_ns += clock.now() - started_at
        if run.iterations:
            run.request.token_reached()
        return result

    return put
