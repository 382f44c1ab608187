"""Records → OTLP bytes → batches → a thread that sends them: nothing too big, nothing twice, every loss counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.otlp import Encoded
from otel_infer.export.otlp.transport import SendResult
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.export.spans import exporter as room
from otel_infer.export.spans import tree
from otel_infer.export.spans.exporter import (
    BATCH_BYTES,
    STEPS_PER_CALL,
    BatchSender,
    OtlpSpanExporter,
    SpanBatch,
    encode_resource_and_scope,
    select_steps,
)
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded
from tests.support.story import BASE, MS, Batches, Story, ids

ALL = Decision(True, 1 << 30, "all")


def rows(lengths: list[int], first: int = 20) -> RequestSteps:
    """Steps one after the other, of so many ms; the one before them is the prefill's."""
    ends = BASE + np.cumsum([first, *lengths]) * MS
    starts = ends - np.array([first, *lengths]) * MS
    ones = np.ones(len(ends), np.int64)
    return RequestSteps(np.array([np.arange(1, len(ends) + 1), starts, ends, ones, ones, 0 * ones]))


def record_of(steps: int, name: str = "a") -> RequestRecord:
    """A request with so many decode steps of 1 ms."""
    story = Story()
    a = story.arrives(0, name, http=False)
    story.step(0, 20, [a])
    story.step(20, 21, [a])
    story.ends(21 + steps, a)
    record = story.record()
    record.steps = rows([1] * steps)
    (record.summary,) = summarize_steps([record.steps], [False])
    record.stages[-1] = record.stages[-1]._replace(ended_at=int(record.steps.ended_at[-1]))
    return record


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_sent_is_the_tree_and_its_steps() -> None:
    story = Story()
    a, b = story.arrives(0), story.arrives(1, "b", http=False)
    story.stage("tokenize", 2, 3, a)
    story.step(10, 20, [a, b], {a: 5})
    story.step(20, 30, [a, b])
    story.step(30, 40, [b, a])
    story.ends(41, a)
    story.ends(42, b, events.ERROR, "ValueError")
    for record in story.records():
        expected = {
            (s.name, s.span_id.hex(), s.parent_span_id.hex(), s.start, s.end)
            for s in tree.build_request_spans(record, ALL)
        }
        sent = [span for span in story.spans() if span["trace_id"] == record.trace_id.hex()]
        got = {(s["name"], s["span_id"], s["parent_span_id"], s["start"], s["end"]) for s in sent}
        assert expected <= got
        assert {name for name, *_ in got - expected} == {"decode step"}
        assert len(got - expected) == 2


def test_the_resource_and_the_scope_are_ours() -> None:
    story = Story()
    story.ends(3, story.arrives(0))
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    sink.export_request(story.record(), ALL)
    sink.flush(0)
    (batch,) = batches.taken
    named = {"service.name": "shop", "host.name": "h"}
    body = b"".join(room.otlp.build_export_request(*encode_resource_and_scope(named), batch.parts))
    assert {span["resource"]["service.name"] for span in decoded("traces", body)} == {"shop"}
    assert {span["scope"]["name"] for span in decoded("traces", body)} == {"otel_infer"}
    unnamed = b"".join(room.otlp.build_export_request(*encode_resource_and_scope({}), batch.parts))
    assert {span["resource"]["service.name"] for span in decoded("traces", unnamed)} == {
        "unknown_service:python"
    }


def test_steps_of_many_requests_go_to_the_right_parents() -> None:
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    for number in range(40):
        sink.export_request(record_of(number + 1, f"r{number}"), ALL)
    sink.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    decodes = {span["span_id"]: span["trace_id"] for span in spans if span["name"] == "decode"}
    steps = [span for span in spans if span["name"] == "decode step"]
    assert all(decodes[step["parent_span_id"]] == step["trace_id"] for step in steps)
    for number in range(40):
        trace_id = ids(f"r{number}")[0].hex()
        assert sum(step["trace_id"] == trace_id for step in steps) == number + 1


def test_steps_of_several_engines_have_ids_of_their_own_though_they_have_the_same_numbers() -> None:
    batches, record = Batches(), record_of(6)
    assert record.steps is not None
    record.is_multi_engine, record.steps.step[:] = True, [1, 2, 3, 3, 2, 4, 3]
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    sink.export_request(record, ALL)
    sink.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    steps = [span for span in spans if span["name"] == "decode step"]
    assert sorted(step["attributes"]["infer.step.id"] for step in steps) == [2, 2, 3, 3, 3, 4]
    assert len({span["span_id"] for span in spans}) == len(spans)


# ── which steps ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_slowest_steps_are_chosen_and_stand_in_order_of_time() -> None:
    chosen = select_steps(rows([5, 1, 9, 2, 7, 3]), 3)
    assert chosen.step.tolist() == [2, 4, 6]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(-1, 50))
def test_as_many_steps_are_chosen_as_are_granted_and_none_that_is_left_out_is_slower(
    lengths: list[int], granted: int
) -> None:
    everything = rows(lengths)
    chosen = select_steps(everything, granted)
    assert len(chosen) == max(min(granted, len(lengths)), 0)
    assert chosen.step.tolist() == sorted(set(chosen.step.tolist()))
    assert 1 not in chosen.step.tolist(), "the first one is the prefill's"
    taken = set(chosen.step.tolist())
    left_out = [length for step, length in zip(range(2, 99), lengths) if step not in taken]
    kept = [length for step, length in zip(range(2, 99), lengths) if step in taken]
    assert not kept or not left_out or min(kept) >= max(left_out)


@pytest.mark.parametrize(("granted", "steps"), [(0, 0), (2, 2), (9, 5)])
def test_no_more_steps_are_sent_than_were_granted(granted: int, steps: int) -> None:
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    sink.export_request(record_of(5), Decision(True, granted, "budget"))
    sink.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    assert sum(span["name"] == "decode step" for span in spans) == steps
    (decode,) = [span for span in spans if span["name"] == "decode"]
    assert decode["attributes"].get(semconv.STEPS_DROPPED, 0) == 5 - steps


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_batch_is_larger_than_three_mebibytes_however_long_a_request_is() -> None:
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    for number in range(2):
        sink.export_request(record_of(40_000, f"r{number}"), ALL)
    sink.flush(0)
    assert len(batches.taken) > 2
    assert max(batch.size for batch in batches.taken) <= BATCH_BYTES
    assert sum(batch.spans for batch in batches.taken) == 2 * (40_000 + 3)
    for batch, body in zip(batches.taken, batches.bodies()):
        assert batch.size == sum(map(len, batch.parts))
        assert len(decoded("traces", body)) == batch.spans


def test_rows_are_encoded_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    original = room.otlp.StepEncoder.encode_steps

    def encode(self: Any, columns: Any, owners: Any) -> Any:
        encoded.append(len(columns.owner))
        return original(self, columns, owners)

    monkeypatch.setattr(room.otlp.StepEncoder, "encode_steps", encode)
    sink = OtlpSpanExporter(Batches(), False)  # type: ignore[arg-type]
    for number in range(3):
        sink.export_request(record_of(6000, f"r{number}"), ALL)
    sink.flush(0)
    assert max(encoded) <= STEPS_PER_CALL
    assert sum(encoded) == 18_000


def test_spans_that_cannot_be_encoded_are_counted_and_cost_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, original = record_of(3, "broken"), room.otlp.encode_span

    def encode(span: Any) -> bytes:
        if span.span_id == broken.span_id:
            raise ValueError("of a kind that nobody thought of")
        return original(span)

    monkeypatch.setattr(room.otlp, "encode_span", encode)
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    sink.export_request(broken, ALL._replace(steps=0))
    sink.export_request(record_of(3, "whole"), ALL)
    sink.flush(0)
    assert [batch.spans for batch in batches.taken] == [6]
    assert batches.lost == {"not_encoded": 3}


def test_what_waits_is_handed_over_once_a_second() -> None:
    batches = Batches()
    sink = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    sink.flush(10_000_000_000)
    sink.export_request(record_of(3), ALL)
    sink.flush(10_900_000_000)
    assert batches.taken == []
    sink.flush(11_000_000_000)
    assert [batch.spans for batch in batches.taken] == [6]
    sink.flush(0)
    assert len(batches.taken) == 1, "nothing is nothing"


# ── the sender ───────────────────────────────────────────────────────────────────────────────────────────────────


class Outlet:
    """A destination that a test holds in its hand."""

    def __init__(
        self, answer: Callable[[int], SendResult] = lambda count: SendResult(count, 0, None)
    ) -> None:
        self.answer = answer
        self.bodies: list[bytes] = []
        self.open = threading.Event()
        self.entered = threading.Event()
        self.open.set()
        self.shut = 0

    def send_spans(self, parts: Sequence[Encoded], count: int) -> SendResult:
        self.bodies.append(b"".join(parts))
        self.entered.set()
        self.open.wait(10)
        return self.answer(count)

    def shutdown(self) -> None:
        self.shut += 1
        self.open.set()


def batch(spans: int = 1, size: int = 10) -> SpanBatch:
    return SpanBatch([b"\x12\x00"] * spans, spans, size)


@pytest.fixture
def outlet() -> Outlet:
    return Outlet()


@pytest.fixture
def sender(outlet: Outlet) -> Iterator[BatchSender]:
    sender = BatchSender(outlet, lambda: encode_resource_and_scope({}))
    sender.start()
    yield sender
    outlet.open.set()
    sender.close(5)


def test_what_is_put_is_sent_in_order_and_counted(sender: BatchSender, outlet: Outlet) -> None:
    for spans in (1, 2, 3):
        sender.put(batch(spans, size=spans * 10))
    assert sender.flush(5)
    assert [len(decoded("traces", body)) for body in outlet.bodies] == [1, 2, 3]
    assert (sender.accepted, sender.bytes_sent, sum(sender.lost.values())) == (6, 60, 0)


def test_what_is_refused_is_counted_with_its_reason(sender: BatchSender, outlet: Outlet) -> None:
    outlet.answer = lambda count: SendResult(count - 2, 2, "HTTP 400")
    sender.put(batch(5))
    assert sender.flush(5)
    assert (sender.accepted, dict(sender.lost), sender.last_refusal) == (3, {"refused": 2}, "HTTP 400")


def test_a_full_queue_loses_the_newest_and_counts_it(sender: BatchSender, outlet: Outlet) -> None:
    outlet.open.clear()
    sender.put(batch(1, room.QUEUE_BYTES // 2))
    assert outlet.entered.wait(5)
    sender.put(batch(1, room.QUEUE_BYTES // 2))
    sender.put(batch(7, 1))  # what is being sent takes its room too
    assert dict(sender.lost) == {"queue_full": 7}
    outlet.open.set()
    assert sender.flush(5)
    sender.put(batch(1, 10))
    assert sender.flush(5)
    assert sender.accepted == 3


def test_flush_says_that_it_took_too_long(sender: BatchSender, outlet: Outlet) -> None:
    outlet.open.clear()
    sender.put(batch())
    assert not sender.flush(0.02)
    outlet.open.set()
    assert sender.flush(5)


def test_closing_sends_what_is_queued_and_lets_go() -> None:
    outlet = Outlet()
    sender = BatchSender(outlet, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3))
    sender.close(5)
    assert (sender.accepted, sum(sender.lost.values())) == (3, 0)
    assert not sender.is_alive()
    assert outlet.shut


def test_closing_in_the_middle_of_a_retry_ends_it_and_counts_everything() -> None:
    outlet = Outlet(lambda count: SendResult(0, count, "shut down"))
    outlet.open.clear()
    sender = BatchSender(outlet, lambda: encode_resource_and_scope({}))
    sender.start()
    sender.put(batch(3))
    assert outlet.entered.wait(5)
    sender.put(batch(4))
    sender.close(0.02)
    assert not sender.is_alive()
    assert dict(sender.lost) == {"refused": 7}


def test_what_comes_after_the_close_is_counted_as_lost() -> None:
    sender = BatchSender(Outlet(), lambda: encode_resource_and_scope({}))
    sender.start()
    sender.close(1)
    sender.put(batch(3))
    assert sum(sender.lost.values()) == 3


def test_a_bug_in_the_exporter_loses_its_batch_and_no_other(sender: BatchSender, outlet: Outlet) -> None:
    def broken(count: int) -> SendResult:
        if count == 1:
            raise RuntimeError("no")
        return SendResult(count, 0, None)

    outlet.answer = broken
    sender.put(batch(1))
    sender.put(batch(2))
    assert sender.flush(5)
    assert (sender.accepted, dict(sender.lost), sender.last_refusal) == (2, {"refused": 1}, "RuntimeError")
