"""Hooks that record how images, audio and video of a prompt are fetched and converted to model input.

    render_chat_async ─▶ load_from_url_async ─▶ (tokenizer) ─▶ _process_tokens_async ─▶ add_request
    tokenize             fetch media                           prepare media

Both stages lie inside `tokenize`. `fetch media` waits for a remote server. `prepare media` waits for the
single thread on which vLLM prepares media.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Call
from otel_infer.instrumentation.vllm._instrumentor import MEDIA, instrumentor
from otel_infer.ringbuffer import events
from otel_infer.tracing import start

FETCH, PREPARE = events.FETCH_MEDIA, events.PREPARE_MEDIA


def _record_stage(name: str) -> Generator[None, Any, None]:
    request, started_at, items = start.current_request(), _clock.now(), 0
    try:
        yield
    except BaseException:
        items = events.RAISED
        raise
    finally:
        if request is not None:
            request.record_stage(name, started_at, items)


@instrumentor.patch_function(
    "vllm.multimodal.media.connector:MediaConnector.load_from_url_async", optional=True, part=MEDIA
)
def trace_fetch_media(call: Call) -> Generator[None, Any, None]:
    """Records `fetch media` once per image, audio or video; several may overlap in one request."""
    yield from _record_stage(FETCH)


@instrumentor.patch_function(
    "vllm.renderers.base:BaseRenderer._process_tokens_async", reads=("prompt",), optional=True, part=MEDIA
)
def trace_prepare_media(call: Call) -> Generator[None, Any, None]:
    """Records `prepare media`, except for a prompt of text alone."""
    if not call["prompt"].get("multi_modal_data"):
        yield
        return
    yield from _record_stage(PREPARE)
