"""Exports records: encodes them as OTLP, queues the bytes, and sends them from another thread.

The reader of the rings encodes and never waits: if the queue is full, the new batch is counted as lost. A
batch is limited in bytes. It is closed when it is full, or a second after the previous one. Full batches are
queued after the reader's own work, because the sender and a local receiver would evict the reader's data from
the CPU caches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export import otlp
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import startup, tree
from otel_infer.export.spans.batch_sender import BatchSender, SpanBatch
from otel_infer.ringbuffer.events import Value

log = logging.getLogger(__name__)

BATCH_BYTES = 3 << 20
MAX_FULL_BATCHES = 2
"""Full batches that wait until the reader has done its work. More at a time might not fit the queue."""
FLUSH_INTERVAL_NS = 1_000_000_000
PART_BYTES = 1 << 18
"""Size at which encoded spans are joined into one part.

Each part costs the compressing thread one wait for the GIL.
"""
STEPS_PER_CALL = 4096
"""Steps per encoding call: half a megabyte, so that the copy of the output reads from the CPU cache."""


class EncodedTree(NamedTuple):
    """The spans of one request, encoded, and their number."""

    encoded: bytes
    spans: int


class OtlpSpanExporter:
    """Encodes the spans of exported requests.

    It collects requests until `flush`, because encoding many at a time costs less.
    """

    exported_only = True

    def __init__(self, sender: BatchSender, latency_attributes: bool) -> None:
        self._sender = sender
        self.taken = 0
        self.latency_attributes = latency_attributes
        self._step_encoder = otlp.StepEncoder(
            semconv.SPAN_DECODE_STEP,
            semconv.STEP_ID,
            semconv.BATCH_SIZE,
            semconv.STEP_TOKENS,
            semconv.INTERFERENCE_PREFILL_TOKENS,
            semconv.DEVICE_SPAN,
        )
        self._pending_spans: list[list[otlp.Span] | EncodedTree] = []
        self._pending_starts: list[list[otlp.Span]] = []
        self._parts: list[otlp.Encoded] = []
        self._span_count = self._request_count = self._size = 0
        self._full_batches: list[SpanBatch] = []
        self._pending_rows: list[RequestSteps] = []
        self._owners: list[tuple[bytes, bytes, bytes]] = []
        self._offsets: list[int] = []
        self._row_count = 0
        self._now = self._batched_at = 0

    def export_request(self, record: RequestRecord, decision: tail_sampler.Decision) -> None:
        """Adds one request whose decision is to export."""
        spans = tree.build_request_spans(record, decision, self.latency_attributes)
        self._pending_spans.append(spans)
        self.taken += 1
        if decision.steps and record.steps is not None:
            decode = next((span for span in spans if span.name == semconv.SPAN_DECODE), None)
            if decode is not None:
                self._add_steps(record, record.steps, decode.span_id, decision.steps)

    def export_encoded(self, tree: EncodedTree) -> None:
        """Adds one request whose decision is to export, without steps."""
        self._pending_spans.append(tree)
        self.taken += 1

    def export_start(self, record: StartRecord) -> None:
        """Adds the start of one process."""
        self._pending_starts.append(startup.build_start_spans(record))

    def flush(self, now: int) -> None:
        """Encodes all added records, and queues full batches.

        The open batch is closed if `now` is 0, or if a second has passed since the last one.
        """
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
            self._full_batches.append(
                SpanBatch(self._parts, self._span_count, self._size, self._request_count)
            )
            self._parts, self._span_count, self._size, self._request_count = [], 0, 0, 0
        if len(self._full_batches) > MAX_FULL_BATCHES:
            self._queue_full_batches()

    def _encode_spans(self) -> None:
        starts, self._pending_starts = self._pending_starts, []
        requests, self._pending_spans = self._pending_spans, []
        self._encode_trees(starts, requests_per_tree=0)
        self._encode_trees(requests, requests_per_tree=1)

    def _encode_trees(self, trees: Sequence[list[otlp.Span] | EncodedTree], requests_per_tree: int) -> None:
        """Encodes trees of spans, each of them one request or none."""
        encoded: list[bytes] = []
        count = size = 0
        for spans in trees:
            if isinstance(spans, EncodedTree):
                tree_bytes, number = spans
            else:
                try:
                    tree_bytes, number = b"".join(map(otlp.encode_span, spans)), len(spans)
                except Exception:  # one request must not stop the others
                    log.exception("spans of a request were not encoded: trace %s", spans[0].trace_id.hex())
                    self._sender.count_not_encoded(len(spans), requests_per_tree)
                    continue
            encoded.append(tree_bytes)
            count, size = count + number, size + len(tree_bytes)
            if size >= PART_BYTES:
                self._add_part(b"".join(encoded), count, len(encoded) * requests_per_tree)
                encoded, count, size = [], 0, 0
        if encoded:
            self._add_part(b"".join(encoded), count, len(encoded) * requests_per_tree)

    def _add_part(self, encoded: otlp.Encoded, count: int, requests: int) -> None:
        if self._size + len(encoded) > BATCH_BYTES:
            self._close_batch()
        self._parts.append(encoded)
        self._span_count += count
        self._request_count += requests
        self._size += len(encoded)

    def _add_steps(self, record: RequestRecord, rows: RequestSteps, parent: bytes, granted: int) -> None:
        selected = select_steps(rows, granted)
        if not record.is_multi_engine:
            self._add_rows(record, selected, parent, record.span_id)
            return
        # Each engine numbers its steps from 1, so span ids are derived from the number and its occurrence.
        repeats = count_repeats(selected.step)
        request_id = int.from_bytes(record.span_id, "big")
        for repeat in range(int(repeats.max(initial=-1)) + 1):
            ids_from = (request_id ^ repeat << 48).to_bytes(8, "big")
            self._add_rows(record, selected.select_rows(np.flatnonzero(repeats == repeat)), parent, ids_from)

    def _add_rows(
        self, record: RequestRecord, selected: RequestSteps, parent: bytes, ids_from: bytes
    ) -> None:
        number = len(selected)
        for start in range(0, number, STEPS_PER_CALL):
            part = (
                selected
                if number <= STEPS_PER_CALL
                else selected.select_rows(slice(start, start + STEPS_PER_CALL))
            )
            count = min(number - start, STEPS_PER_CALL)
            if self._row_count + count > STEPS_PER_CALL:
                self._encode_steps()
            self._pending_rows.append(part)
            self._owners.append((record.trace_id, parent, ids_from))
            self._offsets.append(record.wall_offset)
            self._row_count += count

    def _encode_steps(self) -> None:
        if not self._row_count:
            return
        tables, owners, offsets, number = self._pending_rows, self._owners, self._offsets, self._row_count
        self._pending_rows, self._owners, self._offsets, self._row_count = [], [], [], 0
        try:
            encoded, count = self._encode_rows(tables, owners, offsets)
        except Exception:  # the rows of one request must not stop later ones
            log.exception("%d decode steps were not encoded", number)
            self._sender.count_not_encoded(number, requests=0)
            return
        self._add_part(encoded, count, requests=0)

    def _encode_rows(
        self, tables: list[RequestSteps], owners: list[tuple[bytes, bytes, bytes]], offsets: list[int]
    ) -> tuple[otlp.Encoded, int]:
        """Returns the encoded decode steps of these tables, and their number."""
        counts = [len(rows) for rows in tables]
        owner = np.arange(len(tables), dtype=np.uint32).repeat(counts)
        offset = np.array(offsets).repeat(counts)
        step, start, end, tokens, size, prefill = np.concatenate([rows.table for rows in tables], axis=1)
        trace, parent, request = (np.frombuffer(b"".join(ids), np.uint8) for ids in zip(*owners))
        step_owners = otlp.StepOwners(trace.reshape(-1, 16), parent.reshape(-1, 8), request.reshape(-1, 8))
        device = np.zeros(len(owner), np.int64)
        if any(rows.device is not None for rows in tables):
            device = np.concatenate([_device_or_zeros(rows) for rows in tables])
        columns = otlp.StepColumns(owner, start + offset, end + offset, step, size, tokens, prefill, device)
        return self._step_encoder.encode_steps(columns, step_owners)


def count_repeats(numbers: Any) -> Any:
    """Returns for each number how often it occurred before it: 0 for a first occurrence."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else order
    repeats = np.empty(len(ordered), np.int64)
    repeats[order] = np.arange(len(ordered)) - np.repeat(firsts, np.diff(np.r_[firsts, len(ordered)]))
    return repeats


def _device_or_zeros(rows: RequestSteps) -> Any:
    return np.zeros(len(rows), np.int64) if rows.device is None else rows.device


def select_steps(rows: RequestSteps, granted: int) -> RequestSteps:
    """Returns the decode steps that become spans: all, or the slowest `granted`, in order of time.

    The first row is the step of the first token, which belongs to `prefill`.
    """
    decode = rows.select_rows(slice(1, None))
    if granted >= len(decode):
        return decode
    if granted <= 0:
        return decode.select_rows(slice(0))
    durations = decode.ended_at - decode.started_at
    slowest = np.sort(np.argpartition(durations, len(durations) - granted)[len(durations) - granted :])
    return decode.select_rows(slowest)


def encode_resource_and_scope(resource: Mapping[str, Value]) -> tuple[bytes, bytes]:
    """Returns the encoded resource and instrumentation scope, for an export request."""
    named = {semconv.SERVICE_NAME: semconv.UNKNOWN_SERVICE, **resource}
    return otlp.encode_resource(named), otlp.encode_scope(semconv.SCOPE, VERSION, semconv.SCHEMA_URL)
