"""Completes the flushes that writers wait for, and records whether everything was accepted."""

from __future__ import annotations

from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.pipeline import Pipeline

READ_CYCLES = 2
"""Cycles after a request until the events recorded before it have been read."""


class FlushRequests:
    """The pending flushes of the writers of one server.

    Only the writers wait: the thread that reads the rings does not, because rings fill meanwhile.
    """

    def __init__(self, rings: MergedReader, pipeline: Pipeline) -> None:
        self._rings, self._pipeline = rings, pipeline
        self._pending: list[tuple[int, int]] = []
        self._cycles = 0
        self._refused_before: dict[int, int] = {}
        """How much had been refused at the last flush of each writer, by its ring."""

    @property
    def are_pending(self) -> bool:
        """Returns whether a writer waits."""
        return bool(self._pending)

    def add_writers(self) -> None:
        """Adds new writers. Earlier refusals do not count for their flushes."""
        refused, known = self._pipeline.delivery.count_refused(), self._refused_before
        self._refused_before = {ring: known.get(ring, refused) for ring, _ in self._rings.list_writers()}

    def complete(self, now: int, requested: list[tuple[int, int]]) -> None:
        """Completes the flushes in progress if they are done, or begins those `requested`."""
        if not self._pending:
            self._pending, self._cycles = requested, 0
            return
        self._cycles += 1
        if self._cycles == READ_CYCLES:
            self._pipeline.export_without_grace(now)
            self._pipeline.flush(0.0)
        if self._cycles >= READ_CYCLES and self._pipeline.is_sent():
            known, delivery = self._refused_before, self._pipeline.delivery
            refused = {ring for ring, _ in self._pending if not delivery.is_accepted(known.get(ring, 0))}
            known.update((ring, delivery.count_refused()) for ring, _ in self._pending)
            self._rings.complete_flushes(self._pending, refused)
            self._pending = []
