"""Byte layouts of all events: fixed structs for request and step events, JSON for events with free text.

The writers pack with them and the readers unpack with them; a code identifies each layout in a ring.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from otel_infer.ringbuffer.events.devices import MemoryRefused, MemorySeen, StageTimed, StepTimed
from otel_infer.ringbuffer.events.exchanges import (
    METHODS_AND_SCHEMES,
    SINGLE_CHUNK,
    CallServed,
    ExchangeEnded,
    HttpDescribed,
    HttpServed,
)
from otel_infer.ringbuffer.events.plain_values import to_plain
from otel_infer.ringbuffer.events.processes import (
    HooksReported,
    MarkSeen,
    ModuleImported,
    PauseSeen,
    PhaseBegan,
    PhaseEnded,
    ProcessLeft,
    ProcessStarted,
    ServerBound,
    ThreadRan,
)
from otel_infer.ringbuffer.events.requests import (
    AttributeSet,
    BatchFormed,
    BytesMoved,
    CacheHeld,
    EngineFinished,
    FirstTokenSent,
    LinkDescribed,
    ModelPlaced,
    NameUpdated,
    OperationNamed,
    PrefixRead,
    RequestArrived,
    RequestEnded,
    RequestPreempted,
    RequestReceived,
    RequestScheduled,
    RequestSubmitted,
    ResponseStarted,
    SpanEventAdded,
    SpanLinked,
    SpanUnseen,
    StageEnded,
    StateCarried,
    StepsUnrecorded,
    TokenReached,
    TokensDrafted,
)
from otel_infer.ringbuffer.events.steps import BlocksSized, StepDone, StepExecuted, StepScheduled, WaitingSeen

MAX_INSTANT = 1 << 62
"""ns; a monotonic clock reaches it after 146 years."""


class RecordedEvent(NamedTuple):
    """Event with its origin: ring number (one process or engine) and request handle (0 = no request)."""

    ring: int
    handle: int
    event: Any


# ── layouts of request events ────────────────────────────────────────────────────────────────────────────────────
# In a layout below, S is a string id of the process's string table (u32), and T a short one (u16).


class EventLayout(NamedTuple):
    """Byte layout of one event: the `struct` format of its fields, and the indexes of its string ids."""

    code: int
    event: type
    packed: struct.Struct
    strings: tuple[int, ...]


def _make_layout(code: int, event: type, fields: str) -> EventLayout:
    strings = tuple(i for i, f in enumerate(fields.split()) if f in "ST")
    packed = fields.replace("S", "I").replace("T", "H").replace(" ", "")
    return EventLayout(code, event, struct.Struct("<" + packed), strings)


REQUEST_LAYOUTS: tuple[EventLayout, ...] = (
    _make_layout(1, RequestArrived, "q q 16s 8s 8s 8s H T T T T"),
    _make_layout(2, StageEnded, "q q S q"),
    _make_layout(3, RequestSubmitted, "q I I I S"),
    _make_layout(4, RequestReceived, "q"),
    _make_layout(5, RequestScheduled, "q"),
    _make_layout(6, RequestPreempted, "q S"),
    _make_layout(7, TokenReached, "q"),
    _make_layout(8, FirstTokenSent, "q"),
    _make_layout(9, ResponseStarted, "q"),
    _make_layout(10, EngineFinished, "q S I"),
    _make_layout(11, RequestEnded, "q H S H I q q"),
    _make_layout(12, SpanLinked, "q 16s 8s"),
    _make_layout(13, HooksReported, "q S H H"),
    _make_layout(14, HttpDescribed, "q S S S"),
    _make_layout(15, PauseSeen, "q q S"),
    _make_layout(16, SpanUnseen, "q"),
    _make_layout(17, MarkSeen, "q q S I"),
    _make_layout(18, ExchangeEnded, "q B S H I q q S B"),
    _make_layout(20, ProcessStarted, "q q 16s 8s 8s"),
    _make_layout(21, ModuleImported, "q S q"),
    _make_layout(22, PhaseBegan, "q S"),
    _make_layout(23, PhaseEnded, "q q S S S S"),
    _make_layout(24, ProcessLeft, "q S"),
    _make_layout(25, PrefixRead, "q I I"),
    _make_layout(26, TokensDrafted, "q I I"),
    _make_layout(27, StepExecuted, "q q S I H Q H"),
    _make_layout(28, StepTimed, "q q S I H Q H I I I I"),
    _make_layout(29, StageTimed, "q q S I I I"),
    _make_layout(30, MemorySeen, "q S Q Q Q Q Q Q q q"),
    _make_layout(31, MemoryRefused, "q Q Q Q"),
    _make_layout(36, WaitingSeen, "q S I"),
    _make_layout(37, BytesMoved, "q q S q B"),
    _make_layout(38, CacheHeld, "q q"),
    _make_layout(39, BlocksSized, "q S I H I"),
    _make_layout(42, StepsUnrecorded, "q"),
    _make_layout(43, OperationNamed, "q S S S"),
    _make_layout(44, ThreadRan, "q q S H I I I I"),
    _make_layout(45, ServerBound, "q S I"),
    _make_layout(46, BatchFormed, "q I"),
    _make_layout(47, CallServed, "q S S S"),
    _make_layout(48, ModelPlaced, "q S"),
    _make_layout(41, HttpServed, "q q H S S S S"),
)
LAYOUT_BY_EVENT: Mapping[type, EventLayout] = {layout.event: layout for layout in REQUEST_LAYOUTS}
LAYOUT_BY_CODE: Mapping[int, EventLayout] = {layout.code: layout for layout in REQUEST_LAYOUTS}

# Events with free text (set by user code) are encoded as JSON, and never use the string table.
TEXT_CODES: Mapping[type, int] = {
    AttributeSet: 32,
    SpanEventAdded: 33,
    NameUpdated: 34,
    StateCarried: 35,
    LinkDescribed: 40,
}
_ATTRIBUTE_CODE = TEXT_CODES[AttributeSet]
_TEXT_EVENTS: Mapping[int, Callable[..., Any]] = {code: event for event, code in TEXT_CODES.items()}


make_tuple: Callable[[type, Iterable[Any]], Any] = tuple.__new__
"""Creates a named tuple from all its fields in order, in half the time of its constructor."""

_encode_json = json.JSONEncoder(default=to_plain, separators=(",", ":"), ensure_ascii=False).encode
_SURROGATE = b"\\ud"
"""The begin of a JSON escape of a surrogate, which a cell that this release wrote has only in pairs."""


def decode_json(body: bytes) -> Any:
    """Returns a JSON value whose strings are valid Unicode: `?` takes the place of a lone surrogate.

    Raises `ValueError`, and `RecursionError` for a value that is nested too deep.
    """
    value = json.loads(body)
    if _SURROGATE in body.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


MAX_COUNT = 0xFFFFFFFF


def clamp_count(number: Any) -> int:
    """Returns a count clamped to a u32 field of an event; 0 for a value that is not a number."""
    if type(number) is int and 0 <= number <= MAX_COUNT:
        return number
    try:
        return max(0, min(int(number), MAX_COUNT))
    except Exception:  # a user's object may raise anything
        return 0


_PLAIN_TEXT = r"[ !#-\[\]-~]*"
_is_plain_text = re.compile(_PLAIN_TEXT, re.ASCII).fullmatch
"""Matches a text that JSON writes as it is."""


def pack_text(event: AttributeSet | SpanEventAdded | NameUpdated | StateCarried | LinkDescribed) -> bytes:
    """Returns a free-text event as bytes; values that JSON does not support are replaced by their `str`, and
    lone surrogates by `?`.
    """
    if type(event) is AttributeSet:
        at, key, value = event
        if type(value) is str and _is_plain_text(value) and _is_plain_text(key):
            return b'[%d,"%b","%b"]' % (at, key.encode(), value.encode())  # a third of the encoder's time
    try:
        text = _encode_json(event)
    except Exception:  # a cycle, a deep value, a huge integer, or an object whose `str` raises
        text = _encode_json([to_plain(field) for field in event])
    return text.encode("utf-8", "replace")


def unpack_requests(code: int, bodies: Sequence[bytes], text_of: Callable[[int], str]) -> list[Any]:
    """Returns the request events with this code in `bodies`, which may be longer; column by column.

    Raises `ValueError` if one of them is invalid.
    """
    layout = LAYOUT_BY_CODE.get(code)
    if layout is None:
        return [_unpack_text(code, body) for body in bodies]
    size = layout.packed.size
    if min(map(len, bodies)) < size:
        raise ValueError("the event is longer than its body")
    return unpack_joined(layout, b"".join([body[:size] for body in bodies]), text_of)


def unpack_joined(layout: EventLayout, joined: bytes, text_of: Callable[[int], str]) -> list[Any]:
    """Returns the request events of this layout that follow each other in `joined`. Raises like `unpack_requests`."""
    _, event, packed, strings = layout
    columns: list[Any] = list(zip(*packed.iter_unpack(joined)))
    if not 0 <= min(columns[0]) <= max(columns[0]) < MAX_INSTANT:
        raise ValueError("an instant is outside of the clock")
    for i in strings:
        columns[i] = map(text_of, columns[i])
    return [*map(make_tuple, repeat(event), zip(*columns))]


_match_plain_text = re.compile(
    rf'\[(0|[1-9]\d{{0,17}}),"({_PLAIN_TEXT})","({_PLAIN_TEXT})"\]\0*'.encode()
).fullmatch
"""Matches an `AttributeSet` whose value is a text that JSON writes as it is; its instant is below `MAX_INSTANT`."""


def _unpack_text(code: int, body: bytes) -> Any:
    """Returns the free-text event with this code; raises `ValueError` for an invalid one."""
    if code not in _TEXT_EVENTS:
        raise ValueError(f"unknown event code {code}")
    plain = _match_plain_text(body) if code == _ATTRIBUTE_CODE else None
    if plain is not None:
        return AttributeSet(int(plain[1]), plain[2].decode(), plain[3].decode())
    event = _TEXT_EVENTS[code](*map(to_plain, decode_json(body.rstrip(b"\0"))))
    if type(event.at) is not int or not 0 <= event.at < MAX_INSTANT:
        raise ValueError("the instant is not a whole number of ns, or outside of the clock")
    return event


EXPANDED_EVENTS = frozenset((ExchangeEnded,))
"""Events that stand for others in a ring."""


def expand(event: Any) -> tuple[Any, ...]:
    """Returns the events that one event from a ring stands for, in order; nearly always the event itself."""
    if type(event) is not ExchangeEnded:
        return (event,)
    at, route, http = event.at, event.route, event.http
    expanded: list[Any] = []
    if http & SINGLE_CHUNK:
        expanded.append(ResponseStarted(at - event.send_wait_ns))
    if http > SINGLE_CHUNK:
        expanded.append(make_tuple(HttpDescribed, (at, *METHODS_AND_SCHEMES[http // 2 - 1], route)))
    return (*expanded, make_tuple(RequestEnded, event[:7]))


# ── layouts of step events ───────────────────────────────────────────────────────────────────────────────────────
SCHEDULED_CODE = 1
DONE_CODE = 2
MAX_STEP = 1 << 62
"""Steps are counted from 1 or by the engine; larger numbers are damage, and too large for the step table."""


COLUMN = 0xFFFF
"""In place of a count of (position, tokens) pairs: a whole column follows, one u32 per member."""
SCHEDULED_HEAD = struct.Struct("<qQBxHHHIIIII")
"""at, step, keyframe, left, joined, tokens (counts), size, kv used, kv total, running, waiting."""
DONE_HEAD = struct.Struct("<qQHxxII")
"""at, step, delivered (count), size, discarded."""


def _read_exceptions(body: bytes, offset: int, count: int, size: int) -> tuple[tuple[int, int], ...]:
    """Returns (position, tokens) of the members whose tokens are not 1, from pairs or from a whole column."""
    if count == COLUMN:
        column = _read_numbers(body, offset, size)
        return tuple((i, tokens) for i, tokens in enumerate(column) if tokens != 1)
    pairs = _read_numbers(body, offset, 2 * count)
    return tuple(zip(pairs[::2], pairs[1::2])) if pairs else ()


def _read_numbers(body: bytes, offset: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}I", body, offset) if count else ()


def unpack_step(code: int, body: bytes) -> StepScheduled | StepDone:
    """Returns the step event with this code in `body`; raises `ValueError` for an invalid one."""
    if code == SCHEDULED_CODE:
        head = SCHEDULED_HEAD.unpack_from(body)
        at, step, keyframe, n_left, n_joined, n_tokens, size, used, total, running, waiting = head
        if step >= MAX_STEP or not 0 <= at < MAX_INSTANT:
            raise ValueError("the step or its instant is out of range")
        change = _read_numbers(body, SCHEDULED_HEAD.size, n_left + n_joined)
        tokens = (
            _read_exceptions(body, SCHEDULED_HEAD.size + 4 * len(change), n_tokens, size) if n_tokens else ()
        )
        left, joined = change[:n_left], change[n_left:]
        fields = at, step, bool(keyframe), size, left, joined, tokens, used, total, running, waiting
        return make_tuple(StepScheduled, fields)  # type: ignore[no-any-return]
    if code == DONE_CODE:
        at, step, count, size, discarded = DONE_HEAD.unpack_from(body)
        if step >= MAX_STEP or not 0 <= at < MAX_INSTANT:
            raise ValueError("the step or its instant is out of range")
        delivered = _read_exceptions(body, DONE_HEAD.size, count, size) if count else ()
        return make_tuple(StepDone, (at, step, delivered, discarded))  # type: ignore[no-any-return]
    raise ValueError(f"unknown step event code {code}")
