"""The record of one request: its stages, steps and outcome. Stories in ms, compared as the exported span tree."""

from __future__ import annotations

from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.export.sampling.tail_sampler import TailSampler
from otel_infer.ringbuffer import events
from tests.support.story import BASE, MS, PROCESS, WALL, RequestHandle, Story, ids, ms, ns, text


def streamed(story: Story, at: float = 0, name: str = "a", **more: Any) -> RequestHandle:
    """Submits a request to the engine 4 ms after its arrival."""
    member = story.arrives(at, name, **more)
    story.stage("tokenize", at + 2, at + 4, member)
    story.submitted(at + 4, member, input_tokens=5)
    return member


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_streamed_request_has_stages_and_decode_steps() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 4, a, items=5)
    story.submitted(4, a, input_tokens=5, max_tokens=4)
    story.received(5, a)
    story.step(10, 30, [a], prompt={a: 5})
    story.step(30, 40, [a])
    story.step(40, 50, [a])
    story.step(50, 52, [a])
    story.finished(52, a, tokens=4)
    story.ends(60, a, chunks=4)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–60
          chat toy 0–60 · 5 → 4
            ingress 0–2
            tokenize 2–4 · 5 items
            queue 4–10 · hidden 1, scheduler 5
            prefill 10–30
            decode 30–52
              decode step 30–40 · step 2, batch 1
              decode step 40–50 · step 3, batch 1
              decode step 50–52 · step 4, batch 1
            postprocess 52–60
    """)


def test_time_between_stages_belongs_to_neither() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 10, 12, a)
    story.submitted(20, a)
    story.step(30, 40, [a])
    story.step(50, 60, [a])  # idle for 10 ms
    story.ends(65, a, chunks=2)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–65
          chat toy 0–65 · 0 → 2
            ingress 0–10
            tokenize 10–12
            queue 20–30
            prefill 30–40
            decode 40–60
              decode step 50–60 · step 2, batch 1
            postprocess 60–65
    """)


def test_unseen_stage_is_absent() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.step(10, 30, [a])
    story.ends(30, a)
    assert story.tree() == text("""
        chat toy 0–30 · 0 → 1
          prefill 10–30
    """)


def test_offline_request_has_no_server_span() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.stage("tokenize", 1, 2, a)
    story.submitted(2, a, input_tokens=7)
    story.step(3, 5, [a], prompt={a: 7})
    story.step(5, 7, [a])
    story.finished(7, a)
    story.ends(8, a)
    assert story.tree() == text("""
        chat toy 0–8 · 7 → 2
          tokenize 1–2
          queue 2–3
          prefill 3–5
          decode 5–7
            decode step 5–7 · step 2, batch 1
    """)


def test_engine_without_steps_gets_stages_from_timestamps() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a, input_tokens=5)
    story.add_request_event(a, events.RequestScheduled(ns(10)))
    story.add_request_event(a, events.TokenReached(ns(30)))
    story.finished(50, a, "length", tokens=4)
    story.ends(60, a, chunks=4)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–60
          chat toy 0–60 · 5 → 4
            ingress 0–4
            queue 4–10
            prefill 10–30
            decode 30–50
            postprocess 50–60
    """)


def test_engine_without_timestamps_gets_no_model_stages() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a)
    story.finished(50, a, tokens=4)
    story.ends(60, a)
    assert [stage.name for stage in story.record().stages] == ["ingress", "postprocess"]


def test_reported_decode_stage_is_not_derived_again() -> None:
    """Assisted decoding has a loop of its own and reports one decode stage without steps."""
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(1, a, input_tokens=5)
    story.add_request_event(a, events.RequestScheduled(ns(2)))
    story.stage("decode", 2, 40, a, items=9)
    story.finished(40, a, tokens=9)
    story.ends(41, a)
    assert story.tree() == text("""
        chat toy 0–41 · 5 → 9
          queue 1–2
          decode 2–40 · 9 items
    """)


def test_first_token_time_is_nearest_to_the_client() -> None:
    observed = (events.TokenReached(ns(31)), events.FirstTokenSent(ns(33)))
    for count, expected in ((0, 30), (1, 31), (2, 33)):
        story = Story()
        a = streamed(story)
        story.step(10, 30, [a])
        story.step(30, 40, [a])
        for event in observed[:count]:
            story.add_request_event(a, event)
        story.ends(50, a, chunks=2)
        record = story.record()
        assert (ms(record.first_token_at), record.ttft_ns) == (expected, expected * MS)
        assert ms(record.stages[-2].started_at) == 30, "stages use the engine's time"


def test_engine_request_without_operation_is_named_inference() -> None:
    story = Story()
    a = story.arrives(0, operation="")
    story.stage("forward", 2, 8, a)
    story.add_request_event(a, events.ResponseStarted(ns(9)))
    story.ends(10, a, chunks=1)
    assert story.tree() == text("""
        POST /health 0–10
          inference 0–10
            ingress 0–2
            forward 2–8
            postprocess 8–10
    """)


def failed_request(*stages: tuple[str, float, float, int]) -> Story:
    """A request whose error response has a body, so that it also has `postprocess`."""
    story = Story()
    a = story.arrives(0, operation="")
    for name, started, ended, items in stages:
        story.stage(name, started, ended, a, items=items)
    story.add_request_event(a, events.ResponseStarted(ns(18)))
    story.ends(20, a, events.ERROR, "MemoryError", status=500, chunks=1)
    return story


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([("tokenize", 1, 2, 5), ("forward", 2, 9, events.RAISED)], "forward"),
        ([("forward", 3, 9, events.RAISED), ("generate", 2, 10, events.RAISED)], "forward"),
        ([("forward", 1, 2, events.RAISED), ("forward", 3, 9, 2), ("guard", 9, 12, events.RAISED)], "guard"),
        ([("forward", 1, 2, events.RAISED), ("guard", 3, 9, events.RAISED)], "guard"),
        ([("forward", 1, 2, events.RAISED), ("fallback", 3, 9, 0)], "postprocess"),
    ],
    ids=["last", "innermost", "not a handled one", "not an earlier one", "none"],
)
def test_the_stage_that_raised_is_the_failed_one(
    stages: list[tuple[str, float, float, int]], expected: str
) -> None:
    record = failed_request(*stages).record()
    assert record.failed_stage == expected
    assert all(stage.attributes.get("infer.items", 0) >= 0 for stage in record.stages)


def test_a_stage_that_raised_after_the_engine_is_the_failed_one() -> None:
    """While the engine has the request, its own stage counts; a stage around it only repeats the exception."""
    for finished, expected in ((True, "guard"), (False, "decode")):
        story = Story()
        a = streamed(story)
        story.step(10, 20, [a], prompt={a: 5})
        story.step(20, 30, [a])
        if finished:
            story.finished(30, a, tokens=2)
        story.stage("guard", 31, 35, a, items=events.RAISED)
        story.ends(40, a, events.ERROR, "ValueError", status=500)
        assert story.record().failed_stage == expected


def test_a_tokenized_request_without_engine_is_no_inference() -> None:
    """`POST /tokenize`, or a model that was loaded: no stage of them is work of a model."""
    for stages in (["tokenize"], ["fetch media", "prepare media", "tokenize"], ["weights"]):
        story = Story()
        a = story.arrives(0, operation="")
        for number, name in enumerate(stages, 1):
            story.stage(name, number, number + 1, a)
        story.add_request_event(a, events.ResponseStarted(ns(9)))
        story.ends(10, a, chunks=1)
        assert story.record().operation == ""
        assert story.tree().splitlines()[0] == "POST /health 0–10"


def test_stages_of_a_refused_request_are_below_the_server_span() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 8, a)
    story.add_request_event(a, events.ResponseStarted(ns(9)))
    story.ends(10, a, status=400)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–10
          ingress 0–2
          tokenize 2–8
          postprocess 9–10
    """)


@pytest.mark.parametrize("operation", ["", "chat"])
@pytest.mark.parametrize("stage", ["tokenize", "check input"])
def test_a_refused_request_is_no_inference(operation: str, stage: str) -> None:
    """Its prompt is too long, for example; what the application had named it does not count."""
    story = Story()
    a = story.arrives(0, operation=operation)
    story.stage(stage, 2, 8, a)
    story.ends(10, a, status=400)
    assert story.record().operation == ""


@pytest.mark.parametrize(("outcome", "status"), [(events.ERROR, 500), (events.ABORTED, 0)])
def test_a_request_that_failed_while_tokenized_is_an_inference(outcome: int, status: int) -> None:
    story = Story()
    a = story.arrives(0, operation="")
    story.stage("tokenize", 2, 10, a)
    story.ends(10, a, outcome, "RuntimeError", status=status)
    assert (story.record().operation, story.record().failed_stage) == ("inference", "tokenize")


def test_a_refusal_by_the_engine_is_an_inference() -> None:
    story = Story()
    a = streamed(story)
    story.ends(10, a, status=429)
    assert story.record().operation == "chat"


def test_a_refused_request_with_lost_events_keeps_its_operation() -> None:
    """Events that show that an engine had it may be missing."""
    story = Story()
    a = story.arrives(0)
    story.add_event(PROCESS, 0, events.EventsLost(ns(5), 3, 0))
    story.ends(10, a, status=400)
    assert story.record().operation == "chat"


def test_non_generative_request_has_stages_without_tokens() -> None:
    story = Story()
    a = story.arrives(0, http=False, operation="embeddings", flags=events.SAMPLED | events.NON_GENERATIVE)
    story.stage("tokenize", 1, 2, a, items=12)
    story.stage("h2d", 2, 3, a)
    story.stage("forward", 3, 9, a, items=2)
    story.ends(10, a)
    assert story.tree() == text("""
        embeddings toy 0–10
          tokenize 1–2 · 12 items
          h2d 2–3
          forward 3–9 · 2 items
    """)


def test_custom_stages_may_overlap_and_nest() -> None:
    story = Story()
    a = story.arrives(0, operation="")
    story.stage("rerank", 3, 6, a)
    story.stage("retrieve", 2, 8, a)
    story.stage("guard", 5, 9, a)
    story.stage("rerank", 8, 9, a)
    story.ends(10, a)
    assert story.tree() == text("""
        POST /health 0–10
          inference 0–10
            ingress 0–2
            retrieve 2–8
            rerank 3–6
            guard 5–9
            rerank 8–9
    """)


def test_http_request_without_stages_is_one_span() -> None:
    story = Story()
    a = story.arrives(0, operation="")
    story.ends(3, a, chunks=1)
    assert story.tree() == "POST /health 0–3"
    assert story.record().stages == []


def test_user_data_without_stages_is_on_server_span() -> None:
    """The span keeps the id that was current, because spans of databases and clients refer to it as their parent."""
    story = Story()
    a = story.arrives(0, operation="")
    story.add_request_event(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.add_request_event(a, events.SpanEventAdded(ns(2), "cache.miss", {"key": 7}))
    story.add_request_event(a, events.SpanLinked(ns(2), *ids("other")))
    story.ends(3, a)
    (span,) = story.spans()
    assert span["kind"] == 2
    assert span["span_id"] == ids("a")[1].hex()
    assert span["parent_span_id"] == ids("caller")[1].hex()
    assert span["attributes"]["tenant"] == "blue"
    assert [event["name"] for event in span["events"]] == ["cache.miss"]
    assert [link["span_id"] for link in span["links"]] == [ids("other")[1].hex()]


def test_user_data_is_on_the_request_span() -> None:
    story = Story()
    a = streamed(story)
    story.add_request_event(a, events.AttributeSet(ns(1), "tenant", "blue"))
    story.add_request_event(a, events.AttributeSet(ns(2), "tenant", "red"))
    story.add_request_event(a, events.AttributeSet(ns(2), "http.request.body.size", 7))
    story.add_request_event(a, events.SpanEventAdded(ns(3), "cache.miss", {"key": 7}))
    story.add_request_event(a, events.SpanLinked(ns(3), *ids("other")))
    story.step(10, 20, [a])
    story.ends(21, a)
    request, server = story.span("chat toy"), story.span("POST /v1/chat/completions")
    assert request["attributes"]["tenant"] == "red"
    assert server["attributes"]["http.request.body.size"] == 7
    assert request["events"] == [{"at": WALL + 3 * MS, "name": "cache.miss", "attributes": {"key": 7}}]
    trace_id, span_id = ids("other")
    assert request["links"] == [{"trace_id": trace_id.hex(), "span_id": span_id.hex(), "attributes": {}}]
    story.add_request_event(a, events.LinkDescribed(ns(3), ids("a third")[1].hex(), {"target": "unknown"}))
    story.add_request_event(a, events.LinkDescribed(ns(3), span_id.hex(), {"kind": "retry"}))
    assert [link["attributes"] for link in story.span("chat toy")["links"]] == [{"kind": "retry"}]
    story.add_request_event(a, events.NameUpdated(ns(4), "answer"))
    assert story.span("answer")["kind"] == 1
    assert story.span("POST /v1/chat/completions")["kind"] == 2


def test_user_attributes_do_not_overwrite_ours() -> None:
    story = Story()
    a = streamed(story)
    story.add_request_event(a, events.AttributeSet(ns(1), semconv.USAGE_OUTPUT_TOKENS, 99))
    story.step(10, 20, [a])
    story.ends(21, a)
    assert story.span("chat toy")["attributes"][semconv.USAGE_OUTPUT_TOKENS] == 1


# ── steps and batches ────────────────────────────────────────────────────────────────────────────────────────────


def test_each_prompt_chunk_has_a_step() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.step(10, 20, [a], prompt={a: 512}, delivered={a: 0})
    story.step(20, 30, [a], prompt={a: 512}, delivered={a: 0})
    story.step(30, 35, [a], prompt={a: 76})
    story.step(35, 40, [a])
    story.ends(40, a)
    assert story.tree() == text("""
        chat toy 0–40 · 0 → 2
          prefill 10–35
            prefill step 10–20 · step 1, 512 tokens, batch 1
            prefill step 20–30 · step 2, 512 tokens, batch 1
            prefill step 30–35 · step 3, 76 tokens, batch 1
          decode 35–40
            decode step 35–40 · step 4, batch 1
    """)


def test_chunked_prompt_with_one_token_has_steps() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.step(10, 20, [a], prompt={a: 512}, delivered={a: 0})
    story.step(20, 30, [a], prompt={a: 5})
    story.ends(30, a)
    assert story.tree(sampler=TailSampler("auto", 2000, False, False)) == text("""
        chat toy 0–30 · 0 → 1
          prefill 10–30
            prefill step 10–20 · step 1, 512 tokens, batch 1
            prefill step 20–30 · step 2, 5 tokens, batch 1
    """)


def steps_of(story: Story, member: RequestHandle) -> list[tuple[Any, ...]]:
    """Returns (step, from, until, tokens, batch size, others' prompt tokens) of every step that delivered tokens."""
    rows = story.record(member).steps
    if rows is None:
        return []
    columns = rows.table.tolist()
    return [(step, ms(start), ms(end), *rest) for step, start, end, *rest in zip(*columns)]


def test_steps_have_batch_size_and_others_prompt_tokens() -> None:
    story = Story()
    a, b, c = streamed(story), streamed(story, 1, "b"), streamed(story, 2, "c")
    story.step(10, 20, [a], prompt={a: 5})
    story.step(20, 50, [a, b, c], prompt={b: 300, c: 20}, delivered={b: 0})
    story.step(50, 70, [a, b, c], prompt={b: 100})
    story.step(70, 75, [a, b, c])
    for member in (a, b, c):
        story.ends(76, member, chunks=3)
    assert steps_of(story, a) == [
        (1, 10, 20, 1, 1, 0),
        (2, 20, 50, 1, 3, 320),
        (3, 50, 70, 1, 3, 100),
        (4, 70, 75, 1, 3, 0),
    ]
    assert steps_of(story, b) == [(3, 50, 70, 1, 3, 0), (4, 70, 75, 1, 3, 0)]
    assert steps_of(story, c) == [(2, 20, 50, 1, 3, 300), (3, 50, 70, 1, 3, 100), (4, 70, 75, 1, 3, 0)]


def test_members_may_pause_reorder_and_return() -> None:
    story = Story()
    a, b, c = (streamed(story, i, name) for i, name in enumerate("abc"))
    story.step(10, 20, [a, b, c])
    story.step(20, 30, [a, c])
    story.step(30, 40, [c, b, a])
    story.step(40, 50, [b])
    story.step(50, 60, [a, b])
    for member in (a, b, c):
        story.ends(61, member)
    assert [row[0] for row in steps_of(story, a)] == [1, 2, 3, 5]
    assert [row[0] for row in steps_of(story, b)] == [1, 3, 4, 5]
    assert [row[0] for row in steps_of(story, c)] == [1, 2, 3]


def test_pipelined_step_counts_from_the_first_token() -> None:
    """The second step is scheduled before the first token is known. It is neither prefill nor another request's prompt."""
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    first = story.scheduled(10, [b], prompt={b: 5})
    second = story.scheduled(12, [b, a], prompt={a: 40})
    story.done(20, first)
    third = story.scheduled(22, [b, a])
    story.done(50, second)
    fourth = story.scheduled(52, [b, a])
    story.done(60, third)
    story.done(70, fourth)
    for member in (a, b):
        story.ends(75, member)
    assert steps_of(story, b) == [
        (1, 10, 20, 1, 1, 0),
        (2, 20, 50, 1, 2, 40),
        (3, 22, 60, 1, 2, 0),
        (4, 52, 70, 1, 2, 0),
    ]
    assert steps_of(story, a) == [(2, 12, 50, 1, 2, 0), (3, 50, 60, 1, 2, 0), (4, 52, 70, 1, 2, 0)]
    assert [chunk.step for chunk in story.record(a).prefill_steps] == [2]
    assert "prefill step" not in story.tree()


def test_unfinished_step_delivers_nothing() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.scheduled(20, [a])
    story.step(30, 40, [a])
    story.scheduled(40, [a])
    story.ends(50, a)
    assert [row[0] for row in steps_of(story, a)] == [1, 3]
    assert story.record().output_tokens == 2


def test_discarded_results_are_counted_without_steps() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    last = story.scheduled(30, [a])
    overrun = story.scheduled(31, [a])
    story.done(40, last)
    story.finished(40, a, "length", tokens=3)
    story.done(50, overrun, {a: 0}, discarded=1)
    story.ends(60, a, chunks=3)
    assert [row[0] for row in steps_of(story, a)] == [1, 2, 3]
    assert story.span("decode")["attributes"][semconv.STEPS_DISCARDED] == 1
    assert ms(story.record().last_token_at) == 40


def test_preemption_with_offload_is_a_gap_in_decode() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [a, b])
    story.step(20, 30, [a, b])
    story.preempted(30, a, "offload")
    story.step(30, 40, [b])
    story.step(40, 50, [b])
    story.step(50, 60, [b, a])
    story.ends(61, a)
    story.ends(61, b)
    assert story.tree(a) == text("""
        POST /v1/chat/completions 0–61
          chat toy 0–61 · 5 → 3, 1 preemptions
            ingress 0–2
            tokenize 2–4
            queue 4–10
            prefill 10–20
            decode 20–60
              decode step 20–30 · step 2, batch 2
              decode step 50–60 · step 5, batch 2
            postprocess 60–61
    """)
    assert [row[5] for row in steps_of(story, b)] == [1, 0, 0, 0, 0], "no token is recomputed"


def test_recomputation_is_prompt_tokens_for_others_only() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [a, b], prompt={a: 100, b: 7})
    story.step(20, 30, [a, b])
    story.preempted(30, a, "recompute")
    story.step(30, 40, [b])
    story.step(40, 50, [b, a], prompt={a: 64}, delivered={a: 0})
    story.step(50, 60, [b, a], prompt={a: 38})
    story.step(60, 70, [b, a])
    story.ends(71, a)
    story.ends(71, b)
    assert steps_of(story, b) == [
        (1, 10, 20, 1, 2, 100),
        (2, 20, 30, 1, 2, 0),
        (3, 30, 40, 1, 1, 0),
        (4, 40, 50, 1, 2, 64),
        (5, 50, 60, 1, 2, 38),
        (6, 60, 70, 1, 2, 0),
    ]
    assert steps_of(story, a) == [
        (1, 10, 20, 1, 2, 7),
        (2, 20, 30, 1, 2, 0),
        (5, 50, 60, 1, 2, 0),
        (6, 60, 70, 1, 2, 0),
    ]
    assert [stage.name for stage in story.record(a).stages].count("prefill") == 1
    assert story.record(a).preemptions == 1
    assert len(story.record(a).prefill_steps) == 1


def test_preemption_during_prefill_continues_the_prefill() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [b, a], prompt={a: 50}, delivered={a: 0})
    story.preempted(20, a, "recompute")
    story.step(20, 30, [b])
    story.step(30, 40, [b, a], prompt={a: 90})
    story.ends(41, a)
    story.ends(41, b)
    assert [(chunk.step, chunk.tokens) for chunk in story.record(a).prefill_steps] == [(1, 50), (3, 90)]
    (prefill,) = [stage for stage in story.record(a).stages if stage.name == "prefill"]
    assert (ms(prefill.started_at), ms(prefill.ended_at)) == (10, 40)


def test_sequences_of_a_request_share_its_steps() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(1, a, input_tokens=8, sequences=2)
    story.step(10, 20, [a, a], prompt={a: 4})
    story.step(20, 30, [a, a])
    story.step(30, 40, [a])
    for at in (30, 40):
        story.finished(at, a)
    story.ends(41, a)
    assert story.tree() == text("""
        chat toy 0–41 · 8 → 5, 2 sequences
          queue 1–10
          prefill 10–20
          decode 20–40
            decode step 20–30 · step 2, 2 tokens, batch 2
            decode step 30–40 · step 3, batch 1
    """)


def test_sequences_forked_after_prefill_add_no_prompt() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.submitted(4, a, sequences=2)
    story.step(10, 20, [a, b], prompt={a: 64})
    story.step(20, 30, [a, b, a, a])
    story.step(30, 40, [a, b, a, a])
    story.ends(41, a)
    story.ends(41, b)
    assert [row[3] for row in steps_of(story, a)] == [1, 3, 3]
    assert [row[5] for row in steps_of(story, b)] == [64, 0, 0]


def test_second_prompt_counts_for_other_requests_only() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.submitted(5, a, input_tokens=30)
    story.step(10, 20, [a, b], prompt={a: 5})
    story.step(20, 30, [a, b, a], tokens={2: 20}, delivered=None)
    story.step(30, 40, [a, b, a])
    story.ends(41, a)
    story.ends(41, b)
    assert [row[5] for row in steps_of(story, b)] == [5, 20, 0]
    assert [row[5] for row in steps_of(story, a)] == [1, 0, 0]
    assert story.record(a).input_tokens == 35
    assert story.record(a).sequences == 2


def test_fastest_sequence_sets_the_first_token_time() -> None:
    """Its sibling is still in its prompt."""
    story = Story()
    a, b = story.arrives(0, http=False), streamed(story, 1, "b")
    story.submitted(1, a, input_tokens=8, sequences=2)
    first = story.scheduled(10, [b, a, a], tokens={1: 4, 2: 300})
    story.done(20, first, tokens={2: 0})
    story.step(20, 30, [b, a, a], tokens={2: 100})
    story.step(30, 40, [b, a, a])
    story.ends(41, a)
    story.ends(41, b)
    assert ms(story.record(a).first_token_at) == 20
    assert [row[3] for row in steps_of(story, a)] == [1, 2, 2]
    assert [row[5] for row in steps_of(story, b)] == [304, 100, 0]
    assert story.record(a).discarded == 0


def test_speculative_decoding_delivers_several_tokens_per_step() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a], prompt={a: 5})
    story.step(20, 30, [a], prompt={a: 4}, delivered={a: 3})
    story.step(30, 40, [a], prompt={a: 4})
    story.step(40, 50, [a], prompt={a: 4}, delivered={a: 4})
    story.ends(51, a)
    assert [row[3] for row in steps_of(story, a)] == [1, 3, 1, 4]
    record = story.record()
    assert record.output_tokens == 9
    assert len(record.prefill_steps) == 1
    assert "· step 2, 3 tokens, batch 1" in story.tree()


def test_kv_utilization_is_recorded_per_stage() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a], kv=(3, 10))
    story.step(20, 30, [a], kv=(5, 10))
    story.step(30, 40, [a], kv=(9, 10))
    story.ends(41, a)
    assert story.span("prefill")["attributes"] == {semconv.KV_UTILIZATION_START: 0.3}
    decode = story.span("decode")["attributes"]
    assert (decode[semconv.KV_UTILIZATION_START], decode[semconv.KV_UTILIZATION_END]) == (0.5, 0.9)


def test_request_without_tokens_has_no_decode() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a, input_tokens=6)
    story.step(10, 30, [a], prompt={a: 6}, delivered={a: 0})
    story.finished(30, a)
    story.ends(34, a)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–34
          chat toy 0–34 · 6 → 0
            ingress 0–4
            queue 4–10
            prefill 10–30
            postprocess 30–34
    """)


# ── outcome ──────────────────────────────────────────────────────────────────────────────────────────────────────


def abort_in_stage(story: Story, stage: str) -> None:
    """Aborts a request at 100 ms in this stage, while the engine continues."""
    a = story.arrives(0)
    if stage == "ingress":
        return story.aborts(100, a)
    story.stage("tokenize", 10, 120 if stage == "tokenize" else 12, a)
    if stage == "tokenize":
        return story.aborts(100, a)
    story.submitted(20, a)
    if stage == "queue":
        story.step(110, 120, [a])
        story.finished(125, a, "abort", tokens=1)
        return story.aborts(100, a)
    if stage == "prefill":
        story.step(30, 40, [a], prompt={a: 9}, delivered={a: 0})
        story.step(40, 110, [a], prompt={a: 9})
        story.finished(125, a, "abort", tokens=1)
        return story.aborts(100, a)
    story.step(30, 40, [a])
    story.step(40, 80, [a])
    if stage == "decode":
        story.step(80, 110, [a])
        story.finished(115, a, "abort", tokens=3)
        return story.aborts(100, a)
    story.finished(80, a, "length", tokens=2)
    return story.aborts(100, a)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("ingress", "ingress 0–100"),
        ("tokenize", "ingress 0–10\ntokenize 10–100"),
        ("queue", "ingress 0–10\ntokenize 10–12\nqueue 20–100"),
        ("prefill", "ingress 0–10\ntokenize 10–12\nqueue 20–30\nprefill 30–100"),
        ("decode", "ingress 0–10\ntokenize 10–12\nqueue 20–30\nprefill 30–40\ndecode 40–100"),
        (
            "postprocess",
            "ingress 0–10\ntokenize 10–12\nqueue 20–30\nprefill 30–40\ndecode 40–80\npostprocess 80–100",
        ),
    ],
)
@pytest.mark.parametrize("error", ["client_disconnect", "timeout", "cancelled"])
def test_failed_stage_is_the_current_stage(stage: str, expected: str, error: str) -> None:
    story = Story()
    abort_in_stage(story, stage)
    story.recorded_events = [
        recorded._replace(event=recorded.event._replace(error_type=error))
        if isinstance(recorded.event, events.RequestEnded)
        else recorded
        for recorded in story.recorded_events
    ]
    record = story.record()
    assert (record.failed_stage, record.error_type) == (stage, error)
    stages = "\n".join(f"{s.name} {ms(s.started_at):g}–{ms(s.ended_at):g}" for s in record.stages)
    assert stages == expected


def test_tokens_computed_after_the_end_are_excluded() -> None:
    story = Story()
    abort_in_stage(story, "decode")
    record = story.record()
    assert [row[0] for row in steps_of(story, RequestHandle("a", PROCESS, 1))] == [1, 2]
    assert record.output_tokens == 2
    assert ms(record.last_token_at) == 80


def test_abort_before_the_first_token_has_none() -> None:
    for stage in ("queue", "prefill"):
        story = Story()
        abort_in_stage(story, stage)
        record = story.record()
        assert (record.first_token_at, record.steps, record.output_tokens) == (0, None, 0)


def test_engine_failure_sets_the_failed_stage() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    story.finished(35, a, "error", tokens=2)
    story.ends(36, a, events.ERROR, "OutOfMemoryError", status=500)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–36 · OutOfMemoryError, ERROR
          chat toy 0–36 · 5 → 2, OutOfMemoryError, died in decode, ERROR
            ingress 0–2
            tokenize 2–4
            queue 4–10
            prefill 10–20
            decode 20–36
              decode step 20–30 · step 2, batch 1
    """)


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_engine_abort_with_complete_response_is_aborted(stage: str) -> None:
    """Its response completed, and the engine may have stopped only afterwards."""
    story = Story()
    a = streamed(story)
    if stage != "queue":
        story.step(10, 20, [a], prompt={a: 5}, delivered={a: 0} if stage == "prefill" else None)
    story.finished(41, a, "abort")
    story.ends(40, a)
    record, request = story.record(), story.span("chat toy")
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ABORTED, "", stage)
    assert [s.name for s in record.stages][-1] == stage
    assert (request["status"], semconv.ERROR_TYPE in request["attributes"]) == (0, False)


def test_engine_error_with_complete_response_is_an_error() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.finished(30, a, "error", tokens=1)
    story.ends(40, a)
    record = story.record()
    assert (record.outcome, record.error_type, record.failed_stage) == (events.ERROR, "_OTHER", "decode")


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_one_aborted_sequence_leaves_the_request_ok(reason: str) -> None:
    story = Story()
    a = story.arrives(0)
    story.add_request_event(a, events.RequestSubmitted(ns(2), 2, 5, 0, "toy"))
    story.step(10, 20, [a])
    story.finished(15, a, reason)
    story.finished(20, a, "stop", tokens=1)
    story.ends(22, a)
    assert story.record().outcome == events.OK


def test_abort_reason_overrides_the_engine_outcome() -> None:
    story = Story()
    a = streamed(story)
    story.finished(20, a, "abort")
    story.ends(21, a, events.ABORTED, "timeout")
    assert (story.record().outcome, story.record().error_type) == (events.ABORTED, "timeout")


def test_innermost_custom_stage_is_the_failed_stage() -> None:
    story = Story()
    a = story.arrives(0, operation="")
    story.stage("retrieve", 1, 3, a)
    story.stage("rerank", 5, 8.99, a)
    story.stage("pipeline", 4, 8.995, a)
    story.ends(9, a, events.ERROR, "ValueError", status=500)
    assert story.record().failed_stage == "rerank"


@pytest.mark.parametrize(("left_at", "expected"), [(8, ""), (3.5, "forward"), (2.5, "forward")])
def test_a_client_that_leaves_between_stages_leaves_none(left_at: float, expected: str) -> None:
    """At 2.5 ms the model runs; at 3.5 ms a cancellation may have ended it; at 8 ms the handler does something else."""
    story = Story()
    a = story.arrives(0, operation="")
    story.stage("forward", 2, 3, a)
    story.ends(left_at, a, events.ABORTED, "client_disconnect")
    assert story.record().failed_stage == expected


def test_failure_outside_stages_has_no_failed_stage() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.ends(9, a, events.ERROR, "ValueError")
    assert story.record().failed_stage == ""
    assert semconv.FAILED_STAGE not in story.span("chat toy")["attributes"]


@pytest.mark.parametrize(
    ("outcome", "error", "status"),
    [
        (events.OK, "", 0),
        (events.ABORTED, "", 0),
        (events.ABORTED, "client_disconnect", 0),
        (events.ABORTED, "cancelled", 0),
        (events.ABORTED, "timeout", 2),
        (events.ERROR, "ValueError", 2),
        (events.ERROR, "process_died", 2),
    ],
)
def test_span_status_is_error_for_server_faults_only(outcome: int, error: str, status: int) -> None:
    story = Story()
    a = streamed(story)
    story.ends(20, a, outcome, error)
    for name in ("chat toy", "POST /v1/chat/completions"):
        span = story.span(name)
        assert (span["status"], span["attributes"].get("error.type", "")) == (status, error)


def test_process_death_ends_its_requests() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    other = story.arrives(0, "other", http=False, process=2)
    story.step(10, 20, [a])
    story.add_event(PROCESS, 0, events.ProcessDied(ns(50)))
    story.ends(60, other)
    assert {record.failed_stage: record.error_type for record in story.records()} == {
        "decode": "process_died",
        "queue": "process_died",
        "": "",
    }
    assert ms(story.record(b).ended_at) == 50


def test_first_end_counts() -> None:
    story = Story()
    a = streamed(story)
    story.ends(20, a)
    story.aborts(30, a)
    story.add_event(PROCESS, 0, events.ProcessDied(ns(40)))
    assert [(record.outcome, ms(record.ended_at)) for record in story.records()] == [(events.OK, 20)]


# ── late events ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_last_step_reported_late_ends_with_the_request() -> None:
    """Another thread sends the last byte before the engine's thread reports the end of the step."""
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    step = story.scheduled(20, [a])
    story.ends(30, a, chunks=2)
    story.done(30.2, step)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–30
          chat toy 0–30 · 5 → 2
            ingress 0–2
            tokenize 2–4
            queue 4–10
            prefill 10–20
            decode 20–30
              decode step 20–30 · step 2, batch 1
    """)


def test_only_step_reported_late_ends_with_the_request() -> None:
    story = Story()
    a = streamed(story)
    step = story.scheduled(10, [a])
    story.ends(30, a)
    story.done(30.2, step)
    record = story.record()
    assert (ms(record.first_token_at), record.output_tokens) == (30, 1)
    assert [stage.name for stage in record.stages] == ["ingress", "tokenize", "queue", "prefill"]


def test_step_begun_after_success_delivers_nothing() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.ends(30, a)
    story.step(31, 40, [a])
    assert [row[0] for row in steps_of(story, a)] == [1]


# ── lost events ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_decode_steps_leave_a_gap() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    for at in (30, 40, 50):
        story.scheduled(at, [a], lost=True)
    story.steps_lost(30)
    story.keyframe_next()
    story.step(60, 70, [a])
    story.step(70, 80, [a])
    story.ends(90, a, chunks=7)
    assert story.tree() == text("""
        POST /v1/chat/completions 0–90
          chat toy 0–90 · 5 → 0, telemetry lost
            ingress 0–2
            tokenize 2–4
            queue 4–10
            prefill 10–20
            decode 20–80
              decode step 20–30 · step 2, batch 1
              decode step 60–70 · step 6, batch 1
              decode step 70–80 · step 7, batch 1
            postprocess 80–90
    """)
    assert story.span("decode")["attributes"][semconv.ITL_MAX] == pytest.approx(0.010), (
        "the loss is not an inter-token gap"
    )


def test_engine_token_count_survives_lost_steps() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.scheduled(20, [a], lost=True)
    story.steps_lost(21)
    story.finished(30, a, tokens=2)
    story.ends(31, a, chunks=2)
    record = story.record()
    assert record.output_tokens == 2
    assert [(stage.name, ms(stage.ended_at)) for stage in record.stages][-2:] == [
        ("decode", 30),
        ("postprocess", 31),
    ]


def test_lost_last_steps_hide_the_last_token() -> None:
    story = Story()
    a = streamed(story)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    story.scheduled(30, [a], lost=True)
    story.steps_lost(31)
    story.ends(50, a, chunks=3)
    assert [stage.name for stage in story.record().stages] == ["ingress", "tokenize", "queue", "prefill"]


def test_steps_lost_in_the_queue_hide_its_end() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [b])
    story.scheduled(20, [b, a], {a: 64}, lost=True)
    story.steps_lost(25)
    story.keyframe_next()
    story.step(30, 40, [b, a])
    story.step(40, 50, [b, a])
    story.ends(60, a, chunks=3)
    story.ends(60, b, chunks=3)
    record = story.record(a)
    assert [stage.name for stage in record.stages] == ["ingress", "tokenize", "postprocess"]
    assert (record.telemetry_lost, record.first_token_at) == (True, 0)
    assert [row[5] for row in steps_of(story, b)] == [0, 0, 0]


def test_first_token_begins_decode_after_lost_steps() -> None:
    story = Story()
    a = streamed(story)
    story.scheduled(10, [a], lost=True)
    story.steps_lost(15)
    story.add_request_event(a, events.TokenReached(ns(21)))
    story.keyframe_next()
    story.step(20, 30, [a])
    story.step(30, 40, [a])
    story.ends(45, a, chunks=3)
    assert story.tree().splitlines()[4:] == [
        "    decode 21–40",
        "      decode step 30–40 · step 3, batch 1",
        "    postprocess 40–45",
    ]
    assert story.record().ttft_ns == 21 * MS


def test_prompt_begun_after_a_loss_is_counted() -> None:
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [b])
    story.scheduled(20, [b], lost=True)
    story.steps_lost(25)
    story.keyframe_next()
    story.step(30, 40, [b, a], {a: 64}, {a: 0})
    story.step(40, 50, [b, a], {a: 32})
    story.step(50, 60, [b, a])
    story.ends(61, a)
    story.ends(61, b)
    assert [row[5] for row in steps_of(story, b)] == [0, 64, 32, 0]
    assert [row[0] for row in steps_of(story, a)] == [4, 5]


def test_loss_reported_late_corrects_earlier_steps() -> None:
    """The reader dates a loss when it notices it, which can be after steps that it reads later."""
    story = Story()
    a, b = streamed(story), streamed(story, 1, "b")
    story.step(10, 20, [b])
    story.scheduled(20, [b, a], {a: 64}, lost=True)
    story.step(30, 40, [b, a], keyframe=True)
    story.steps_lost(45)
    story.keyframe_next()
    story.step(50, 60, [b, a])
    story.ends(70, a)
    story.ends(70, b)
    record = story.record(a)
    assert record.telemetry_lost
    assert [stage.name for stage in record.stages] == ["ingress", "tokenize", "postprocess"]
    assert story.record(b).find_stage("queue") is not None


def test_lost_events_hide_the_ingress_duration() -> None:
    story = Story()
    a = story.arrives(0)
    story.add_event(PROCESS, 0, events.EventsLost(ns(8), 3, 0))
    story.submitted(10, a)
    story.step(20, 30, [a])
    story.ends(40, a)
    assert [stage.name for stage in story.record().stages] == ["queue", "prefill", "postprocess"]
    assert story.record().telemetry_lost


def test_loss_before_an_abort_hides_the_last_stage() -> None:
    story = Story()
    a = streamed(story)
    story.add_event(PROCESS, 0, events.EventsLost(ns(8), 3, 0))
    story.aborts(50, a)
    record = story.record()
    assert [stage.name for stage in record.stages] == ["ingress", "tokenize"]
    assert record.failed_stage == "queue"


def test_request_recovered_after_a_crash_is_an_inference() -> None:
    story = Story()
    trace_id, span_id = ids("a")
    recovered = events.LiveRecovered(BASE, WALL, trace_id, span_id, ids("caller")[1], events.SAMPLED)
    story.add_event(PROCESS, 7, recovered)
    story.add_event(PROCESS, 0, events.ProcessDied(ns(50)))
    assert story.tree() == "inference 0–50 · process_died, telemetry lost, ERROR"
    assert story.spans()[0]["parent_span_id"] == ids("caller")[1].hex()
