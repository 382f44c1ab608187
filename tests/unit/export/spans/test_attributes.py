"""What the spans of a request say, in words, numbers and lengths; where each stands is in `test_tree`."""

from __future__ import annotations

import pytest

from otel_infer import semconv
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.export.spans import attributes as said
from otel_infer.export.spans import tree
from otel_infer.ringbuffer import events
from tests.support.story import Story, ns
from tests.unit.export.spans.test_tree import ALL, attributes, served


@pytest.mark.parametrize("granted", [0, 1, 2, 3])
def test_steps_that_are_left_out_are_counted(granted: int) -> None:
    story = Story()
    served(story)
    counts = said.step_count_attributes(story.record(), granted)
    assert counts["infer.steps.count"] == 3
    assert counts.get("infer.steps.dropped", 0) == 3 - granted


def test_requests_that_are_alike_share_their_words() -> None:
    story = Story()
    served(story, "a")
    served(story, "b")
    one, other = (said.string_attributes(record, ALL) for record in story.records())
    assert one is other
    assert one["gen_ai.response.finish_reasons"] == ("length",)
    kept = Decision(True, 0, "slow", missed=("ttft",))
    assert said.string_attributes(story.records()[0], kept) == {
        **one,
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
def test_what_we_say_goes_before_what_user_code_said_of_the_same_name(key: str) -> None:
    plain, story = Story(), Story()
    served(plain)
    story.state(served(story), events.AttributeSet(ns(1), key, "else"))
    assert attributes(story, "chat toy") == attributes(plain, "chat toy")
    for span in tree.build_request_spans(story.record(), ALL):
        assert len(span.all_attributes) == len(span.attributes) + len(span.durations) + len(span.shared)
