"""The thread that sends batches: their order, what is lost of them, and what becomes of their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from otel_infer.export.otlp import Encoded
from otel_infer.export.otlp.transport import SendResult
from otel_infer.export.spans.batch_sender import QUEUE_BYTES, BatchSender, SpanBatch
from otel_infer.export.spans.exporter import encode_resource_and_scope
from tests.support.otlp_messages import decoded


class ControlledTransport:
    """A transport that the test opens and closes."""

    def __init__(
        self, answer: Callable[[int], SendResult] = lambda count: SendResult(count, 0, None)
    ) -> None:
        self.answer = answer
        self.bodies: list[bytes] = []
        self.open = threading.Event()
        self.entered = threading.Event()
        self.open.set()
        self.shut = 0
        self.is_absent = False

    def send_spans(self, parts: Sequence[Encoded], count: int) -> SendResult:
        self.bodies.append(b"".join(parts))
        self.entered.set()
        self.open.wait(10)
        return self.answer(count)

    def shutdown(self) -> None:
        self.shut += 1
        self.open.set()


def batch(spans: int = 1, size: int = 10, requests: int = 0) -> SpanBatch:
    return SpanBatch([b"\x12\x00"] * spans, spans, size, requests)


@pytest.fixture
def transport() -> ControlledTransport:
    return ControlledTransport()


@pytest.fixture
def sender(transport: ControlledTransport) -> Iterator[BatchSender]:
    sender = BatchSender(transport, lambda: encode_resource_and_scope({}))
    sender.start()
    yield sender
    transport.open.set()
    sender.close(5)


def test_batches_are_sent_in_order_and_counted(sender: BatchSender, transport: ControlledTransport) -> None:
    for spans in (1, 2, 3):
        sender.put(batch(spans, size=spans * 10))
    assert sender.flush(5)
    assert [len(decoded("traces", body)) for body in transport.bodies] == [1, 2, 3]
    assert (sender.accepted, sender.bytes_sent, sum(sender.lost.values())) == (6, 60, 0)


def test_refusals_are_counted_with_their_reason(sender: BatchSender, transport: ControlledTransport) -> None:
    transport.answer = lambda count: SendResult(count - 2, 2, "HTTP 400")
    sender.put(batch(5))
    assert sender.flush(5)
    assert (sender.accepted, dict(sender.lost), sender.last_refusal) == (3, {"refused": 2}, "HTTP 400")


def test_full_queue_drops_the_newest_batch(sender: BatchSender, transport: ControlledTransport) -> None:
    transport.open.clear()
    sender.put(batch(1, QUEUE_BYTES // 2))
    assert transport.entered.wait(5)
    sender.put(batch(1, QUEUE_BYTES // 2))
    sender.put(batch(7, 1))  # the batch in flight also counts towards the limit
    assert dict(sender.lost) == {"queue_full": 7}
    transport.open.set()
    assert sender.flush(5)
    sender.put(batch(1, 10))
    assert sender.flush(5)
    assert sender.accepted == 3


def test_flush_returns_false_on_timeout(sender: BatchSender, transport: ControlledTransport) -> None:
    transport.open.clear()
    sender.put(batch())
    assert not sender.flush(0.02)
    transport.open.set()
    assert sender.flush(5)


def test_close_sends_the_queue_and_shuts_down() -> None:
    transport = ControlledTransport()
    sender = BatchSender(transport, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3))
    sender.close(5)
    assert (sender.accepted, sum(sender.lost.values())) == (3, 0)
    assert not sender.is_alive()
    assert transport.shut


def test_close_during_a_retry_counts_all_spans() -> None:
    transport = ControlledTransport(lambda count: SendResult(0, count, "shut down"))
    transport.open.clear()
    sender = BatchSender(transport, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3))
    assert transport.entered.wait(5)
    sender.put(batch(4))
    sender.close(0.02)
    assert not sender.is_alive()
    assert dict(sender.lost) == {"refused": 7}


def test_batches_after_close_are_counted_as_lost() -> None:
    sender = BatchSender(ControlledTransport(), lambda: encode_resource_and_scope({}))
    sender.start()
    sender.close(1)
    sender.put(batch(3))
    assert sum(sender.lost.values()) == 3


def test_transport_exception_loses_its_batch_only(
    sender: BatchSender, transport: ControlledTransport
) -> None:
    def broken(count: int) -> SendResult:
        if count == 1:
            raise RuntimeError("no")
        return SendResult(count, 0, None)

    transport.answer = broken
    sender.put(batch(1))
    sender.put(batch(2))
    assert sender.flush(5)
    assert (sender.accepted, dict(sender.lost), sender.last_refusal) == (2, {"refused": 1}, "RuntimeError")


def settled(sender: BatchSender) -> dict[str, int]:
    """Returns the ledger's counts of requests that are not 0."""
    counts = sender.ledger.read_counts(0, 0)
    return {name: count for name, count in {**counts.results, **counts.lost}.items() if count}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (SendResult(9, 0, None), {"exported": 3}),
        (SendResult(0, 9, "HTTP 503"), {"refused": 3}),
        (SendResult(0, 9, "connection refused"), {"refused": 3}),
        (SendResult(0, 9, "timeout"), {"unconfirmed": 3}),
        (SendResult(0, 9, "connection reset"), {"unconfirmed": 3}),
        (SendResult(0, 9, "DEADLINE_EXCEEDED"), {"unconfirmed": 3}),
        (SendResult(7, 2, "partial success: too long"), {"exported": 1, "refused": 2}),
    ],
)
def test_requests_of_a_batch_are_exported_refused_or_unconfirmed(
    result: SendResult, expected: dict[str, int], sender: BatchSender, transport: ControlledTransport
) -> None:
    transport.answer = lambda count: result
    sender.put(batch(9, requests=3))
    assert sender.flush(5)
    assert settled(sender) == expected


def test_requests_that_find_the_queue_full_or_are_queued_at_close_are_counted() -> None:
    transport = ControlledTransport(lambda count: SendResult(0, count, "shut down"))
    transport.open.clear()
    sender = BatchSender(transport, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3, requests=1))
    assert transport.entered.wait(5)
    sender.put(batch(4, requests=2))
    sender.put(batch(4, QUEUE_BYTES, requests=4))
    sender.close(0.02)
    assert settled(sender) == {"refused": 3, "queue_full": 4}


def test_a_batch_that_the_destination_holds_at_close_is_unconfirmed() -> None:
    transport = ControlledTransport()
    transport.open.clear()
    transport.shutdown = lambda: None  # type: ignore[method-assign]
    sender = BatchSender(transport, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3, requests=2))
    assert transport.entered.wait(5)
    sender.close(0.02)
    assert settled(sender) == {"unconfirmed": 2}
    transport.open.set()
    sender.join(5)
    assert settled(sender) == {"unconfirmed": 2}, "the late answer is not counted as well"


def test_destination_that_refuses_connections_does_not_delay_the_end(
    sender: BatchSender, transport: ControlledTransport
) -> None:
    transport.open.clear()
    transport.is_absent, transport.answer = True, lambda count: SendResult(0, count, "connection refused")
    for spans in (1, 2):
        sender.put(batch(spans))
    began = time.monotonic()
    assert sender.close(60) == 0
    assert time.monotonic() - began < 10
    assert sum(sender.lost.values()) == 3
