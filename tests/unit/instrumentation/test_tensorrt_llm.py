"""TensorRT-LLM's PyTorch executor, on stand-ins with the signatures of its main branch after 1.4.0rc1."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from otel_infer.instrumentation import tensorrt_llm
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording, record_with, stages_of

SOURCES = {
    "tensorrt_llm.llmapi.llm": """
class BaseLLM:
    def __init__(self, model, tokenizer=None, tokenizer_mode="auto", **kwargs):
        self.model = model
""",
    "tensorrt_llm.executor.request": """
class GenerationRequest:
    def __init__(self, prompt_token_ids, sampling_params):
        self.prompt_token_ids, self.sampling_params, self.id = prompt_token_ids, sampling_params, None

    def set_id(self, id):
        assert self.id is None, f"Request ID is already set: {self.id}"
        self.id = id
        return self
""",
    "tensorrt_llm.executor.result": """
class Output:
    token_ids, finish_reason = (), None

class GenerationResultBase:
    def __init__(self, id):
        self.id, self._done, self._outputs = id, False, [Output()]

    def _handle_response(self, response, additional_outputs=None):
        if isinstance(response, Exception):
            raise response
        self._outputs[0].token_ids, self._outputs[0].finish_reason = response
        self._done = response[1] is not None

class GenerationResult(GenerationResultBase):
    def __init__(self, generation_request, background_error_handler=None, executor=None):
        super().__init__(generation_request.id)
""",
    "tensorrt_llm.executor.base_worker": """
class BaseWorker:
    def __init__(self, engine):
        self.engine = engine

    def _enqueue_request(self, request, result_wait_queue=None):
        return self.engine.enqueue_request(request)
""",
    "tensorrt_llm._torch.pyexecutor.py_executor": """
class PyExecutor:
    def __init__(self):
        self.active_requests = []

    def enqueue_request(self, request):
        self.active_requests.append(request.id)
        return 2048 + request.id

    def _forward_step(self, scheduled_requests, new_tensors_device=None, num_accepted_tokens_device=None):
        return scheduled_requests.outputs

    def _update_requests(self, sample_state, resource_manager=None):
        for request, count in sample_state:
            request.tokens += count

    def _terminate_request(self, request):
        self.active_requests.remove(request.py_client_id)
""",
}


class Parameters:
    """Sampling parameters."""

    max_tokens = 3


class LlmRequest:
    """A request in the worker."""

    def __init__(self, client_id: int, prompt: int) -> None:
        self.py_client_id, self.context_chunk_size, self.tokens = client_id, prompt, prompt

    def get_num_tokens(self, beam: int) -> int:
        return self.tokens


class ScheduledRequests:
    """A batch."""

    def __init__(
        self, context: list[LlmRequest], generation: list[LlmRequest], outputs: Any = "logits"
    ) -> None:
        self.context_requests, self.generation_requests, self.outputs = context, generation, outputs


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    for name, source in SOURCES.items():
        module = ModuleType(name)
        exec(source, module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
    with record_with(tensorrt_llm.instrumentor) as recording:
        find("llmapi.llm").BaseLLM("/models/tiny", tokenizer=None)
        yield recording
    assert tensorrt_llm._process.running == tensorrt_llm._process.submitted == {}


def find(module: str) -> Any:
    return sys.modules[f"tensorrt_llm.{module}"]


class Server:
    """The process of an `LLM`, and its worker, to which a request goes as a pickle."""

    def __init__(self) -> None:
        self.executor = find("_torch.pyexecutor.py_executor").PyExecutor()
        self.worker = find("executor.base_worker").BaseWorker(self.executor)

    def submit(self, client_id: int, prompt: int) -> tuple[Any, LlmRequest]:
        """Returns the result of a new request, and the request in the worker."""
        request = find("executor.request").GenerationRequest(list(range(prompt)), Parameters())
        request.set_id(client_id)
        result = find("executor.result").GenerationResult(request, executor=self)
        sent = dict(pickle.loads(pickle.dumps(request.__dict__)))
        received = find("executor.request").GenerationRequest([], None)
        received.__dict__.update(sent)
        self.worker._enqueue_request(received)
        return result, LlmRequest(client_id, prompt)


def test_overlapping_steps_belong_to_their_batches(recording: Recording) -> None:
    server = Server()
    (first, one), (second, two) = server.submit(1, 5), server.submit(2, 4)
    executor = server.executor
    executor._forward_step(ScheduledRequests([one, two], []))
    executor._forward_step(ScheduledRequests([], [one, two]), None)
    executor._update_requests([(one, 1), (two, 1)])
    first._handle_response(((7,), None))
    executor._update_requests([(one, 1), (two, 3)])
    executor._terminate_request(two)
    executor._forward_step(ScheduledRequests([], [one]))
    executor._update_requests([(one, 1)], resource_manager=None)
    executor._terminate_request(one)
    first._handle_response(((7, 8, 9), "length"))
    second._handle_response(((7, 8, 9, 9), "stop"))
    long, short = recording.records()
    assert [record.name for record in (long, short)] == ["text_completion tiny"] * 2
    assert (long.input_tokens, long.output_tokens, long.finish_reasons) == (5, 3, ("length",))
    assert (short.input_tokens, short.output_tokens) == (4, 4)
    assert (len(long.steps), len(short.steps)) == (3, 2)
    assert long.steps.batch_size.tolist() == [2, 2, 1]
    assert stages_of(long) == ["queue", "prefill", "decode"]


def test_a_servers_request_is_named_once(recording: Recording) -> None:
    request = start.open_request("POST", owner="asgi", server=True)
    assert request is not None
    token = request.attach()
    server = Server()
    result, running = server.submit(1, 5)
    server.executor._forward_step(ScheduledRequests([running], []))
    server.executor._update_requests([(running, 1)])
    server.executor._terminate_request(running)
    result._handle_response(((7,), "stop"))
    detach(token)
    request.close()
    (record,) = recording.records()
    assert (record.operation, record.provider, record.model) == ("text_completion", "tensorrt-llm", "tiny")
    assert len(record.steps) == record.output_tokens == 1


def test_a_forward_pass_that_fails_is_a_step_without_tokens(recording: Recording) -> None:
    """TensorRT-LLM terminates the requests of the batch. The steps after it belong to their own batches."""
    server = Server()
    (failed, one), (other, two) = server.submit(1, 5), server.submit(2, 4)
    server.executor._forward_step(ScheduledRequests([one], [], outputs=None))
    server.executor._terminate_request(one)
    with pytest.raises(RuntimeError) as raised:
        failed._handle_response(error := RuntimeError("out of memory"))
    assert raised.value is error
    server.executor._forward_step(ScheduledRequests([two], []))
    server.executor._update_requests([(two, 1)])
    server.executor._terminate_request(two)
    other._handle_response(((7,), "stop"))
    broken, whole = recording.records()
    assert (broken.outcome, broken.error_type) == (events.ERROR, "RuntimeError")
    assert (len(whole.steps), whole.output_tokens) == (1, 1)


def test_a_cancelled_request_is_aborted(recording: Recording) -> None:
    server = Server()
    result, running = server.submit(1, 5)
    server.executor._terminate_request(running)
    result._handle_response(((), "cancelled"))
    (record,) = recording.records()
    assert record.outcome == events.ABORTED
