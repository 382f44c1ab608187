"""Free text that is too long for the ring: keys and ids stay whole, values are cut, and the cut is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.text_limits import pack_text_to_fit
from otel_infer.ringbuffer.writer import RequestWriter

LIMIT = layout.MAX_PARTS * layout.PART_BYTES
KEY = "gen_ai.input.messages"


def unpack(packed: bytes) -> Any:
    return json.loads(packed)


@pytest.mark.parametrize("length", [LIMIT, 2 * LIMIT, 100_000])
def test_a_long_value_is_cut_and_its_key_is_whole(length: int) -> None:
    packed, is_cut = pack_text_to_fit(events.AttributeSet(7, KEY, "x" * length), LIMIT)
    at, key, value = unpack(packed)
    assert (at, key, is_cut) == (7, KEY, True)
    assert LIMIT / 2 < len(value) < LIMIT
    assert len(packed) <= LIMIT


def test_a_short_value_is_written_as_it_is() -> None:
    event = events.AttributeSet(7, KEY, "short")
    assert pack_text_to_fit(event, LIMIT) == (events.pack_text(event), False)


def test_a_long_list_keeps_its_first_items() -> None:
    packed, is_cut = pack_text_to_fit(events.AttributeSet(7, KEY, [f"item {i}" for i in range(1000)]), LIMIT)
    value = unpack(packed)[2]
    assert is_cut
    assert value == [f"item {i}" for i in range(len(value))]
    assert len(value) > 50


def test_event_attributes_share_the_room() -> None:
    attributes = {"first": "a" * 50_000, "number": 3, "second": "b" * 50_000}
    packed, is_cut = pack_text_to_fit(events.SpanEventAdded(7, "retry", attributes), LIMIT)
    at, name, kept = unpack(packed)
    assert (at, name, is_cut) == (7, "retry", True)
    assert list(kept) == ["first", "number", "second"]
    assert kept["number"] == 3
    assert min(len(kept["first"]), len(kept["second"])) > 300


def test_the_id_of_a_link_is_whole() -> None:
    packed, _ = pack_text_to_fit(events.LinkDescribed(7, "ab" * 8, {"reason": "r" * 9000}), LIMIT)
    assert unpack(packed)[1] == "ab" * 8


def test_a_key_that_is_too_long_is_not_written() -> None:
    assert pack_text_to_fit(events.AttributeSet(7, "k" * 9000, "value"), LIMIT) == (b"", True)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_cycle() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def make_deep_list() -> list[Any]:
    value: list[Any] = []
    for _ in range(2000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Unprintable(), "<Unprintable>"),
        ([1, Unprintable()], [1, "<Unprintable>"]),
        (10**5000, hex(10**5000)[:1000]),
        (-(10**2500), hex(-(10**2500))[:1000]),
        (b"caf\xe9", "caf\ufffd"),
        ("caf\udce9", "caf?"),
    ],
    ids=["str raises", "in a list", "huge", "negative", "bytes", "surrogate"],
)
def test_odd_values_become_plain(value: Any, expected: Any) -> None:
    packed, _ = pack_text_to_fit(events.AttributeSet(7, "key", value), LIMIT)
    found = unpack(packed)[2]
    assert (found[:1000] if isinstance(found, str) else found) == expected


@pytest.mark.parametrize("make", [make_cycle, make_deep_list])
def test_deep_and_cyclic_values_are_written(make: Any) -> None:
    packed, _ = pack_text_to_fit(events.AttributeSet(7, "key", make()), LIMIT)
    assert unpack(packed)[1] == "key"
    assert len(packed) <= LIMIT


values = st.recursive(
    st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans(), st.lists, max_leaves=20
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), values | st.text(min_size=500), max_size=140))
def test_any_attributes_fit(attributes: dict[str, Any]) -> None:
    packed, _ = pack_text_to_fit(events.SpanEventAdded(7, "name", attributes), LIMIT)
    assert len(packed) <= LIMIT
    assert not packed or set(unpack(packed)[2]) <= set(json.loads(json.dumps(attributes)))


def test_cut_values_are_counted() -> None:
    arena, rings = MemoryArena(), MergedReader()
    writer = RequestWriter(arena, "1-a", "server")
    writer.write_event(0, events.AttributeSet(7, KEY, "x" * 5000))
    writer.write_event(0, events.AttributeSet(8, KEY, "short"))
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, 1)
    assert rings.read_counts()["values_cut"] == 1
