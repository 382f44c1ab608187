"""LMDeploy's PyTorch engine, on stand-ins with the signatures of release 0.18."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from otel_infer.instrumentation import lmdeploy
from otel_infer.ringbuffer import events
from tests.support.rings import Recording, record_with, stages_of

PACKAGE = "lmdeploy.pytorch.engine"
SOURCES = {
    "engine": """
class Engine:
    def __init__(self, model_path, engine_config=None, trust_remote_code=False, speculative_config=None):
        self.model_path, self.added = model_path, []

    def _add_message(self, reqs):
        self.added += reqs
""",
    "engine_instance": """
class EngineInstance:
    def __init__(self, engine):
        self.engine, self.left = engine, 0

    async def async_stream_infer(self, session_id, input_ids, gen_config=None, multimodal=None, adapter_name=None,
                                 notify_add_msg_func=None, **kwargs):
        try:
            async for output in self.engine.answer(session_id, input_ids, gen_config):
                yield output
        finally:
            self.left += 1
""",
    "inputs_maker": """
class InputsMakerAsync:
    def __init__(self):
        self.batches = []

    async def send_next_inputs(self):
        return self.batches.pop(0)

    async def prefetch_next_inputs(self):
        return self.batches.pop(0)
""",
    "engine_loop": """
class EngineLoop:
    def _finish_forward_output(self, out, running, model_inputs, delta):
        for sequence, count in zip(running, out or ()):
            sequence.generated_ids = sequence.generated_ids + [1] * count
""",
}


class Named:
    """An object with these attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


PREFILL, DECODE, DELTA = (
    {"inputs": Named(is_decoding=False)},
    {"inputs": Named(is_decoding=True)},
    {"inputs": None},
)


class Server:
    """A model server: its engine, and the sequences of its sessions."""

    def __init__(self) -> None:
        self.engine = self._new("engine", "Engine", "/models/tiny")
        self.maker, self.loop = (
            self._new("inputs_maker", "InputsMakerAsync"),
            self._new("engine_loop", "EngineLoop"),
        )
        self.outputs: dict[int, asyncio.Queue[Any]] = {}
        self.sequences: dict[int, Any] = {}
        self.engine.answer = self._answer

    @staticmethod
    def _new(module: str, name: str, *args: Any) -> Any:
        return getattr(sys.modules[f"{PACKAGE}.{module}"], name)(*args)

    async def _answer(self, session_id: int, input_ids: Any, gen_config: Any) -> Any:
        self.engine._add_message([Named(data={"session_id": session_id})])
        while True:
            output = await self.outputs[session_id].get()
            if isinstance(output, Exception):
                raise output
            yield output
            if output.status.name != "SUCCESS":
                return

    def begin(self, session: int, prompt: int, cached: int = 0, limit: int | None = None) -> Any:
        """Begins a generation in a task, which returns the statuses of its outputs."""
        self.outputs[session] = asyncio.Queue()
        self.sequences[session] = Named(
            session_id=session, num_token_ids=prompt - cached, cached_tokens=cached, generated_ids=[]
        )
        config = Named(max_new_tokens=limit) if limit else None
        instance = self._new("engine_instance", "EngineInstance", self.engine)

        async def read() -> list[str]:
            stream = instance.async_stream_infer(session, list(range(prompt)), config)
            return [output.status.name async for output in stream]

        return asyncio.create_task(read())

    async def send(self, kind: dict[str, Any], *sessions: int, prefetched: bool = False) -> list[Any]:
        """Sends the next batch."""
        running = [self.sequences[session] for session in sessions]
        self.maker.batches.append((kind, running) if sessions else (None, None))
        await (self.maker.prefetch_next_inputs if prefetched else self.maker.send_next_inputs)()
        return running

    def finish(self, running: list[Any], *tokens: int) -> None:
        """Processes the results of the first batch without."""
        self.loop._finish_forward_output(tokens, running, None, None)

    def output(self, session: int, status: str, tokens: int = 1) -> None:
        """Sends an output to the reader of a session."""
        self.outputs[session].put_nowait(Named(status=Named(name=status), token_ids=[1] * tokens))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    for name, source in SOURCES.items():
        module = ModuleType(f"{PACKAGE}.{name}")
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with record_with(lmdeploy.instrumentor) as recording:
        yield recording
    assert lmdeploy._sessions == {}


def test_overlapping_steps_belong_to_their_batches(recording: Recording) -> None:
    async def run() -> None:
        server = Server()
        first, second = server.begin(7, prompt=9, cached=4, limit=3), server.begin(8, prompt=5)
        await asyncio.sleep(0)
        prefill = await server.send(PREFILL, 7, 8)
        decode = await server.send(DELTA, 7, 8, prefetched=True)
        server.finish(prefill, 1, 1)
        await server.send(DELTA, prefetched=True)  # nothing to prefetch
        server.finish(decode, 2, 1)
        for session, tokens in ((7, 3), (8, 2)):
            server.output(session, "SUCCESS", tokens - 1)
            server.output(session, "FINISH")
        assert (await first, await second) == (["SUCCESS", "FINISH"],) * 2

    asyncio.run(run())
    first, second = recording.records()
    assert [record.name for record in (first, second)] == ["text_completion tiny"] * 2
    assert stages_of(first) == ["queue", "prefill", "decode"]
    assert (first.input_tokens, first.output_tokens, second.output_tokens) == (9, 3, 2)
    assert (len(first.steps), len(second.steps)) == (2, 2)
    assert second.steps.batch_size.tolist() == [2, 2]
    assert first.cached_tokens == 4
    assert [record.outcome for record in (first, second)] == [events.OK] * 2


def test_a_reader_that_leaves_ends_the_stream_and_the_request(recording: Recording) -> None:
    async def run() -> int:
        server = Server()
        instance = server._new("engine_instance", "EngineInstance", server.engine)
        server.outputs[7] = asyncio.Queue()
        server.output(7, "SUCCESS")
        stream = instance.async_stream_infer(7, [1, 2])
        await stream.__anext__()
        await stream.aclose()
        left: int = instance.left
        return left

    assert asyncio.run(run()) == 1
    (record,) = recording.records()
    assert record.outcome == events.ABORTED


@pytest.mark.parametrize(
    ("status", "outcome"), [("CANCEL", events.ABORTED), ("INPUT_LENGTH_ERROR", events.ERROR)]
)
def test_the_status_of_the_last_output_is_the_outcome(
    recording: Recording, status: str, outcome: int
) -> None:
    async def run() -> None:
        server = Server()
        task = server.begin(7, prompt=3)
        await asyncio.sleep(0)
        server.output(7, status, tokens=0)
        assert await task == [status]

    asyncio.run(run())
    (record,) = recording.records()
    assert record.outcome == outcome


def test_an_exception_stays_the_users(recording: Recording) -> None:
    error = ValueError("broken")

    async def run() -> None:
        server = Server()
        task = server.begin(7, prompt=3)
        await asyncio.sleep(0)
        server.outputs[7].put_nowait(error)
        with pytest.raises(ValueError) as raised:
            await task
        assert raised.value is error

    asyncio.run(run())
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "ValueError")
