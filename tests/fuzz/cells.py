"""Ring cells and step records with damaged bytes, counters and lengths, read by the sidecar's pipeline."""

from __future__ import annotations

import random

from otel_infer.config.environment import Config
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.pipeline import Pipeline
from tests.fuzz.odd_values import TEXTS

AFTER = 1 << 60
REQUESTS, STEPS = 20, 30
SIZES = layout.RingSizes(cells=512, live_slots=64, strings=64, step_cells=256)


def run_once(draw: random.Random) -> int:
    """Damages cells of a small server's rings and reads them. Returns the number of damaged cells."""
    arena, rings = MemoryArena(), MergedReader()
    _write_rings(draw, arena)
    damaged = draw.randint(1, 200)
    for _ in range(damaged):
        memory = draw.choice([memory for _, memory in arena.buffers])
        at = layout.PAGE + 8 * draw.randrange((len(memory) - layout.PAGE) // 8)
        width = min(draw.choice((1, 1, 1, 8, 40)), len(memory) - at)
        memory[at : at + width] = draw.randbytes(width)
    pipeline = Pipeline(Config(console=True), rings, [], None, {}, None, 0)
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, 1)
    for now in (AFTER, AFTER + 1):
        pipeline.run_cycle(now, final=True)
    if pipeline.failed > REQUESTS:
        raise AssertionError(f"{pipeline.failed} failures")
    return damaged


def _write_rings(draw: random.Random, arena: MemoryArena) -> None:
    writer = RequestWriter(arena, "1-a", "server", SIZES)
    steps = BatchWriter(StepWriter(arena, "1-a-1", "toy", SIZES), HandleTable())
    handles = []
    for number in range(REQUESTS):
        at, ids = number * 1000 + 1, draw.randbytes(16)
        arrived = events.RequestArrived(
            at, at, ids, ids[:8], bytes(8), bytes(8), 1, "chat", "toy", "toy", "POST"
        )
        handle = writer.open_request(arrived)
        handles.append(handle)
        writer.write_event(handle, events.AttributeSet(at + 1, "note", draw.choice(TEXTS)))
        writer.write_event(handle, events.SpanEventAdded(at + 1, "event", {"key": draw.choice(TEXTS)}))
        writer.write_event(handle, events.RequestSubmitted(at + 2, 10, 10, 1, "toy"))
    for handle in handles:
        steps.handles[handle] = handle.to_bytes(4, "little")
    for _ in range(STEPS):
        batch = draw.sample(handles, draw.randint(1, 8))
        steps.write_done(steps.write_scheduled(batch, running=len(batch)))
    for handle in handles:
        writer.close_request(handle, events.RequestEnded(10**9, events.OK, "", 200, 1, 0, 0))
