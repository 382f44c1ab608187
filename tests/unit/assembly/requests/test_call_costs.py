"""The cost of a model's call by its number of items, and the part of a call that is due to its batch."""

from __future__ import annotations

import pytest

from otel_infer import semconv
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.ringbuffer import events
from tests.support.story import Story, ns

BASE_MS, PER_ITEM_MS = 10.0, 2.0


class Service:
    """A service whose worker calls a model for a batch of items at a time."""

    def __init__(self) -> None:
        self.story, self.now = Story(), 0.0

    def serve(self, items: int, requests: int = 1, wait: str = semconv.SPAN_QUEUE_WAIT) -> None:
        """Serves a request in a batch of so many requests, which have so many items."""
        request = self.story.arrives(self.now, f"at {self.now}", http=False)
        began = self.now + 1
        ended = began + BASE_MS + PER_ITEM_MS * items
        self.story.stage(wait, self.now, began, request)
        self.story.stage(semconv.SPAN_FORWARD, began, ended, request, items)
        if requests > 1:
            attribute = events.AttributeSet(ns(ended), semconv.BATCH_REQUESTS, requests)
            self.story.add_request_event(request, attribute)
        self.story.ends(ended, request)
        self.now = ended + 1

    def learn(self) -> None:
        """Serves batches of two sizes, alone."""
        for _ in range(12):
            self.serve(1)
            self.serve(3)

    def last_causes_ms(self) -> dict[str, float]:
        records = self.story.records()
        attribute_latency(records)
        breakdown = records[-1].breakdown
        assert breakdown is not None
        return {cause: length / 1e6 for cause, length in breakdown.causes.items()}


def test_items_of_other_requests_are_batching() -> None:
    service = Service()
    service.learn()
    service.serve(items=8, requests=4)
    causes = service.last_causes_ms()
    of_others = PER_ITEM_MS * 6
    assert causes[semconv.CAUSE_BATCHING] == pytest.approx(of_others, abs=0.5)
    assert causes[semconv.CAUSE_DECODE] == pytest.approx(BASE_MS + PER_ITEM_MS * 2, abs=0.5)
    assert sum(causes.values()) == pytest.approx(1 + BASE_MS + PER_ITEM_MS * 8)


@pytest.mark.parametrize(
    ("items", "requests", "wait"),
    [(8, 1, semconv.SPAN_QUEUE_WAIT), (8, 4, "own stage")],
    ids=["alone", "no queue"],
)
def test_a_call_without_a_batch_is_its_own(items: int, requests: int, wait: str) -> None:
    service = Service()
    service.learn()
    service.serve(items, requests, wait)
    causes = service.last_causes_ms()
    assert semconv.CAUSE_BATCHING not in causes
    assert causes[semconv.CAUSE_DECODE] == pytest.approx(BASE_MS + PER_ITEM_MS * items)


def test_nothing_is_divided_before_two_sizes_are_known() -> None:
    service = Service()
    for _ in range(12):
        service.serve(items=8, requests=4)
    assert semconv.CAUSE_BATCHING not in service.last_causes_ms()
