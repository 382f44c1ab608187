"""Hooks that record how images, audio and video of a prompt are fetched and converted to model input.

    render_chat_async ─▶ load_from_url_async ─▶ (tokenizer) ─▶ _process_tokens_async ─▶ add_request
    tokenize             fetch media                           prepare media

Both stages lie inside `tokenize`. `fetch media` waits for a remote server. `prepare media` waits for the
single thread on which vLLM prepares media.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.vllm._instrumentor import MEDIA, instrumentor
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span, start

FETCH, PREPARE = events.FETCH_MEDIA, events.PREPARE_MEDIA


@instrumentor.patch_function(
    "vllm.multimodal.media.connector:MediaConnector.load_from_url_async", optional=True, part=MEDIA
)
def trace_fetch_media(call: Call) -> Generator[None, Any, None]:
    """Records `fetch media` once per image, audio or video; several may overlap in one request."""
    request, started_at, items = start.current_request(), _clock.now(), 0
    try:
        yield
    except BaseException:
        items = events.RAISED
        raise
    finally:
        if request is not None:
            request.record_stage(FETCH, started_at, items)


@instrumentor.patch_hot_path(
    "vllm.renderers.base:BaseRenderer._process_tokens_async", reads=("prompt",), optional=True, part=MEDIA
)
def wrap_prepare_media(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Records `prepare media`, except for a prompt of text alone."""

    def process_tokens(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, prompt, *args, **kwargs)
        try:
            if hook.alive and prompt.get("multi_modal_data") and (request := start.current_request()):
                return _record_preparation(prepared, request, _clock.now())
        except Exception as exc:
            hook.mark_failed(exc)
        return prepared

    return process_tokens


async def _record_preparation(
    prepared: Awaitable[Any], request: request_span.RequestSpan, started_at: int
) -> Any:
    items = 0
    try:
        return await prepared
    except BaseException:
        items = events.RAISED
        raise
    finally:
        request.record_stage(PREPARE, started_at, items)
