"""Step rings against a model: whatever is written, lost or torn, what is read is what was, or it is said to be lost."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import batch_writer, events, layout
from otel_infer.ringbuffer.batch_writer import KEYFRAME_CHECK_NS, BatchWriter, HandleTable
from otel_infer.ringbuffer.step_reader import StepReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import MemoryArena


def make_log(halvings: int = 0) -> tuple[BatchWriter, HandleTable, mmap.mmap]:
    sizes = layout.RingSizes().scale_down(halvings)
    writer, handles = StepWriter(MemoryArena(), "test", "toy", sizes), HandleTable()
    return BatchWriter(writer, handles), handles, writer.memory


class Replayed:
    """What a reader believes about batches: the smallest assembler there is."""

    def __init__(self) -> None:
        self.members: list[int] | None = None
        self.batches: dict[int, list[int]] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.lost = 0

    def feed(self, fact: Any) -> None:
        if isinstance(fact, events.StepsLost):
            self.members, self.lost = None, self.lost + fact.lost
        elif isinstance(fact, events.StepScheduled):
            if fact.keyframe:
                self.members = list(fact.joined)
            elif self.members is not None:
                members = self.members.copy()
                for position in fact.left:
                    del members[position]
                self.members = members + list(fact.joined)
            if self.members is not None:
                assert len(self.members) == fact.size
                self.batches[fact.step] = self.members
                self.tokens[fact.step] = dict(fact.tokens)
        elif isinstance(fact, events.StepDone):
            self.done[fact.step] = dict(fact.delivered)


changes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 30), max_size=3) | st.just(list(range(20))),  # leave
        st.integers(0, 3) | st.just(20),  # join
        st.lists(st.integers(0, 30), max_size=2),  # sit out, without being said to
        st.booleans(),  # two of them swap places
        st.sampled_from(["one each", "a column", "a few said"]),  # tokens
        st.booleans(),  # the reader polls
        st.booleans(),  # the reader is replaced by a new one
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(changes, st.integers(0, 3))
def test_every_batch_that_is_read_is_the_batch_that_was_run(history: list[Any], halvings: int) -> None:
    log, handles, memory = make_log(halvings)
    reader, seen = StepReader(memory, 1), Replayed()
    truth: dict[int, list[int]] = {}
    columns: dict[int, dict[int, int]] = {}
    running: list[str] = []
    born = 0
    for leave, join, sit_out, swap, how, poll, restart in history:
        left = [running[i] for i in leave if i < len(running)]
        running = [key for key in running if key not in left]
        for _ in range(join):
            born += 1
            running.append(f"r{born}")
            handles.bind_handle(running[-1], born)
        out = {running[i] for i in sit_out if i < len(running)}
        batch = [key for key in running if key not in out]
        if swap and len(batch) > 1:
            batch[0], batch[-1] = batch[-1], batch[0]
        numbers = [i % 3 for i in range(len(batch))] if how != "one each" else []
        others = {i: n for i, n in enumerate(numbers) if n != 1}
        several = [(batch[i], n) for i, n in others.items()] if how == "a few said" else []
        tokens = struct.pack(f"<{len(numbers)}I", *numbers) if how == "a column" else b""
        step = log.write_scheduled(batch, left, tokens, several=[*several, *[("nobody", 2)] * bool(several)])
        if several:
            log.write_done_except(step, others.items())
        else:
            log.write_done(step, tokens, len(batch))
        truth[step] = [int(key[1:]) for key in batch]
        columns[step] = others
        batch.clear()  # it is the engine's, who goes on with it
        if restart:
            reader, seen = StepReader(memory, 1), Replayed()
        if poll:
            for said in reader.poll(0):
                seen.feed(said.event)
    for said in reader.poll(0, final=True):
        seen.feed(said.event)
    for step, members in seen.batches.items():
        assert members == truth[step]
        assert seen.tokens[step] == columns[step]
    for step, delivered in seen.done.items():
        assert delivered == columns[step]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 400), st.integers(0, 2**32))
def test_a_reader_that_was_lapped_goes_on_at_a_keyframe(before: int, during: int, seed: int) -> None:
    log, handles, memory = make_log(7)  # 128 cells
    for i in range(40):
        handles.bind_handle(i, i + 1)
    reader, seen = StepReader(memory, 1), Replayed()

    def run(steps: int) -> None:
        for k in range(steps):
            members = list(range((seed >> (k % 8)) % 7, 20 + k % 5))
            log.write_done(log.write_scheduled(members))

    run(before)
    for _ in range(2):
        for said in reader.poll(0):
            seen.feed(said.event)
    run(during)
    for _ in range(3):
        for said in reader.poll(0):
            seen.feed(said.event)
    run(3)
    for said in reader.poll(0, final=True):
        seen.feed(said.event)
    last = max(seen.batches)
    assert last == before + during + 3
    if during * 2 > 128:
        assert seen.lost > 0


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 127), st.integers(0, 63), st.integers(0, 255))
def test_a_torn_record_is_never_taken_for_a_whole_one(cell: int, byte: int, value: int) -> None:
    log, handles, memory = make_log(7)
    handles.bind_handle("a", 7)
    reader = StepReader(memory, 1)
    for _ in range(10):
        log.write_done(log.write_scheduled(["a"]))
    offset = layout.PAGE + cell * 64 + byte
    at_an_end = byte < 8 or byte >= 56
    memory[offset] = value
    steps = [said.event.step for said in reader.poll(0, final=True) if hasattr(said.event, "step")]
    if at_an_end or cell >= log._writer.cells_written:
        assert steps == sorted(steps) and len(steps) <= 20


def test_a_record_of_a_step_that_is_still_being_written_is_left_alone() -> None:
    log, handles, memory = make_log()
    reader = StepReader(memory, 1)
    log.write_scheduled(["a"])
    end = layout.PAGE + 128 - 8
    whole = memory[end : end + 8]
    memory[end : end + 8] = bytes(8)
    assert list(reader.poll(0, final=True)) == []
    memory[end : end + 8] = whole
    assert [type(said.event) for said in reader.poll(0, final=True)] == [events.StepScheduled]


def test_what_was_not_complete_at_the_previous_wake_is_not_taken_yet() -> None:
    log, _, memory = make_log()
    reader = StepReader(memory, 1)
    log.write_scheduled(["a"])
    assert list(reader.poll(0)) == []
    assert len(list(reader.poll(0))) == 1


def test_an_unchanged_batch_is_a_change_of_nothing_and_a_keyframe_comes_every_256_steps() -> None:
    log, handles, memory = make_log()
    reader = StepReader(memory, 1)
    members = ["a", "b"]
    for _ in range(600):
        log.write_scheduled(members)
    said = [s.event for s in reader.poll(0, final=True)]
    keyframes = [fact.step for fact in said if fact.keyframe]
    assert keyframes[:3] == [1, 257, 513]
    assert all(not fact.joined for fact in said if not fact.keyframe)


def test_a_reader_that_asks_gets_a_keyframe_within_the_time_that_it_takes_to_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instants = iter(
        (0, 1, KEYFRAME_CHECK_NS - 1, KEYFRAME_CHECK_NS, KEYFRAME_CHECK_NS + 1, 2 * KEYFRAME_CHECK_NS)
    )
    monkeypatch.setattr(batch_writer, "_now", instants.__next__)
    log, _, memory = make_log()
    StepReader(memory, 2)
    reader = StepReader(memory, 1)
    log.write_scheduled(["a"])
    reader.request_keyframe()
    for _ in range(5):
        log.write_scheduled(["a"])
    assert [s.event.keyframe for s in reader.poll(0, final=True)] == [True, False, False, True, False, False]


def test_a_swap_at_equal_count_is_seen() -> None:
    log, handles, memory = make_log()
    for i, key in enumerate("abc"):
        handles.bind_handle(key, i + 1)
    reader, seen = StepReader(memory, 1), Replayed()
    log.write_scheduled(["a", "b"])
    log.write_scheduled(["a", "c"])
    log.write_scheduled(["c", "a"])
    for said in reader.poll(0, final=True):
        seen.feed(said.event)
    assert list(seen.batches.values()) == [[1, 2], [1, 3], [3, 1]]
