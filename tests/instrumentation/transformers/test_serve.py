"""The parts of `transformers serve` below its routes: the queue of the generating thread, and the streamers."""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import Any

import pytest

from otel_infer.instrumentation.transformers import instrumentor
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.instrumentation.transformers.recorded import Recorded, check_stages, open_server_request, sizes

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.real

HANDLERS = ("chat_completion", "completion", "response", "utils")


@pytest.fixture
def serving(recorded: Recorded) -> Any:
    """Returns the module of the managers."""
    for name in HANDLERS:
        try:
            importlib.import_module(f"transformers.cli.serving.{name}")
        except ModuleNotFoundError as missing:
            if not str(missing.name).startswith("transformers.cli.serving.completion"):
                pytest.skip(f"transformers serve needs {missing.name}")
    assert instrumentor.parts["serve"] == "active"
    return importlib.import_module("transformers.cli.serving.utils")


@pytest.fixture
def inputs(tokenizer: Any) -> Any:
    return tokenizer("time and again", return_tensors="pt")


def settings(tokens: int = 5) -> Any:
    return transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)


async def streamed(
    manager: Any, model: Any, tokenizer: Any, inputs: Any, tokens: int = 5, cancel_at: int = 0
) -> list[str]:
    """Returns the pieces of text of one streamed response."""
    queue, streamer = manager.generate_streaming(model, tokenizer, inputs, settings(tokens), request_id="r")
    pieces: list[str] = []
    while (piece := await asyncio.wait_for(queue.get(), 30)) is not None:
        assert isinstance(piece, str), piece
        pieces.append(piece)
        if len(pieces) == cancel_at:
            streamer.cancel()
    return pieces


def test_a_streamed_response_waits_in_the_threads_queue(
    model: Any, tokenizer: Any, inputs: Any, serving: Any, recorded: Recorded
) -> None:
    async def run() -> tuple[Any, list[str], list[str]]:
        manager = serving.GenerateManager()
        first = asyncio.create_task(streamed(manager, model, tokenizer, inputs, tokens=20))
        await asyncio.sleep(0)
        request = open_server_request()
        token = request.attach()
        pieces = await streamed(manager, model, tokenizer, inputs)
        detach(token)
        return request, pieces, await first

    request, pieces, _ = asyncio.run(run())
    request.close(status_code=200)
    assert len(pieces) == 5
    other, record = recorded.records()
    check_stages(record, "ingress", "queue", "prefill", "decode", "postprocess")
    assert record.input_tokens == inputs["input_ids"].numel()
    assert (record.max_tokens, record.output_tokens, sizes(record)) == (5, 5, [1] * 5)
    queue, prefill = record.find_stage("queue"), record.find_stage("prefill")
    assert queue is not None and prefill is not None
    assert float(str(queue.attributes["infer.queue.hidden"])) > 0
    assert other.steps is not None and queue.ended_at >= int(other.steps.ended_at[-1])
    assert record.first_token_at > prefill.started_at, "the prompt was counted as the first token"


def test_an_unstreamed_response_has_the_same_numbers(
    model: Any, tokenizer: Any, inputs: Any, serving: Any, recorded: Recorded
) -> None:
    async def run() -> Any:
        return await serving.GenerateManager().generate_non_streaming(
            model, tokenizer, inputs, settings(), request_id="r"
        )

    request = open_server_request()
    token = request.attach()
    _, prompt, generated = asyncio.run(run())
    detach(token)
    request.close(status_code=200)
    record = recorded.only_record()
    assert (
        (record.input_tokens, record.output_tokens)
        == (prompt, len(generated))
        == (inputs["input_ids"].numel(), 5)
    )
    assert sizes(record) == [1] * 5


def test_a_cancelled_response_is_aborted(
    model: Any, tokenizer: Any, inputs: Any, serving: Any, recorded: Recorded
) -> None:
    request = open_server_request()
    token = request.attach()
    pieces = asyncio.run(
        streamed(serving.GenerateManager(), model, tokenizer, inputs, tokens=1000, cancel_at=3)
    )
    detach(token)
    request.close(status_code=200)
    record = recorded.only_record()
    assert len(pieces) < 1000
    assert record.finish_reasons == ("abort",)


def test_a_queued_request_after_disconnect_is_recorded_once(
    model: Any, inputs: Any, serving: Any, recorded: Recorded
) -> None:
    thread, is_free = serving.InferenceThread(), threading.Event()
    thread.submit(is_free.wait)
    request = open_server_request()
    token = request.attach()
    answer = thread.submit(lambda: model.generate(**inputs, generation_config=settings()))
    detach(token)
    request.close(events.ABORTED, "cancelled")
    is_free.set()
    assert answer.result(10).shape[1] == inputs["input_ids"].shape[1] + 5
    thread.submit(model.generate, **inputs, generation_config=settings()).result(10)
    first, second = recorded.records()
    assert (first.outcome, first.steps) == (events.ABORTED, None)
    assert (second.parent_span_id, sizes(second)) == (b"", [1] * 5)


def test_the_thread_uses_the_submitters_current_request(serving: Any, recorded: Recorded) -> None:
    request = open_server_request()
    token = request.attach()
    thread = serving.InferenceThread()
    assert thread.submit(start.current_request).result(10) is request
    detach(token)
    assert thread.submit(start.current_request).result(10) is None
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(10)
    request.close()
    assert recorded.only_record().engine == "transformers"
