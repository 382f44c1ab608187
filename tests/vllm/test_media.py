"""Media fetched for a prompt, by vLLM's own connector and renderer.

There is no server here: vLLM's multimodal models need torchvision, which has no build for vLLM's CPU release.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import SimpleNamespace

import pytest

import otel_infer
from otel_infer import semconv
from otel_infer.testing import capture

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]
PIXEL = (200, 30, 30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serves a picture; returns its URL."""
    from PIL import Image

    picture = BytesIO()
    Image.new("RGB", (8, 8), PIXEL).save(picture, "PNG")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(picture.getvalue())))
            self.end_headers()
            self.wfile.write(picture.getvalue())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/picture.png"
    server.shutdown()
    server.server_close()


def test_fetching_and_preparing_a_picture_are_stages(url: str) -> None:
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.renderers.base import BaseRenderer

    async def prepare(*_: object, **__: object) -> dict[str, object]:
        return {"type": "multimodal"}

    async def render() -> None:
        with otel_infer.request("chat", model="tiny"):
            picture = await MediaConnector().fetch_image_async(url)
            assert picture.media.getpixel((0, 0)) == PIXEL
            prompt = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": picture}}
            renderer = SimpleNamespace(_process_multimodal_async=prepare)
            assert (await BaseRenderer._process_tokens_async(renderer, prompt))["type"] == "multimodal"  # type: ignore[arg-type]

    with capture() as captured:
        asyncio.run(render())
        (request,) = captured.requests()
    names = [stage.name for stage in request.stages]
    assert names == [semconv.SPAN_FETCH_MEDIA, semconv.SPAN_PREPARE_MEDIA]
    assert request.breakdown is not None and request.breakdown.causes[semconv.CAUSE_MEDIA] > 0
