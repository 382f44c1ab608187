"""The compiled ring writer writes the same bytes as the Python code that takes its place where it is not built."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import sys
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import events, layout, writer
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.step_ring import CONSTANTS, PythonStepRing

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is not built")

SMALL = RingSizes(64, 64, 64, 64)
_NUMBERS = {
    "q": st.integers(-(2**63), 2**63 - 1),
    "Q": st.integers(0, 2**64 - 1),
    "I": st.integers(0, 2**32 - 1),
    "H": st.integers(0, 2**16 - 1),
    "B": st.integers(0, 255),
    "X": st.binary(max_size=16),
    "x": st.binary(max_size=8),
    "S": st.text(max_size=8),
    "T": st.text(max_size=8),
}
_TEXTS = st.one_of(
    st.text(max_size=60), st.text('abc-"\\ ~', max_size=60), st.integers(1, 2300).map("x".__mul__)
)
_ATTRIBUTES = st.tuples(
    st.integers(-(2**63), 2**63 - 1), _TEXTS, st.one_of(_TEXTS, st.integers(), st.booleans())
)


def make_writer(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> writer.RequestWriter:
    monkeypatch.setattr(writer, "native", native if compiled else None)
    monkeypatch.setattr(writer.os, "urandom", lambda count: b"\1" * count)
    made = writer.RequestWriter(MemoryArena(), "", "server", SMALL)
    assert (made.write_event.__class__.__name__ == "builtin_function_or_method") == compiled
    return made


def ring_bytes(made: writer.RequestWriter) -> bytes:
    return bytes(memoryview(made.memory)[layout.PAGE :])


def any_event(kind: type) -> st.SearchStrategy[Any]:
    fields = writer._COMPILED_LAYOUTS[kind][1]
    values = _ATTRIBUTES if fields == "A" else st.tuples(*(_NUMBERS[field] for field in fields))
    return values.map(lambda values: events.make_tuple(kind, values))


ANY_EVENT = st.sampled_from(sorted(writer._COMPILED_LAYOUTS, key=lambda kind: kind.__name__)).flatmap(
    any_event
)


@settings(deadline=None, max_examples=300)
@given(recorded=st.lists(st.tuples(st.integers(0, 2**32 - 1), ANY_EVENT), max_size=8))
def test_compiled_events_are_the_same_bytes(recorded: list[tuple[int, Any]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        compiled, plain = make_writer(True, monkeypatch), make_writer(False, monkeypatch)
    for handle, event in recorded:
        compiled.write_event(handle, event)
        plain.write_event(handle, event)
    assert ring_bytes(compiled) == ring_bytes(plain)


@settings(deadline=None, max_examples=100)
@given(
    numbers=st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)),
    ids=st.tuples(*(st.binary(min_size=size, max_size=size) for size in (16, 8, 8, 8))),
    flags=st.integers(0, 2**16 - 1),
    names=st.tuples(*[st.text(max_size=8)] * 4),
)
def test_compiled_arrivals_are_the_same_bytes(
    numbers: tuple[int, int], ids: tuple[bytes, ...], flags: int, names: tuple[str, ...]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        compiled, plain = make_writer(True, monkeypatch), make_writer(False, monkeypatch)
        arrived = events.make_tuple(events.RequestArrived, (*numbers, *ids, flags, *names))
        assert compiled.open_request(arrived) == plain.open_request(arrived) != 0
        assert compiled.open_request(arrived) == plain.open_request(arrived)
    assert ring_bytes(compiled) == ring_bytes(plain)


@pytest.mark.parametrize(
    "event",
    [
        events.EngineFinished(1, "stop", -1),
        events.EngineFinished(1, "stop", 2**32),
        events.RequestReceived(2**63),
        events.RequestReceived("now"),  # type: ignore[arg-type]
        events.make_tuple(events.RequestReceived, (1, 2)),
        object(),
    ],
)
def test_an_event_that_does_not_fit_raises_and_writes_no_cell(
    event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = make_writer(True, monkeypatch)
    before = ring_bytes(compiled)
    with pytest.raises((ValueError, OverflowError, TypeError, KeyError)):
        compiled.write_event(7, event)
    compiled.write_event(7, events.RequestReceived(1))
    cell = layout.CELL.unpack_from(ring_bytes(compiled))
    assert before.count(0) == len(before)
    assert cell[0] == cell[-1] == 1  # the next event takes the first cell


STEP_CALLS = st.one_of(
    st.tuples(
        st.just("write_unchanged"),
        st.tuples(st.sampled_from([3, 4]), *[st.integers(0, 2**32 - 1)] * 4, st.integers(1, 2**62)),
    ),
    st.tuples(st.just("write_single_tokens"), st.tuples(*[st.integers(1, 2**62)] * 2, st.integers(0, 9))),
    st.tuples(st.just("check_keyframe"), st.tuples(st.integers(0, 2**62))),
)


@settings(deadline=None)
@given(calls=st.lists(STEP_CALLS, max_size=200))
def test_compiled_steps_are_the_same_bytes(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    size = layout.PAGE + 64 * layout.CELL_BYTES
    memories = [mmap.mmap(-1, size) for _ in range(2)]
    rings = [
        kind(memory, size - layout.CELL_BYTES, *CONSTANTS)
        for kind, memory in zip((native.StepRing, PythonStepRing), memories)
    ]
    for ring in rings:
        ring.size, ring.next_keyframe_step = 3, 100
        ring.next_keyframe_at = ring.next_check_at = 2**62
    for name, arguments in calls:
        results = [getattr(ring, name)(*arguments) for ring in rings]
        assert results[0] == results[1]
        attributes = ("cells_written", "offset", "step", "next_keyframe_step", "keyframe_requests")
        assert len({tuple(getattr(ring, each) for each in attributes) for ring in rings}) == 1
    assert memories[0][:] == memories[1][:]


def test_layouts_that_compiled_code_writes_itself() -> None:
    """`_request_state.c` packs these events by their layout."""
    layouts = writer._COMPILED_LAYOUTS
    assert layouts[events.StageEnded] == (2, "qqSq")
    assert layouts[events.OperationNamed] == (43, "qSSS")
    assert layouts[events.ModelPlaced] == (48, "qS")
    assert layouts[events.RequestEnded] == (11, "qHSHIqq")
    assert layouts[events.ExchangeEnded][1] == "qBSHIqqSB"


def test_text_is_named_again_after_its_table_was_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its id would be given to another text."""
    made = make_writer(True, monkeypatch)
    stage = events.StageEnded(1, 0, "forward", 0)
    for _ in range(2):  # the second event finds the text by its identity
        made.write_event(1, stage)
    table = made._string_table
    table.ids.clear()
    table.on_cleared()
    made.write_event(1, stage)
    assert table.ids["forward"]


def test_another_interpreter_gets_no_compiled_module() -> None:
    """Its types are static. The Python code runs there instead."""
    name = next(
        name for name in ("_interpreters", "_xxsubinterpreters") if importlib.util.find_spec(name) is not None
    )
    interpreters: Any = importlib.import_module(name)
    other = interpreters.create()
    seen = tempfile.TemporaryFile()
    code = f"""
import os, sys
sys.path[:] = {sys.path!r}
try:
    import otel_infer.ringbuffer._native
except ImportError as exc:
    os.write({seen.fileno()}, str(exc).encode())
"""
    try:
        interpreters.run_string(other, code)
    finally:
        interpreters.destroy(other)
    seen.seek(0)
    refused = seen.read()  # Python 3.12 refuses a module for an interpreter with a lock of its own by itself
    assert refused == b"the compiled module serves one interpreter" or b"subinterpreters" in refused
