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
    HttpDescribed,
    RequestArrived,
    SpanEventAdded,
    StageEnded,
    StateCarried,
)
from tests.support.story import MS, WALL, Story, Who, ids, ns, text

ALL = Decision(True, 1 << 30, "all", True)


def served(story: Story, name: str = "a", **more: Any) -> Who:
    """A request of 4 tokens: queued 4–10 ms, prefill to 30, decode to 70."""
    who = story.arrives(0, name, **more)
    story.submitted(4, who, input_tokens=5, max_tokens=8)
    story.step(10, 30, [who], {who: 5})
    for at, until in ((30, 40), (40, 65), (65, 70)):
        story.step(at, until, [who])
    story.finished(70, who, "length", tokens=4)
    story.ends(80, who, chunks=4)
    return who


def attributes(story: Story, name: str) -> dict[str, Any]:
    said: dict[str, Any] = story.span(name)["attributes"]
    return said


# ── what stands where ────────────────────────────────────────────────────────────────────────────────────────────


def test_usage_and_everything_about_the_request_stand_on_the_request_span_alone() -> None:
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


def test_what_is_http_stands_on_the_server_span() -> None:
    story = Story()
    served(story)
    assert attributes(story, "POST /v1/chat/completions") == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.scheme": "http",
    }


def test_below_somebody_elses_server_span_what_is_http_stands_on_the_request() -> None:
    story = Story()
    a = served(story, http=False)
    story.state(a, HttpDescribed(ns(1), "POST", "https", "/chat"))
    assert attributes(story, "chat toy")["url.scheme"] == "https"


def test_a_decode_has_figures_of_all_its_steps() -> None:
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


def test_the_callers_trace_state_is_carried_by_every_span_but_the_steps() -> None:
    story = Story()
    a = served(story)
    story.state(a, StateCarried(ns(0), "ot=th:8"))
    spans = tree.build_request_spans(story.record(), ALL)
    assert {span.trace_state for span in spans} == {"ot=th:8"}
    assert len(spans) == 8


def test_a_stage_of_the_device_says_by_whose_clock_it_was_timed() -> None:
    story = Story()
    a = served(story)
    story.state(a, StageEnded(ns(9), ns(5), "h2d", 0))
    assert attributes(story, "h2d") == {"infer.clock": "host"}
    assert "infer.clock" not in attributes(story, "queue")


def test_a_request_has_as_many_finish_reasons_as_sequences_that_finished() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.submitted(1, a, sequences=3)
    story.step(10, 20, [a, a, a])
    for reason in ("stop", "length", "stop"):
        story.finished(20, a, reason, tokens=1)
    story.ends(21, a)
    assert attributes(story, "chat toy")[semconv.RESPONSE_FINISH_REASONS] == ["stop", "length", "stop"]


def test_what_was_exported_though_not_sampled_is_marked() -> None:
    story = Story()
    served(story, flags=0)
    keeps = TailSampler("auto", 2000, keep_unsampled=True, ratio=False)
    assert "chat toy 0–80 · 5 → 4, unsampled" in story.tree(keeps=keeps)
    story = Story()
    story.ends(3, story.arrives(0, operation="", flags=0))
    assert story.tree(keeps=keeps) == "POST /health 0–3 · unsampled"


def test_names_of_vllm_and_sglang_have_the_meaning_of_vllm() -> None:
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


def test_a_stage_that_a_request_did_not_have_has_no_latency_either() -> None:
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
def test_a_server_span_is_named_as_the_conventions_say(method: str, route: str, name: str) -> None:
    for operation in ("", "chat"):
        story = Story()
        a = story.arrives(0, operation=operation)
        arrived = story.said[-1 if not operation else -3]
        story.said = [
            said._replace(event=said.event._replace(name=method))
            if isinstance(said.event, RequestArrived)
            else said
            for said in story.said
            if not isinstance(said.event, HttpDescribed)
        ]
        story.state(a, HttpDescribed(arrived.event.at, method, "http", route))
        story.ends(10, a)
        assert [span["name"] for span in story.spans() if span["kind"] == 2] == [name]


def test_below_another_server_span_a_request_that_reached_nothing_has_the_name_of_its_method() -> None:
    """It is there because spans of databases and clients may lie below it."""
    story = Story()
    a = story.arrives(0, operation="")
    story.said = [
        said._replace(event=said.event._replace(flags=SAMPLED, name="_OTHER"))
        if isinstance(said.event, RequestArrived)
        else said
        for said in story.said
        if not isinstance(said.event, HttpDescribed)
    ]
    story.ends(3, a)
    (span,) = story.spans()
    assert (span["name"], span["kind"], span["span_id"]) == ("HTTP", 1, ids("a")[1].hex())


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sending_again_sends_the_same_spans() -> None:
    story = Story()
    served(story)
    assert story.spans() == story.spans()


def test_every_span_has_an_id_of_its_own_and_a_parent_that_is_there_and_around_it() -> None:
    story = Story()
    for name in "abc":
        who = served(story, name)
        for at in (71, 72, 73):
            story.stage("rerank", at, at + 1, who)
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
def test_derived_ids_are_eight_bytes_never_zero_and_all_different(
    span_id: bytes, of: str, count: int
) -> None:
    derived = tree.derive_span_ids(span_id, of, count)
    assert len(derived) == len(set(derived)) == count
    assert all(len(one) == 8 and any(one) for one in derived)
    assert derived == tree.derive_span_ids(span_id, of, count + 1)[:count]
    assert not set(derived) & set(tree.derive_span_ids(span_id, f"{of}!", count))


def test_times_are_wall_times() -> None:
    story = Story()
    served(story)
    span = story.span("prefill")
    assert (span["start"], span["end"]) == (WALL + 10 * MS, WALL + 30 * MS)


def test_chunks_are_spans_only_where_that_was_decided() -> None:
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


def test_stages_of_one_name_share_the_steps_and_each_is_told_once() -> None:
    """A hand-written loop may say a stage for each chunk of a prompt, and for each token."""
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
    """(cause, when, how long), ms."""
    return [
        (
            event["attributes"]["infer.pause.cause"],
            (event["at"] - WALL) / MS,
            round(event["attributes"]["infer.pause.duration"] * 1e3, 6),
        )
        for event in story.span(name)["events"]
        if event["name"] == "infer.pause"
    ]


def test_a_kept_request_says_what_held_it_up() -> None:
    story = Story()
    served(story)
    story.paused(42, 60, "gc")
    story.paused(5, 9, "compile")
    story.paused(90, 95, "gc")
    assert events(story) == [("compile", 5, 4), ("gc", 42, 18)]
    assert [span["name"] for span in story.spans() if span["events"]] == ["chat toy"]


def test_a_mark_is_an_event_that_says_how_long_before_it_may_have_been() -> None:
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


def test_a_pause_of_the_event_loop_is_an_event_too() -> None:
    story = Story()
    served(story)
    story.paused(42, 70, "event_loop")
    assert events(story) == [("event_loop", 42, 28)]


def test_of_a_pause_a_request_says_the_part_in_which_it_was_there() -> None:
    story = Story()
    served(story)
    story.paused(-10, 3, "throttled")
    story.paused(75, 100, "gc")
    assert events(story) == [("throttled", 0, 3), ("gc", 75, 5)]


def test_the_longest_pauses_are_told_and_the_others_counted() -> None:
    story = Story()
    a = story.arrives(0)
    for number in range(40):
        story.paused(10 * number, 10 * number + (1 + number % 5))
    story.ends(500, a)
    said = events(story)
    assert len(said) == 32
    assert [at for _, at, _ in said] == sorted(at for _, at, _ in said)
    assert [length for _, _, length in said].count(1) == 0
    assert attributes(story, "chat toy")["infer.pauses.dropped"] == 8


def test_a_request_that_is_not_kept_says_nothing_of_pauses() -> None:
    story = Story()
    served(story)
    story.paused(42, 60)
    spans = story.spans(TailSampler("off", 0, keep_unsampled=False, ratio=False))
    assert [span["events"] for span in spans] == [[]] * len(spans)


def test_pauses_stand_among_the_users_own_events_in_order_of_time() -> None:
    story = Story()
    a = served(story)
    story.paused(42, 60)
    for at, name in ((50, "after"), (10, "before")):
        story.state(a, SpanEventAdded(ns(at), name, {}))
    assert [event["name"] for event in story.span("chat toy")["events"]] == ["before", "infer.pause", "after"]
