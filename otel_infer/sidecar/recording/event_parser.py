"""Turns a line of a tape into an event, and refuses whatever no writer writes.

A tape may come from anywhere, so each field is checked against the type of its event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from otel_infer.config.redaction import replace_controls
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events.plain_values import to_plain

MAX_MEMBERS = 1 << 20
"""Sequences of a step, and items of a list."""
MAX_ID_BYTES = 64

TYPES_BY_NAME: Mapping[str, type[Any]] = {event.__name__: event for event in events.EVENT_TYPES}


class InvalidEvent(ValueError):
    """Failure to read an event; the message states why."""


def parse_event(line: Any) -> events.RecordedEvent:
    """Returns the event of a line `[ring, handle, name, field, …]`; raises `InvalidEvent`."""
    if not isinstance(line, list) or len(line) < 3:
        raise InvalidEvent("a line is no event")
    ring, handle, name, *fields = line
    checks = _CHECKS.get(name) if isinstance(name, str) else None
    if checks is None or not _count_required_fields(name) <= len(fields) <= len(checks):
        raise InvalidEvent(
            f"unknown event {name!r:.60} with {len(fields)} fields; use the otel_infer release that recorded it"
        )
    event = TYPES_BY_NAME[name](*(check(field) for check, field in zip(checks, fields)))
    if not 0 <= event.at < events.MAX_INSTANT:
        raise InvalidEvent(f"the instant of {name} is outside of the clock")
    if isinstance(event, events.StepScheduled) and event.size > MAX_MEMBERS:
        raise InvalidEvent("a batch is larger than any")
    return events.RecordedEvent(check_number(ring), check_number(handle), event)


def _count_required_fields(name: str) -> int:
    """Returns how many fields an event must have. An earlier release recorded it without the last ones."""
    kind = TYPES_BY_NAME[name]
    return len(kind._fields) - len(kind._field_defaults)


def check_number(value: Any) -> int:
    """Returns a whole number that fits 64 bits; raises `InvalidEvent`."""
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return value
    raise InvalidEvent(f"not a number of an event: {value!r:.60}")


def _check_text(value: Any) -> str:
    if isinstance(value, str):
        return replace_controls(value)
    raise InvalidEvent(f"not a text: {value!r:.60}")


def _check_bytes(value: Any) -> bytes:
    if (
        isinstance(value, dict)
        and isinstance(value.get("hex"), str)
        and len(value["hex"]) <= 2 * MAX_ID_BYTES
    ):
        return bytes.fromhex(value["hex"])
    raise InvalidEvent(f"not an id: {value!r:.60}")


def _check_list(value: Any) -> list[Any]:
    if isinstance(value, list) and len(value) <= MAX_MEMBERS:
        return value
    raise InvalidEvent(f"not a list: {value!r:.60}")


def _check_numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(check_number, _check_list(value)))


def _check_pairs(value: Any) -> tuple[tuple[int, int], ...]:
    pairs = tuple(map(_check_numbers, _check_list(value)))
    if any(len(pair) != 2 for pair in pairs):
        raise InvalidEvent("not a list of pairs")
    return pairs  # type: ignore[return-value]


def _check_mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {_check_text(key): _check_value(item) for key, item in value.items()}
    raise InvalidEvent(f"not attributes: {value!r:.60}")


def _check_value(value: Any) -> Any:
    """Returns a plain value whose texts a terminal can print."""
    plain = to_plain(value)
    if isinstance(plain, list):
        return [_check_value(item) for item in plain]
    if isinstance(plain, dict):
        return {replace_controls(key): _check_value(item) for key, item in plain.items()}
    return replace_controls(plain) if isinstance(plain, str) else plain


def _make_check(hint: Any) -> Callable[[Any], Any]:
    by_type: dict[Any, Callable[[Any], Any]] = {
        int: check_number,
        bool: bool,
        str: _check_text,
        bytes: _check_bytes,
    }
    if hint in by_type:
        return by_type[hint]
    text = str(hint)
    if text.startswith("collections.abc.Mapping"):
        return _check_mapping
    if text == "collections.abc.Sequence[int]":
        return _check_numbers
    return _check_pairs if "tuple[int, int]" in text else _check_value


_CHECKS = {
    name: tuple(map(_make_check, get_type_hints(event).values())) for name, event in TYPES_BY_NAME.items()
}
