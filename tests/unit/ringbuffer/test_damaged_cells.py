"""Damaged cells and records are counted as torn or lost; the others are read, and no exception escapes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from otel_infer.analysis.finish import finish_requests
from otel_infer.assembly.assembler import Assembler
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.reader import InvalidRing
from otel_infer.ringbuffer.step_reader import StepReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter

AFTER = 1 << 60
IDS = bytes(range(16))


class Rings:
    """The rings of one process with one engine, and a reader."""

    def __init__(self) -> None:
        self.arena = MemoryArena()
        self.writer = RequestWriter(self.arena, "1-a", "server")
        self.steps = StepWriter(self.arena, "1-a-1", "toy")
        self.reader, self.assembler = MergedReader(), Assembler()

    def write_request(self, number: int) -> None:
        at = number * 1000 + 1
        handle = self.writer.open_request(
            events.RequestArrived(at, at, IDS, IDS[:8], bytes(8), bytes(8), 1, "chat", "toy", "toy", "POST")
        )
        self.writer.write_event(handle, events.AttributeSet(at + 1, "note", f"value {number}" * 20))
        self.writer.write_event(handle, events.StageEnded(at + 2, at, "ingress", 0))
        self.writer.close_request(handle, events.RequestEnded(at + 10, events.OK, "", 200, 1, 0, 0))

    def read_all(self) -> int:
        """Reads everything; returns the number of finished requests."""
        for name, memory in self.arena.buffers:
            self.reader.add_ring(name, memory, 1)
        recorded = self.reader.poll(AFTER, final=True)
        self.assembler.feed_events(recorded)
        return len(finish_requests(self.assembler, 1 << 61))

    @property
    def memory(self) -> Any:
        return self.writer.memory


@pytest.mark.parametrize(
    "body",
    [
        b'[1,"k",' + b"[" * 1100 + b"]" * 1100 + b"]",
        b'[1,"k",' + b"9" * 1500 + b"]",
        b'[-5,"k","v"]',
        b'[99999999999999999999999,"k","v"]',
        b'["1","k","v"]',
        b"{}",
        b"[1]",
        b"\xff\xfe",
    ],
    ids=["deep", "huge", "negative instant", "late instant", "no instant", "object", "short", "no text"],
)
def test_a_cell_with_odd_text_leaves_the_next_request_readable(body: bytes) -> None:
    rings = Rings()
    rings.write_request(1)
    rings.writer._write_cells(
        events.TEXT_CODES[events.AttributeSet], 1, body[: layout.MAX_PARTS * layout.PART_BYTES]
    )
    rings.write_request(2)
    assert rings.read_all() == 2


@pytest.mark.parametrize("counter", [1 << 63, (1 << 64) - 1, 1 << 50, 0])
def test_a_corrupted_counter_costs_one_cell(counter: int) -> None:
    rings = Rings()
    for number in range(3):
        rings.write_request(number)
    words = memoryview(rings.memory)[layout.PAGE :].cast("Q")
    words[8 * 9] = counter  # the head of the tenth cell
    assert rings.read_all() >= 2
    assert rings.assembler.events_torn + rings.assembler.events_lost == 1


def test_a_step_ring_without_cells_is_rejected() -> None:
    rings = Rings()
    rings.steps.words[layout.W_CELLS] = 0
    with pytest.raises(InvalidRing):
        StepReader(rings.steps.memory, 1)


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_in_rings_raise_nothing(seed: int) -> None:
    draw, rings = random.Random(seed), Rings()
    for number in range(40):
        rings.write_request(number)
    for _ in range(draw.randint(1, 60)):
        memory = draw.choice([memory for _, memory in rings.arena.buffers])
        at = draw.randrange(layout.PAGE, min(len(memory), layout.PAGE + 200 * layout.CELL_BYTES))
        memory[at] = draw.randrange(256)
    assert 0 < rings.read_all() <= 40
