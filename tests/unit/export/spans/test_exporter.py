"""From records to OTLP batches and the sending thread: batch sizes, no duplicates, and counted losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_infer import semconv
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.export.spans import exporter as exporter_module
from otel_infer.export.spans import tree
from otel_infer.export.spans.exporter import (
    BATCH_BYTES,
    STEPS_PER_CALL,
    OtlpSpanExporter,
    encode_resource_and_scope,
    select_steps,
)
from otel_infer.ringbuffer import events
from tests.support.otlp_messages import decoded
from tests.support.story import BASE, MS, BatchCollector, Story, ids

ALL = Decision(True, 1 << 30, "all")


def rows(lengths: list[int], first: int = 20) -> RequestSteps:
    """Consecutive steps of these lengths in ms, after the prefill step."""
    ends = BASE + np.cumsum([first, *lengths]) * MS
    starts = ends - np.array([first, *lengths]) * MS
    ones = np.ones(len(ends), np.int64)
    return RequestSteps(np.array([np.arange(1, len(ends) + 1), starts, ends, ones, ones, 0 * ones]))


def make_record(steps: int, name: str = "a") -> RequestRecord:
    """A request with this many decode steps of 1 ms."""
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


def test_exported_spans_are_the_tree_and_its_steps() -> None:
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


def test_batches_have_our_resource_and_scope() -> None:
    story = Story()
    story.ends(3, story.arrives(0))
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    exporter.export_request(story.record(), ALL)
    exporter.flush(0)
    (batch,) = batches.collected
    named = {"service.name": "shop", "host.name": "h"}
    body = b"".join(exporter_module.otlp.build_export_request(*encode_resource_and_scope(named), batch.parts))
    assert {span["resource"]["service.name"] for span in decoded("traces", body)} == {"shop"}
    assert {span["scope"]["name"] for span in decoded("traces", body)} == {"otel_infer"}
    unnamed = b"".join(exporter_module.otlp.build_export_request(*encode_resource_and_scope({}), batch.parts))
    assert {span["resource"]["service.name"] for span in decoded("traces", unnamed)} == {
        "unknown_service:python"
    }


def test_steps_have_their_own_decode_as_parent() -> None:
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    for number in range(40):
        exporter.export_request(make_record(number + 1, f"r{number}"), ALL)
    exporter.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    decodes = {span["span_id"]: span["trace_id"] for span in spans if span["name"] == "decode"}
    steps = [span for span in spans if span["name"] == "decode step"]
    assert all(decodes[step["parent_span_id"]] == step["trace_id"] for step in steps)
    for number in range(40):
        trace_id = ids(f"r{number}")[0].hex()
        assert sum(step["trace_id"] == trace_id for step in steps) == number + 1


def test_steps_of_several_engines_have_distinct_ids() -> None:
    """Steps of several engines can have the same numbers."""
    batches, record = BatchCollector(), make_record(6)
    assert record.steps is not None
    record.is_multi_engine, record.steps.step[:] = True, [1, 2, 3, 3, 2, 4, 3]
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    exporter.export_request(record, ALL)
    exporter.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    steps = [span for span in spans if span["name"] == "decode step"]
    assert sorted(step["attributes"]["infer.step.id"] for step in steps) == [2, 2, 3, 3, 3, 4]
    assert len({span["span_id"] for span in spans}) == len(spans)


# ── selection of steps ───────────────────────────────────────────────────────────────────────────────────────────


def test_slowest_steps_are_selected_in_time_order() -> None:
    chosen = select_steps(rows([5, 1, 9, 2, 7, 3]), 3)
    assert chosen.step.tolist() == [2, 4, 6]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(-1, 50))
def test_selection_has_the_granted_number_of_slowest_steps(lengths: list[int], granted: int) -> None:
    everything = rows(lengths)
    chosen = select_steps(everything, granted)
    assert len(chosen) == max(min(granted, len(lengths)), 0)
    assert chosen.step.tolist() == sorted(set(chosen.step.tolist()))
    assert 1 not in chosen.step.tolist(), "the first step is the prefill's"
    selected = set(chosen.step.tolist())
    dropped = [length for step, length in zip(range(2, 99), lengths) if step not in selected]
    kept = [length for step, length in zip(range(2, 99), lengths) if step in selected]
    assert not kept or not dropped or min(kept) >= max(dropped)


@pytest.mark.parametrize(("granted", "steps"), [(0, 0), (2, 2), (9, 5)])
def test_exported_steps_do_not_exceed_the_grant(granted: int, steps: int) -> None:
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    exporter.export_request(make_record(5), Decision(True, granted, "budget"))
    exporter.flush(0)
    spans = [span for body in batches.bodies() for span in decoded("traces", body)]
    assert sum(span["name"] == "decode step" for span in spans) == steps
    (decode,) = [span for span in spans if span["name"] == "decode"]
    assert decode["attributes"].get(semconv.STEPS_DROPPED, 0) == 5 - steps


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_is_at_most_three_mebibytes() -> None:
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    for number in range(2):
        exporter.export_request(make_record(40_000, f"r{number}"), ALL)
    exporter.flush(0)
    assert len(batches.collected) > 2
    assert max(batch.size for batch in batches.collected) <= BATCH_BYTES
    assert sum(batch.spans for batch in batches.collected) == 2 * (40_000 + 3)
    for batch, body in zip(batches.collected, batches.bodies()):
        assert batch.size == sum(map(len, batch.parts))
        assert len(decoded("traces", body)) == batch.spans


def test_steps_are_encoded_in_limited_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    original = exporter_module.otlp.StepEncoder.encode_steps

    def encode(self: Any, columns: Any, owners: Any) -> Any:
        encoded.append(len(columns.owner))
        return original(self, columns, owners)

    monkeypatch.setattr(exporter_module.otlp.StepEncoder, "encode_steps", encode)
    exporter = OtlpSpanExporter(BatchCollector(), False)  # type: ignore[arg-type]
    for number in range(3):
        exporter.export_request(make_record(6000, f"r{number}"), ALL)
    exporter.flush(0)
    assert max(encoded) <= STEPS_PER_CALL
    assert sum(encoded) == 18_000


def test_unencodable_spans_are_counted_without_affecting_others(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, original = make_record(3, "broken"), exporter_module.otlp.encode_span

    def encode(span: Any) -> bytes:
        if span.span_id == broken.span_id:
            raise ValueError("unsupported value")
        return original(span)

    monkeypatch.setattr(exporter_module.otlp, "encode_span", encode)
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    exporter.export_request(broken, ALL._replace(steps=0))
    exporter.export_request(make_record(3, "whole"), ALL)
    exporter.flush(0)
    assert [batch.spans for batch in batches.collected] == [6]
    assert batches.lost == {"not_encoded": 3}


def test_unencodable_steps_are_counted_without_affecting_later_ones() -> None:
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    broken = make_record(3, "broken")
    assert broken.steps is not None
    broken.steps = RequestSteps(broken.steps.table[:5])
    exporter.export_request(broken, ALL)
    exporter.flush(0)
    exporter.export_request(make_record(3, "whole"), ALL)
    exporter.flush(0)
    assert batches.lost == {"not_encoded": 3}
    assert [batch.spans for batch in batches.collected] == [3, 6]


def test_batch_is_handed_over_once_a_second() -> None:
    batches = BatchCollector()
    exporter = OtlpSpanExporter(batches, False)  # type: ignore[arg-type]
    exporter.flush(10_000_000_000)
    exporter.export_request(make_record(3), ALL)
    exporter.flush(10_900_000_000)
    assert batches.collected == []
    exporter.flush(11_000_000_000)
    assert [batch.spans for batch in batches.collected] == [6]
    exporter.flush(0)
    assert len(batches.collected) == 1, "no empty batch is handed over"
