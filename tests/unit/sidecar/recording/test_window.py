"""The window: the latest events within a byte limit, and the state needed to interpret them."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.process import Mark
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.cli import replay
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.sidecar.recording import file, flight_recorder, window_state
from otel_infer.sidecar.recording import window as room
from otel_infer.sidecar.recording.window import EventWindow, WindowSnapshot
from tests.support.simulator import Simulator, Tick, records_by_number, ticks, tokens_by_step

SECOND = 1_000_000_000
MB = 1 << 20
_QUIET = Tick([], -1, False, -1, -1, False, False, False, False, 1)
PREEMPTED_BESIDE = [
    _QUIET,
    _QUIET._replace(arrivals=[(2, 12, 6)]),
    *[_QUIET] * 4,
    _QUIET._replace(preempt=0, recompute=True),
    _QUIET._replace(arrivals=[(1, 2, 3)]),
]
"""One of two sequences recomputes its prompt at the start of the window, and another request joins the batch."""


def arrived(at: int, number: int) -> events.RequestArrived:
    ids = number.to_bytes(16, "big")
    return events.RequestArrived(
        at, at, ids, ids[8:], bytes(8), bytes(8), events.SAMPLED, "chat", "toy", "m", "chat m"
    )


def ended(at: int) -> events.RequestEnded:
    return events.RequestEnded(at, events.OK, "", 200, 1, 0, 0)


def keyframe(at: int, step: int, members: list[int]) -> events.StepScheduled:
    return events.StepScheduled(at, step, True, len(members), (), tuple(members), (), 1, 2, 3, 4)


def unchanged(at: int, step: int, size: int) -> events.StepScheduled:
    return events.StepScheduled(at, step, False, size, (), (), (), 1, 2, 3, 4)


def done(at: int, step: int) -> events.StepDone:
    return events.StepDone(at, step, (), 0)


def startup_events() -> list[RecordedEvent]:
    """Returns the events of a process (ring 1) and of its engine (ring 2)."""
    return [
        RecordedEvent(1, 0, events.ProcessSeen(0, 77, "server", 0)),
        RecordedEvent(2, 0, events.EngineSeen(0, 1, 77, "toy")),
    ]


def events_of(snapshot: WindowSnapshot) -> list[RecordedEvent]:
    return [recorded for batch in snapshot.iter_batches() for recorded in batch.recorded_events]


def records(snapshot: WindowSnapshot) -> dict[int, RequestRecord]:
    """Returns the request records of a window, by number."""
    assembler, found, horizon = Assembler(), [], 0
    for batch in snapshot.iter_batches():
        horizon = batch.horizon
        assembler.feed_events(batch.recorded_events)
        found += assembler.drain_records(horizon)
    return records_by_number(found + assembler.drain_records(horizon + GRACE_NS))


def plain(record: RequestRecord) -> dict[str, Any]:
    """Returns the fields that two records of the same request share.

    The other fields depend on all events of the server: the cost of a step, or whether it was a warm-up.
    """
    excluded = {
        "cost_model",
        "warmup_steps",
        "prefills_by_step",
        "thread_delays",
        "breakdown",
        "_summary",
        "steps",
    }
    fields = {name: getattr(record, name) for name in record.__slots__ if name not in excluded}
    return {**fields, "steps": record.steps.table.tolist() if record.steps is not None else None}


# ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(program=ticks(max_ticks=40), cuts=st.lists(st.integers(0, 300), max_size=20))
def test_recent_events_are_returned_unchanged(program: list[Tick], cuts: list[int]) -> None:
    with Simulator(2) as simulator:
        simulator.run(program)
    window, before = EventWindow(), 0
    for cut in [*sorted(cuts), len(simulator.recorded_events)]:
        piece = simulator.recorded_events[before:cut]
        window.add_events(piece, piece[-1].event.at if piece else 0)
        before = max(cut, before)
    assert events_of(window.take_snapshot()) == simulator.recorded_events


def test_the_window_holds_120_seconds_plus_one_chunk() -> None:
    window = EventWindow()
    for cycle in range(20 * 300):
        at = cycle * SECOND // 20
        window.add_events([RecordedEvent(1, 7, events.TokenReached(at))], at)
    snapshot = window.take_snapshot()
    held = events_of(snapshot)
    assert 120 <= snapshot.seconds <= 124.1
    assert snapshot.event_count == len(held)
    assert held[-1].event.at == (20 * 300 - 1) * SECOND // 20
    assert 120 * SECOND <= held[-1].event.at - held[0].event.at <= 124.1 * SECOND


@pytest.mark.parametrize("first", [[], startup_events()])
def test_the_window_begins_with_its_first_horizon(first: list[RecordedEvent]) -> None:
    """Earlier events have no horizon, so they do not lengthen the window."""
    window = EventWindow()
    window.add_events(first, 0)
    window.add_events(startup_events(), 3000 * SECOND)
    window.add_events([RecordedEvent(1, 1, arrived(3001 * SECOND, 1))], 3002 * SECOND)
    assert window.take_snapshot().seconds == 2


def test_the_window_empties_while_no_event_arrives() -> None:
    window = EventWindow()
    window.add_events([RecordedEvent(1, 7, events.TokenReached(5))], 5)
    for second in range(1, 130):
        window.add_events([], second * SECOND)
    assert events_of(window.take_snapshot()) == []
    assert window.size == 0


@pytest.mark.parametrize("limit", [1 * MB, 32 * MB])
def test_the_byte_limit_shortens_the_window(limit: int) -> None:
    window, dice, number = EventWindow(limit=limit), random.Random(1), 0
    cycles, largest = 400 if limit == MB else 60, 0
    tracemalloc.start()
    for cycle in range(cycles):
        at = cycle * SECOND // 20
        cycle_events = []
        for _ in range(2000 if limit == 32 * MB else 200):
            number += 1  # incompressible requests that never end
            cycle_events.append(
                RecordedEvent(1, number, arrived(at, number)._replace(trace_id=dice.randbytes(600)))
            )
        window.add_events(cycle_events, at)
        largest = max(largest, window.size)
    del cycle_events
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * limit < largest <= limit
    assert allocated < 1.15 * limit + MB
    snapshot = window.take_snapshot()
    assert snapshot.seconds < cycles / 20 - 0.5
    assert snapshot.dropped_requests > 0
    assert events_of(snapshot)[-1].handle == number


def test_default_limits_are_32_mib_and_120_s() -> None:
    assert room.MAX_BYTES == 32 * MB
    assert room.WINDOW_NS == 120 * SECOND


# ── state before the window ──────────────────────────────────────────────────────────────────────────────────────


def test_an_open_request_keeps_events_before_the_window() -> None:
    window = EventWindow()
    before = [
        *startup_events(),
        RecordedEvent(1, 0, events.HooksReported(1, "toy", 3, 4)),
        RecordedEvent(1, 0, events.HooksReported(2, "toy", 4, 4)),
        RecordedEvent(1, 5, arrived(10, 1)),
        RecordedEvent(1, 6, arrived(11, 2)),
        RecordedEvent(1, 5, events.StageEnded(20, 10, "tokenize", 1)),
        RecordedEvent(1, 5, events.AttributeSet(21, "users", ["a", "b"])),
        RecordedEvent(1, 5, events.RequestSubmitted(22, 1, 8, 9, "toy")),
        RecordedEvent(1, 6, ended(30)),
    ]
    window.add_events(before, 100)
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 5, ended(200 * SECOND))], 200 * SECOND)
    snapshot = window.take_snapshot()
    expected = [before[0], before[1], before[3], before[4], *before[6:9]]
    assert events_of(snapshot) == [*expected, RecordedEvent(1, 5, ended(200 * SECOND))]
    (record,) = records(snapshot).values()
    assert record.arrived_at == 10
    assert record.attributes["users"] == ["a", "b"]
    assert record.input_tokens == 8
    assert not record.telemetry_lost


def add_old_request(window: EventWindow, steps: int) -> int:
    """Adds request 1 and its steps, two per second from the first step; returns the instant of the next step."""
    window.add_events([*startup_events(), RecordedEvent(1, 5, arrived(10, 1))], 10)
    for step in range(1, steps + 1):
        at = step * SECOND // 2
        is_keyframe = step % 4 == 1
        scheduled = keyframe(at, step, [5]) if is_keyframe else unchanged(at, step, 1)
        window.add_events(
            [RecordedEvent(2, 0, scheduled), RecordedEvent(2, 0, done(at + 1000, step))], at + 2000
        )
    return (steps + 1) * SECOND // 2


@pytest.mark.parametrize("capacity", ["all", "few", "none"])
def test_open_requests_beyond_the_step_limit_are_marked(
    capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives later is complete."""
    if capacity == "few":
        monkeypatch.setattr(window_state, "MAX_SECTIONS", 2)
    if capacity == "none":
        monkeypatch.setattr(window_state, "MAX_STEPS_BYTES", 10)
    window = EventWindow()
    at = add_old_request(window, 400)
    later = [
        RecordedEvent(1, 6, arrived(at, 2)),
        RecordedEvent(2, 0, events.StepScheduled(at + 5, 401, False, 2, (), (6,), ((1, 8),), 1, 2, 3, 4)),
        RecordedEvent(2, 0, done(at + 6, 401)),
        RecordedEvent(2, 0, unchanged(at + 7, 402, 2)),
        RecordedEvent(2, 0, done(at + 8, 402)),
        RecordedEvent(1, 6, ended(at + 9)),
        RecordedEvent(1, 5, ended(at + 10)),
    ]
    window.add_events(later, at + 10)
    found = records(window.take_snapshot())
    assert found[1].arrived_at == 10
    assert found[1].telemetry_lost == (capacity != "all")
    assert found[1].first_token_at == (0 if capacity != "all" else SECOND // 2 + 1000)
    assert capacity != "all" or found[1].output_tokens == 402
    assert not found[2].telemetry_lost
    assert found[2].output_tokens == 2
    assert found[2].steps is not None
    assert found[2].steps.step.tolist() == [401, 402]


def test_steps_without_open_requests_are_dropped() -> None:
    window = EventWindow()
    at = add_old_request(window, 400)
    window.add_events([RecordedEvent(1, 5, ended(at))], at)
    for second in range(200, 400):
        window.add_events([], second * SECOND)
    assert [type(recorded.event) for recorded in events_of(window.take_snapshot())][2:4] == [
        events.StepScheduled
    ] * 2
    assert len(events_of(window.take_snapshot())) == 2 + 1 + 2 * 4


def test_early_steps_of_a_new_engine_are_retained() -> None:
    """Retained steps begin at a keyframe, and the first step of an engine is one."""
    window = EventWindow()
    at = add_old_request(window, 3)
    for second in range(2, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 5, ended(200 * SECOND))], 200 * SECOND)
    (record,) = records(window.take_snapshot()).values()
    assert at < 3 * SECOND
    assert not record.telemetry_lost
    assert record.output_tokens == 3


def test_events_of_an_ended_process_are_dropped() -> None:
    window = EventWindow()
    add_old_request(window, 10)
    window.add_events([RecordedEvent(1, 0, events.ProcessDied(6 * SECOND))], 6 * SECOND)
    for second in range(7, 200):
        window.add_events([], second * SECOND)
    assert events_of(window.take_snapshot()) == []
    assert window.size == 0


def test_requests_missing_in_the_live_table_are_dropped() -> None:
    """The listed requests are marked, and later requests are complete."""
    window = EventWindow()
    lost = events.EventsLost(20, 9, 1)
    window.add_events(
        [
            *startup_events(),
            RecordedEvent(1, 5, arrived(10, 1)),
            RecordedEvent(1, 6, arrived(11, 2)),
            RecordedEvent(1, 0, lost),
            RecordedEvent(1, 0, events.LiveListed(20, [6])),
            RecordedEvent(1, 7, arrived(30, 3)),
        ],
        100,
    )
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, handle, ended(200 * SECOND)) for handle in (5, 6, 7)], 200 * SECOND)
    found = records(window.take_snapshot())
    assert {number: record.telemetry_lost for number, record in found.items()} == {2: True, 3: False}


def test_pauses_of_open_requests_are_retained() -> None:
    window = EventWindow()
    pauses = [events.PauseSeen(5, 4, "gc"), events.PauseSeen(15, 12, "gc")]
    window.add_events(
        [*startup_events(), RecordedEvent(1, 0, pauses[0]), RecordedEvent(1, 5, arrived(10, 1))], 10
    )
    window.add_events([RecordedEvent(1, 0, pauses[1])], 20)
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 5, ended(200 * SECOND))], 200 * SECOND)
    (record,) = records(window.take_snapshot()).values()
    assert [(pause.started_at, pause.ended_at) for pause in record.pauses] == [(12, 15)]


def test_marks_of_open_requests_are_retained() -> None:
    window = EventWindow()
    mark = events.MarkSeen(15, 12, "allocator_retry", 2)
    window.add_events([*startup_events(), RecordedEvent(1, 5, arrived(10, 1)), RecordedEvent(1, 0, mark)], 20)
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 5, ended(200 * SECOND))], 200 * SECOND)
    (record,) = records(window.take_snapshot()).values()
    assert record.marks == (Mark(12, 15, "allocator_retry", 2),)


def test_throttled_clocks_of_open_requests_are_retained() -> None:
    window = EventWindow()
    clocks = [events.GpuClocksThrottled(at, at + 5, "hw_thermal", True) for at in (2, 15)]
    window.add_events(
        [*startup_events(), RecordedEvent(0, 0, clocks[0]), RecordedEvent(1, 5, arrived(10, 1))], 10
    )
    window.add_events([RecordedEvent(0, 0, clocks[1])], 20)
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 5, ended(200 * SECOND))], 200 * SECOND)
    (record,) = records(window.take_snapshot()).values()
    assert record.gpu_throttled_at == ((15, 20),)


def test_a_request_with_too_many_events_is_dropped() -> None:
    window = EventWindow()
    window.add_events([*startup_events(), RecordedEvent(1, 5, arrived(10, 1))], 10)
    window.add_events([RecordedEvent(1, 5, events.StageEnded(11, 10, "x" * 90, n)) for n in range(1000)], 20)
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    snapshot = window.take_snapshot()
    assert snapshot.dropped_requests == 1
    assert events_of(snapshot) == startup_events()


@pytest.mark.timeout(400)  # on a slow machine with others beside it
@settings(max_examples=150)
@example(program=PREEMPTED_BESIDE, depth=1, span=1, scarce=False)
@given(program=ticks(max_ticks=60), depth=st.integers(1, 2), span=st.integers(1, 3000), scarce=st.booleans())
def test_window_records_equal_full_tape_or_are_marked(
    program: list[Tick], depth: int, span: int, scarce: bool
) -> None:
    """`scarce`: steps of before the last keyframe are not remembered. Whose prompts were in a step with those who are
    marked is a guess, and so is how many tokens of others' prompts there were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_state, "MAX_SECTIONS", 1 if scarce else window_state.MAX_SECTIONS)
        patch.setattr(room, "CHUNK_NS", 1_000_000)
        window = EventWindow(span * 1_000_000)
        with Simulator(depth) as simulator:
            wake = simulator.poll

            def poll(final: bool = False) -> None:
                before = len(simulator.recorded_events)
                wake(final)
                window.add_events(simulator.recorded_events[before:], simulator.rings.horizon)

            simulator.poll = poll  # type: ignore[method-assign]
            simulator.run(program)
        snapshot = window.take_snapshot()
    in_window = {
        int.from_bytes(fact.trace_id, "big")
        for passage in list(snapshot.iter_batches())[bool(snapshot.state.unpack_rows()) :]
        for _, _, fact in passage.recorded_events
        if isinstance(fact, events.RequestArrived)
    }
    whole, found = records_by_number(simulator.records), records(snapshot)
    assert in_window <= found.keys() <= whole.keys()
    marked_until = max((record.ended_at for record in found.values() if record.telemetry_lost), default=0)
    for number, record in found.items():
        assert number not in in_window or not record.telemetry_lost
        if not record.telemetry_lost and not scarce and record.arrived_at > marked_until:
            assert plain(record) == plain(whole[number])
        elif not record.telemetry_lost:
            assert tokens_by_step(record) == tokens_by_step(whole[number])
        assert record.arrived_at == whole[number].arrived_at
        assert record.ended_at == whole[number].ended_at


# ── tapes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_written_window_is_an_ordinary_tape(tmp_path: Path) -> None:
    window = EventWindow()
    at = add_old_request(window, 400)
    window.add_events([RecordedEvent(1, 5, ended(at))], at)
    writer = file.RecordingWriter(tmp_path / "a.tape")
    for batch in window.take_snapshot().iter_batches():
        writer.write(*batch)
    writer.close()
    (record,) = replay.read_records(tmp_path / "a.tape")
    assert record.arrived_at == 10
    assert record.output_tokens == 400


def test_a_tape_records_when_its_coverage_begins(tmp_path: Path) -> None:
    window = EventWindow()
    window.add_events(
        [*startup_events(), RecordedEvent(1, 5, arrived(10, 1)), RecordedEvent(1, 6, arrived(11, 2))], 12
    )
    assert window.take_snapshot().began_at == 0
    window.add_events([RecordedEvent(1, 5, ended(20))], 5 * SECOND)
    for second in range(6, 200):
        window.add_events([], second * SECOND)
    window.add_events([RecordedEvent(1, 6, ended(200 * SECOND))], 200 * SECOND)
    assert window.take_snapshot().began_at == 5 * SECOND
    flight_recorder.write_recording(tmp_path / "a.tape", window.take_snapshot(), flight_recorder.SIGNAL)
    assert file.read_began_at(tmp_path / "a.tape") == 5 * SECOND


def test_a_snapshot_is_not_changed_by_later_events() -> None:
    window = EventWindow()
    at = add_old_request(window, 400)
    snapshot = window.take_snapshot()
    before = events_of(snapshot)
    for step in range(401, 800):
        scheduled = RecordedEvent(2, 0, unchanged(at + step * SECOND // 2, step, 1))
        window.add_events(
            [scheduled, RecordedEvent(1, 5, events.TokenReached(scheduled.event.at))], scheduled.event.at
        )
    assert events_of(snapshot) == before


def test_dropped_requests_are_counted_until_they_end() -> None:
    window = EventWindow()
    window.add_events(
        [*startup_events(), *(RecordedEvent(1, handle, arrived(10, handle)) for handle in (5, 6, 7))], 10
    )
    excess = [
        RecordedEvent(1, handle, events.StageEnded(11, 10, "x" * 90, n))
        for n in range(1000)
        for handle in (5, 6, 7)
    ]
    window.add_events(excess, 20)
    dropped = []
    for second, event in (
        (1, None),
        (200, ended(200 * SECOND)),
        (400, events.LiveListed(400 * SECOND, [7])),
        (600, None),
    ):
        window.add_events(
            [RecordedEvent(1, 5 if second == 200 else 0, event)] if event else [], second * SECOND
        )
        for later in range(1, 150):
            window.add_events([], (second + later) * SECOND)
        dropped.append(window.take_snapshot().dropped_requests)
    assert dropped == [3, 2, 1, 1]
    window.add_events([RecordedEvent(1, 0, events.ProcessDied(800 * SECOND))], 800 * SECOND)
    for later in range(801, 1000):
        window.add_events([], later * SECOND)
    assert window.take_snapshot().dropped_requests == 0


def test_both_parts_of_a_joined_request_are_retained() -> None:
    """Rings: 1 frontend, 2 engine core, 3 its engine. The first of three requests continues."""
    window = EventWindow()
    joined = [arrived(20 + n, n)._replace(flags=events.JOINED) for n in (1, 2, 3)]
    window.add_events(
        [
            RecordedEvent(1, 0, events.ProcessSeen(0, 77, "server", 0)),
            RecordedEvent(2, 0, events.ProcessSeen(0, 78, "engine", 0)),
            RecordedEvent(3, 0, events.EngineSeen(0, 2, 78, "toy")),
            *(RecordedEvent(1, 10 + n, arrived(10 + n, n)) for n in (1, 2, 3)),
            *(RecordedEvent(2, 20 + n, arrival) for n, arrival in enumerate(joined, 1)),
            RecordedEvent(3, 0, keyframe(30, 1, [21, 22])),
            RecordedEvent(3, 0, done(40, 1)),
            RecordedEvent(2, 22, ended(50)),
            RecordedEvent(1, 12, ended(60)),
        ],
        100,
    )
    for second in range(1, 200):
        window.add_events([], second * SECOND)
    handles = {
        (recorded.ring, recorded.handle) for recorded in events_of(window.take_snapshot()) if recorded.handle
    }
    assert handles == {(1, 11), (2, 21), (1, 12), (2, 22), (1, 13), (2, 23)}
    window.add_events([RecordedEvent(2, n, ended(200 * SECOND)) for n in (21, 23)], 200 * SECOND)
    for second in range(201, 400):
        window.add_events([], second * SECOND)
    handles = {
        (recorded.ring, recorded.handle) for recorded in events_of(window.take_snapshot()) if recorded.handle
    }
    assert handles == {(1, 11), (2, 21), (1, 12), (2, 22), (1, 13), (2, 23)}
    window.add_events([RecordedEvent(1, n, ended(400 * SECOND)) for n in (11, 13)], 400 * SECOND)
    for second in range(401, 600):
        window.add_events([], second * SECOND)
    assert not [recorded for recorded in events_of(window.take_snapshot()) if recorded.handle]
