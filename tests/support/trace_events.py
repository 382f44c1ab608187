"""Checks Chrome's trace event format as its readers take it: slices, counters, names.

It follows the format's description ("Trace Event Format", the JSON object form) strictly: fields and their types, names of
existing tracks, nested slices. Readers compute an end differently: some add floating point numbers, Perfetto truncates to
integer ns. Slices have to nest either way.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

WHOLE = {"traceEvents", "displayTimeUnit", "otherData"}
COMMON = {"name", "ph", "pid", "tid", "ts", "args"}
FIELDS = {"X": COMMON | {"dur"}, "C": COMMON, "M": COMMON}
METADATA: dict[str, tuple[str, type]] = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}
MOST_ID = 1 << 31
Event = dict[str, Any]


def read_as_trace(text: str) -> list[Event]:
    """Returns the events of a trace; fails where a reader could misread it."""
    trace = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    assert set(trace) <= WHOLE and isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    events: list[Event] = trace["traceEvents"]
    for event in events:
        _check(event)
    _check_names(events)
    _check_counters(events)
    _check_nesting(events, lambda us: us)
    _check_nesting(events, lambda us: int(us * 1000))
    return events


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"duplicate key: {pairs}"
    return dict(pairs)


def _check(event: Event) -> None:
    assert set(event) == FIELDS[event["ph"]], event
    assert type(event["name"]) is str and event["name"]
    assert all(type(event[key]) is int and 0 <= event[key] < MOST_ID for key in ("pid", "tid"))
    assert all(type(event.get(key, 0)) in (int, float) and event.get(key, 0) >= 0 for key in ("ts", "dur"))
    assert type(event["args"]) is dict
    if event["ph"] == "M":
        key, kind = METADATA[event["name"]]
        assert set(event["args"]) == {key} and type(event["args"][key]) is kind
    if event["ph"] == "C":
        assert event["args"] and all(type(n) is int and n >= 0 for n in event["args"].values())
    if event["ph"] == "X":
        assert all(type(value) in (int, float, str, bool) for value in event["args"].values())


def _check_names(events: list[Event]) -> None:
    """Checks that each process and track in use has exactly one name."""
    named = [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"]
    assert len(named) == len(set(named))
    for event in events:
        assert ("process_name", event["pid"], 0) in named
        assert event["ph"] != "X" or ("thread_name", event["pid"], event["tid"]) in named


def _check_counters(events: list[Event]) -> None:
    """Checks that a counter keeps its series, and that its values are in order of time."""
    counters: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append(event)
    for values in counters.values():
        assert len({tuple(event["args"]) for event in values}) == 1
        assert [event["ts"] for event in values] == sorted(event["ts"] for event in values)


def _check_nesting(events: list[Event], made: Any) -> None:
    """Checks that slices of a track are in order, beside or inside each other."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        ends: list[float] = []
        last = 0
        for event in slices:
            begin, end = made(event["ts"]), made(event["ts"]) + made(event["dur"])
            assert begin >= last
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], f"overlapping slices: {event}"
            ends.append(end)
            last = begin
