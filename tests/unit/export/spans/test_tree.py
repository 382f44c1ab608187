"""The spans of one record: names, parents, ids, status and attributes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.export.sampling.tail_sampler import Decision, TailSampler
from otel_infer.export.spans import tree
from otel_infer.ringbuffer.events import (
    SAMPLED,
    CodeLocated,
    HttpDescribed,
    RequestArrived,
    SpanEventAdded,
    StageEnded,
    StateCarried,
)
from tests.support.story import MS, PROCESS, WALL, RequestHandle, Story, ids, ns, text

ALL = Decision(True, 1 << 30, "all", True)


def served(story: Story, name: str = "a", **more: Any) -> RequestHandle:
    """A request of 4 tokens: queued 4–10 ms, prefill to 30, decode to 70."""
    member = story.arrives(0, name, **more)
    story.submitted(4, member, input_tokens=5, max_tokens=8)
    story.step(10, 30, [member], {member: 5})
    for at, until in ((30, 40), (40, 65), (65, 70)):
        story.step(at, until, [member])
    story.finished(70, member, "length", tokens=4)
    story.ends(80, member, chunks=4)
    return member


def attributes(story: Story, name: str) -> dict[str, Any]:
    attributes: dict[str, Any] = story.span(name)["attributes"]
    return attributes


# ── which span has which attributes ──────────────────────────────────────────────────────────────────────────────


def test_usage_attributes_are_on_the_request_span_only() -> None:
    story = Story()
    served(story)
    assert attributes(story, "chat toy") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "infer.engine": "toy",
        "infer.time_to_first_token": 0.030,
        "infer.keep.reason": "all",
    }
    assert sum("gen_ai.usage.output_tokens" in span["attributes"] for span in story.spans()) == 1


def test_http_attributes_are_on_the_server_span() -> None:
    story = Story()
    served(story)
    assert attributes(story, "POST /v1/chat/completions") == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
    }


def test_http_attributes_move_to_the_request_span() -> None:
    """Another library has the server span."""
    story = Story()
    a = served(story, http=False)
    story.add_request_event(a, HttpDescribed(ns(1), "POST", "https", "/chat"))
    assert attributes(story, "chat toy")["url.scheme"] == "https"


def test_decode_has_statistics_of_all_its_steps() -> None:
    story = Story()
    served(story)
    assert attributes(story, "decode") == {
        "infer.steps.count": 3,
        "infer.steps.duration.sum": pytest.approx(0.040),
        "infer.steps.duration.p50": pytest.approx(0.010),
        "infer.steps.duration.p95": pytest.approx(0.0235),
        "infer.steps.duration.max": pytest.approx(0.025),
        "infer.steps.slowest.id": 3,
        "infer.inter_token_latency.max": pytest.approx(0.025),
        "infer.batch.size.max": 1,
    }


def test_trace_state_is_on_all_spans_except_steps() -> None:
    story = Story()
    a = served(story)
    story.add_request_event(a, StateCarried(ns(0), "ot=th:8"))
    spans = tree.build_request_spans(story.record(), ALL)
    assert {span.trace_state for span in spans} == {"ot=th:8"}
    assert len(spans) == 8


def test_device_stage_has_the_clock_attribute() -> None:
    story = Story()
    a = served(story)
    story.add_request_event(a, StageEnded(ns(9), ns(5), "h2d", 0))
    assert attributes(story, "h2d") == {"infer.clock": "host"}
    assert "infer.clock" not in attributes(story, "queue")


def test_finish_reasons_match_the_finished_sequences() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(1, a, sequences=3)
    story.step(10, 20, [a, a, a])
    for reason in ("stop", "length", "stop"):
        story.finished(20, a, reason, tokens=1)
    story.ends(21, a)
    assert attributes(story, "chat toy")[semconv.RESPONSE_FINISH_REASONS] == ["stop", "length", "stop"]


def test_unsampled_exported_request_is_marked() -> None:
    story = Story()
    served(story, flags=0)
    sampler = TailSampler("auto", 2000, keep_unsampled=True, ratio=False)
    assert "chat toy 0–80 · 5 → 4, unsampled" in story.tree(sampler=sampler)
    story = Story()
    story.ends(3, story.arrives(0, operation="", flags=0))
    assert story.tree(sampler=sampler) == "POST /health 0–3 · unsampled"


def test_latency_attributes_have_vllm_semantics() -> None:
    story = Story()
    served(story)
    (request,) = [span for span in story.spans(latency=True) if span["name"] == "chat toy"]
    latency = {
        key: value for key, value in request["attributes"].items() if key.startswith("gen_ai.latency.")
    }
    assert latency == {
        "gen_ai.latency.time_in_queue": 0.006,
        "gen_ai.latency.time_in_model_prefill": 0.020,
        "gen_ai.latency.time_in_model_decode": 0.040,
        "gen_ai.latency.time_to_first_token": 0.030,
        "gen_ai.latency.e2e": 0.080,
    }
    assert not any(
        "latency." in key for span in story.spans() for key in span["attributes"] if key.startswith("gen_ai")
    )


def test_absent_stage_has_no_latency_attribute() -> None:
    story = Story()
    story.aborts(30, story.arrives(0, http=False))
    (request,) = story.spans(latency=True)
    assert [key for key in request["attributes"] if key.startswith("gen_ai.latency.")] == [
        "gen_ai.latency.e2e"
    ]


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("method", "route", "name"),
    [
        ("POST", "/chat", "POST /chat"),
        ("POST", "", "POST"),
        ("_OTHER", "/chat", "HTTP /chat"),
        ("_OTHER", "", "HTTP"),
    ],
)
def test_server_span_name_follows_the_semantic_conventions(method: str, route: str, name: str) -> None:
    for operation in ("", "chat"):
        story = Story()
        a = story.arrives(0, operation=operation)
        arrived = story.recorded_events[-1 if not operation else -3]
        story.recorded_events = [
            recorded._replace(event=recorded.event._replace(name=method))
            if isinstance(recorded.event, RequestArrived)
            else recorded
            for recorded in story.recorded_events
            if not isinstance(recorded.event, HttpDescribed)
        ]
        story.add_request_event(a, HttpDescribed(arrived.event.at, method, "http", route))
        story.ends(10, a)
        assert [span["name"] for span in story.spans() if span["kind"] == 2] == [name]


def test_request_without_stages_is_named_after_its_method() -> None:
    """Below another library's server span. It is exported because spans of databases and clients may be its children."""
    story = Story()
    a = story.arrives(0, operation="")
    story.recorded_events = [
        recorded._replace(event=recorded.event._replace(flags=SAMPLED, name="_OTHER"))
        if isinstance(recorded.event, RequestArrived)
        else recorded
        for recorded in story.recorded_events
        if not isinstance(recorded.event, HttpDescribed)
    ]
    story.ends(3, a)
    (span,) = story.spans()
    assert (span["name"], span["kind"], span["span_id"]) == ("HTTP", 1, ids("a")[1].hex())


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_repeated_export_gives_the_same_spans() -> None:
    story = Story()
    served(story)
    assert story.spans() == story.spans()


def test_span_ids_are_unique_and_parents_enclose_children() -> None:
    story = Story()
    for name in "abc":
        member = served(story, name)
        for at in (71, 72, 73):
            story.stage("rerank", at, at + 1, member)
    spans = story.spans()
    by_id = {span["span_id"]: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        parent = by_id.get(span["parent_span_id"])
        if span["kind"] == 2:
            assert span["parent_span_id"] == ids("caller")[1].hex()
        else:
            assert parent is not None
            assert parent["trace_id"] == span["trace_id"]
            assert parent["start"] <= span["start"] <= span["end"] <= parent["end"]


@given(st.binary(min_size=8, max_size=8), st.text(max_size=9), st.integers(0, 70))
def test_derived_ids_are_unique_nonzero_eight_bytes(span_id: bytes, name: str, count: int) -> None:
    derived = tree.derive_span_ids(span_id, name, count)
    assert len(derived) == len(set(derived)) == count
    assert all(len(derived_id) == 8 and any(derived_id) for derived_id in derived)
    assert derived == tree.derive_span_ids(span_id, name, count + 1)[:count]
    assert not set(derived) & set(tree.derive_span_ids(span_id, f"{name}!", count))


def test_span_times_are_wall_clock_times() -> None:
    story = Story()
    served(story)
    span = story.span("prefill")
    assert (span["start"], span["end"]) == (WALL + 10 * MS, WALL + 30 * MS)


def test_prefill_chunks_are_spans_only_if_decided() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.step(10, 20, [a], {a: 64}, {a: 0})
    story.step(20, 30, [a], {a: 64})
    story.step(30, 40, [a])
    story.ends(40, a)
    record = story.record()
    with_chunks = [span.name for span in tree.build_request_spans(record, ALL)]
    without = [span.name for span in tree.build_request_spans(record, ALL._replace(prefill_steps=False))]
    assert with_chunks == ["chat toy", "prefill", "prefill step", "prefill step", "decode"]
    assert without == ["chat toy", "prefill", "decode"]


def test_repeated_stages_share_the_steps_without_duplicates() -> None:
    """A hand-written loop may record a stage for each chunk of a prompt, and for each token."""
    story = Story()
    a = story.arrives(0, http=False)
    story.step(10, 20, [a], {a: 64}, {a: 0})
    story.step(30, 40, [a], {a: 64}, {a: 0})
    story.step(45, 48, [a], {a: 8})
    story.step(50, 60, [a])
    story.step(70, 80, [a])
    for name, began, ended in (
        ("prefill", 9, 21),
        ("prefill", 29, 41),
        ("decode", 49, 61),
        ("decode", 69, 81),
    ):
        story.stage(name, began, ended, a)
    story.ends(90, a)
    assert story.tree() == text(
        """
        chat toy 0–90 · 0 → 3
          prefill 9–21
            prefill step 10–20 · step 1, 64 tokens, batch 1
            prefill step 45–48 · step 3, 8 tokens, batch 1
          prefill 29–41
            prefill step 30–40 · step 2, 64 tokens, batch 1
          decode 49–61
            decode step 50–60 · step 4, batch 1
            decode step 70–80 · step 5, batch 1
          decode 69–81
        """
    )
    spans = story.spans()
    assert len({span["span_id"] for span in spans}) == len(spans)
    counts = [span["attributes"].get("infer.steps.count") for span in spans if span["name"] == "decode"]
    assert counts == [2, None]


# ── pauses ───────────────────────────────────────────────────────────────────────────────────────────────────────


def events(story: Story, name: str = "chat toy") -> list[tuple[str, float, float]]:
    """Returns (cause, start, duration) of each pause event, in ms."""
    return [
        (
            event["attributes"]["infer.pause.cause"],
            (event["at"] - WALL) / MS,
            round(event["attributes"]["infer.pause.duration"] * 1e3, 6),
        )
        for event in story.span(name)["events"]
        if event["name"] == "infer.pause"
    ]


def test_exported_request_has_pause_events() -> None:
    story = Story()
    served(story)
    story.paused(42, 60, "gc")
    story.paused(5, 9, "compile")
    story.paused(90, 95, "gc")
    assert events(story) == [("compile", 5, 4), ("gc", 42, 18)]
    assert [span["name"] for span in story.spans() if span["events"]] == ["chat toy"]


def test_mark_event_has_its_time_window() -> None:
    story = Story()
    served(story)
    story.marked(10, 60, "allocator_retry", 3)
    (event,) = [event for span in story.spans() for event in span["events"]]
    assert event["name"] == "infer.mark"
    assert event["attributes"] == {
        "infer.mark.name": "allocator_retry",
        "infer.mark.count": 3,
        "infer.mark.window": 0.05,
    }


def test_event_loop_pause_is_an_event() -> None:
    story = Story()
    served(story)
    story.paused(42, 70, "event_loop")
    assert events(story) == [("event_loop", 42, 28)]


def located(at: float, since: float, reason: str, waiter: str = "") -> CodeLocated:
    return CodeLocated(ns(at), ns(since), reason, "lookup", "/srv/app.py", 31, "", waiter, "")


def test_a_pause_of_the_loop_has_the_code_that_blocked_it() -> None:
    story = Story()
    served(story)
    story.paused(42, 70, "event_loop")
    story.paused(20, 25, "gc")
    story.add_event(PROCESS, 0, located(68, 43, "event_loop"))
    gc, loop = (event["attributes"] for event in story.span("chat toy")["events"])
    assert "code.function.name" not in gc
    assert loop == {
        "infer.pause.cause": "event_loop",
        "infer.pause.duration": 0.028,
        "code.function.name": "lookup",
        "code.file.path": "/srv/app.py",
        "code.line.number": 31,
    }


def test_the_code_of_a_late_request_is_an_event_of_that_request_alone() -> None:
    story = Story()
    served(story, "a")
    b = served(story, "b")
    story.add_event(PROCESS, b.handle, located(60, 10, "request", waiter="handle /srv/app.py:40"))
    (event,) = [event for span in story.spans() for event in span["events"]]
    assert event["attributes"]["infer.pause.cause"] == "request"
    assert event["attributes"]["infer.pause.duration"] == 0.05
    assert event["attributes"]["infer.code.waiter"] == "handle /srv/app.py:40"
    assert [len(span["events"]) for span in story.spans() if span["name"] == "chat toy"] in ([0, 1], [1, 0])


def test_code_before_or_after_a_request_is_not_its_own() -> None:
    story = Story()
    served(story)
    story.add_event(PROCESS, 0, located(-1, -30, "event_loop"))
    story.add_event(PROCESS, 0, located(300, 250, "step"))
    assert events(story) == []


def test_pause_event_is_clipped_to_the_request() -> None:
    story = Story()
    served(story)
    story.paused(-10, 3, "throttled")
    story.paused(75, 100, "gc")
    assert events(story) == [("throttled", 0, 3), ("gc", 75, 5)]


def test_longest_pauses_are_exported_and_others_counted() -> None:
    story = Story()
    a = story.arrives(0)
    for number in range(40):
        story.paused(10 * number, 10 * number + (1 + number % 5))
    story.ends(500, a)
    pauses = events(story)
    assert len(pauses) == 32
    assert [at for _, at, _ in pauses] == sorted(at for _, at, _ in pauses)
    assert [length for _, _, length in pauses].count(1) == 0
    assert attributes(story, "chat toy")["infer.pauses.dropped"] == 8


def test_unsampled_request_has_no_pause_events() -> None:
    story = Story()
    served(story)
    story.paused(42, 60)
    spans = story.spans(TailSampler("off", 0, keep_unsampled=False, ratio=False))
    assert [span["events"] for span in spans] == [[]] * len(spans)


def test_pause_and_user_events_are_ordered_by_time() -> None:
    story = Story()
    a = served(story)
    story.paused(42, 60)
    for at, name in ((50, "after"), (10, "before")):
        story.add_request_event(a, SpanEventAdded(ns(at), name, {}))
    assert [event["name"] for event in story.span("chat toy")["events"]] == ["before", "infer.pause", "after"]
