"""The vLLM instrumentation, tested with stand-ins; vLLM need not be installed."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.hooks.detokenize_sample import SAMPLED_OUTPUTS
from otel_infer.instrumentation.hooks.probe import Call, Hook
from otel_infer.instrumentation.hooks.target import TargetMismatch
from otel_infer.instrumentation.transformers import tokenization
from otel_infer.instrumentation.vllm import (
    api_server,
    detokenization,
    engine_core,
    multimodal,
    output_processor,
    scheduler_steps,
    scheduler_waits,
    startup,
    worker,
)
from otel_infer.instrumentation.vllm import scheduler as steps
from otel_infer.instrumentation.vllm._instrumentor import model_name, response_id
from otel_infer.ringbuffer import events
from otel_infer.tracing import propagation, request_span, start
from otel_infer.tracing.context import detach
from tests.support.rings import Recording, stages_of


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()
    propagation._fragments.clear()
    api_server.in_flight.clear()


# ── an engine core ───────────────────────────────────────────────────────────────────────────────────────────────


WAITING, FOR_KV, FOR_GRAMMAR = (
    SimpleNamespace(name=name)
    for name in ("WAITING", "WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
)


class Request:
    """Stand-in for the request object of the scheduler."""

    def __init__(self, request_id: str, trace_headers: dict[str, str] | None) -> None:
        self.request_id, self.trace_headers = request_id, trace_headers
        self.num_output_tokens, self.reason = 0, "length"
        self.num_prompt_tokens, self.num_preemptions, self.skip_reading_prefix_cache = 6, 0, False
        self.status, self.structured_output_request = WAITING, None

    def is_finished(self) -> bool:
        return False

    def get_finished_reason(self) -> str:
        return self.reason


class Scheduler:
    """Stand-in for the vLLM scheduler; `output` and `update` set what its methods return."""

    def __init__(self, num_spec_tokens: int = 0) -> None:
        self.hook = Hook("stand-in")
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.deferred_waiting: set[Request] = set()
        self.connector: object | None = None
        self.num_spec_tokens = num_spec_tokens
        self.requests: dict[str, Request] = {}
        self.observability_config: Any = None
        self.kv_cache_manager = SimpleNamespace(
            enable_caching=True,
            block_pool=SimpleNamespace(num_gpu_blocks=21, get_num_free_blocks=lambda: 5),
        )
        self._schedule = steps.wrap_schedule(lambda scheduler: scheduler.output, self.hook)
        self._add = engine_core.wrap_add_request(Scheduler.add_request, self.hook)
        self._free = engine_core.wrap_free_request(
            lambda scheduler, request: scheduler.running.remove(request), self.hook
        )
        self._preempt = engine_core.wrap_preempt_request(lambda *_: None, self.hook)

    def add(self, request_id: str, headers: dict[str, str] | None) -> Request:
        return self.add_existing(Request(request_id, headers))

    def add_existing(self, request: Request) -> Request:
        self._add(self, request)
        return request

    def add_request(self, request: Request) -> None:
        """As in vLLM: a request that exists already only gets more of its prompt."""
        if request.request_id not in self.requests:
            self.requests[request.request_id] = request
            self.running.append(request)

    def schedule(
        self,
        new: dict[str, int] | None = None,
        drafts: dict[str, int] | None = None,
        resumed: SequenceOf[str] = (),
        **tokens: int,
    ) -> Any:
        """Schedules a batch; `new` maps requests with a new prompt to their cached token count."""
        self.output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request_id, num_computed_tokens=cached)
                for request_id, cached in (new or {}).items()
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            scheduled_spec_decode_tokens={request_id: [-1] * n for request_id, n in (drafts or {}).items()},
        )
        return self._schedule(self)

    def update(self, output: Any, finishes: tuple[Request, ...] = (), **tokens: int) -> None:
        """Delivers `tokens` per request and frees the requests in `finishes`."""
        sampled = SimpleNamespace(
            sampled_token_ids=[[7] * n for n in tokens.values()],
            req_id_to_index={request_id: index for index, request_id in enumerate(tokens)},
            pooler_output=None,
        )
        outputs = [
            SimpleNamespace(request_id=request_id, new_token_ids=[7] * n) for request_id, n in tokens.items()
        ]
        result = {0: SimpleNamespace(outputs=outputs)} if outputs else {}

        def updated(*_: Any) -> Any:
            for request in finishes:
                self.free(request)
            return result

        steps.wrap_update_from_output(updated, self.hook)(self, output, sampled)

    def free(self, request: Request) -> None:
        self._free(self, request)
        self.requests.pop(request.request_id)

    def preempt(self, request: Request) -> None:
        self._preempt(self, request, 0.0)


def open_server_request(
    sequences: int = 1, tokens: int = 4
) -> tuple[request_span.RequestSpan, dict[str, str]]:
    """Opens a server request and returns it with its propagation headers."""
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    request.record_submitted("vllm", sequences, tokens)
    return request, propagation.inject(request)


def tokens_by_step(record: RequestRecord) -> dict[int, int]:
    """Returns the output tokens of the request by step number."""
    assert record.steps is not None
    return dict(zip(record.steps.step.tolist(), record.steps.tokens.tolist()))


def test_request_continues_in_the_engine_core_with_steps(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request(tokens=6)
    sequence = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(r=4))
    scheduler.update(scheduler.schedule(r=2), r=1)
    sequence.num_output_tokens = 2
    scheduler.update(scheduler.schedule(r=1), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert tokens_by_step(record) == {2: 1, 3: 1}
    assert [chunk.tokens for chunk in record.prefill_steps] == [4, 2]
    assert (record.finish_reasons, record.output_tokens, record.outcome) == (("length",), 2, events.OK)
    assert stages_of(record) == ["ingress", "queue", "prefill", "decode"]
    (first, *_) = recording._assembler.drain_steps()
    assert (first.kv_used, first.kv_total, first.running, first.waiting) == (15, 20, 1, 0)
    assert scheduler.hook.alive


def test_prompt_added_in_parts_is_one_request(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    for _ in range(3):
        scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(r=4), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue", "prefill"]
    assert propagation._fragments == {}
    assert scheduler.hook.alive


def test_requests_in_a_batch_have_separate_token_counts(recording: Recording) -> None:
    scheduler = Scheduler(num_spec_tokens=3)
    (request_a, headers_a), (request_b, headers_b) = open_server_request(), open_server_request()
    a, b = scheduler.add("a", headers_a), scheduler.add("b", headers_b)
    scheduler.update(scheduler.schedule(a=4, b=4), a=1, b=1)
    scheduler.update(scheduler.schedule(a=3, b=1), a=3, b=1)
    scheduler.update(scheduler.schedule(a=1, b=1), (a, b), a=1, b=1)
    request_a.close()
    request_b.close()
    first, second = recording.records()
    assert (tokens_by_step(first), tokens_by_step(second)) == ({1: 1, 2: 3, 3: 1}, {1: 1, 2: 1, 3: 1})


def test_scheduled_tokens_of_a_finished_request_are_discarded(recording: Recording) -> None:
    scheduler = Scheduler()
    (request_a, headers_a), (request_b, headers_b) = open_server_request(), open_server_request()
    a, b = scheduler.add("a", headers_a), scheduler.add("b", headers_b)
    first = scheduler.schedule(a=4, b=4)
    second = scheduler.schedule(a=1, b=1)
    scheduler.update(first, (a,), a=1, b=1)
    third = scheduler.schedule(b=1)
    scheduler.update(second, b=1)
    scheduler.update(third, (b,), b=1)
    request_a.close()
    request_b.close()
    by_steps = {len(tokens_by_step(record)): record for record in recording.records()}
    assert tokens_by_step(by_steps[1]) == {1: 1} and by_steps[1].discarded == 1
    assert tokens_by_step(by_steps[3]) == {1: 1, 2: 1, 3: 1}


def test_empty_batch_is_not_a_step(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    scheduler.add("r", headers)
    scheduler.update(scheduler.schedule())
    scheduler.update(scheduler.schedule(r=4), r=1)
    request.close()
    (record,) = recording.records()
    assert tokens_by_step(record) == {1: 1}


def test_preempted_request_is_prefilled_again(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(r=4), r=1)
    scheduler.preempt(sequence)
    scheduler.update(scheduler.schedule(r=5), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert record.preemptions == 1
    assert tokens_by_step(record) == {1: 1, 2: 1}


def test_sequences_of_one_prompt_are_one_request(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request(sequences=2)
    a, b = scheduler.add("0_r", headers), scheduler.add("1_r", headers)
    scheduler.update(scheduler.schedule(**{"0_r": 4, "1_r": 4}), **{"0_r": 1, "1_r": 1})
    scheduler.update(scheduler.schedule(**{"0_r": 1, "1_r": 1}), (a, b), **{"0_r": 1, "1_r": 1})
    request.close()
    (record,) = recording.records()
    assert tokens_by_step(record) == {1: 2, 2: 2}
    assert record.finish_reasons == ("length", "length")
    assert propagation._fragments == {}


def test_request_without_trace_headers_is_not_recorded(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    scheduler.add("r", headers)
    untraced = scheduler.add("untraced", None)
    scheduler.update(scheduler.schedule(r=4, untraced=4), r=1, untraced=1)
    scheduler.update(scheduler.schedule(r=1, untraced=1), (untraced,), r=1, untraced=1)
    request.close()
    (record,) = recording.records()
    assert tokens_by_step(record) == {1: 1, 2: 1}
    assert scheduler.hook.alive


def test_front_end_abort_has_no_engine_finish_reason(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    sequence.reason = "abort"
    scheduler.update(scheduler.schedule(r=4), r=1)
    scheduler.free(sequence)
    request.close()
    assert recording.records()[0].finish_reasons == ()


def test_prefix_cache_hits_are_recorded_once_per_prompt(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request(sequences=2, tokens=6)
    a, b = scheduler.add("0_r", headers), scheduler.add("1_r", headers)
    scheduler.update(scheduler.schedule(new={"0_r": 0}, **{"0_r": 6}), **{"0_r": 1})
    scheduler.update(scheduler.schedule(new={"1_r": 4}, **{"0_r": 1, "1_r": 2}), **{"0_r": 1, "1_r": 1})
    scheduler.preempt(b)
    b.num_preemptions = 1
    done = scheduler.schedule(new={"1_r": 4}, **{"0_r": 1, "1_r": 2})
    scheduler.update(done, (a, b), **{"0_r": 1, "1_r": 1})
    request.close()
    (record,) = recording.records()
    assert (record.prefix_tokens, record.cached_tokens) == (12, 4)
    assert record.cached_input_tokens == 0, (
        "the second sequence hit the blocks of the first; the prompt itself was computed"
    )


def test_disabled_prefix_cache_records_no_lookups(recording: Recording) -> None:
    scheduler = Scheduler()
    scheduler.kv_cache_manager.enable_caching = False
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(new={"r": 0}, r=6), (sequence,), r=1)
    request.close()
    assert recording.records()[0].prefix_tokens == 0


def test_draft_and_accepted_tokens_include_the_last_step(recording: Recording) -> None:
    scheduler = Scheduler(num_spec_tokens=3)
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(new={"r": 0}, r=4), r=1)
    scheduler.update(scheduler.schedule(drafts={"r": 3}, r=4), r=3)
    scheduler.update(scheduler.schedule(drafts={"r": 3}, r=4), (sequence,), r=2)
    request.close()
    (record,) = recording.records()
    assert tokens_by_step(record) == {1: 1, 2: 3, 3: 2}
    assert (record.drafted_tokens, record.accepted_tokens) == (6, 3)
    assert scheduler.hook.alive


def compile_grammar(request: Request, broken: bool = False) -> None:
    """Compiles a grammar for the request through the hooked vLLM manager."""
    request.structured_output_request = object()  # type: ignore[assignment]
    hook = Hook("stand-in")

    def compile_schema(manager: Any, request: Request) -> str:
        if broken:
            raise ValueError("no such schema")
        return "a grammar"

    created = scheduler_waits.wrap_create_grammar(compile_schema, hook)
    init_grammar = scheduler_waits.wrap_grammar_init(lambda manager, request: created(manager, request), hook)
    with pytest.raises(ValueError, match="no such schema") if broken else contextlib.nullcontext():
        assert init_grammar(None, request) == "a grammar"
    assert hook.alive


def test_grammar_compilation_is_a_stage(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = Request("r", headers)
    compile_grammar(sequence)
    scheduler.add_existing(sequence)
    scheduler.update(scheduler.schedule(new={"r": 0}, r=4), r=1)
    scheduler.update(scheduler.schedule(r=1), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue", "grammar", "prefill", "decode"]


@pytest.mark.parametrize("broken", [True, False])
def test_abort_during_grammar_compilation_keeps_the_stage(recording: Recording, broken: bool) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = Request("r", headers)
    if broken:
        compile_grammar(sequence, broken)
    else:
        sequence.structured_output_request = object()  # type: ignore[assignment]
        scheduler_waits.wrap_grammar_init(lambda *_: None, Hook("stand-in"))(None, sequence)
    scheduler.add_existing(sequence)
    sequence.reason = "abort"
    scheduler.free(sequence)
    request.close(events.ABORTED, "client_disconnect")
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue", "grammar"]
    assert record.failed_stage == "queue"


def test_kv_transfer_is_a_stage_until_rescheduling(
    recording: Recording,
) -> None:
    scheduler = Scheduler()
    scheduler.connector = object()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    scheduler.waiting, scheduler.deferred_waiting, sequence.status = [sequence], {sequence}, FOR_KV
    scheduler.update(scheduler.schedule())
    scheduler.update(scheduler.schedule())
    hook = Hook("stand-in")
    for answer in (False, None):  # False: not yet (vLLM 0.17); None: transferred
        update = scheduler_waits.wrap_update_remote_kv(lambda *_, answer=answer: answer, hook)
        assert update(scheduler, sequence) is answer
    scheduler.waiting, scheduler.deferred_waiting, sequence.status = [], set(), WAITING
    scheduler.update(scheduler.schedule(new={"r": 4}, r=2), r=1)
    scheduler.update(scheduler.schedule(r=1), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert stages_of(record) == ["ingress", "queue", "kv transfer", "prefill", "decode"]
    assert hook.alive and scheduler.hook.alive


def test_waiting_requests_are_counted_by_reason_each_second(
    recording: Recording,
) -> None:
    scheduler, requests = Scheduler(), [Request(str(number), None) for number in range(5)]
    open_server_request()  # a process records nothing before its first request
    reporter = scheduler_waits.WaitingReporter()
    requests[1].status, requests[2].status = FOR_KV, FOR_GRAMMAR
    scheduler.waiting, scheduler.deferred_waiting = requests, set(requests[1:4])
    reporter.on_scheduled(scheduler, 5_000_000_000, 5)
    scheduler.waiting, scheduler.deferred_waiting = [], set()
    reporter.on_scheduled(scheduler, 5_900_000_000, 0)
    recording.records()
    waiting = recording._assembler.processes.count_waiting
    assert waiting() == {"capacity": 2, "kv_transfer": 1, "grammar": 1, "other": 1}
    reporter.on_idle(scheduler, 5_950_000_000)
    recording.records()
    assert waiting() == {"capacity": 0, "kv_transfer": 0, "grammar": 0, "other": 0}


def test_rate_limited_counter_flushes_each_second_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        scheduler_steps.recorder, "count", lambda mark, since, at, count: counts.append((since, at, count))
    )
    tally = scheduler_steps.RateLimitedCounter("kv_eviction")
    for at in (10, 20, 999_999_999, 1_000_000_010, 2_000_000_000):
        tally.add()
        tally.flush_if_due(at)
    tally.flush(2_500_000_000)
    tally.flush(2_600_000_000)
    assert counts == [(10, 1_000_000_010, 4), (2_000_000_000, 2_500_000_000, 1)]


# ── a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """Stand-in for the vLLM worker; `execute` returns `result`."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.hook = rank, Hook("stand-in")
        self.result: Any = None

    def execute(self, output: Any) -> Any:
        return worker.wrap_execute_model(lambda it, output: it.result, self.hook)(self, output)

    def sample(self) -> Any:
        return worker.wrap_sample_tokens(lambda it, grammar: "tokens", self.hook)(self, None)


def read_executions(recording: Recording) -> list[tuple[int, int]]:
    """Returns rank and process id of every recorded execution."""
    recording.records()
    found = recording._assembler.workers.drain_executions()
    assert all(execution.length_ns >= 0 for execution in found)
    return [(execution.rank, execution.pid) for execution in found]


def batch(recording: Recording) -> Any:
    """Returns a batch as a scheduler sends it to its workers."""
    scheduler = Scheduler()
    scheduler.add("r", open_server_request()[1])
    return scheduler.schedule(r=4)


def test_worker_records_its_execution_of_each_step(recording: Recording) -> None:
    rank_worker = Worker(rank=1)
    assert rank_worker.execute(batch(recording)) is None
    assert read_executions(recording) == []
    assert rank_worker.sample() == "tokens"
    assert read_executions(recording) == [(1, os.getpid())]


def test_step_without_sampling_ends_with_its_execution(recording: Recording) -> None:
    pooling, stage = Worker(), Worker()
    pooling.result = "a pooled output"
    assert pooling.execute(batch(recording)) == "a pooled output"
    assert read_executions(recording) == [(0, os.getpid())]
    stage.execute(batch(recording))
    stage.execute(batch(recording))
    assert read_executions(recording) == [(0, os.getpid())]


def test_dummy_batch_is_not_an_execution(recording: Recording) -> None:
    rank_worker = Worker()
    rank_worker.execute(SimpleNamespace())
    rank_worker.sample()
    assert read_executions(recording) == [] and rank_worker.hook.alive


# ── a front end ──────────────────────────────────────────────────────────────────────────────────────────────────


class Sequence:
    """Stand-in for a request that the front end sends to the engine core."""

    def __init__(self, request_id: str, prompt: str = "") -> None:
        self.request_id, self.external_req_id = request_id, prompt or request_id
        self.prompt_token_ids, self.trace_headers = [1] * 5, None
        self.sampling_params: Any = SimpleNamespace(max_tokens=16)
        self.pooling_params = self.lora_request = None
        self.detokenizer: Any = None
        self.resumable = False


class FrontEnd:
    """Stand-in for an output processor and its client."""

    def __init__(self) -> None:
        self.hook = Hook("stand-in")
        self.otel_infer_model = "tiny"
        self.request_states: dict[str, Sequence] = {}

    def add(self, sequence: Sequence, parent: Any = None) -> None:
        def add_request(self: FrontEnd, request: Sequence, prompt: Any, parent_req: Any = None) -> None:
            self.request_states[request.request_id] = request

        api_server.wrap_add_request(add_request, self.hook)(self, sequence, None, parent)
        assert self.hook.alive

    def submit(self, sequence: Sequence, failure: BaseException | None = None) -> None:
        """Submits a sequence as a server does, whose client is asynchronous."""

        async def send(self: FrontEnd, request: Sequence) -> None:
            if failure is not None:
                raise failure

        asyncio.run(api_server._wrap_submit(send, self.hook)(self, sequence))
        assert self.hook.alive

    def finish(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            output_processor.wrap_finish_request(lambda *_: None, self.hook)(self, sequence)

    def abort(self, *sequences: Sequence) -> None:
        gone = [sequence.request_id for sequence in sequences]
        output_processor.wrap_abort_requests(lambda *_: gone, self.hook)(self, gone)


def prepare_prompt(prompt: dict[str, Any]) -> str:
    """Prepares a prompt as the vLLM renderer does."""

    async def process_tokens(self: Any, prompt: dict[str, Any], *, skip_mm_cache: bool = False) -> str:
        return "prepared"

    process = multimodal.wrap_prepare_media(process_tokens, Hook("stand-in"))
    result: str = asyncio.run(process(None, prompt, skip_mm_cache=True))
    return result


def test_every_recorded_stage_has_a_cause() -> None:
    stated = {
        api_server.TOKENIZE,
        multimodal.FETCH,
        multimodal.PREPARE,
        scheduler_waits.GRAMMAR,
        scheduler_waits.KV_TRANSFER,
    }
    assert stated <= semconv.STAGE_CAUSES.keys()


def test_multimodal_inputs_are_stages_and_text_is_not(recording: Recording) -> None:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    token = request.attach()
    list(multimodal.trace_fetch_media(Call(None, (), {}, {})))
    assert prepare_prompt({"multi_modal_data": {"image": []}}) == "prepared" == prepare_prompt({})
    detach(token)
    list(multimodal.trace_fetch_media(Call(None, (), {}, {})))  # outside any request
    request.close()
    (record,) = recording.records()
    assert [stage.name for stage in record.stages if "media" in stage.name] == [
        "fetch media",
        "prepare media",
    ]


def test_prompt_without_a_server_opens_a_request(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r-1234", "r")
    front_end.add(sequence)
    front_end.submit(sequence)
    assert sequence.trace_headers is not None and propagation.REQUEST_HEADER in sequence.trace_headers
    front_end.finish(sequence)
    (record,) = recording.records()
    assert (record.operation, record.model, record.input_tokens, record.max_tokens) == (
        "text_completion", "tiny", 5, 16,
    )  # fmt: skip
    assert record.attributes["infer.request.id"] == "r"
    assert "gen_ai.response.id" not in record.attributes
    assert api_server.in_flight == {}


def test_route_request_has_engine_and_response_ids(
    recording: Recording,
) -> None:
    request = start.open_request("POST /v1/completions", owner="asgi")
    assert request is not None
    request.operation = "text_completion"  # as set by the hook of the route
    token = request.attach()
    front_end, sequence = FrontEnd(), Sequence("cmpl-a1-0-9f8a", "cmpl-a1-0")
    front_end.add(sequence)
    front_end.submit(sequence)
    front_end.finish(sequence)
    detach(token)
    request.close()
    (record,) = recording.records()
    known = {key: value for key, value in record.attributes.items() if key.endswith(".id")}
    assert known == {"infer.request.id": "cmpl-a1-0", "gen_ai.response.id": "cmpl-a1"}


def test_server_request_outlasts_its_last_sequence(recording: Recording) -> None:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    request.operation = "chat"
    token = request.attach()
    front_end, sequence = FrontEnd(), Sequence("r")
    front_end.add(sequence)
    front_end.submit(sequence)
    detach(token)
    front_end.finish(sequence)
    assert recording.records() == []
    request.close()
    (record,) = recording.records()
    assert (record.operation, record.provider, record.model) == ("chat", "vllm", "tiny")


def test_pooling_request_has_operation_embeddings(recording: Recording) -> None:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    request.operation = "text_completion"
    token = request.attach()
    sequence = Sequence("r")
    sequence.sampling_params, sequence.pooling_params = None, SimpleNamespace(task="embed")
    front_end = FrontEnd()
    front_end.add(sequence)
    front_end.submit(sequence)
    detach(token)
    request.close()
    (record,) = recording.records()
    assert (record.operation, record.max_tokens) == ("embeddings", 0)


def test_renderer_and_tokenizer_hooks_record_one_tokenize_stage(recording: Recording) -> None:
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    token = request.attach()
    renderer = SimpleNamespace(model_config=SimpleNamespace(model="tiny"))
    tokenize = tokenization._wrap_tokenize(lambda prompt: [1, 2, 3], Hook("stand-in"))

    async def render_chat(self: Any, prompt: str) -> list[int]:
        assert request.tokenizing
        tokens: list[int] = tokenize(prompt)
        return tokens

    render = api_server._make_render_hook("chat")(render_chat, Hook("stand-in"))
    assert asyncio.run(render(renderer, "a b c")) == [1, 2, 3]
    detach(token)
    request.close()
    (record,) = recording.records()
    assert stages_of(record).count("tokenize") == 1
    assert request.operation == "chat" and not request.tokenizing


def test_a_renderer_that_is_not_a_coroutine_function_is_left_alone() -> None:
    with pytest.raises(TargetMismatch, match="is not a coroutine function"):
        api_server._make_render_hook("chat")(len, Hook("stand-in"))


@pytest.mark.parametrize(
    ("end", "operation", "model"),
    [((events.OK, "", 400), "", ""), ((events.OK, "", 200), "", ""), ((events.ERROR, "500", 500), "chat", "tiny"),
     ((events.ABORTED, "client_disconnect", 0), "chat", "tiny")],
    ids=["too long", "tokenize", "failed", "aborted"],
)  # fmt: skip
def test_a_tokenized_request_is_named_if_it_failed(
    recording: Recording, end: tuple[int, str, int], operation: str, model: str
) -> None:
    """Unless it failed, only its hand-over to the engine shows that it is an inference."""
    request = start.open_request("POST", owner="asgi")
    assert request is not None
    token = request.attach()
    renderer = SimpleNamespace(model_config=SimpleNamespace(model="tiny"))

    async def render_chat(self: Any) -> None:
        pass

    asyncio.run(api_server._make_render_hook("chat")(render_chat, Hook("stand-in"))(renderer))
    detach(token)
    request.close(*end)
    (record,) = recording.records()
    assert (record.operation, record.model) == (operation, model)


def test_parallel_sequences_count_the_prompt_once(recording: Recording) -> None:
    front_end, parent = FrontEnd(), SimpleNamespace(sampling_params=SimpleNamespace(n=2))
    first, second = Sequence("0_r", "r"), Sequence("1_r", "r")
    front_end.add(first, parent)
    front_end.add(second, parent)
    front_end.submit(first)
    front_end.submit(second)
    front_end.finish(first)
    assert recording.records() == []
    front_end.finish(second)
    (record,) = recording.records()
    assert (record.sequences, record.input_tokens) == (2, 5)


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("chatcmpl-a1", "chatcmpl-a1"),
        ("chatcmpl-job-5", "chatcmpl-job-5"),
        ("cmpl-job-5-0", "cmpl-job-5"),
        ("cmpl-86a528c8f1ab9568-b49bb093a4b3817c-beam-0", "cmpl-86a528c8f1ab9568"),
        (
            "chatcmpl-86a528c8f1ab9568-b49bb093a4b3817c-beam-0",
            "chatcmpl-86a528c8f1ab9568-b49bb093a4b3817c-beam-0",
        ),
        ("resp_a1_0", "resp_a1"),
        ("embd-job-5-0", "embd-job-5"),
        ("score-a1-12", "score-a1"),
        ("0", "0"),
    ],
)
def test_response_id_omits_engine_suffixes(request_id: str, expected: str) -> None:
    assert response_id(request_id) == expected


def test_aborted_prompt_without_a_server_is_aborted(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    front_end.add(sequence)
    front_end.submit(sequence)
    front_end.abort(sequence)
    (record,) = recording.records()
    assert (record.outcome, record.finish_reasons) == (events.ABORTED, ("abort",))


def test_engine_failure_is_recorded_on_open_requests(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    front_end.add(sequence)
    front_end.submit(sequence)
    output_processor.wrap_propagate_error(lambda *_: None, front_end.hook)(
        front_end, MemoryError("private text")
    )
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ERROR, "MemoryError")


class Detokenizer:
    """Finds a stop string at its third token, if `makes_text` is set."""

    def __init__(self, makes_text: bool = True) -> None:
        self.output_token_ids: list[int] = []
        self.makes_text = makes_text

    def update(self, tokens: list[int], stopped: bool) -> str | None:
        self.output_token_ids += tokens
        if not self.makes_text or len(self.output_token_ids) < 3:
            return None
        del self.output_token_ids[3:]
        return "."

    def deliver(self, tokens: int = 1) -> str | None:
        """Calls `update` as vLLM does."""
        return self.update([7] * tokens, False)


def submit_from_server(front_end: FrontEnd, sequence: Sequence) -> request_span.RequestSpan:
    """Opens a server request and submits the sequence as its prompt."""
    request = start.open_request("POST /", owner="asgi")
    assert request is not None
    token = request.attach()
    front_end.add(sequence)
    front_end.submit(sequence)
    detach(token)
    return request


def process(
    front_end: FrontEnd, *outputs: Any, aborts: tuple[str, ...] = (), finishes: tuple[Any, ...] = ()
) -> None:
    """Runs the hooked output processor on outputs of the engine core."""

    def processed(processor: Any, outputs: Any) -> Any:
        front_end.finish(*finishes)
        return SimpleNamespace(reqs_to_abort=list(aborts))

    output_processor.wrap_process_outputs(processed, front_end.hook)(front_end, outputs)


def ended(sequence: Sequence, reason: FinishReason | None) -> Any:
    return SimpleNamespace(request_id=sequence.request_id, finish_reason=reason)


class FinishReason(enum.IntEnum):
    """As in vLLM: the first member is 0."""

    STOP, LENGTH, ABORT, ERROR = range(4)

    def __str__(self) -> str:
        return self.name.lower()


def test_tokens_after_a_stop_string_are_not_output(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer()
    request = submit_from_server(front_end, sequence)
    assert detokenizer.deliver(0) is None and not request.tokens_reached
    assert detokenizer.deliver() is None
    assert detokenizer.deliver(4) == "."
    process(front_end, ended(sequence, None), aborts=("r",), finishes=(sequence,))
    request.close()
    (record,) = recording.records()
    assert (record.finish_reasons, record.output_tokens) == (("stop",), 3)
    assert record.detokenize_ns > 0 and record.first_token_at
    assert front_end.hook.alive


def test_output_finished_by_both_ends_is_counted_once(recording: Recording) -> None:
    """The engine finishes the request when the front end has found the stop string."""
    scheduler, front_end, sequence = Scheduler(), FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer()
    request = submit_from_server(front_end, sequence)
    part = scheduler.add("r", sequence.trace_headers)
    scheduler.update(scheduler.schedule(r=5), r=1)
    while detokenizer.deliver() is None:
        scheduler.update(scheduler.schedule(r=1), r=1)
    part.num_output_tokens = 4
    scheduler.update(scheduler.schedule(r=1), (part,), r=1)
    process(front_end, ended(sequence, None), aborts=("r",), finishes=(sequence,))
    request.close()
    assert recording.records()[0].output_tokens == 3


def test_request_without_output_has_no_first_token(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer()
    request = submit_from_server(front_end, sequence)
    detokenizer.deliver(0)
    process(front_end, ended(sequence, FinishReason.ERROR), finishes=(sequence,))
    request.close()
    assert recording.records()[0].first_token_at == 0


def test_tokens_without_detokenization_are_marked_as_reached(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer(makes_text=False)
    request = submit_from_server(front_end, sequence)
    detokenizer.deliver()
    assert request.tokens_reached


@pytest.mark.parametrize(
    ("reason", "outcome", "reasons"),
    [
        (FinishReason.STOP, events.OK, ()),
        (FinishReason.LENGTH, events.OK, ()),
        (FinishReason.ABORT, events.ABORTED, ("abort",)),
        (FinishReason.ERROR, events.ERROR, ()),
    ],
)
def test_engine_finish_reason_determines_the_outcome(
    recording: Recording, reason: FinishReason, outcome: int, reasons: tuple[str, ...]
) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    front_end.add(sequence)
    front_end.submit(sequence)
    process(front_end, ended(sequence, reason), finishes=(sequence,))
    (record,) = recording.records()
    assert (record.outcome, record.finish_reasons) == (outcome, reasons)


def test_prompt_rejected_before_the_engine_records_the_exception(
    recording: Recording,
) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")

    def reject(self: FrontEnd, request: Sequence, prompt: Any, parent_req: Any = None) -> None:
        raise TypeError("no such token")

    with pytest.raises(TypeError):
        api_server.wrap_add_request(reject, front_end.hook)(front_end, sequence, prompt=None)
    front_end.add(sequence)
    with pytest.raises(OSError):
        front_end.submit(sequence, OSError("the engine is gone"))
    first, second = recording.records()
    assert (first.error_type, second.error_type) == ("TypeError", "OSError")
    assert api_server.in_flight == {}


def test_streamed_prompt_is_one_sequence_with_summed_tokens(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.resumable = True
    front_end.add(sequence)
    front_end.submit(sequence)
    front_end.submit(sequence)
    sequence.resumable = False
    front_end.submit(sequence)  # marks the end of the prompt
    front_end.finish(sequence)
    (record,) = recording.records()
    assert (record.sequences, record.input_tokens) == (1, 10)


def test_streamed_prompt_counts_one_prefix_cache_lookup(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(new={"r": 0}, r=4), r=1)
    scheduler.update(scheduler.schedule(new={"r": 5}, r=4), (sequence,), r=1)
    request.close()
    (record,) = recording.records()
    assert (record.prefix_tokens, record.cached_tokens) == (6, 0)


def test_nine_batches_may_be_in_flight(recording: Recording) -> None:
    scheduler = Scheduler()
    request, headers = open_server_request()
    sequence = scheduler.add("r", headers)
    flights = [scheduler.schedule(r=4), *(scheduler.schedule(r=1) for _ in range(9))]
    for output in flights[:-1]:
        scheduler.update(output, r=1)
    scheduler.update(flights[-1], (sequence,), r=1)
    request.close()
    assert len(tokens_by_step(recording.records()[0])) == 10


def test_invalid_and_unused_drafts_are_not_counted(recording: Recording) -> None:
    """Drafts rejected by a grammar and drafts of a finished request do not count."""
    scheduler = Scheduler(num_spec_tokens=3)
    scheduler.connector = object()  # keeps the blocks of a finished request
    (request, headers), (finished_request, finished_headers) = open_server_request(), open_server_request()
    sequence, finished = scheduler.add("r", headers), scheduler.add("g", finished_headers)
    scheduler.update(scheduler.schedule(new={"r": 0, "g": 0}, r=4, g=4), r=1, g=1)
    output = scheduler.schedule(drafts={"r": 3, "g": 3}, r=4, g=4)
    output.num_invalid_spec_tokens = {"r": 2}
    finished.is_finished = lambda: True  # type: ignore[method-assign]
    scheduler.update(output, (sequence, finished), r=2, g=2)
    request.close()
    finished_request.close()
    first, second = recording.records()
    assert (first.drafted_tokens, first.accepted_tokens) == (1, 1)
    assert (second.drafted_tokens, second.accepted_tokens) == (0, 0)
    assert scheduler.hook.alive


def test_drafts_of_a_preempted_request_are_not_counted(
    recording: Recording,
) -> None:
    scheduler = Scheduler(num_spec_tokens=3)
    request, headers = open_server_request()
    sequence: Any = scheduler.add("r", headers)
    scheduler.update(scheduler.schedule(new={"r": 0}, r=4), r=1)
    output = scheduler.schedule(drafts={"r": 3}, r=4)
    sequence.num_stale_output_tokens, sequence.drop_stale_output = 4, True
    scheduler.update(output, (sequence,), r=2)
    request.close()
    assert recording.records()[0].drafted_tokens == 0
    assert scheduler.hook.alive


@pytest.mark.parametrize(("endpoint", "kept"), [(None, False), ("http://collector", True)])
def test_trace_headers_are_removed_unless_vllm_traces(
    recording: Recording, endpoint: str | None, kept: bool
) -> None:
    scheduler = Scheduler()
    scheduler.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
    _, headers = open_server_request()
    assert bool(scheduler.add("r", headers).trace_headers) == kept


@pytest.mark.parametrize(
    ("served", "name"),
    [
        (["tiny", "other"], "tiny"),
        ("org/model", "org/model"),
        ("/models/tiny-llama/", "tiny-llama"),
        (None, "m"),
        ("accounts/us/models/llama", "accounts/us/models/llama"),
    ],
)
def test_model_name_is_the_first_served_name(served: Any, name: str) -> None:
    assert model_name(SimpleNamespace(served_model_name=served, model="./m")) == name


def test_unreadable_token_ids_disable_the_detokenizer_hook(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokens:
        def __bool__(self) -> bool:
            raise ValueError

    class Taker:
        def update(self, tokens: Tokens) -> str:
            return "text"

    monkeypatch.setattr(detokenization, "_hook", Hook("update"))
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = Taker()
    submit_from_server(front_end, sequence)
    assert sequence.detokenizer.update(Tokens()) == "text"
    assert not detokenization._hook.alive
    later = Sequence("s")
    later.detokenizer = Taker()
    submit_from_server(front_end, later)
    assert vars(later.detokenizer) == {}


@pytest.fixture
def detokenizer_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list with the time (ns) that each detokenizing takes, instead of the clock's."""
    clock = [0, 0]

    def now() -> int:
        clock[1] += clock[0]
        return clock[1]

    monkeypatch.setattr(detokenization._clock, "now", now)
    return clock


def test_detokenization_is_estimated_from_the_first_outputs(
    recording: Recording, detokenizer_clock: list[int]
) -> None:
    """One long wait in the sample counts once, not for each later token."""
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer(makes_text=False)
    request = submit_from_server(front_end, sequence)
    detokenizer_clock[0] = 1_000_000
    detokenizer.deliver()
    detokenizer_clock[0] = 10
    for _ in range(SAMPLED_OUTPUTS - 1):
        assert "update" in vars(detokenizer)
        detokenizer.deliver()
    assert "update" not in vars(detokenizer)
    for _ in range(100):
        detokenizer.deliver(2)
    process(front_end, ended(sequence, FinishReason.LENGTH), finishes=(sequence,))
    assert request.detokenize_ns == 1_000_000 + 10 * (SAMPLED_OUTPUTS - 1) + 10 * 200


def test_short_output_is_timed_whole(recording: Recording, detokenizer_clock: list[int]) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    sequence.detokenizer = detokenizer = Detokenizer(makes_text=False)
    request = submit_from_server(front_end, sequence)
    detokenizer_clock[0] = 10
    detokenizer.deliver()
    detokenizer.deliver(3)
    front_end.abort(sequence)
    assert request.detokenize_ns == 20
    assert "update" not in vars(detokenizer)


def test_outputs_are_not_searched_unless_a_sequence_ends(recording: Recording) -> None:
    class Unread(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("searched")

    front_end = FrontEnd()
    result = SimpleNamespace(reqs_to_abort=[])
    processed = output_processor.wrap_process_outputs(lambda *_: result, front_end.hook)
    assert processed(front_end, Unread([1, 2])) is result
    assert front_end.hook.alive


def test_removed_hooks_record_nothing(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, recorded = Hook("stand-in"), []
    hook.alive = False
    monkeypatch.setattr(startup.recorder, "record_startup", recorded.append)
    startup._make_phase_wrapper(events.WEIGHTS)(lambda self: None, hook)(None)
    assert recorded == []
    sequence = SimpleNamespace(otel_infer_grammar=(1, 0))
    scheduler_waits.wrap_create_grammar(lambda *_: None, hook)(None, sequence)
    assert sequence.otel_infer_grammar == (1, 0)
    monkeypatch.setattr(steps, "evictions", SimpleNamespace(add=lambda: recorded.append("eviction")))
    assert steps.evict_cached_block(lambda *_: True, hook)(None, None)
    assert recorded == []


def test_failing_mark_of_a_grammar_keeps_the_grammar() -> None:
    hook = Hook("stand-in")

    class Frozen:
        __slots__ = ()
        otel_infer_grammar = (1, 0)

    assert scheduler_waits.wrap_create_grammar(lambda *_: "a grammar", hook)(None, Frozen()) == "a grammar"
    assert not hook.alive


def test_failing_dummy_batch_counter_disables_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError

    hook = Hook("stand-in")
    monkeypatch.setattr(steps, "dummy_batches", SimpleNamespace(add=fail))
    assert steps.wrap_execute_dummy_batch(lambda: 7, hook)() == 7
    assert not hook.alive


def test_submission_that_timed_out_is_aborted(recording: Recording) -> None:
    front_end, sequence = FrontEnd(), Sequence("r")
    front_end.add(sequence)
    with pytest.raises(TimeoutError):
        front_end.submit(sequence, TimeoutError())
    (record,) = recording.records()
    assert (record.outcome, record.error_type) == (events.ABORTED, "timeout")
