"""Streamers of `generate`: tokens become text in the generating thread, which their tokenizer tells of (see `text`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.integrations.transformers._integration import integration
from otel_infer.integrations.transformers.run import thread
from otel_infer.patching import Hook


@integration.step_hook("transformers.generation.streamers:TextStreamer.put", part="streamers")
def put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """The first `put` is the prompt."""

    def put(self: Any, value: Any) -> Any:
        result = original(self, value)
        run = thread.run
        if run is not None and run.iterations and hook.alive:
            run.request.token_reached()
        return result

    return put
