"""Cells that are decoded together give the same events as cells that are decoded one at a time."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.writer import RequestWriter

EVENTS = (
    events.StageEnded(7, 5, "forward", 1),
    events.RequestReceived(8),
    events.AttributeSet(9, "key", "v"),
    events.AttributeSet(9, "key", "a long value " * 9),
    events.ExchangeEnded(10, 0, "", 200, 1, 5, 0, "/embed", events.HTTP_CODES["POST", "http"] + 1),
    events.OperationNamed(11, "chat", "torch", "m"),
    events.ModelPlaced(11, "CPUExecutionProvider"),
    events.EngineFinished(12, "stop", 3),
    events.SpanEventAdded(13, "event", {"a": "b" * 40}),
)


def write_cells(numbers: list[int]) -> tuple[RequestReader, Any]:
    """Returns the reader of a ring with an arrival and an event for each number, and the cells."""
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(512, 64, 64, 64))
    for number in numbers:
        arrived = events.RequestArrived(
            1, 2, bytes([number + 1] * 16), bytes([1] * 8), bytes(8), bytes(8), 1, "chat", "p", "m", "POST"
        )
        handle = writer.open_request(arrived)
        writer.write_event(handle, EVENTS[number])
    reader = RequestReader(arena.buffers[0][1], 1)
    reader.observe()
    return reader, reader._cells[: reader._complete].copy()


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.integers(0, len(EVENTS) - 1), min_size=1, max_size=24),
    damaged=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    swaps=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_cells_decoded_together_equal_cells_decoded_alone(
    numbers: list[int], damaged: list[tuple[int, int]], swaps: int, seed: int
) -> None:
    reader, cells = write_cells(numbers)
    rng = random.Random(seed)
    for _ in range(swaps):  # other threads write between the parts of an event
        a, b = rng.randrange(len(cells)), rng.randrange(len(cells))
        cells[[a, b]] = cells[[b, a]]
    octets = cells.view(np.uint8).reshape(-1)
    for at, value in damaged:
        octets[at % len(octets)] = value
    together = reader._decode_cells(cells), reader.torn, reader._pending
    other, _ = write_cells(numbers)
    alone = [
        event for number in range(len(cells)) for event in other._decode_cells(cells[number : number + 1])
    ]
    assert together == (alone, other.torn, other._pending)


def test_no_cells_give_no_events() -> None:
    reader, cells = write_cells([0])
    assert reader._decode_cells(cells[:0]) == []
