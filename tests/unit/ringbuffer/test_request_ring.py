"""Request ring, live table and string table: every written event is read or counted as lost."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MAX_TOTAL_BYTES, FileArena, MemoryArena, RingUnavailable
from otel_infer.ringbuffer.reader import MAX_HOLE_POLLS, InvalidRing, RequestReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter

SMALL = layout.RingSizes(cells=64, live_slots=8, strings=16, step_cells=64)


def make_writer(sizes: layout.RingSizes = SMALL) -> tuple[RequestWriter, mmap.mmap]:
    writer = RequestWriter(MemoryArena(), "test", "server", sizes)
    return writer, writer.memory


def arrival(number: int, name: str = "POST /v1/chat/completions", flags: int = 1) -> events.RequestArrived:
    trace = number.to_bytes(16, "big")
    return events.RequestArrived(
        number, number + 1, trace, trace[8:], bytes(8), bytes(8), flags, "chat", "toy", "m", name
    )


def read(reader: RequestReader, final: bool = True) -> list[Any]:
    return [recorded.event for recorded in reader.poll(0, final)]


instants = st.integers(0, 2**60)
values = st.one_of(
    st.text(max_size=80), st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False)
)
written_events = st.one_of(
    st.builds(
        events.StageEnded,
        st.integers(0, 2**60),
        st.integers(0, 2**60),
        st.sampled_from(["a", "b"]),
        st.integers(0, 9),
    ),
    st.builds(events.RequestReceived, st.integers(0, 2**60)),
    st.builds(events.AttributeSet, st.integers(0, 2**60), st.text(max_size=20), values),
    st.builds(arrival, st.integers(1, 2**60)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(written_events, st.integers(0, 2**32 - 1), st.booleans()), max_size=120))
def test_events_are_read_in_order_and_losses_counted(
    history: list[tuple[Any, int, bool]],
) -> None:
    writer, memory = make_writer()
    reader = RequestReader(memory, 1)
    got: list[Any] = []
    for event, handle, poll in history:
        writer.write_event(handle, event)
        if poll:
            got += list(reader.poll(0))
    got += list(reader.poll(0, final=True))
    written = [(handle, event) for event, handle, _ in history]
    complete = [
        (recorded.handle, recorded.event)
        for recorded in got
        if not isinstance(recorded.event, events.EventsLost)
    ]
    rest = iter(written)
    assert all(any(event == candidate for candidate in rest) for event in complete)  # a subsequence
    if reader.lost == 0 and reader.torn == 0:
        assert complete == written


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 63), st.integers(0, 63), st.integers(1, 255))
@example(cell=39, byte=0, change=32)  # the newest cell has the counter of an older one
def test_a_cell_with_mismatched_counters_is_torn(cell: int, byte: int, change: int) -> None:
    writer, memory = make_writer()
    for i in range(40):
        writer.write_event(i, events.RequestReceived(i))
    offset = layout.PAGE + cell * 64 + byte
    memory[offset] ^= change
    reader = RequestReader(memory, 1)
    got = [event.at for event in read(reader) if isinstance(event, events.RequestReceived)]
    if byte < 8 or byte >= 56:
        assert cell not in got
        assert reader.lost + reader.torn >= 1 or cell >= 40


def test_a_reserved_unwritten_cell_is_awaited_then_counted() -> None:
    writer, memory = make_writer()
    reader = RequestReader(memory, 1)
    writer.write_event(1, events.RequestReceived(1))
    writer._next_cell()  # like a thread that stopped between reserving and writing
    writer.write_event(1, events.RequestReceived(3))
    seen: list[Any] = []
    polls = 0
    while len(seen) < 2:
        seen += [event for event in read(reader, final=False) if isinstance(event, events.RequestReceived)]
        polls += 1
        assert polls < MAX_HOLE_POLLS + 5
    assert [event.at for event in seen] == [1, 3]
    assert reader.torn == 1


def test_a_late_write_to_reserved_cell_is_read() -> None:
    writer, memory = make_writer()
    reader = RequestReader(memory, 1)
    cell = writer._next_cell()
    writer.write_event(1, events.RequestReceived(2))
    assert read(reader, final=False) == [] and read(reader, final=False) == []
    body = events.LAYOUT_BY_EVENT[events.RequestReceived].packed.pack(1)
    layout.CELL.pack_into(memory, layout.PAGE + cell * 64, cell + 1, 4, 0, 1, 1, body, cell + 1)
    got = read(reader, final=False) + read(reader, final=False)
    assert [event.at for event in got] == [1, 2]


def test_an_overwritten_ring_reports_number_of_losses() -> None:
    writer, memory = make_writer()
    reader = RequestReader(memory, 1)
    for i in range(200):
        writer.write_event(1, events.RequestReceived(i))
    got = read(reader)
    lost = [event for event in got if isinstance(event, events.EventsLost)]
    assert lost[0].lost + len(got) - 1 == 200


def test_a_late_reader_recovers_requests_in_flight() -> None:
    writer, memory = make_writer()
    first = writer.open_request(arrival(7))
    second = writer.open_request(arrival(8))
    for i in range(200):
        writer.write_event(second, events.RequestReceived(i))
    writer.close_request(second, events.RequestEnded(9, events.OK, "", 200, 0, 0, 0))
    live = dict(RequestReader(memory, 1).read_live_requests())
    assert list(live) == [first]
    assert live[first].trace_id == (7).to_bytes(16, "big")


ids = [st.binary(min_size=size, max_size=size) for size in (16, 8, 8, 8)]


@given(st.tuples(instants, instants, *ids, st.integers(0, 2**16 - 1), st.text(max_size=20)))
def test_an_arrival_with_only_a_name_is_preserved(fields: tuple[Any, ...]) -> None:
    writer, memory = make_writer()
    *known, name = fields
    arrived = events.RequestArrived(*known, "", "", "", name)
    handle = writer.open_request(arrived)
    reader = RequestReader(memory, 1)
    assert read(reader) == [arrived]
    assert [(handle, events.LiveRecovered(*known[:5], known[6]))] == list(reader.read_live_requests())


@pytest.mark.parametrize("single_chunk", [False, True])
@pytest.mark.parametrize("http_codes", [None, *events.HTTP_CODES])
def test_an_exchange_end_is_read_as_separate_events(
    http_codes: tuple[str, str] | None, single_chunk: bool
) -> None:
    writer, memory = make_writer()
    ended = events.RequestEnded(90, events.ERROR, "E", 500, 3, 40, 5)
    http = (events.HTTP_CODES[http_codes] if http_codes else 0) + (events.SINGLE_CHUNK if single_chunk else 0)
    route = "/a/{b}" if http_codes else ""
    writer.write_event(7, events.ExchangeEnded(*ended, route, http))
    expected: list[Any] = [events.ResponseStarted(50)] if single_chunk else []
    expected += [events.HttpDescribed(90, *http_codes, route)] if http_codes else []
    assert read(RequestReader(memory, 1)) == [*expected, ended]


def test_a_reused_slot_has_a_new_handle() -> None:
    writer, _ = make_writer()
    handles = set()
    for i in range(64):
        handle = writer.open_request(arrival(i + 1))
        writer.close_request(handle, events.RequestEnded(9, events.OK, "", 200, 0, 0, 0))
        handles.add(handle)
    assert len(handles) == 64


def test_closing_a_request_twice_frees_one_slot() -> None:
    writer, memory = make_writer()
    handle = writer.open_request(arrival(1))
    ended = events.RequestEnded(9, events.OK, "", 200, 0, 0, 0)
    writer.close_request(handle, ended)
    writer.close_request(handle, ended)
    opened = [writer.open_request(arrival(i + 2)) for i in range(8)]
    assert len(set(opened)) == 8 and 0 not in opened


def test_a_full_live_table_only_counts_unrecorded_requests() -> None:
    writer, memory = make_writer()
    handles = [writer.open_request(arrival(i + 1)) for i in range(9)]
    assert handles[8] == 0
    assert writer.words[layout.W_UNRECORDED] == 1
    assert [
        event.lost for event in read(RequestReader(memory, 1)) if isinstance(event, events.EventsLost)
    ] == []


@pytest.mark.parametrize("final", [True, False])
def test_a_loss_is_reported_before_later_events(final: bool) -> None:
    writer, memory = make_writer()
    reader = RequestReader(memory, 1)
    writer.write_event(1, events.TokenReached(1))
    assert list(reader.poll(2)) == []
    assert len(list(reader.poll(3))) == 1
    for at in range(2, 200):
        writer.write_event(1, events.TokenReached(at))
    polls = [list(reader.poll(10_000 + poll, final=final)) for poll in range(1 if final else 2)]
    assert polls[:-1] == ([] if final else [[]])  # a complete event is returned one poll later
    lost, *after = [recorded.event for recorded in polls[-1]]
    assert isinstance(lost, events.EventsLost) and lost.lost > 0
    assert 1 < lost.at == after[0].at < 200
    assert not any(isinstance(event, events.EventsLost) for event in after)


def test_a_table_full_of_recent_texts_yields_other_without_loss() -> None:
    writer, memory = make_writer()
    for i in range(28):
        writer.write_event(1, events.StageEnded(i, 0, f"stage {i}", 0))
    got = read(RequestReader(memory, 1))
    stages = [event.stage for event in got if isinstance(event, events.StageEnded)]
    assert stages[:3] == ["stage 0", "stage 1", "stage 2"]
    assert set(stages[16:]) == {events.OTHER}
    assert len(got) == len(stages) == 28


@pytest.mark.parametrize("gil", [True, False], ids=["GIL", "free-threaded"])
def test_concurrent_threads_lose_no_events(gil: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    writer, memory = make_writer(layout.RingSizes())

    def write_events(thread: int) -> None:
        for i in range(1000):
            writer.write_event(thread, events.StageEnded(i, thread, "s", i))

    threads = [threading.Thread(target=write_events, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    reader = RequestReader(memory, 1)
    got = list(reader.poll(0, final=True))
    assert reader.lost == reader.torn == 0
    for n in range(4):
        assert [recorded.event.items for recorded in got if recorded.handle == n] == list(range(1000))


def test_a_ring_of_another_layout_version_is_rejected() -> None:
    writer, memory = make_writer()
    writer.words[layout.W_VERSION] = 99
    with pytest.raises(InvalidRing, match="layout version 99"):
        RequestReader(memory, 1)


def test_ring_files_are_private_locked_and_allocated(tmp_path: Any) -> None:
    arena = FileArena(tmp_path)
    writer = RequestWriter(arena, "one", "server")
    path = tmp_path / "one.requests"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == len(writer.memory)
    assert path.stat().st_blocks * 512 >= len(writer.memory)
    with pytest.raises(RingUnavailable, match="File exists"):
        RequestWriter(arena, "one", "server")
    arena.close()


def test_a_missing_directory_is_named_in_the_error(tmp_path: Any) -> None:
    with pytest.raises(RingUnavailable, match="nowhere"):
        RequestWriter(FileArena(tmp_path / "nowhere"), "one", "server")


def test_rings_together_stay_below_16_mib(tmp_path: Any) -> None:
    arena = FileArena(tmp_path)
    created = 0
    with pytest.raises(RingUnavailable, match="are used up"):
        for i in range(200):
            StepWriter(arena, str(i), "toy")
            created += 1
    assert created > 16
    assert sum(os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)) <= MAX_TOTAL_BYTES
    arena.close()
