"""OTLP encoding: the protobuf classes read the output, and for single spans they write the same bytes."""

from __future__ import annotations

import gzip
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from otel_infer.export import otlp
from otel_infer.export.otlp import span_encoder as single
from otel_infer.export.otlp.step_encoder import StepColumns, StepOwners

NAMES = (
    "decode step",
    "infer.step.id",
    "infer.batch.size",
    "infer.step.tokens",
    "infer.interference.prefill_tokens",
    "infer.device.span",
)
NAME, STEP, BATCH, TOKENS, PREFILL, DEVICE = NAMES
U64 = 1 << 64

text = st.text(st.characters(exclude_categories=()), max_size=20)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
instant = st.integers(0, U64 - 1)
plain = st.one_of(text, st.booleans(), int64, st.floats())
value = st.one_of(plain, st.lists(text), st.lists(st.booleans()), st.lists(int64), st.lists(st.floats()))
attributes = st.dictionaries(text, value, max_size=5)
trace_id, span_id = st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8)
span = st.builds(
    otlp.Span,
    trace_id=trace_id,
    span_id=span_id,
    parent_span_id=st.one_of(st.just(b""), span_id),
    name=text,
    kind=st.integers(0, 5),
    start=instant,
    end=instant,
    attributes=attributes,
    events=st.lists(st.builds(otlp.SpanEvent, instant, text, attributes), max_size=3),
    links=st.lists(st.builds(otlp.SpanLink, trace_id, span_id, attributes), max_size=3),
    status=st.integers(0, 2),
    trace_state=st.text(max_size=10),
    flags=st.integers(0, (1 << 32) - 1),
    durations=st.dictionaries(text.map("length {}".format), st.floats(), max_size=3),
    shared=st.builds(
        otlp.SharedAttributes, st.dictionaries(text.map("recurring {}".format), value, max_size=3)
    ),
)


def as_utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def comparable(value: Any) -> Any:
    """Makes NaN comparable and distinguishes True from 1."""
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, float):
        return struct.pack("<d", value)
    return (type(value), as_utf8(value) if isinstance(value, str) else value)


def read(any_value: AnyValue) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [read(item) for item in any_value.array_value.values]
    return None if kind is None else getattr(any_value, kind)


def pairs(key_values: Any) -> list[tuple[str, Any]]:
    return [(pair.key, comparable(read(pair.value))) for pair in key_values]


def expected_pairs(attributes: Any) -> list[tuple[str, Any]]:
    return [(as_utf8(key), comparable(value)) for key, value in attributes.items()]


def parsed(encoded: bytes) -> list[trace_pb2.Span]:
    return list(trace_pb2.ScopeSpans.FromString(encoded).spans)


@given(span)
def test_span_round_trips_through_protobuf(span: otlp.Span) -> None:
    (decoded_span,) = parsed(otlp.encode_span(span))

    assert (span.trace_id, span.span_id, span.parent_span_id) == (
        decoded_span.trace_id,
        decoded_span.span_id,
        decoded_span.parent_span_id,
    )
    assert (as_utf8(span.name), span.kind, span.start, span.end) == (
        decoded_span.name,
        decoded_span.kind,
        decoded_span.start_time_unix_nano,
        decoded_span.end_time_unix_nano,
    )
    assert (span.status, "", span.trace_state, span.flags) == (
        decoded_span.status.code,
        decoded_span.status.message,
        decoded_span.trace_state,
        decoded_span.flags,
    )
    assert expected_pairs(span.all_attributes) == pairs(decoded_span.attributes)
    assert [(e.at, as_utf8(e.name), expected_pairs(e.attributes)) for e in span.events] == [
        (e.time_unix_nano, e.name, pairs(e.attributes)) for e in decoded_span.events
    ]
    assert [(link.trace_id, link.span_id, expected_pairs(link.attributes)) for link in span.links] == [
        (link.trace_id, link.span_id, pairs(link.attributes)) for link in decoded_span.links
    ]


@given(span)
def test_span_bytes_equal_the_protobuf_serialization(span: otlp.Span) -> None:
    encoded = otlp.encode_span(span)
    assert encoded == trace_pb2.ScopeSpans.FromString(encoded).SerializeToString()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 << 63, str(1 << 63)),
        (-(1 << 63) - 1, str(-(1 << 63) - 1)),
        (np.int64(-7), -7),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (b"\x00\xff", b"\x00\xff"),
        ((1, None, "x"), [1, None, "x"]),
        ("\ud800!", "?!"),
        (3 + 4j, "(3+4j)"),
    ],
)
def test_unusual_value_is_sent_as_the_nearest_type(value: Any, expected: Any) -> None:
    span = otlp.Span(b"t" * 16, b"s" * 8, b"", "x", 1, 1, 2, {"key": value})
    (decoded_span,) = parsed(otlp.encode_span(span))
    assert [("key", comparable(expected))] == pairs(decoded_span.attributes)


@st.composite
def batches(draw: st.DrawFn) -> tuple[StepColumns, StepOwners]:
    """Owners in any order, all eight shapes of rows, integers of any size."""
    owners, rows = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    seed = np.random.default_rng(draw(st.integers(0, 1 << 32)))

    def column(strategy: st.SearchStrategy[int]) -> np.ndarray:
        return np.array(draw(st.lists(strategy, min_size=rows, max_size=rows)), np.int64)

    # Mostly unsigned numbers of every length, because they determine the widths of varints.
    number = st.one_of(st.integers(0, 300), st.integers(0, 63).map(lambda bits: (1 << bits) - 1), int64)
    columns = StepColumns(
        owner=column(st.integers(0, owners - 1)).astype(np.uint32),
        start=column(st.integers(0, (1 << 63) - 1)),
        end=column(st.integers(0, (1 << 63) - 1)),
        step=column(number),
        batch_size=column(number),
        tokens=column(st.one_of(st.just(1), st.just(0), number)),
        others_prefill_tokens=column(st.one_of(st.just(0), number)),
        device_span=column(st.one_of(st.just(0), number)) if draw(st.booleans()) else column(st.just(0)),
    )
    ids = (seed.integers(0, 256, (owners, width), dtype=np.uint8) for width in (16, 8, 8))
    return columns, StepOwners(*ids)


def expected_rows(columns: StepColumns, owners: StepOwners) -> list[tuple[Any, ...]]:
    rows = []
    for owner, start, end, step, batch, tokens, prefill, device in sorted(
        zip(*(column.tolist() for column in columns)), key=lambda row: row[0]
    ):
        values = {STEP: step, BATCH: batch}
        values |= {TOKENS: tokens} if tokens != 1 else {}
        values |= {PREFILL: prefill} if prefill > 0 else {}
        values |= {DEVICE: device} if device > 0 else {}
        ids = (owners.trace_id[owner].tobytes(), owners.parent_span_id[owner].tobytes())
        rows.append((*ids, NAME, 1, start, end, values))
    return rows


def read_rows(spans: list[trace_pb2.Span]) -> list[tuple[Any, ...]]:
    return [
        (
            decoded_span.trace_id,
            decoded_span.parent_span_id,
            decoded_span.name,
            decoded_span.kind,
            decoded_span.start_time_unix_nano,
            decoded_span.end_time_unix_nano,
            {pair.key: pair.value.int_value for pair in decoded_span.attributes},
        )
        for decoded_span in spans
    ]


@given(batches())
def test_step_rows_round_trip_grouped_by_request(
    batch: tuple[StepColumns, StepOwners],
) -> None:
    columns, owners = batch
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(columns, owners)
    spans = parsed(encoded)
    assert count == len(columns.owner) == len(spans)
    assert expected_rows(columns, owners) == read_rows(spans)


@given(batches())
def test_encoding_is_deterministic(batch: tuple[StepColumns, StepOwners]) -> None:
    assert otlp.StepEncoder(*NAMES).encode_steps(*batch) == otlp.StepEncoder(*NAMES).encode_steps(*batch)


def one_request(**changes: Any) -> tuple[StepColumns, StepOwners]:
    """100 ordinary rows of one request."""
    step = np.arange(100, dtype=np.int64)
    ordinary: dict[str, Any] = {
        "owner": np.zeros(100, np.uint32),
        "start": 1_790_000_000_000_000_000 + step,
        "end": 1_790_000_000_005_000_000 + step,
        "step": step,
        "batch_size": np.full(100, 256),
        "tokens": np.ones(100, np.int64),
        "others_prefill_tokens": np.zeros(100, np.int64),
        "device_span": np.zeros(100, np.int64),
    }
    ids = (np.full((1, width), 7, np.uint8) for width in (16, 8, 8))
    return StepColumns(**ordinary | changes), StepOwners(*ids)


@pytest.mark.parametrize("step", [0, 1 << 13, 1 << 27, 1 << 34, 1 << 62])
def test_ordinary_row_takes_at_most_130_bytes(step: int) -> None:
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(*one_request(step=np.full(100, step)))
    assert len(encoded) / count <= 130


def test_device_timed_row_takes_at_most_160_bytes() -> None:
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(*one_request(device_span=np.full(100, 40_000_000)))
    assert len(encoded) / count <= 160


def test_large_step_id_among_small_ones_is_correct() -> None:
    step = np.arange(100, dtype=np.int64)
    step[50] = 1 << 40
    encoded, _ = otlp.StepEncoder(*NAMES).encode_steps(*one_request(step=step))
    assert step.tolist() == [values[STEP] for *_, values in read_rows(parsed(encoded))]


def test_narrower_column_types_give_the_same_bytes() -> None:
    narrow = one_request(batch_size=np.full(100, 256, np.int32), tokens=np.full(100, 2, np.uint8))
    wide = one_request(tokens=np.full(100, 2))
    encode = otlp.StepEncoder(*NAMES).encode_steps
    assert encode(*wide) == encode(*narrow)


def test_many_owners_are_sorted() -> None:
    """Beyond 65,536 owners another sort is used."""
    owners = np.arange(70_000, dtype=np.uint32)[::-1].copy()
    ids = np.frombuffer(np.arange(70_000, dtype="<u8").tobytes(), np.uint8).reshape(-1, 8)
    columns, _ = one_request()
    stretched = [np.resize(column, 70_000) for column in columns[1:]]
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(
        StepColumns(owners, *stretched), StepOwners(np.hstack([ids, ids]), ids, ids)
    )
    parents = [int.from_bytes(span.parent_span_id, "little") for span in parsed(encoded)]
    assert (count, list(range(70_000))) == (70_000, parents)


def splitmix64(value: int) -> int:
    """splitmix64, as published."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % U64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % U64
    return value ^ value >> 31


@given(span_id, int64)
def test_step_ids_are_machine_independent(request: bytes, step: int) -> None:
    expected = splitmix64((splitmix64(int.from_bytes(request, "little")) + step * 0x9E3779B97F4A7C15) % U64)
    decoded_span = otlp.derive_step_span_ids(np.frombuffer(request, np.uint8).reshape(1, 8), np.array([step]))
    assert (expected or 0x9E3779B97F4A7C15).to_bytes(8, "little") == decoded_span.tobytes()


@given(st.sets(span_id, min_size=1, max_size=20), st.sets(int64, min_size=1, max_size=50))
def test_step_ids_are_unique_across_requests(requests: set[bytes], steps: set[int]) -> None:
    pairs_of_ids = [(request, step) for request in requests for step in steps]
    ids = np.frombuffer(b"".join(request for request, _ in pairs_of_ids), np.uint8).reshape(-1, 8)
    decoded_span = otlp.derive_step_span_ids(ids, np.array([step for _, step in pairs_of_ids]))
    assert len(pairs_of_ids) == len({row.tobytes() for row in decoded_span})


def test_adjacent_request_ids_share_no_step_id() -> None:
    requests = np.arange(1, 257, dtype="<u8").view(np.uint8).reshape(-1, 8)
    ids = otlp.derive_step_span_ids(np.repeat(requests, 1024, axis=0), np.tile(np.arange(1024), 256))
    assert 256 * 1024 == len(np.unique(ids.view("<u8")))


def test_step_id_is_never_zero() -> None:
    assert any(otlp.derive_step_span_ids(np.zeros((1, 8), np.uint8), np.zeros(1, np.int64)).tobytes())


def test_rows_have_the_derived_ids() -> None:
    columns, owners = one_request()
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(columns, owners)
    expected = otlp.derive_step_span_ids(np.repeat(owners.request_span_id, count, axis=0), columns.step)
    assert [row.tobytes() for row in expected] == [span.span_id for span in parsed(encoded)]


@given(attributes, st.lists(st.lists(span, max_size=3), max_size=4))
def test_export_request_has_resource_scope_and_spans(
    resource: dict[str, Any], parts: list[list[otlp.Span]]
) -> None:
    body = otlp.build_export_request(
        otlp.encode_resource(resource),
        otlp.encode_scope("otel_infer", "1.2", "https://schema"),
        [b"".join(map(otlp.encode_span, part)) for part in parts],
    )
    (resource_spans,) = ExportTraceServiceRequest.FromString(b"".join(body)).resource_spans
    (scope_spans,) = resource_spans.scope_spans

    assert expected_pairs(resource) == pairs(resource_spans.resource.attributes)
    assert ("otel_infer", "1.2", "https://schema") == (
        scope_spans.scope.name,
        scope_spans.scope.version,
        scope_spans.schema_url,
    )
    assert [span.span_id for part in parts for span in part] == [span.span_id for span in scope_spans.spans]


def test_resource_has_each_attribute_once() -> None:
    body = otlp.build_export_request(
        otlp.encode_resource({"service.name": "x"}), otlp.encode_scope("s", ""), []
    )
    (resource_spans,) = ExportTraceServiceRequest.FromString(b"".join(body)).resource_spans
    assert [
        KeyValue(key="service.name", value=AnyValue(string_value="x"))
    ] == resource_spans.resource.attributes


@pytest.mark.parametrize("library", ["isal", "zlib"])
@given(parts=st.lists(st.binary(max_size=2000)))
def test_parts_are_compressed_as_one_gzip_stream(library: str, parts: list[bytes]) -> None:
    deflate = (
        zlib if library == "zlib" else pytest.importorskip("isal.isal_zlib", reason="isal is not installed")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "deflate", deflate)
        compressed = otlp.gzip_parts(parts)
        assert b"".join(parts) == gzip.decompress(compressed)
        assert compressed == otlp.gzip_parts(parts)


def test_decode_steps_compress_to_under_30_bytes() -> None:
    columns, owners = one_request()
    encoded, count = otlp.StepEncoder(*NAMES).encode_steps(columns, owners)
    assert len(otlp.gzip_parts([encoded])) / count < 30
