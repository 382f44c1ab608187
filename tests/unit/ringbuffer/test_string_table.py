"""Texts that are no longer used make room for others, and no event is read with another event's text."""

from __future__ import annotations

import mmap
import random

import pytest

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.writer import RequestWriter

SIZES = layout.RingSizes(cells=256, live_slots=8, strings=16, step_cells=64)


def make_ring() -> tuple[RequestWriter, RequestReader]:
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", SIZES)
    ((_, memory),) = arena.buffers
    assert isinstance(memory, mmap.mmap)
    return writer, RequestReader(memory, 1)


def write_and_read(writer: RequestWriter, reader: RequestReader, stages: list[str]) -> list[str]:
    """Writes these stages, few enough to be read at once; returns their names as read."""
    for at, stage in enumerate(stages):
        writer.write_event(1, events.StageEnded(at + 1, 0, stage, 0))
    read = [recorded.event for recorded in reader.poll(1 << 40, final=True)]
    return [event.stage for event in read if isinstance(event, events.StageEnded)]


def test_new_texts_are_named_after_thousands_of_others() -> None:
    """A table of 16 sees 400 texts that are used for a while, as the models of a server that loads many."""
    writer, reader = make_ring()
    for model in range(400):
        name = f"model {model}"
        for _ in range(40):
            names = write_and_read(writer, reader, [name] * 8)
        assert names == [name] * 8


def test_texts_in_use_keep_their_names_while_others_come_and_go() -> None:
    writer, reader = make_ring()
    lasting = ["prefill", "decode", "queue"]
    for number in range(2_000):
        names = write_and_read(writer, reader, [*lasting, f"request {number}", *lasting])
        assert names[:3] == names[4:] == lasting
        assert names[3] in (f"request {number}", events.OTHER)


@pytest.mark.parametrize("seed", range(20))
def test_a_text_is_read_as_itself_or_as_other(seed: int) -> None:
    """Whatever texts follow each other, and however far the reader is behind."""
    writer, reader = make_ring()
    chosen = random.Random(seed)
    for _ in range(150):
        stages = [f"stage {chosen.choice((3, 10, 1_000)) * chosen.random():.0f}" for _ in range(40)]
        for read, written in zip(write_and_read(writer, reader, stages), stages, strict=True):
            assert read in (written, events.OTHER)


def test_another_reader_knows_the_texts_as_they_are_now() -> None:
    writer, reader = make_ring()
    for model in range(100):
        for _ in range(4):
            write_and_read(writer, reader, [f"model {model}"] * 100)
    later = RequestReader(writer.memory, 2).poll(1 << 40, final=True)
    stages = [recorded.event.stage for recorded in later if isinstance(recorded.event, events.StageEnded)]
    assert set(stages) == {"model 99"}
