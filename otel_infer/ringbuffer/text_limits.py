"""Cuts the values of a free-text event until the ring takes it. Keys, ids and instants stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events.plain_values import to_plain

_MIN_ROOM = 8
_SHORT, _OVERHEAD = 64, 6
"""Length of a value that stays whole, and bytes of JSON around a value."""
_CUTTERS: dict[type, Callable[[Any, int], Any]] = {
    events.AttributeSet: lambda event, room: event._replace(value=_cut_value(to_plain(event.value), room)),
    events.NameUpdated: lambda event, room: event._replace(name=_cut_value(event.name, room)),
    events.SpanEventAdded: lambda event, room: event._replace(
        name=_cut_value(event.name, room), attributes=_cut_mapping(event.attributes, room)
    ),
    events.LinkDescribed: lambda event, room: event._replace(attributes=_cut_mapping(event.attributes, room)),
}
"""An entry of `tracestate` has no meaning after a cut, so a `StateCarried` that is too long is not written."""


def pack_text_to_fit(event: Any, limit: int) -> tuple[bytes, bool]:
    """Returns a free-text event in at most `limit` bytes, and whether that cut it.

    The bytes are empty where the keys alone are longer than the limit.
    """
    packed, room = events.pack_text(event), limit
    if len(packed) <= limit:
        return packed, False
    cut = _CUTTERS.get(type(event))
    while cut is not None and len(packed) > limit and room >= _MIN_ROOM:
        packed = events.pack_text(cut(event, room))
        room = room * 3 // 4
    return (packed if len(packed) <= limit else b""), True


def _cut_mapping(attributes: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Returns the attributes in about `room` bytes: long values share it, short ones are whole.

    The last attributes go where keys and short values fill it.
    """
    plain = {str(key): to_plain(value) for key, value in attributes.items()}
    sizes = {key: len(str(value)) + _OVERHEAD for key, value in plain.items()}
    long_keys = [key for key, size in sizes.items() if size > _SHORT]
    free = room - sum(len(key) + min(sizes[key], _SHORT) for key in plain) + _SHORT * len(long_keys)
    share = max(free // max(len(long_keys), 1) - _OVERHEAD, _MIN_ROOM)
    kept: dict[str, Any] = {}
    for key, value in plain.items():
        kept[key] = _cut_value(value, share) if sizes[key] > _SHORT else value
        room -= len(key) + len(str(kept[key])) + _OVERHEAD
        if room < 0:
            del kept[key]
            break
    return kept


def _cut_value(value: Any, room: int) -> Any:
    """Returns a plain value in about `room` bytes: a text is cut at its end, a list loses its last items."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace")[:room].decode("utf-8", "ignore")
    if isinstance(value, dict):
        return _cut_mapping(value, room)
    if isinstance(value, list):
        kept = []
        for item in value:
            piece = _cut_value(item, room)
            room -= len(str(piece)) + 2
            if room < 0:
                break
            kept.append(piece)
        return kept
    return value
