"""Sends batches of encoded spans from a thread, and counts what became of their requests."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.export import otlp
from otel_infer.export.otlp import transport
from otel_infer.ringbuffer.ledger import RequestLedger

QUEUE_BYTES = 24 << 20
ABSENT_S = 0.5
"""How long a destination that refuses connections is tried at the end."""


class SpanBatch(NamedTuple):
    """One export request: encoded parts, the number of their spans, their size in bytes, and the number of
    requests whose own spans they contain.
    """

    parts: list[otlp.Encoded]
    spans: int
    size: int
    requests: int = 0


class BatchSender(threading.Thread):
    """The thread that compresses and sends batches, one at a time.

    The SDK exporter does retries, TLS and timeouts.
    """

    def __init__(
        self,
        destination: transport.Transport,
        identity: Callable[[], tuple[bytes, bytes]],
        ledger: RequestLedger | None = None,
    ) -> None:
        super().__init__(name="otel_infer-sender", daemon=True)
        self.ledger = ledger or RequestLedger()
        self._current: SpanBatch | None = None
        self._transport, self._identity = destination, identity
        self._queue: deque[SpanBatch] = deque()
        self._queued_bytes = 0
        self._condition = threading.Condition()
        self._busy = self._closing = False
        self.accepted = 0
        self.bytes_sent = 0
        self.lost: Counter[str] = Counter()
        self.last_refusal = ""

    def put(self, batch: SpanBatch) -> None:
        """Queues a batch, or counts it as lost if the queue is full or the sender is closing."""
        with self._condition:
            if self._closing or self._queued_bytes + batch.size > QUEUE_BYTES:
                self._count_lost(semconv.LOSS_QUEUE_FULL, batch)
                return
            self._queued_bytes += batch.size
            self._queue.append(batch)
            self._condition.notify()

    def run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
                if not self._queue:
                    return
                batch = self._queue.popleft()
                self._current = batch
                self._busy = True
            result = self._send_batch(batch)
            with self._condition:
                if self._current is batch:
                    self._current = None
                    self._count_result(batch, result)
                self._queued_bytes -= batch.size
                self._busy = False
                self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until every queued batch was tried. Returns False if `timeout` s were not enough."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float) -> float:
        """Flushes for at most `timeout` s, then counts the remaining batches as lost.

        Returns the time that is left, s; 0 if the destination refuses connections.
        """
        until = time.monotonic() + timeout
        while not (done := self.flush(min(max(until - time.monotonic(), 0.0), ABSENT_S))):
            if self._transport.is_absent or time.monotonic() >= until:
                break
        with self._condition:
            if not done:
                for batch in self._queue:
                    self._count_lost(semconv.LOSS_REFUSED, batch)
                self._queue.clear()
            self._closing = True
            self._condition.notify_all()
        if not done:
            self._transport.shutdown()  # stops a pending retry, so that its batch is counted too
        self.join(1.0)
        with self._condition:
            if self._current is not None:  # the destination still holds the connection
                self._count_lost(semconv.LOSS_REFUSED, self._current, is_unconfirmed=True)
                self._current = None
        self._transport.shutdown()
        return 0.0 if self._transport.is_absent else max(until - time.monotonic(), 0.0)

    def _send_batch(self, batch: SpanBatch) -> transport.SendResult:
        try:
            return self._transport.send_spans(
                otlp.build_export_request(*self._identity(), batch.parts), batch.spans
            )
        except Exception as error:  # an exporter's bug must not end the thread
            return transport.SendResult(0, batch.spans, type(error).__name__)

    def _count_result(self, batch: SpanBatch, result: transport.SendResult) -> None:
        self.bytes_sent += batch.size
        self.accepted += result.accepted
        if result.rejected:
            self.last_refusal = result.reason or ""
            lost = batch._replace(spans=result.rejected, requests=min(batch.requests, result.rejected))
            self._count_lost(semconv.LOSS_REFUSED, lost, transport.is_unconfirmed(result))
            batch = batch._replace(requests=batch.requests - lost.requests)
        if result.accepted:
            self.ledger.add_result(semconv.EXPORT_RESULT_EXPORTED, batch.requests)

    def count_not_encoded(self, spans: int, requests: int) -> None:
        """Counts spans that could not be encoded, and the requests among them."""
        self._count_lost(semconv.LOSS_NOT_ENCODED, SpanBatch([], spans, 0, requests))

    def _count_lost(self, reason: str, batch: SpanBatch, is_unconfirmed: bool = False) -> None:
        """Counts the spans of a batch under this reason, and its requests.

        `is_unconfirmed`: the destination may have the requests.
        """
        self.lost[reason] += batch.spans
        self.ledger.add_lost(semconv.LOSS_UNCONFIRMED if is_unconfirmed else reason, batch.requests)
