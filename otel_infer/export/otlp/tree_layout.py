"""Encodes trees of spans that differ only in ids, instants and numbers, with one `struct` call per tree."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

from otel_infer.export.otlp.span_encoder import (
    Span,
    SpanEvent,
    _encode_attributes,
    _encode_double_prefix,
    _encode_integer_prefix,
    _make_layout,
    encode_field,
    encode_number,
    encode_string,
)

_ONE_BYTE, _TWO_BYTES = "B", "H"
_LINK_IDS = (b"\x6a\x1c\x0a\x10", b"\x12\x08")
"""The bytes before the trace id of a link, and before its span id."""


class SpanTreeLayout:
    """The bytes of trees like `spans`, with holes. The spans have no flags or `tracestate`, and their links no attributes.

    `numbers`: names of attributes with a hole. Their values are floats, or whole numbers from 1 to 16383, of as many bytes
    as a varint as in `spans`. Of an event, the instant and each float have a hole; of a link, both ids.
    """

    def __init__(self, spans: Sequence[Span], numbers: Collection[str]) -> None:
        holes: list[tuple[bytes, str]] = []
        tail = b""
        for span in spans:
            (first, form), *others, rest = _describe_span(span, numbers)
            length = len(rest) + struct.calcsize("<" + _join_formats([(first, form), *others]))
            prefix = encode_field(2, bytes(length))[:-length]
            holes += [(tail + prefix + first, form), *others]
            tail = rest
        self._parts: list[Any] = [part for before, _ in holes for part in (before, None)]
        self._wide = [2 * number + 1 for number, (_, form) in enumerate(holes) if form == _TWO_BYTES]
        self._pack, self._tail = struct.Struct("<" + _join_formats(holes)).pack, tail

    def encode_tree(self, values: Sequence[Any]) -> bytes:
        """Returns the encoded spans, with `list_values` of them in the holes."""
        parts = self._parts.copy()
        parts[1::2] = values
        for place in self._wide:
            parts[place] = parts[place] & 127 | 128 | parts[place] >> 7 << 8
        return self._pack(*parts) + self._tail


def list_values(spans: Sequence[Span], numbers: Collection[str]) -> list[Any]:
    """Returns the ids, instants, durations, numbers, events and links of each span."""
    values: list[Any] = []
    for span in spans:
        parent = (span.parent_span_id,) if span.parent_span_id else ()
        values += (span.trace_id, span.span_id, *parent, span.start, span.end, *span.durations.values())
        values += [value for name, value in span.attributes.items() if name in numbers]
        for event in span.events:
            values += (event.at, *(value for value in event.attributes.values() if isinstance(value, float)))
        for link in span.links:
            values += link[:2]
    return values


def _join_formats(holes: Sequence[tuple[bytes, str]]) -> str:
    return "".join(f"{len(before)}s{form}" for before, form in holes)


def _describe_event(event: SpanEvent) -> tuple[list[tuple[bytes, str]], bytes]:
    """Returns the holes of an event, each with the bytes before it, and the bytes after the last hole."""
    holes, rest = [(b"\x09", "Q")], encode_string(2, event.name)
    for name, value in event.attributes.items():
        if isinstance(value, float):
            holes.append((rest + _encode_double_prefix(3, name), "d"))
            rest = b""
        else:
            rest += _encode_attributes(3, {name: value})
    return holes, rest


def _describe_span(span: Span, numbers: Collection[str]) -> list[Any]:
    """Returns the holes of a span, each with the bytes before it, and then the bytes after the last hole."""
    holes: list[Any] = [*_make_layout(span.name, span.kind, bool(span.parent_span_id), *span.durations).holes]
    rest = span.shared.encoded
    for name, value in span.attributes.items():
        if name not in numbers:
            rest += _encode_attributes(9, {name: value})
        elif isinstance(value, float):
            holes.append((rest + _encode_double_prefix(9, name), "d"))
            rest = b""
        else:
            form = _ONE_BYTE if value < 128 else _TWO_BYTES  # type: ignore[operator]
            holes.append((rest + _encode_integer_prefix(9, name, struct.calcsize(form)), form))
            rest = b""
    for event in span.events:
        own, after = _describe_event(event)
        length = len(after) + struct.calcsize("<" + _join_formats(own))
        holes.append((rest + encode_field(11, bytes(length))[:-length] + own[0][0], own[0][1]))
        holes += own[1:]
        rest = after
    for _ in span.links:
        holes += [(rest + _LINK_IDS[0], "16s"), (_LINK_IDS[1], "8s")]
        rest = b""
    return [*holes, rest + (encode_field(15, encode_number(3, span.status)) if span.status else b"")]
