"""The cells of a step ring and the two records that nearly every step writes, each by one call.

`StepRing` is the compiled class where it was built, else `PythonStepRing`; both have the same attributes.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.native import native

KEYFRAME_CHECK_NS = 50_000_000
"""Interval of checks whether the reader requests a keyframe; the reader polls as often."""

# An unchanged batch: counts that are 0 are padding of the struct, which is zeroed at no cost.
_pack_unchanged = struct.Struct("<QIqQ8x5IQ").pack_into
_pack_single_tokens = struct.Struct("<QIqQ8xI16xQ").pack_into
# Length and code of a record of one cell, as one number.
_SCHEDULED_WORD, _DONE_WORD = (
    int.from_bytes(struct.pack("<HBx", layout.CELL_BYTES, code), "little")
    for code in (events.SCHEDULED_CODE, events.DONE_CODE)
)
_PAGE = layout.PAGE
_now = _clock.now


class PythonStepRing:
    """Where the next record begins, and when the next keyframe is due.

    `cells_written`: cells so far. `offset`: where the next record begins, at most `last_offset`. `step`: the
    last step's number. `size`: the members of its batch. `retired`: compiled code must not write it any more. The step `next_keyframe_step`, or the first one from
    the instant `next_keyframe_at` on, is a keyframe. `keyframe_requests`: those of the reader that were met.
    """

    __slots__ = (
        "_cells",
        "_words",
        "cells_written",
        "keyframe_requests",
        "last_offset",
        "next_check_at",
        "next_keyframe_at",
        "next_keyframe_step",
        "offset",
        "retired",
        "size",
        "step",
    )

    def __init__(
        self, memory: mmap.mmap | memoryview, last_offset: int, scheduled: int, done: int, interval: int
    ) -> None:
        """`scheduled`, `done`, `interval`: the constants of this module, which the compiled class lacks."""
        self._cells = memory
        self._words = memoryview(memory)[: layout.HEADER_WORDS * 8].cast("Q")
        self.offset, self.last_offset = _PAGE, last_offset
        self.cells_written = self.step = self.size = 0
        self.retired = False
        self.next_keyframe_step = self.next_keyframe_at = self.next_check_at = self.keyframe_requests = 0

    def write_unchanged(
        self, size: int, kv_used: int, kv_total: int, running: int, waiting: int, at: int = 0
    ) -> int:
        """Records a batch, composed at `at` (monotonic ns; 0 = now), with the members of the last one, of one token each; returns the step's number.

        Nothing is compared: the engine itself reports that nobody joined, left or moved. Returns 0, and
        records nothing, if a keyframe is due or the batch has another size. Then the members are to be
        written, so a wrong report of the engine ends with the next keyframe.
        """
        at = at or _now()
        if at >= self.next_check_at:
            self.check_keyframe(at)
        step = self.step + 1
        if step >= self.next_keyframe_step or size != self.size:
            return 0
        self.step = step
        self.cells_written = counter = self.cells_written + 1
        offset = self.offset
        self.offset = offset + 64 if offset < self.last_offset else _PAGE
        _pack_unchanged(
            self._cells,
            offset,
            counter,
            _SCHEDULED_WORD,
            at,
            step,
            size,
            kv_used,
            kv_total,
            running,
            waiting,
            counter,
        )
        return step

    def check_keyframe(self, at: int) -> None:
        """Makes the next step a keyframe if the last one is too old, or the reader requests one."""
        self.next_check_at, requests = at + KEYFRAME_CHECK_NS, self._words[layout.W_KEYFRAME_REQUESTED]
        if at >= self.next_keyframe_at or requests != self.keyframe_requests:
            self.keyframe_requests = requests
            self.next_keyframe_step = 0

    def write_single_tokens(self, step: int, at: int, discarded: int = 0) -> None:
        """Records that every member of the step got one token at `at` (monotonic ns; 0 = now)."""
        self.cells_written = counter = self.cells_written + 1
        offset = self.offset
        self.offset = offset + 64 if offset < self.last_offset else _PAGE
        _pack_single_tokens(self._cells, offset, counter, _DONE_WORD, at or _now(), step, discarded, counter)


CONSTANTS = _SCHEDULED_WORD, _DONE_WORD, KEYFRAME_CHECK_NS
if TYPE_CHECKING:
    StepRing = PythonStepRing
else:
    StepRing = PythonStepRing if native is None else native.StepRing
