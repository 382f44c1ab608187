"""A usual step of vLLM is recorded without its members; each exception is recorded in the slower way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.vllm import engine_core, scheduler_steps
from otel_infer.instrumentation.vllm import scheduler as hooks
from otel_infer.instrumentation.vllm.scheduler_steps import SchedulerSteps
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.step_reader import StepReader
from tests.support.rings import Recording
from tests.unit.instrumentation.vllm.test_vllm import open_server_request


class Unread(dict[str, int]):
    """Tokens by request that may be counted, but not read."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a usual step's members are not read")

    keys = values = items = __iter__  # type: ignore[assignment]


class Engine:
    """A scheduler whose batches are given, with the hooks on it. All running requests are `running`."""

    def __init__(self) -> None:
        self.hook = Hook("stand-in")
        self.running: list[str] = []
        self.waiting: list[str] = []
        self.requests: dict[str, Any] = {}
        self.connector = None
        self.num_spec_tokens, self.num_sampled_tokens_per_step, self.is_mm_encoder_only = 0, 1, False
        free = SimpleNamespace(num_free_blocks=5)
        pool = SimpleNamespace(
            num_gpu_blocks=21, free_block_queue=free, get_num_free_blocks=lambda: free.num_free_blocks
        )
        self.kv_cache_manager, self.free = SimpleNamespace(block_pool=pool, enable_caching=False), free
        self._schedule = hooks.wrap_schedule(lambda engine: engine.output, self.hook)
        self.passed_on: list[str] = []
        self.unchanged: list[int] = []
        self.single: list[int] = []

    @property
    def steps(self) -> SchedulerSteps:
        found: SchedulerSteps = self.otel_infer_batches  # type: ignore[attr-defined]
        return found

    def schedule(
        self, tokens: dict[str, int], new: tuple[str, ...] = (), resumed: tuple[str, ...] = ()
    ) -> Any:
        self.requests |= {request_id: SimpleNamespace(request_id=request_id) for request_id in new}
        self.output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(dict.values(tokens)),
            scheduled_new_reqs=[SimpleNamespace(req_id=request_id) for request_id in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
            scheduled_spec_decode_tokens={},
        )
        passed_on = len(self.passed_on)
        output = self._schedule(self)
        if hasattr(output, "otel_infer_step") and self.hook.alive and len(self.passed_on) == passed_on:
            self.unchanged.append(self.steps.scheduled)
        return output

    def update(
        self, output: Any, during: Callable[[], None] = lambda: None, pooled: Any = None, **tokens: int
    ) -> None:
        outputs = [
            SimpleNamespace(request_id=request_id, new_token_ids=[7] * n) for request_id, n in tokens.items()
        ]

        def updated(*_: Any) -> Any:
            during()
            return {0: SimpleNamespace(outputs=outputs)}

        sampled = SimpleNamespace(pooler_output=pooled, sampled_token_ids=[], req_id_to_index={})
        passed_on = len(self.passed_on)
        hooks.wrap_update_from_output(updated, self.hook)(self, output, sampled)
        if hasattr(output, "otel_infer_step") and len(self.passed_on) == passed_on:
            self.single.append(output.otel_infer_step[1])

    def free_request(self, request_id: str, reason: str) -> None:
        request = SimpleNamespace(
            request_id=request_id, get_finished_reason=lambda: reason, num_output_tokens=1
        )
        engine_core.wrap_free_request(lambda *_: None, self.hook)(self, request)

    def run_first(self, *request_ids: str) -> None:
        """Runs a first step of these requests, and counts the shortcuts from now on."""
        self.running = list(request_ids)
        ones = dict.fromkeys(request_ids, 1)
        self.update(self.schedule(ones, new=request_ids), **ones)
        self.unchanged.clear()
        self.single.clear()

    def read(self) -> list[Any]:
        """Returns the recorded events of all steps."""
        reader = StepReader(self.steps.writer._writer.memory, 1)
        return [recorded.event for recorded in reader.poll(0, final=True)]


def count_calls(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    """Returns the function, which appends its name to `calls`."""

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    return counted


@pytest.fixture(params=[0, scheduler_steps.MIN_REPORTED], ids=["reported", "compared"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Runs each test with changes that are derived from vLLM's report, and with whole batches compared."""
    monkeypatch.setattr(scheduler_steps, "MIN_REPORTED", request.param)
    recording = Recording()
    open_server_request()  # a process records nothing before its first request
    engine = Engine()
    for name in ("record_scheduled", "record_done"):
        recorded = getattr(SchedulerSteps, name)
        monkeypatch.setattr(SchedulerSteps, name, count_calls(recorded, name, engine.passed_on))
    yield engine
    recording.stop()


def test_usual_step_is_recorded_without_its_members(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.free.num_free_blocks = 3
    output = engine.schedule(Unread(a=1, b=1))
    engine.update(output, a=1, b=1)
    assert engine.unchanged == [2] == engine.single and engine.hook.alive
    *_, scheduled, done = engine.read()
    assert (scheduled.size, scheduled.kv_used, scheduled.kv_total, scheduled.running) == (2, 17, 20, 2)
    assert (done.step, done.delivered) == (2, ())


@pytest.mark.parametrize(
    ("running", "tokens", "how"),
    [
        ("abc", "abc", {"new": ("c",)}),
        ("ac", "ac", {"new": ("c",)}),
        ("ac", "ac", {"resumed": ("c",)}),
        ("abc", "ab", {}),
        ("a", "a", {}),
    ],
    ids=["joined", "new for another", "resumed for another", "sits out", "left without notice"],
)
def test_changed_members_are_never_reported_as_unchanged(
    engine: Engine, running: str, tokens: str, how: dict[str, Any]
) -> None:
    engine.run_first("a", "b")
    engine.running = list(running)
    engine.schedule(dict.fromkeys(tokens, 1), **how)
    assert engine.unchanged == [] and engine.hook.alive
    assert engine.read()[-1].size == len(tokens)


def test_members_after_a_step_without_all_of_them_are_compared(engine: Engine) -> None:
    """As in a pipeline, where half of the running requests take turns."""
    engine.run_first("a", "b", "c", "d")
    for batch in ("ab", "cd", "ab"):
        engine.schedule(dict.fromkeys(batch, 1))
    assert engine.unchanged == []
    assert [event.keyframe for event in engine.read()[-3:]] == [True, True, True]


@pytest.mark.parametrize(("left", "tokens", "new"), [((), "cd", ()), (("a",), "ce", ("e",))])
def test_members_are_compared_if_the_last_batch_had_not_all_of_them(
    engine: Engine, left: tuple[str, ...], tokens: str, new: tuple[str, ...]
) -> None:
    """The number of members is the expected one, but a session that waits for input left without notice."""
    engine.run_first("a", "b", "c", "d")
    engine.schedule({"a": 1, "b": 1})
    for request_id in left:
        engine.free_request(request_id, "abort")
    engine.running = list(tokens)
    engine.schedule(dict.fromkeys(tokens, 1), new=new)
    assert engine.unchanged == [] and engine.read()[-1].keyframe


def test_members_are_compared_after_the_hooks_were_absent(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.running = ["c", "d"]
    engine._schedule = hooks.wrap_schedule(lambda engine: engine.output, Hook("installed again"))
    engine.schedule({"c": 1, "d": 1})
    assert engine.unchanged == [] and engine.read()[-1].keyframe


def test_waiting_request_that_left_is_not_counted(engine: Engine) -> None:
    engine.waiting = ["c"]
    engine.run_first("a", "b")
    engine.waiting = []
    engine.free_request("c", "abort")
    engine.schedule({"a": 1, "b": 1})
    waiting = [event.waiting for event in engine.read() if isinstance(event, events.StepScheduled)]
    assert waiting == [1, 0]


def test_several_tokens_of_a_member_are_recorded(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.schedule({"a": 1, "b": 5})
    assert engine.unchanged == [] and engine.read()[-1].tokens == ((1, 5),)


def test_member_that_left_and_came_back_is_recorded_at_the_end(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine_core.wrap_preempt_request(lambda *_: None, engine.hook)(
        engine, SimpleNamespace(request_id="a"), 0.0
    )
    engine.running = ["b", "a"]
    engine.schedule({"b": 1, "a": 9}, resumed=("a",))
    last = engine.read()[-1]
    assert (last.left, len(last.joined), last.tokens) == ((0,), 1, ((1, 9),)) and not last.keyframe


def test_batch_that_passed_unrecorded_is_followed_by_a_whole_one(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.hook.alive = False
    engine.schedule({"a": 1, "b": 1})
    engine.hook.alive = True
    engine.schedule({"b": 1, "a": 1})
    assert engine.unchanged == [] and engine.read()[-1].keyframe


def test_waiting_requests_are_counted_when_one_is_added(engine: Engine) -> None:
    engine.run_first("a", "b")
    added = SimpleNamespace(request_id="c", trace_headers=None)
    engine_core.wrap_add_request(lambda engine, request: engine.waiting.append("c"), engine.hook)(
        engine, added
    )
    engine.schedule(Unread(a=1, b=1))
    assert engine.unchanged == [2] and engine.read()[-1].waiting == 1


@pytest.mark.parametrize(
    "options",
    [{"num_spec_tokens": 3}, {"num_sampled_tokens_per_step": 0}, {"is_mm_encoder_only": True}],
    ids=["drafts", "canvas", "encoder"],
)
def test_results_that_may_not_be_one_token_are_counted(engine: Engine, options: dict[str, Any]) -> None:
    vars(engine).update(options)
    engine.run_first("a", "b")
    engine.update(engine.schedule({"a": 1, "b": 1}), a=2, b=0)
    assert engine.single == []
    assert engine.read()[-1].delivered == ((0, 2), (1, 0))


def test_pooled_results_are_no_tokens(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.update(engine.schedule({"a": 1, "b": 1}), pooled=["a vector", "another"], a=0, b=0)
    assert engine.single == [] and engine.read()[-1].delivered == ((0, 0), (1, 0))


def test_chunk_of_one_token_is_no_result(engine: Engine) -> None:
    engine.run_first("a", "b")
    engine.update(engine.schedule({"a": 1, "b": 1}), b=1)
    assert engine.single == [] and engine.read()[-1].delivered == ((0, 0),)


def test_failed_request_ends_without_a_token(engine: Engine) -> None:
    """vLLM reports its error in place of its token, so there are as many outputs as members."""
    engine.run_first("a", "b")
    output = engine.schedule({"a": 1, "b": 1})
    engine.update(output, lambda: engine.free_request("b", "error"), a=1, b=0)
    assert engine.single == [] and engine.read()[-1].delivered == ((1, 0),)


def test_last_token_of_a_request_is_a_usual_result(engine: Engine) -> None:
    engine.run_first("a", "b")
    output = engine.schedule({"a": 1, "b": 1})
    engine.update(output, lambda: engine.free_request("b", "length"), a=1, b=1)
    assert engine.single == [2]


def test_request_that_left_in_flight_is_discarded_once(engine: Engine) -> None:
    engine.run_first("a", "b")
    first, second = engine.schedule({"a": 1, "b": 1}), engine.schedule({"a": 1, "b": 1})
    engine.free_request("b", "abort")
    engine.update(first, a=1)
    engine.update(second, a=1)
    third = engine.schedule({"a": 1})
    engine.running = ["a"]
    engine.update(third, a=1)
    done = [event for event in engine.read() if isinstance(event, events.StepDone)]
    assert [(event.delivered, event.discarded) for event in done[1:]] == [
        (((1, 0),), 1),
        (((1, 0),), 1),
        ((), 0),
    ]
    assert engine.steps.removals == []


def test_pool_without_a_count_of_free_blocks_is_asked(engine: Engine) -> None:
    engine.kv_cache_manager.block_pool.free_block_queue = None
    engine.run_first("a")
    engine.free.num_free_blocks = 1
    engine.schedule({"a": 1})
    assert engine.unchanged == [2] and engine.read()[-1].kv_used == 19
