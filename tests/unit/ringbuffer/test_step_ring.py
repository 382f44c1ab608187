"""Step rings against a model: every step that is read is correct, and missing steps are reported as lost."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.step_reader import StepReader
from otel_infer.ringbuffer.step_ring import KEYFRAME_CHECK_NS
from otel_infer.ringbuffer.step_writer import StepWriter


def make_batch_writer(halvings: int = 0) -> tuple[BatchWriter, HandleTable, mmap.mmap]:
    sizes = layout.RingSizes().scale_down(halvings)
    writer, handles = StepWriter(MemoryArena(), "test", "toy", sizes), HandleTable()
    return BatchWriter(writer, handles), handles, writer.memory


class ReplayedBatches:
    """The batches as a reader reconstructs them: a minimal assembler."""

    def __init__(self) -> None:
        self.members: list[int] | None = None
        self.batches: dict[int, list[int]] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.lost = 0

    def feed(self, event: Any) -> None:
        if isinstance(event, events.StepsLost):
            self.members, self.lost = None, self.lost + event.lost
        elif isinstance(event, events.StepScheduled):
            if event.keyframe:
                self.members = list(event.joined)
            elif self.members is not None:
                members = self.members.copy()
                for position in event.left:
                    del members[position]
                self.members = members + list(event.joined)
            if self.members is not None:
                assert len(self.members) == event.size
                self.batches[event.step] = self.members
                self.tokens[event.step] = dict(event.tokens)
        elif isinstance(event, events.StepDone):
            self.done[event.step] = dict(event.delivered)


changes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), max_size=3) | st.just(list(range(20))),  # leave
        st.integers(0, 3) | st.just(20),  # join
        st.lists(st.integers(0, 30), max_size=2),  # sit out, without notice to the writer
        st.booleans(),  # the first and last member swap
        st.sampled_from(["one each", "column", "few exceptions"]),  # tokens
        st.booleans(),  # the reader polls
        st.booleans(),  # the reader is replaced by a new one
        st.booleans(),  # the engine reports who left and who joined, or that nobody did
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(changes, st.integers(0, 3))
def test_every_batch_read_equals_the_batch_run(history: list[Any], halvings: int) -> None:
    writer, handles, memory = make_batch_writer(halvings)
    reader, seen = StepReader(memory, 1), ReplayedBatches()
    written: dict[int, list[int]] = {}
    columns: dict[int, dict[int, int]] = {}
    running: list[str] = []
    before: list[str] = []
    created = 0
    for leave, join, sit_out, swap, encoding, poll, restart, reported in history:
        left = [running[i] for i in leave if i < len(running)]
        running = [key for key in running if key not in left]
        joined = [f"r{created + 1 + i}" for i in range(join)]
        for _ in range(join):
            created += 1
            running.append(f"r{created}")
            handles.bind_handle(running[-1], created)
        out = {running[i] for i in sit_out if i < len(running)}
        batch = [key for key in running if key not in out]
        if swap and len(batch) > 1:
            batch[0], batch[-1] = batch[-1], batch[0]
        numbers = [i % 3 for i in range(len(batch))] if encoding != "one each" else []
        others = {i: n for i, n in enumerate(numbers) if n != 1}
        exceptions = [(batch[i], n) for i, n in others.items()] if encoding == "few exceptions" else []
        tokens = struct.pack(f"<{len(numbers)}I", *numbers) if encoding == "column" else b""
        step = 0
        if reported and not tokens and batch == [key for key in before if key not in left] + joined:
            if left or joined or exceptions:
                step = writer.write_changed(len(batch), left, joined, exceptions, 0, 0, 0, 0)
            else:
                step = writer.write_unchanged(len(batch), 0, 0, 0, 0)
        step = step or writer.write_scheduled(
            batch, left, tokens, several=[*exceptions, *[("unknown", 2)] * bool(exceptions)]
        )
        before = batch.copy()
        if exceptions:
            writer.write_done_except(step, others.items())
        else:
            writer.write_done(step, tokens, len(batch))
        written[step] = [int(key[1:]) for key in batch]
        columns[step] = others
        batch.clear()  # the engine reuses the list
        if restart:
            reader, seen = StepReader(memory, 1), ReplayedBatches()
        if poll:
            for recorded in reader.poll(0):
                seen.feed(recorded.event)
    for recorded in reader.poll(0, final=True):
        seen.feed(recorded.event)
    for step, members in seen.batches.items():
        assert members == written[step]
        assert seen.tokens[step] == columns[step]
    for step, delivered in seen.done.items():
        assert delivered == columns[step]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 400), st.integers(0, 2**32))
def test_an_overrun_reader_resumes_at_a_keyframe(before: int, during: int, seed: int) -> None:
    writer, handles, memory = make_batch_writer(7)  # 128 cells
    for i in range(40):
        handles.bind_handle(i, i + 1)
    reader, seen = StepReader(memory, 1), ReplayedBatches()

    def run(steps: int) -> None:
        for k in range(steps):
            members = list(range((seed >> (k % 8)) % 7, 20 + k % 5))
            writer.write_done(writer.write_scheduled(members))

    run(before)
    for _ in range(2):
        for recorded in reader.poll(0):
            seen.feed(recorded.event)
    run(during)
    for _ in range(3):
        for recorded in reader.poll(0):
            seen.feed(recorded.event)
    run(3)
    for recorded in reader.poll(0, final=True):
        seen.feed(recorded.event)
    last = max(seen.batches)
    assert last == before + during + 3
    if during * 2 > 128:
        assert seen.lost > 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 127), st.integers(0, 63), st.integers(0, 255))
def test_a_torn_cell_is_never_read_as_complete(cell: int, byte: int, value: int) -> None:
    writer, handles, memory = make_batch_writer(7)
    handles.bind_handle("a", 7)
    reader = StepReader(memory, 1)
    for _ in range(10):
        writer.write_done(writer.write_scheduled(["a"]))
    offset = layout.PAGE + cell * 64 + byte
    in_counter = byte < 8 or byte >= 56
    memory[offset] = value
    steps = [
        recorded.event.step for recorded in reader.poll(0, final=True) if hasattr(recorded.event, "step")
    ]
    if in_counter or cell >= writer._writer.cells_written:
        assert steps == sorted(steps) and len(steps) <= 20


def test_an_unfinished_step_is_not_read_yet() -> None:
    writer, handles, memory = make_batch_writer()
    reader = StepReader(memory, 1)
    writer.write_scheduled(["a"])
    end = layout.PAGE + 128 - 8
    counter = memory[end : end + 8]
    memory[end : end + 8] = bytes(8)
    assert list(reader.poll(0, final=True)) == []
    memory[end : end + 8] = counter
    assert [type(recorded.event) for recorded in reader.poll(0, final=True)] == [events.StepScheduled]


def test_a_step_is_read_one_poll_after_completion() -> None:
    writer, _, memory = make_batch_writer()
    reader = StepReader(memory, 1)
    writer.write_scheduled(["a"])
    assert list(reader.poll(0)) == []
    assert len(list(reader.poll(0))) == 1


def test_an_unchanged_batch_has_keyframes_every_256_steps() -> None:
    writer, handles, memory = make_batch_writer()
    reader = StepReader(memory, 1)
    members = ["a", "b"]
    for _ in range(600):
        writer.write_scheduled(members)
    steps = [recorded.event for recorded in reader.poll(0, final=True)]
    keyframes = [step.step for step in steps if step.keyframe]
    assert keyframes[:3] == [1, 257, 513]
    assert all(not step.joined for step in steps if not step.keyframe)


def test_a_requested_keyframe_follows_within_the_check_interval() -> None:
    writer, _, memory = make_batch_writer()
    StepReader(memory, 2)
    reader = StepReader(memory, 1)
    writer.write_scheduled(["a"])
    reader.request_keyframe()
    for check_is_due in (False, False, True, False, False):
        ring = writer._writer
        ring.next_check_at = 0 if check_is_due else _clock.now() + KEYFRAME_CHECK_NS
        writer.write_scheduled(["a"])
    assert [recorded.event.keyframe for recorded in reader.poll(0, final=True)] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]


def test_reported_unchanged_batch_has_members_and_load_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, handles, memory = make_batch_writer()
    handles.bind_handle("a", 1)
    reader, seen = StepReader(memory, 1), ReplayedBatches()
    writer.write_done(writer.write_scheduled(["a", "b"]))
    step = writer.write_unchanged(2, 3, 4, 5, 6)
    writer.write_single_tokens(step, 123)
    written = [recorded.event for recorded in reader.poll(0, final=True)]
    for event in written:
        seen.feed(event)
    assert step == 2 and seen.batches[2] == [1, 0] and seen.done == {1: {}, 2: {}}
    load = written[2]
    assert (load.kv_used, load.kv_total, load.running, load.waiting) == (3, 4, 5, 6)
    assert written[3].at == 123


def test_reported_unchanged_batch_is_refused_without_a_batch_or_with_another_size() -> None:
    writer, _, _ = make_batch_writer()
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 0
    assert writer.write_scheduled(["a"]) == 1
    assert writer.write_unchanged(2, 0, 0, 0, 0) == 0
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 2
    writer.clear_batch()
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 0
    assert writer.write_scheduled(["a"]) == 3


def test_wrongly_reported_change_is_recorded_as_a_keyframe() -> None:
    """Somebody else left than the engine reports, so the number of members differs."""
    writer, handles, memory = make_batch_writer()
    for number, key in enumerate("abc", 1):
        handles.bind_handle(key, number)
    reader, seen = StepReader(memory, 1), ReplayedBatches()
    writer.write_scheduled(["a", "b"])
    assert writer.write_changed(2, ["b"], ["c", "d"], (), 0, 0, 0, 0) == 0
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 0
    writer.write_scheduled(["b", "c"], ["b"])
    assert writer.write_changed(2, ["b"], ["a"], [("a", 7)], 0, 0, 0, 0) == 3
    for recorded in reader.poll(0, final=True):
        seen.feed(recorded.event)
    assert seen.batches == {1: [1, 2], 2: [2, 3], 3: [3, 1]}
    assert seen.tokens[3] == {1: 7}


def test_wrongly_reported_members_are_corrected_by_the_next_keyframe() -> None:
    writer, handles, memory = make_batch_writer()
    for number, key in enumerate("ab", 1):
        handles.bind_handle(key, number)
    reader, seen = StepReader(memory, 1), ReplayedBatches()
    writer.write_scheduled(["a"])
    while writer.write_unchanged(1, 0, 0, 0, 0):  # the engine runs b meanwhile
        pass
    last = writer.write_scheduled(["b"])
    for recorded in reader.poll(0, final=True):
        seen.feed(recorded.event)
    assert last == 257 and seen.batches[257] == [2]


def test_reported_unchanged_batch_is_refused_when_a_keyframe_is_due() -> None:
    """It is due after a second, or when the reader requested it and the writer's next check has come."""
    writer, _, memory = make_batch_writer()
    ring, reader = writer._writer, StepReader(memory, 1)
    writer.write_scheduled(["a"])
    reader.request_keyframe()
    assert writer.write_unchanged(1, 0, 0, 0, 0)
    ring.next_check_at = 0
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 0
    writer.write_scheduled(["a"])
    assert writer.write_unchanged(1, 0, 0, 0, 0)
    ring.next_check_at = ring.next_keyframe_at = 0
    assert writer.write_unchanged(1, 0, 0, 0, 0) == 0
    writer.write_scheduled(["a"])
    keyframes = [recorded.event.keyframe for recorded in reader.poll(0, final=True)]
    assert keyframes == [True, False, True, False, True]


def test_a_replaced_or_swapped_member_is_recorded() -> None:
    writer, handles, memory = make_batch_writer()
    for i, key in enumerate("abc"):
        handles.bind_handle(key, i + 1)
    reader, seen = StepReader(memory, 1), ReplayedBatches()
    writer.write_scheduled(["a", "b"])
    writer.write_scheduled(["a", "c"])
    writer.write_scheduled(["c", "a"])
    for recorded in reader.poll(0, final=True):
        seen.feed(recorded.event)
    assert list(seen.batches.values()) == [[1, 2], [1, 3], [3, 1]]
