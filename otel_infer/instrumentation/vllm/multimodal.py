"""Images, audio and video of a prompt, while it is rendered: fetched from where their URLs point, and made into the model's input.

    render_chat_async ─▶ load_from_url_async ─▶ (tokenizer) ─▶ _process_tokens_async ─▶ add_request
    tokenize             fetch media                           prepare media

Both are stages inside of `tokenize`: the first waits for somebody else's server, the second for the one thread that vLLM
prepares media on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Call
from otel_infer.instrumentation.vllm._instrumentor import MEDIA, instrumentor
from otel_infer.tracing import start

FETCH, PREPARE = "fetch media", "prepare media"


def _record_stage(name: str) -> Generator[None, Any, None]:
    request, started_at = start.current_request(), _clock.now()
    try:
        yield
    finally:
        if request is not None:
            request.record_stage(name, started_at)


@instrumentor.patch_function(
    "vllm.multimodal.media.connector:MediaConnector.load_from_url_async", optional=True, part=MEDIA
)
def trace_fetch_media(call: Call) -> Generator[None, Any, None]:
    """Once for each image, sound or film; several of a request at once."""
    yield from _record_stage(FETCH)


@instrumentor.patch_function(
    "vllm.renderers.base:BaseRenderer._process_tokens_async", reads=("prompt",), optional=True, part=MEDIA
)
def trace_prepare_media(call: Call) -> Generator[None, Any, None]:
    """A prompt of text alone is not prepared."""
    if not call["prompt"].get("multi_modal_data"):
        yield
        return
    yield from _record_stage(PREPARE)
