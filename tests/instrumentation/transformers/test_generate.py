"""The installed `model.generate`: the result is unchanged, and the records match."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer import _clock, semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT
from otel_infer.gpu.timing import DeviceTiming
from otel_infer.instrumentation.transformers import generation_run, instrumentor, kv_cache
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from tests.instrumentation.transformers.recorded import (
    Recorded,
    check_stages,
    open_server_request,
    prefilled,
    sizes,
)
from tests.support.fake_device import OnHostClock
from tests.support.rings import stages_of

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.real

PROMPT = 12
NEW = 6


def prompt(rows: int = 1, tokens: int = PROMPT) -> Any:
    return torch.arange(100, 100 + rows * tokens).reshape(rows, tokens)


def arguments(rows: int = 1, **more: Any) -> dict[str, Any]:
    """Returns the arguments of `generate`, with padding named so that no warning appears."""
    return {"inputs": prompt(rows), "max_new_tokens": NEW, "pad_token_id": 0, **more}


def seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return call()


class Stop(Exception):
    """Raised by an argument that the user passes to `generate`."""


class Script(transformers.LogitsProcessor):
    """Row `r` ends at its `ends[r]`-th token; raises at `fails`. Counts its calls."""

    def __init__(self, ends: tuple[int, ...] = (), fails: int = 0) -> None:
        self.ends, self.fails, self.calls = ends, fails, 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails:
            raise Stop("text that no telemetry may show")
        for row, end in enumerate(self.ends):
            if self.calls == end:
                scores[row] = float("-inf")
                scores[row, 2] = 0.0
        return scores


class Streamer:
    """A user's own streamer; raises at its `fails`-th call."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.values, self.ended = fails, [], False

    def put(self, value: Any) -> None:
        self.values.append(value.clone())
        if len(self.values) == self.fails:
            raise Stop

    def end(self) -> None:
        self.ended = True


# ── the result, and the steps ────────────────────────────────────────────────────────────────────────────────────

WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    # arguments beside the prompt, rows of the prompt, rows returned
    "greedy": ({}, 1, 1),
    "sampling": ({"do_sample": True, "top_k": 40}, 1, 1),
    "a batch": ({}, 3, 3),
    "several sequences": ({"do_sample": True, "num_return_sequences": 3}, 2, 6),
    "beams": ({"num_beams": 3}, 1, 1),
    "beams that all come back": ({"num_beams": 3, "num_return_sequences": 2}, 2, 4),
    "a static cache": ({"cache_implementation": "static", "disable_compile": True}, 1, 1),
    "a dictionary": ({"return_dict_in_generate": True, "output_scores": True}, 2, 2),
    "no cache": ({"use_cache": False}, 1, 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_result_is_unchanged_and_every_step_is_recorded(way: str, model: Any, recorded: Recorded) -> None:
    more, rows, returned = WAYS[way]
    more = {"eos_token_id": None, **more}
    ours = seeded(lambda: model.generate(**arguments(rows, **more)))
    instrumentor.remove()
    result_without = seeded(lambda: model.generate(**arguments(rows, **more)))
    assert type(ours) is type(result_without)
    assert torch.equal(getattr(ours, "sequences", ours), getattr(result_without, "sequences", result_without))
    record = recorded.only_record()
    check_stages(record, "queue", "prefill", "decode")
    computed = rows * max(more.get("num_beams", 1), more.get("num_return_sequences", 1))
    assert prefilled(record) == [computed * PROMPT]
    assert sizes(record) == [returned] * NEW
    assert (record.input_tokens, record.output_tokens) == (rows * PROMPT, returned * NEW)
    assert (record.max_tokens, record.sequences) == (NEW, returned)
    assert record.finish_reasons == ("length",)
    assert (record.outcome, record.model, record.engine) == (events.OK, "tiny-llama", "transformers")
    steps = recorded.steps()
    assert [step.size for step in steps] == [1] * NEW
    assert [step.prefill_tokens for step in steps] == [computed * PROMPT] + [0] * (NEW - 1)
    assert all(step.started_at < step.ended_at for step in steps)
    assert all(before.ended_at <= after.started_at for before, after in pairwise(steps))


def test_the_run_ends_when_its_last_row_ends(model: Any, recorded: Recorded) -> None:
    script = Script(ends=(4,))
    result = model.generate(**arguments(logits_processor=[script], eos_token_id=2))
    assert result.shape[1] == PROMPT + 4
    record = recorded.only_record()
    assert (sizes(record), record.output_tokens, record.finish_reasons) == ([1] * 4, 4, ("stop",))


def test_rows_that_end_apart_run_on_together(model: Any, recorded: Recorded) -> None:
    result = model.generate(**arguments(2, logits_processor=[Script(ends=(2, 5))], eos_token_id=2))
    assert result.shape == (2, PROMPT + 5)
    record = recorded.only_record()
    assert (sizes(record), record.finish_reasons) == ([2] * 5, ("stop",))


def test_beams_that_outlast_their_result_are_finished(model: Any, recorded: Recorded) -> None:
    class EndsAtSecondToken(Script):
        """Makes an end at the second token as likely as possible."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                scores[:, 2] = 0.0
            return scores

    script = EndsAtSecondToken()
    more = {"num_beams": 3, "early_stopping": "never", "eos_token_id": 2, "logits_processor": [script]}
    result = model.generate(**arguments(2, **more))
    record = recorded.only_record()
    new_tokens = result.shape[1] - PROMPT
    assert new_tokens < script.calls == len(sizes(record))
    assert (record.output_tokens, record.finish_reasons) == (2 * new_tokens, ("stop",))


def test_ended_beams_have_the_models_step_count(model: Any, recorded: Recorded) -> None:
    script = Script(ends=(3, 3, 3))
    more = {"num_beams": 3, "early_stopping": True, "eos_token_id": 2, "logits_processor": [script]}
    result = model.generate(**arguments(**more))
    record = recorded.only_record()
    assert len(sizes(record)) == script.calls
    assert record.output_tokens == result.shape[1] - PROMPT
    assert record.finish_reasons == ("stop",)


def test_a_stopping_criterion_is_a_stop(model: Any, recorded: Recorded) -> None:
    def enough(input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PROMPT + 3, dtype=torch.bool)

    result = model.generate(**arguments(stopping_criteria=[enough]))
    record = recorded.only_record()
    assert result.shape[1] == PROMPT + 3
    assert (sizes(record), record.finish_reasons) == ([1] * 3, ("stop",))


def kv_sizes(record: Any) -> list[Any]:
    return [
        stage.attributes.get(semconv.KV_SIZE)
        for stage in record.stages
        if stage.name in ("prefill", "decode")
    ]


@pytest.mark.parametrize("rows", [1, 3])
def test_kv_cache_size_is_recorded_after_prefill_and_decode(
    rows: int, model: Any, recorded: Recorded
) -> None:
    model.generate(**arguments(rows))
    config = model.config
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * rows
    (record,) = recorded.records()
    assert kv_sizes(record) == [PROMPT * bytes_per_token, (PROMPT + NEW - 1) * bytes_per_token]


def test_a_static_cache_keeps_its_size(model: Any, recorded: Recorded) -> None:
    model.generate(**arguments(cache_implementation="static", disable_compile=True))
    (record,) = recorded.records()
    after_prompt, in_the_end = kv_sizes(record)
    assert after_prompt == in_the_end > 0


@pytest.mark.parametrize("fails", [0, 3])
def test_the_cache_is_freed_without_garbage_collection(
    fails: int, model: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    record_size = kv_cache.record_size

    def spied(request: Any, cache: Any) -> None:
        seen.append(weakref.ref(cache))
        record_size(request, cache)

    monkeypatch.setattr(kv_cache, "record_size", spied)
    gc.disable()
    try:
        with contextlib.suppress(Stop):
            model.generate(**arguments(logits_processor=[Script(fails=fails)]))
        assert len(seen) == 2
        assert [cache() for cache in seen] == [None, None]
    finally:
        gc.enable()
    (record,) = recorded.records()
    assert all(kv_sizes(record))


def test_an_unknown_cache_kind_is_no_error() -> None:
    class Odd:
        layers = 5

    class Slotted:
        __slots__ = ("keys",)

    class Many:
        layers = (Slotted(),)

    for cache in (None, (1, 2), Odd(), Many()):
        kv_cache.record_size(None, cache)  # type: ignore[arg-type]  # nothing is recorded


def test_cache_size_counts_nested_tensors_and_shared_ones_once() -> None:
    keys = torch.zeros(2, 8)
    layer = SimpleNamespace(
        keys=keys, seen=keys[:1], scaled=(torch.zeros(4), torch.zeros(1)), length=torch.tensor(3)
    )
    state = SimpleNamespace(conv={"a": torch.zeros(3)}, keys=None)
    assert kv_cache.count_cache_bytes(SimpleNamespace(layers=[layer, state])) == 4 * (16 + 4 + 1 + 3)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_launch_time_ends_before_waiting_for_the_device(
    is_streamed: bool, model: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device takes 30 ms for each step, and reading its tokens wait_for_device for it.

    Where the end of launching is unknown, no launch time is recorded.
    """
    device = OnHostClock()
    device.kind = "cpu"  # the model's device
    timing = DeviceTiming(lambda: device)
    monkeypatch.setattr(generation_run, "timing", timing)
    head = model.lm_head.forward
    is_true, on_host = torch.Tensor.__bool__, torch.Tensor.cpu

    def choose(hidden: Any) -> Any:
        device.launch(30_000_000)
        return head(hidden)

    def wait_for_device(tensor: Any) -> Any:
        while device.now() < device.main.free_at:
            time.sleep(0.0005)
        return tensor

    monkeypatch.setattr(model.lm_head, "forward", choose)
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: is_true(wait_for_device(self)))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self, *args: wait_for_device(on_host(self, *args)))
    attributes: dict[str, Any] = {}
    try:
        for _ in range(10):  # the device is found some ms after its first use
            long = arguments(max_new_tokens=30, min_new_tokens=30)
            model.generate(**long, streamer=Streamer() if is_streamed else None)
            time.sleep(0.3)
            (record,) = recorded.records()
            decode = record.find_stage("decode")
            assert decode is not None
            attributes = decode.attributes
            if attributes.get(semconv.DEVICE_METHOD) == BY_EVENT:
                break
    finally:
        timing.stop()
    assert attributes[semconv.DEVICE_METHOD] == BY_EVENT
    assert attributes.get(semconv.DEVICE_BOTTLENECK) != "launch-or-sync"
    if is_streamed and not hasattr(transformers.generation.utils, "StopCheck"):
        assert semconv.DEVICE_LAUNCH not in attributes
    else:
        assert float(attributes[semconv.DEVICE_LAUNCH]) < 0.6 * float(attributes[semconv.DEVICE_DURATION])


def test_one_token_is_a_prefill_and_no_decode(model: Any, recorded: Recorded) -> None:
    model.generate(inputs=prompt(), max_new_tokens=1, pad_token_id=0)
    record = recorded.only_record()
    check_stages(record, "queue", "prefill")
    assert (sizes(record), record.output_tokens, record.finish_reasons) == ([1], 1, ("length",))


def test_the_token_limit_is_found_in_every_place(model: Any, recorded: Recorded) -> None:
    config = transformers.GenerationConfig(max_new_tokens=3, pad_token_id=0, do_sample=False)
    model.generate(prompt(), config)
    assert (recorded.only_record().max_tokens, recorded.steps()[-1:] != []) == (3, True)
    model.generation_config.max_new_tokens = 4
    model.generate(prompt(), pad_token_id=0)
    assert (recorded.only_record().max_tokens, len(recorded.steps())) == (4, 4)
    model.generation_config.max_new_tokens = None
    model.generate(prompt(), max_length=PROMPT + 2, pad_token_id=0)
    record = recorded.only_record()
    assert (record.finish_reasons, sizes(record)) == (("length",), [1, 1])


def test_a_prompt_may_be_passed_by_any_name(model: Any, recorded: Recorded) -> None:
    ids = prompt(2)
    more = {"max_new_tokens": 2, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    by_name = recorded.only_record()
    result = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **more)
    by_vectors = recorded.only_record()
    assert result.shape == (2, 2)
    for record in (by_name, by_vectors):
        assert (record.input_tokens, prefilled(record), sizes(record)) == (2 * PROMPT, [2 * PROMPT], [2, 2])
        assert (record.output_tokens, record.finish_reasons) == (4, ("length",))
    model.generate(max_new_tokens=2, pad_token_id=0)
    assert sizes(recorded.only_record()) == [1, 1]


def test_a_prompt_in_chunks_is_one_prefill(model: Any, recorded: Recorded) -> None:
    cache = {"past_key_values": transformers.DynamicCache(config=model.config)}
    ours = model.generate(**arguments(prefill_chunk_size=5, **cache))
    record = recorded.only_record()
    instrumentor.remove()
    cache = {"past_key_values": transformers.DynamicCache(config=model.config)}
    assert torch.equal(ours, model.generate(**arguments(prefill_chunk_size=5, **cache)))
    assert (prefilled(record), sizes(record)) == ([PROMPT], [1] * NEW)


@pytest.mark.parametrize("rows", [1, 2])
def test_prompt_tokens_in_users_cache_count_as_cached(rows: int, model: Any, recorded: Recorded) -> None:
    cache = transformers.DynamicCache(config=model.config)
    first_output = model.generate(**arguments(rows, past_key_values=cache))
    first = recorded.only_record()
    assert (prefilled(first), first.prefix_tokens) == ([rows * PROMPT], 0)
    has = PROMPT + NEW - 1  # the last token has not been computed
    assert cache.get_seq_length() == has
    whole = torch.cat([first_output, prompt(rows, 4)], dim=1)
    model.generate(whole, past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    record = recorded.only_record()
    assert record.input_tokens == rows * (has + 5)
    assert (prefilled(record), record.prefix_tokens, record.cached_tokens) == (
        [rows * 5],
        rows * (has + 5),
        rows * has,
    )
    assert sizes(record) == [rows] * 2


# ── streamers ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_text_streamers_time_counts_once(
    model: Any, tokenizer: Any, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    request = open_server_request()
    token = request.attach()
    result = model.generate(**arguments(streamer=transformers.TextStreamer(tokenizer, skip_prompt=True)))
    detach(token)
    spent = request.detokenize_ns
    request.close()
    assert capsys.readouterr().out.strip() == tokenizer.decode(result[0, PROMPT:]).strip()
    record = recorded.only_record()
    assert 0 < spent < record.duration_ns
    prefill = record.find_stage("prefill")
    assert prefill is not None and prefill.started_at < record.first_token_at <= prefill.ended_at
    whole = sum(int(stage.attributes.get("infer.detokenize.duration", 0) * 1e9) for stage in record.stages)
    assert whole == pytest.approx(spent, abs=1000)


def test_a_thread_generates_while_an_iterator_reads(model: Any, tokenizer: Any, recorded: Recorded) -> None:
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=lambda: model.generate(**arguments(streamer=streamer)))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text
    record = recorded.only_record()
    check_stages(record, "queue", "prefill", "decode", "postprocess")
    assert sizes(record) == [1] * NEW


def test_a_users_own_streamer_gets_the_same_tokens(model: Any, recorded: Recorded) -> None:
    streamer = Streamer()
    result = model.generate(**arguments(streamer=streamer))
    assert streamer.ended and len(streamer.values) == NEW + 1
    assert torch.equal(torch.cat([value.reshape(-1) for value in streamer.values]), result[0])
    assert sizes(recorded.only_record()) == [1] * NEW


# ── the owner of a request ───────────────────────────────────────────────────────────────────────────────────────


def test_generate_in_a_servers_request_is_its_stages(model: Any, tokenizer: Any, recorded: Recorded) -> None:
    request = open_server_request()
    token = request.attach()
    inputs = tokenizer("time and again", return_tensors="pt")
    result = model.generate(**inputs, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
    tokenizer.batch_decode(result)
    assert start.current_request() is request
    detach(token)
    request.close(status_code=200)
    record = recorded.only_record()
    check_stages(record, "ingress", "tokenize", "queue", "prefill", "decode", "postprocess")
    assert (record.operation, record.model) == ("text_completion", "tiny-llama")
    assert record.input_tokens == inputs["input_ids"].numel()
    assert (sizes(record), record.output_tokens) == ([1] * NEW, NEW)


def test_successive_generate_calls_in_one_request_are_added_up(model: Any, recorded: Recorded) -> None:
    request = open_server_request()
    token = request.attach()
    for tokens in (2, 3):
        model.generate(inputs=prompt(), max_new_tokens=tokens, pad_token_id=0)
    detach(token)
    request.close(status_code=200)
    record = recorded.only_record()
    assert (record.sequences, record.input_tokens, record.output_tokens) == (2, 2 * PROMPT, 5)
    assert sizes(record) == [1] * 5


def test_generate_alone_is_current_request_of_its_callbacks(model: Any, recorded: Recorded) -> None:
    seen: list[Any] = []

    class RecordsCurrentRequest(Script):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            seen.append(start.current_request())
            return super().__call__(input_ids, scores)

    model.generate(**arguments(logits_processor=[RecordsCurrentRequest()]))
    assert start.current_request() is None
    record = recorded.only_record()
    assert [request.get_span_context().span_id for request in seen] == [
        int.from_bytes(record.span_id, "big")
    ] * NEW


def test_threads_generate_side_by_side(model: Any, recorded: Recorded) -> None:
    def work(tokens: int) -> None:
        for _ in range(3):
            model.generate(inputs=prompt(), max_new_tokens=tokens, pad_token_id=0)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = recorded.records()
    assert sorted(len(sizes(record)) for record in records) == [2] * 3 + [3] * 3 + [4] * 3
    assert recorded.in_flight == 0


# ── several tokens per step, and users' own loops ────────────────────────────────────────────────────────────────


def recorded_unchanged(recorded: Recorded, call: Callable[[], Any]) -> Any:
    """Returns the record of a call; checks that its result is the same without otel_infer."""
    ours = seeded(call)
    record = recorded.only_record()
    instrumentor.remove()
    assert torch.equal(ours, seeded(call))
    assert record.outcome == events.OK
    return record


@pytest.mark.parametrize("way", ["a draft model", "prompt lookup"])
def test_steps_of_assisted_decoding_deliver_accepted_tokens(way: str, model: Any, recorded: Recorded) -> None:
    drafts: list[int] = []
    streamer = Streamer()
    more: dict[str, Any] = (
        {"assistant_model": model} if way == "a draft model" else {"prompt_lookup_num_tokens": 3}
    )
    options = {**arguments(**more), "max_new_tokens": 24}
    record = recorded_unchanged(recorded, lambda: model.generate(**options))
    model.generate(**options, streamer=streamer)
    drafts = [int(value.numel()) for value in streamer.values[1:]]
    check_stages(record, "queue", "prefill", "decode")
    assert sizes(record) == drafts and sum(drafts) == 24
    assert (max(drafts) > 1) == (way == "a draft model")
    assert (record.input_tokens, record.output_tokens) == (PROMPT, 24)
    assert record.finish_reasons == ("length",)


def test_a_users_own_loop_is_one_decode(model: Any, recorded: Recorded) -> None:
    def loop(model: Any, input_ids: Any, **_: Any) -> Any:
        return torch.cat([input_ids, input_ids[:, :3]], dim=1)

    record = recorded_unchanged(recorded, lambda: model.generate(**arguments(custom_generate=loop)))
    check_stages(record, "queue", "decode")
    assert record.steps is None
    assert (record.input_tokens, record.output_tokens) == (PROMPT, 3)


def test_library_loops_in_users_loop_are_stepped_separately(model: Any, recorded: Recorded) -> None:
    """Two runs; the second passes its arguments by position."""

    def best_of_two(model: Any, input_ids: Any, **more: Any) -> Any:
        def fresh() -> dict[str, Any]:
            return {**more, "past_key_values": transformers.DynamicCache(config=model.config)}

        model._sample(input_ids, **fresh())
        given = fresh()
        names = ("logits_processor", "stopping_criteria", "generation_config")
        return model._sample(input_ids, *[given.pop(name) for name in names], **given)

    record = recorded_unchanged(recorded, lambda: model.generate(**arguments(custom_generate=best_of_two)))
    check_stages(record, "queue", "prefill", "decode")
    assert (sizes(record), record.output_tokens) == ([1] * 2 * NEW, NEW)
    steps = recorded.steps()
    assert len(steps) == 2 * NEW and all(step.started_at < step.ended_at for step in steps)


def test_a_loop_that_continues_another_is_added_up(model: Any, recorded: Recorded) -> None:
    def continue_twice(model: Any, input_ids: Any, **more: Any) -> Any:
        for _ in range(2):
            cache = transformers.DynamicCache(config=model.config)
            mask = torch.ones_like(input_ids)
            config = copy.deepcopy(more["generation_config"])
            config.max_length = input_ids.shape[1] + NEW
            criteria = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(config.max_length)])
            given = {**more, "past_key_values": cache, "attention_mask": mask, "generation_config": config}
            given.pop("position_ids", None)
            input_ids = model._sample(input_ids, **{**given, "stopping_criteria": criteria})
        return input_ids

    record = recorded_unchanged(recorded, lambda: model.generate(**arguments(custom_generate=continue_twice)))
    assert (sizes(record), record.output_tokens) == ([1] * 2 * NEW, 2 * NEW)


@pytest.mark.parametrize("rows", [1, 2])
def test_time_between_two_calls_is_a_generation_gap(rows: int, model: Any, recorded: Recorded) -> None:
    request = open_server_request()
    token = request.attach()
    model.generate(**arguments(rows))
    since = _clock.now()
    time.sleep(0.02)
    until = _clock.now()
    model.generate(**arguments(rows))
    detach(token)
    request.close()
    record = recorded.only_record()
    (absence,) = record.generation_gaps
    assert absence.since <= since < until <= absence.until
    assert (record.concurrent_sequences, record.output_tokens) == (rows, 2 * rows * NEW)


def test_each_of_twenty_threads_that_generate_at_once_has_its_steps(model: Any, recorded: Recorded) -> None:
    together = threading.Barrier(20)

    def work() -> None:
        together.wait()
        model.generate(**arguments())

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = recorded.records()
    assert len(records) == 20
    assert all(sizes(record) == [1] * NEW and record.ttft_ns for record in records)
    assert not any(record.telemetry_lost for record in records)


def test_stream_from_users_loop_may_be_read_anywhere(model: Any, recorded: Recorded) -> None:
    def loop(model: Any, input_ids: Any, **_: Any) -> Any:
        yield input_ids[:, :1]
        yield input_ids[:, :2]

    stream = model.generate(**arguments(custom_generate=loop))
    next(stream)
    assert start.current_request() is None
    model.generate(**arguments())
    assert sizes(recorded.only_record()) == [1] * NEW
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    reader.join()
    record = recorded.only_record()
    check_stages(record, "queue", "decode")
    assert record.outcome == events.OK
    model.generate(**arguments())
    assert sizes(recorded.only_record()) == [1] * NEW


@pytest.fixture(scope="module", params=["t5", "bart"])
def encoder_decoder(request: pytest.FixtureRequest) -> Any:
    """A tiny encoder-decoder model."""
    sizes = {
        "vocab_size": 200,
        "d_model": 32,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    if request.param == "t5":
        config = transformers.T5Config(**sizes, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        model_class = transformers.T5ForConditionalGeneration
    else:
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
        config = transformers.BartConfig(**sizes, **layers, **heads, bos_token_id=0, forced_eos_token_id=None)
        model_class = transformers.BartForConditionalGeneration
    torch.manual_seed(0)
    return model_class(config).eval()


@pytest.mark.parametrize("beams", [1, 2])
def test_an_encoder_is_prefill_and_the_decoder_steps(
    encoder_decoder: Any, beams: int, recorded: Recorded
) -> None:
    more = {"max_new_tokens": NEW, "min_new_tokens": NEW, "num_beams": beams, "do_sample": False}
    ours = encoder_decoder.generate(prompt(2), **more)
    instrumentor.remove()
    assert torch.equal(ours, encoder_decoder.generate(prompt(2), **more))
    record = recorded.only_record()
    check_stages(record, "queue", "prefill", "decode")
    assert record.input_tokens == 2 * PROMPT
    assert (prefilled(record), sizes(record)) == ([2 * PROMPT], [2] * NEW)
    assert (record.output_tokens, record.finish_reasons) == (2 * NEW, ("length",))


def test_a_pipeline_returns_the_same_result(model: Any, tokenizer: Any, recorded: Recorded) -> None:
    writer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ours = writer("time and again", **options)
    record = recorded.only_record()
    instrumentor.remove()
    assert ours == writer("time and again", **options)
    assert (record.operation, sizes(record)) == ("text_completion", [1] * NEW)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_failing_logits_processor_is_recorded_and_reraised(model: Any, recorded: Recorded) -> None:
    with pytest.raises(Stop) as raised:
        model.generate(**arguments(logits_processor=[Script(fails=4)]))
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    record = recorded.only_record()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, "Stop", "decode")
    assert (sizes(record), record.finish_reasons) == ([1] * 3, ("error",))
    assert "no telemetry" not in repr(record)
    model.generate(**arguments())
    assert sizes(recorded.only_record()) == [1] * NEW


@pytest.mark.parametrize(("again", "expected"), [(False, (events.ERROR, "Stop")), (True, (events.OK, ""))])
def test_a_failure_counts_unless_a_retry_succeeds(
    again: bool, expected: tuple[int, str], model: Any, recorded: Recorded
) -> None:
    request = open_server_request()
    token = request.attach()
    with pytest.raises(Stop):
        model.generate(**arguments(logits_processor=[Script(fails=4)]))
    if again:
        model.generate(**arguments())
    detach(token)
    request.close(status_code=200)
    record = recorded.only_record()
    assert (record.outcome, record.error_type) == expected


def test_an_unreadable_prompt_is_an_error_without_steps(model: Any, recorded: Recorded) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        model.generate(inputs=prompt() + 10**6, max_new_tokens=2, pad_token_id=0)
    record = recorded.only_record()
    assert (record.outcome, record.failed_stage, record.output_tokens) == (events.ERROR, "prefill", 0)


def test_a_failing_streamer_ends_the_run(model: Any, recorded: Recorded) -> None:
    with pytest.raises(Stop):
        model.generate(**arguments(streamer=Streamer(fails=4)))
    record = recorded.only_record()
    assert (record.outcome, record.error_type, len(sizes(record))) == (events.ERROR, "Stop", 2)


def test_a_keyboard_interrupt_is_a_cancellation(model: Any, recorded: Recorded) -> None:
    class Interrupted(Streamer):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.values) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**arguments(streamer=Interrupted()))
    record = recorded.only_record()
    assert (record.outcome, record.error_type, record.finish_reasons) == (
        events.ABORTED,
        "cancelled",
        ("abort",),
    )


def test_a_bad_argument_is_refused_by_the_library(model: Any, recorded: Recorded) -> None:
    with pytest.raises(ValueError):
        model.generate(**arguments(num_beams=2, num_return_sequences=3))
    assert recorded.only_record().error_type == "ValueError"
    with pytest.raises(TypeError):
        model.generate(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    assert recorded.only_record().error_type == "TypeError"


@pytest.mark.parametrize("limit", ["lots", [5], float("inf"), torch.tensor([1, 2])])
def test_invalid_limit_does_not_affect_the_next_call(limit: Any, model: Any, recorded: Recorded) -> None:
    def enough(input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= PROMPT + 3, dtype=torch.bool)

    def result_or_error() -> str:
        try:
            return str(model.generate(**{**arguments(stopping_criteria=[enough]), "max_new_tokens": limit}))
        except Exception as exc:
            return repr(exc)

    ours = result_or_error()
    record = recorded.only_record()
    assert record.max_tokens == 0
    assert (record.outcome == events.OK) == ours.startswith("tensor")
    model.generate(**arguments())
    assert sizes(recorded.only_record()) == [1] * NEW
    instrumentor.remove()
    assert result_or_error() == ours


# ── how the hooks are attached ───────────────────────────────────────────────────────────────────────────────────


def test_generate_is_wrapped_once_and_restored(recorded: Recorded, model: Any) -> None:
    instrumentor.install()
    instrumentor.install()
    ours = transformers.GenerationMixin.generate
    model.generate(**arguments())
    assert len(recorded.records()) == 1
    instrumentor.remove()
    assert transformers.GenerationMixin.generate is not ours
    model.generate(**arguments())
    assert recorded.records() == []


def test_a_hooked_model_can_be_copied_and_saved(model: Any, recorded: Recorded, tmp_path: Path) -> None:
    import copy
    import pickle

    assert copy.copy(model.generate) is not None
    assert pickle.loads(pickle.dumps(transformers.GenerationConfig(max_new_tokens=2))).max_new_tokens == 2
    model.save_pretrained(tmp_path)
    again = copy.deepcopy(model)
    assert torch.equal(again.generate(**arguments()), model.generate(**arguments()))
    assert [stages_of(record) for record in recorded.records()] == [["queue", "prefill", "decode"]] * 2
