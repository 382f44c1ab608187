"""Attributes of request spans: strings, numbers and durations. Which span has which attribute is tested in `test_tree`."""

from __future__ import annotations

import pytest

from otel_infer import semconv
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.export.spans import attributes as span_attributes
from otel_infer.export.spans import tree
from otel_infer.ringbuffer import events
from tests.support.story import Story, ns
from tests.unit.export.spans.test_tree import ALL, attributes, served


@pytest.mark.parametrize("granted", [0, 1, 2, 3])
def test_dropped_steps_are_counted(granted: int) -> None:
    story = Story()
    served(story)
    counts = span_attributes.step_count_attributes(story.record(), granted)
    assert counts["infer.steps.count"] == 3
    assert counts.get("infer.steps.dropped", 0) == 3 - granted


def test_similar_requests_share_their_string_attributes() -> None:
    story = Story()
    served(story, "a")
    served(story, "b")
    first, second = (span_attributes.string_attributes(record, ALL) for record in story.records())
    assert first is second
    assert first["gen_ai.response.finish_reasons"] == ("length",)
    decision = Decision(True, 0, "slow", missed=("ttft",))
    assert span_attributes.string_attributes(story.records()[0], decision) == {
        **first,
        semconv.KEEP_REASON: "slow",
        semconv.SLO_MISSED: ("ttft",),
    }


@pytest.mark.parametrize(
    "key",
    [
        semconv.ENGINE,
        semconv.USAGE_OUTPUT_TOKENS,
        semconv.TTFT,
    ],
)
def test_our_attributes_override_user_attributes(key: str) -> None:
    plain, story = Story(), Story()
    served(plain)
    story.add_request_event(served(story), events.AttributeSet(ns(1), key, "else"))
    assert attributes(story, "chat toy") == attributes(plain, "chat toy")
    for span in tree.build_request_spans(story.record(), ALL):
        assert len(span.all_attributes) == len(span.attributes) + len(span.durations) + len(span.shared)
