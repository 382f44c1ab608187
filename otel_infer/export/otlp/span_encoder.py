"""Encodes spans one at a time, and the request around many: canonical protobuf by plain joins."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Union

import numpy as np

from otel_infer.export.otlp.deflate import deflate
from otel_infer.ringbuffer.events import Value as AttributeValue

_U64_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SMALL_VARINTS = tuple(bytes((value,)) for value in range(128))
_GZIP_CONTAINER = 31
_DOUBLE, _FIXED64 = struct.Struct("<d"), struct.Struct("<Q")
_NO_ATTRIBUTES: Mapping[str, AttributeValue] = MappingProxyType({})
Encoded = Union[bytes, memoryview]
"""A part of an encoded message."""


class SpanEvent(NamedTuple):
    """An event of a span. `at`: unix ns."""

    at: int
    name: str
    attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES


class SpanLink(NamedTuple):
    """A link to another span, by its trace id (16 bytes) and span id (8 bytes)."""

    trace_id: bytes
    span_id: bytes
    attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES


class SharedAttributes(dict[str, AttributeValue]):
    """Attributes that many spans share. All of them refer to the same object, which is encoded once."""

    @cached_property
    def encoded(self) -> bytes:
        """The attributes as encoded fields of a span."""
        return _encode_attributes(9, self)


_NO_SHARED = SharedAttributes()


class Span(NamedTuple):
    """A span of any shape. `start`, `end`: unix ns. `status`: 0 unset, 1 ok, 2 error; never with a message.

    `kind` and `flags`: numbers of the protocol. `parent_span_id`: empty for a root. `durations` and `shared`
    are attributes too, and no name is in two of the three mappings. Values of `durations` are floats.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    name: str
    kind: int
    start: int
    end: int
    attributes: Mapping[str, AttributeValue] = _NO_ATTRIBUTES
    events: Sequence[SpanEvent] = ()
    links: Sequence[SpanLink] = ()
    status: int = 0
    trace_state: str = ""
    flags: int = 0
    durations: Mapping[str, float] = _NO_ATTRIBUTES  # type: ignore[assignment]
    shared: SharedAttributes = _NO_SHARED

    @property
    def all_attributes(self) -> dict[str, AttributeValue]:
        """All attributes of the span in one dict."""
        return {**self.durations, **self.shared, **self.attributes}


def encode_varint(value: int) -> bytes:
    """Returns a canonical varint; a negative number is encoded as its two's complement in 64 bits."""
    if 0 <= value < 128:
        return _SMALL_VARINTS[value]
    if 128 <= value < 1 << 14:
        return bytes((value & 127 | 128, value >> 7))
    value &= _U64_MASK
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=4096)
def _encode_prefix(number: int, length: int) -> bytes:
    """Returns tag and length of a field, cached, because the same few hundred recur in every span."""
    return encode_varint(number << 3 | 2) + encode_varint(length)


def encode_field(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited field, which is present even if it is empty."""
    return _encode_prefix(number, len(payload)) + payload


def encode_string(number: int, text: str) -> bytes:
    """Returns a string field; empty bytes for an empty text, as in proto3."""
    return _encode_bytes(number, _encode_utf8(text))


def encode_number(number: int, value: int) -> bytes:
    """Returns a varint field; empty bytes for 0."""
    return encode_varint(number << 3) + encode_varint(value) if value else b""


def _encode_bytes(number: int, payload: bytes) -> bytes:
    return encode_field(number, payload) if payload else b""


def _encode_fixed64(number: int, value: int) -> bytes:
    return _SMALL_VARINTS[number << 3 | 1] + _FIXED64.pack(value & _U64_MASK) if value else b""


def _encode_utf8(text: str) -> bytes:
    """Returns UTF-8 with `?` for lone surrogates.

    A string that is not UTF-8 makes receivers refuse the whole batch.
    """
    return text.encode("utf-8", "replace")


def _encode_any_value(value: object) -> bytes:
    """Returns an AnyValue.

    A value that no kind of AnyValue holds, such as an integer beyond 64 bits, is sent as text.
    """
    match value:
        case str():
            return encode_field(1, _encode_utf8(value))
        case bool() | np.bool_():
            return b"\x10\x01" if value else b"\x10\x00"
        case int() | np.integer():
            whole = int(value)
            return (
                b"\x18" + encode_varint(whole)
                if -1 << 63 <= whole < 1 << 63
                else encode_field(1, str(whole).encode())
            )
        case float() | np.floating():
            return b"\x21" + _DOUBLE.pack(value)
        case bytes():
            return encode_field(7, value)
        case Sequence():
            return encode_field(5, b"".join(encode_field(1, _encode_any_value(item)) for item in value))
        case None:
            return b""
    return encode_field(1, _encode_utf8(str(value)))


@lru_cache(maxsize=1024)
def encode_key(name: str) -> bytes:
    """Returns the key field of a KeyValue, cached, because names recur in every span."""
    return encode_string(1, name)


def _encode_attributes(number: int, attributes: Mapping[str, AttributeValue]) -> bytes:
    """Returns repeated KeyValue fields. Parts that recur in every request are cached."""
    parts: list[bytes] = []
    for name, value in attributes.items():
        kind = type(value)
        if kind is float:
            parts += _encode_double_prefix(number, name), _DOUBLE.pack(value)
        elif kind is str or kind is bool:
            parts.append(_encode_cached(number, name, value))
        elif kind is int and 0 <= value < 1 << 63:  # type: ignore[operator]
            whole = encode_varint(value)  # type: ignore[arg-type]
            parts += _encode_integer_prefix(number, name, len(whole)), whole
        else:
            parts.append(encode_field(number, encode_key(name) + encode_field(2, _encode_any_value(value))))
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _encode_double_prefix(number: int, name: str) -> bytes:
    return encode_field(number, encode_key(name) + encode_field(2, b"\x21" + bytes(8)))[:-8]


@lru_cache(maxsize=4096)
def _encode_integer_prefix(number: int, name: str, width: int) -> bytes:
    return encode_field(number, encode_key(name) + encode_field(2, b"\x18" + bytes(width)))[:-width]


@lru_cache(maxsize=256, typed=True)
def _encode_cached(number: int, name: str, value: AttributeValue) -> bytes:
    return encode_field(number, encode_key(name) + encode_field(2, _encode_any_value(value)))


def _encode_event(event: SpanEvent) -> bytes:
    return encode_field(
        11,
        _encode_fixed64(1, event.at) + encode_string(2, event.name) + _encode_attributes(3, event.attributes),
    )


def _encode_link(link: SpanLink) -> bytes:
    return encode_field(
        13,
        _encode_bytes(1, link.trace_id)
        + _encode_bytes(2, link.span_id)
        + _encode_attributes(4, link.attributes),
    )


def encode_span(span: Span) -> bytes:
    """Returns one span as an entry of `ScopeSpans`, byte for byte as the stock classes write it."""
    (
        trace_id, span_id, parent, name, kind, start, end,
        attributes, events, links, status, state, flags, durations, shared,
    ) = span  # fmt: skip
    if trace_id and span_id and start > 0 < end and not state:
        values = (trace_id, span_id, parent, start, end) if parent else (trace_id, span_id, start, end)
        if durations:
            layout = _make_layout(name, kind, bool(parent), *durations)
            filled = layout.fill_holes(*values, *durations.values())
        else:
            layout = _make_layout(name, kind, bool(parent))
            filled = layout.fill_holes(*values)
        if not (shared or attributes or events or links or status or flags):  # as of most stages
            return layout.prefix + filled
        parts = [filled]
    else:
        parts = [_encode_without_layout(span)]
    if shared:
        parts.append(shared.encoded)
    if attributes:
        parts.append(_encode_attributes(9, attributes))
    if events or links:
        parts += [*map(_encode_event, events), *map(_encode_link, links)]
    if status:
        parts.append(encode_field(15, encode_number(3, status)))
    if flags:
        parts.append(b"\x85\x01" + struct.pack("<I", flags))
    return encode_field(2, b"".join(parts))


def _encode_without_layout(span: Span) -> bytes:
    """Returns the ids, name, instants and durations of a span without a layout."""
    trace_id, span_id, parent, name, kind, start, end = span[:7]
    ids = (
        _encode_bytes(1, trace_id)
        + _encode_bytes(2, span_id)
        + encode_string(3, span.trace_state)
        + _encode_bytes(4, parent)
    )
    return (
        ids
        + _encode_name_and_kind(name, kind)
        + _encode_fixed64(7, start)
        + _encode_fixed64(8, end)
        + _encode_attributes(9, span.durations)
    )


class _SpanLayout:
    """A run of bytes with holes: the bytes before each hole, and the `struct` format of the value in it."""

    def __init__(self, holes: Sequence[tuple[bytes, str]]) -> None:
        self.holes = holes
        self._parts: list[Any] = [part for before, _ in holes for part in (before, None)]
        layout = struct.Struct("<" + "".join(f"{len(before)}s{form}" for before, form in holes))
        self._pack = layout.pack
        self.prefix = _encode_prefix(2, layout.size)
        """Tag and length of a span that has nothing else."""

    def fill_holes(self, *values: Any) -> bytes:
        """Returns the bytes with one value in each hole."""
        parts = self._parts.copy()
        parts[1::2] = values
        return self._pack(*parts)


@lru_cache(maxsize=1024)
def _make_layout(name: str, kind: int, has_parent: bool, *durations: str) -> _SpanLayout:
    """Returns the layout of the spans with this name and these durations.

    Such spans differ only in ids and numbers.
    """
    holes = [(b"\x0a\x10", "16s"), (b"\x12\x08", "8s"), (b"\x22\x08", "8s")][: 3 if has_parent else 2]
    holes += [(_encode_name_and_kind(name, kind) + b"\x39", "Q"), (b"\x41", "Q")]
    return _SpanLayout(holes + [(_encode_double_prefix(9, duration), "d") for duration in durations])


@lru_cache(maxsize=1024)
def _encode_name_and_kind(name: str, kind: int) -> bytes:
    return encode_string(5, name) + encode_number(6, kind)


def encode_resource(attributes: Mapping[str, AttributeValue]) -> bytes:
    """Returns the encoded resource, for `build_export_request`."""
    return encode_field(1, _encode_attributes(1, attributes))


def encode_scope(name: str, version: str, schema_url: str = "") -> bytes:
    """Returns the encoded instrumentation scope and the schema of its spans, for `build_export_request`."""
    return encode_field(1, encode_string(1, name) + encode_string(2, version)) + encode_string(3, schema_url)


def build_export_request(resource: bytes, scope: bytes, spans: Sequence[Encoded]) -> list[Encoded]:
    """Returns an ExportTraceServiceRequest, in parts.

    Each item of `spans` may hold any number of encoded spans.
    """
    length = sum(map(len, spans))
    inner = b"\x12" + encode_varint(len(scope) + length) + scope
    outer = b"\x0a" + encode_varint(len(resource) + len(inner) + length) + resource
    return [outer + inner, *spans]


def gzip_parts(parts: Sequence[Encoded]) -> bytes:
    """Returns all parts as one gzip member of level 1.

    The bytes are reproducible, because there is no time stamp.
    """
    stream = deflate.compressobj(1, deflate.DEFLATED, _GZIP_CONTAINER)
    return b"".join([*map(stream.compress, parts), stream.flush()])
