"""Records → OTLP bytes → a bounded queue → a thread that sends them.

The reader encodes and never waits: when the queue is full the new batch is counted as lost. Batches are capped in bytes
and handed over when they are full, or a second after the last one: a few of them when the reader has done its work, since
whoever sends and whoever receives would have the processor's caches meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export import otlp
from otel_infer.export.otlp import transport
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import startup, tree
from otel_infer.ringbuffer.events import Value

log = logging.getLogger(__name__)

BATCH_BYTES = 3 << 20
QUEUE_BYTES = 24 << 20
MAX_FULL_BATCHES = 2
"""Full batches that wait for the reader; of more, the queue could not hold all."""
FLUSH_INTERVAL_NS = 1_000_000_000
PART_BYTES = 1 << 18
"""Spans that are encoded one by one are handed on together, so much of them: whoever compresses asks for the interpreter after each part."""
STEPS_PER_CALL = 4096
"""Steps that are encoded at once: half a megabyte, so that what was written is still in the processor's cache when it is copied."""

LOST_UNENCODED = "not_encoded"
LOST_QUEUE = "queue_full"
LOST_REFUSED = "refused"


class SpanBatch(NamedTuple):
    """One request to the destination: encoded spans and how many they are."""

    parts: list[otlp.Encoded]
    spans: int
    size: int


class BatchSender(threading.Thread):
    """Compresses and sends batches, one at a time; retries, TLS and timeouts are the SDK exporter's."""

    def __init__(self, outlet: transport.Transport, identity: Callable[[], tuple[bytes, bytes]]) -> None:
        super().__init__(name="otel_infer-sender", daemon=True)
        self._transport, self._identity = outlet, identity
        self._queue: deque[SpanBatch] = deque()
        self._queued_bytes = 0
        self._condition = threading.Condition()
        self._busy = self._closing = False
        self.accepted = 0
        self.bytes_sent = 0
        self.lost: Counter[str] = Counter()
        self.last_refusal = ""

    def put(self, batch: SpanBatch) -> None:
        """Queues a batch, or counts it as lost: there is no room, or nobody will send it any more."""
        with self._condition:
            if self._closing or self._queued_bytes + batch.size > QUEUE_BYTES:
                self.lost[LOST_QUEUE] += batch.spans
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
                self._busy = True
            self._send_batch(batch)
            with self._condition:
                self._queued_bytes -= batch.size
                self._busy = False
                self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Waits until everything queued was tried; False if `timeout` s were not enough."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._queue and not self._busy, timeout)

    def close(self, timeout: float) -> None:
        """Flushes for at most `timeout` s, then counts what is left as lost."""
        done = self.flush(timeout)
        with self._condition:
            if not done:
                self.lost[LOST_REFUSED] += sum(batch.spans for batch in self._queue)
                self._queue.clear()
            self._closing = True
            self._condition.notify_all()
        if not done:
            self._transport.shutdown()  # ends the retry that the thread is in, so that its batch is counted too
        self.join(1.0)
        self._transport.shutdown()

    def _send_batch(self, batch: SpanBatch) -> None:
        try:
            sent = self._transport.send_spans(
                otlp.build_export_request(*self._identity(), batch.parts), batch.spans
            )
        except Exception as broken:  # an exporter's bug must not end the thread
            sent = transport.SendResult(0, batch.spans, type(broken).__name__)
        self.accepted += sent.accepted
        self.bytes_sent += batch.size
        if sent.rejected:
            self.lost[LOST_REFUSED] += sent.rejected
            self.last_refusal = sent.reason or ""


class OtlpSpanExporter:
    """Encodes what was decided to be exported. What it takes it collects until `flush`: many at once cost each of them less."""

    exported_only = True

    def __init__(self, sender: BatchSender, latency_attributes: bool) -> None:
        self._sender = sender
        self._latency_attributes = latency_attributes
        self._step_encoder = otlp.StepEncoder(
            semconv.SPAN_DECODE_STEP,
            semconv.STEP_ID,
            semconv.BATCH_SIZE,
            semconv.STEP_TOKENS,
            semconv.INTERFERENCE_PREFILL_TOKENS,
            semconv.DEVICE_SPAN,
        )
        self._pending_spans: list[list[otlp.Span]] = []
        self._parts: list[otlp.Encoded] = []
        self._span_count = self._size = 0
        self._full_batches: list[SpanBatch] = []
        self._pending_rows: list[RequestSteps] = []
        self._owners: list[tuple[bytes, bytes, bytes]] = []
        self._offsets: list[int] = []
        self._row_count = 0
        self._now = self._batched_at = 0

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Takes one request whose decision is to export."""
        spans = tree.build_request_spans(record, decision, self._latency_attributes)
        self._pending_spans.append(spans)
        if decision.steps and record.steps is not None:
            decode = next((span for span in spans if span.name == semconv.SPAN_DECODE), None)
            if decode is not None:
                self._add_steps(record, record.steps, decode.span_id, decision.steps)

    def export_start(self, record: StartRecord) -> None:
        """Takes the start of one process."""
        self._pending_spans.append(startup.build_start_spans(record))

    def flush(self, now: int) -> None:
        """Hands what there is to the sender; with `now` only if a second has passed since the last batch."""
        self._now = now or self._now
        self._encode_spans()
        if not now or now - self._batched_at >= FLUSH_INTERVAL_NS:
            self._encode_steps()
            self._close_batch()
        self._queue_full_batches()

    def _queue_full_batches(self) -> None:
        full, self._full_batches = self._full_batches, []
        for batch in full:
            self._sender.put(batch)

    def _close_batch(self) -> None:
        self._batched_at = self._now
        if self._span_count:
            self._full_batches.append(SpanBatch(self._parts, self._span_count, self._size))
            self._parts, self._span_count, self._size = [], 0, 0
        if len(self._full_batches) > MAX_FULL_BATCHES:
            self._queue_full_batches()

    def _encode_spans(self) -> None:
        waiting, self._pending_spans = self._pending_spans, []
        encoded: list[bytes] = []
        count = size = 0
        for spans in waiting:
            try:
                one = b"".join(map(otlp.encode_span, spans))
            except Exception:  # one request must not cost all others
                log.exception("spans are not exported: trace %s", spans[0].trace_id.hex())
                self._sender.lost[LOST_UNENCODED] += len(spans)
                continue
            encoded.append(one)
            count, size = count + len(spans), size + len(one)
            if size >= PART_BYTES:
                self._add_part(b"".join(encoded), count)
                encoded, count, size = [], 0, 0
        if encoded:
            self._add_part(b"".join(encoded), count)

    def _add_part(self, encoded: otlp.Encoded, count: int) -> None:
        if self._size + len(encoded) > BATCH_BYTES:
            self._close_batch()
        self._parts.append(encoded)
        self._span_count += count
        self._size += len(encoded)

    def _add_steps(self, record: RequestRecord, rows: RequestSteps, parent: bytes, granted: int) -> None:
        chosen = select_steps(rows, granted)
        if not record.is_multi_engine:
            self._add_rows(record, chosen, parent, record.span_id)
            return
        # Several engines, and each numbers its steps from 1: span ids follow from the number and from which of them it is.
        times = count_repeats(chosen.step)
        own = int.from_bytes(record.span_id, "big")
        for time in range(int(times.max(initial=-1)) + 1):
            ids_from = (own ^ time << 48).to_bytes(8, "big")
            self._add_rows(record, chosen.select_rows(np.flatnonzero(times == time)), parent, ids_from)

    def _add_rows(self, record: RequestRecord, chosen: RequestSteps, parent: bytes, ids_from: bytes) -> None:
        number = len(chosen)
        for begin in range(0, number, STEPS_PER_CALL):
            some = (
                chosen
                if number <= STEPS_PER_CALL
                else chosen.select_rows(slice(begin, begin + STEPS_PER_CALL))
            )
            count = min(number - begin, STEPS_PER_CALL)
            if self._row_count + count > STEPS_PER_CALL:
                self._encode_steps()
            self._pending_rows.append(some)
            self._owners.append((record.trace_id, parent, ids_from))
            self._offsets.append(record.wall_offset)
            self._row_count += count

    def _encode_steps(self) -> None:
        if not self._row_count:
            return
        counts = [len(rows) for rows in self._pending_rows]
        owner = np.arange(len(self._pending_rows), dtype=np.uint32).repeat(counts)
        offset = np.array(self._offsets).repeat(counts)
        step, start, end, tokens, size, prefill = np.concatenate(
            [rows.table for rows in self._pending_rows], axis=1
        )
        trace, parent, request = (np.frombuffer(b"".join(c), np.uint8) for c in zip(*self._owners))
        owners = otlp.StepOwners(trace.reshape(-1, 16), parent.reshape(-1, 8), request.reshape(-1, 8))
        device = np.zeros(len(owner), np.int64)
        if any(rows.device is not None for rows in self._pending_rows):
            device = np.concatenate([_device_or_zeros(rows) for rows in self._pending_rows])
        encoded, count = self._step_encoder.encode_steps(
            otlp.StepColumns(owner, start + offset, end + offset, step, size, tokens, prefill, device), owners
        )
        self._pending_rows, self._owners, self._offsets, self._row_count = [], [], [], 0
        self._add_part(encoded, count)


def count_repeats(numbers: Any) -> Any:
    """Of each of these numbers, how many times it was there before: 0, or more where one comes again."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else order
    found = np.empty(len(ordered), np.int64)
    found[order] = np.arange(len(ordered)) - np.repeat(firsts, np.diff(np.r_[firsts, len(ordered)]))
    return found


def _device_or_zeros(rows: RequestSteps) -> Any:
    return np.zeros(len(rows), np.int64) if rows.device is None else rows.device


def select_steps(rows: RequestSteps, granted: int) -> RequestSteps:
    """The decode steps that become spans: all, or the slowest ones, in order of time. The first row is the prefill's."""
    decode = rows.select_rows(slice(1, None))
    if granted >= len(decode):
        return decode
    if granted <= 0:
        return decode.select_rows(slice(0))
    lengths = decode.ended_at - decode.started_at
    slowest = np.sort(np.argpartition(lengths, len(lengths) - granted)[len(lengths) - granted :])
    return decode.select_rows(slowest)


def encode_resource_and_scope(resource: Mapping[str, Value]) -> tuple[bytes, bytes]:
    """Resource and instrumentation scope, ready for an envelope."""
    named = {semconv.SERVICE_NAME: semconv.UNKNOWN_SERVICE, **resource}
    return otlp.encode_resource(named), otlp.encode_scope(semconv.SCOPE, VERSION, semconv.SCHEMA_URL)
