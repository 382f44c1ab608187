"""The waits of items in a framework's batcher: for the batcher, for the batch, and for its turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_infer import _clock, semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.instrumentation.batches import WaitingItem, begin_batch, describe_item
from otel_infer.tracing import start
from otel_infer.tracing.context import detach
from otel_infer.tracing.request_span import RequestSpan
from tests.support.rings import Recording

MS = 1_000_000


@pytest.fixture
def recording() -> Iterator[Recording]:
    recording = Recording()
    yield recording
    recording.stop()


def put(name: str, age_ms: int) -> tuple[RequestSpan, WaitingItem]:
    """Returns a request, and its item that was put that long ago."""
    now = _clock.now()
    request = start.open_request(name, owner="test", arrived_at=now - age_ms * MS)
    assert request is not None
    token = request.attach()
    item = describe_item()
    detach(token)
    assert item is not None and item.request is request
    return request, item._replace(put_at=now - age_ms * MS)


def waits_of(record: RequestRecord) -> list[tuple[str, int]]:
    """Returns the waits in ms, rounded down to 10 ms."""
    names = semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT
    stages = [stage for stage in record.stages if stage.name in names]
    return [(stage.name, (stage.ended_at - stage.started_at) // MS // 10 * 10) for stage in stages]


def test_an_item_waits_for_the_batcher_then_for_the_batch(recording: Recording) -> None:
    (early, first), (late, second) = put("early", 60), put("late", 20)
    token = begin_batch([first, second], free_at=_clock.now() - 40 * MS)
    current = start.current_request()
    detach(token)
    for request in (early, late):
        request.close()
    assert current is not None and current.owner == "batch"
    early_record, late_record = recording.records()
    assert waits_of(early_record) == [(semconv.SPAN_QUEUE_WAIT, 20), (semconv.SPAN_BATCH_WAIT, 40)]
    assert waits_of(late_record) == [(semconv.SPAN_BATCH_WAIT, 20)]
    assert [link.span_id for link in early_record.links] == [late_record.span_id]


def test_a_complete_batch_waits_for_its_turn(recording: Recording) -> None:
    request, item = put("only", 60)
    detach(begin_batch([item, None], complete_at=_clock.now() - 40 * MS))
    request.close()
    (record,) = recording.records()
    assert waits_of(record) == [(semconv.SPAN_BATCH_WAIT, 20), (semconv.SPAN_QUEUE_WAIT, 40)]


def test_a_batch_of_no_request_attaches_nothing(recording: Recording) -> None:
    ended, item = put("ended", 1)
    ended.close()
    assert describe_item() is None
    assert begin_batch([item, None]) is None
