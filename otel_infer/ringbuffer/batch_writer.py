"""Who is in a step: predicted from the step before, verified with one C-level `==`, written as a change.

An engine's scheduler may let members sit out, overtake or swap, so a count proves nothing. What is compared is the
engine's own ordered list against the list we expect: equal, or equal up to newcomers at its end → a change; anything
else → a keyframe, the whole batch as packed handles. Nothing here runs bytecode per sequence.
"""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.step_writer import (
    CHANGE_LAYOUTS,
    DONE_WORD,
    SCHEDULED_WORD,
    StepWriter,
    pack_single_tokens,
    pack_unchanged,
)

KEYFRAME_STEPS = 256
KEYFRAME_NS = 1_000_000_000
KEYFRAME_CHECK_NS = 50_000_000
"""How often it is looked whether the reader asks for a keyframe: as often as that reads."""
MAX_CHANGES = 16
"""If more left or came at once, a keyframe costs less than saying it one by one."""
_UNKNOWN_HANDLE = bytes(4)
_PAGE, _KEYFRAME_REQUESTED = layout.PAGE, layout.W_KEYFRAME_REQUESTED

_now = _clock.now
_pack_word = struct.Struct("<I").pack
_pack_pair = struct.Struct("<II").pack


class HandleTable(dict[Any, bytes]):
    """The engine's own key of a sequence → its request's handle as 4 bytes; 0 for what arrived before us."""

    def __missing__(self, key: Hashable) -> bytes:
        return _UNKNOWN_HANDLE

    def bind_handle(self, key: Hashable, handle: int) -> None:
        """From here on this sequence belongs to that request."""
        self[key] = struct.pack("<I", handle)


class BatchWriter:
    """The steps of one engine thread.

    Members are whatever objects the engine lists; they are told apart by identity and by `==`. `handles` binds them to
    requests, or `pack` gives the handles of many, 4 bytes each, if members cannot be dictionary keys. `number`: its ring's, among
    those of this process.
    """

    def __init__(self, writer: StepWriter, handles: HandleTable, number: int = 0) -> None:
        self.number = number
        self._writer = writer
        self._members: list[Any] = []
        self._packed_handles = bytearray()
        self._ordinals: list[int] = []
        self._ordinal_of: dict[int, int] = {}
        self._next_ordinal = 0
        self.handles = handles
        self.pack_handles: Callable[[Iterable[Any]], bytes] = lambda members: b"".join(
            map(handles.__getitem__, members)
        )
        self.alive = True
        self._step = 0
        self._next_keyframe_step = 0
        self._next_keyframe_at = self._next_check_at = 0
        self._keyframe_requests = 0

    def assign_to_thread(self) -> BatchWriter:
        """To this thread, which writes it from here on."""
        self._writer.words[layout.W_THREAD] = threading.get_native_id()
        return self

    def write_scheduled(
        self,
        members: list[Any],
        left: Sequence[Any] = (),
        tokens: bytes = b"",
        kv_used: int = 0,
        kv_total: int = 0,
        running: int = 0,
        waiting: int = 0,
        several: Sequence[tuple[Any, int]] = (),
    ) -> int:
        """States that a batch was composed, and returns the step's number.

        `members` is the engine's ordered batch, which it may go on changing. `left` are those who finished or were
        preempted since the last step. Every member is scheduled for one token, but for `several`: a few (member, tokens);
        where there are many, `tokens` is a u32 column in the order of `members`.
        """
        at = _now()
        self._step = step = self._step + 1
        writer = self._writer
        if (
            not left
            and not tokens
            and not several
            and step < self._next_keyframe_step
            and at < self._next_check_at
            and members == self._members
        ):
            writer.cells_written = counter = writer.cells_written + 1
            offset = writer.offset
            writer.offset = offset + 64 if offset < writer.last_offset else _PAGE
            pack_unchanged(
                writer.memory,
                offset,
                counter,
                SCHEDULED_WORD,
                at,
                step,
                len(members),
                kv_used,
                kv_total,
                running,
                waiting,
                counter,
            )
            return step
        self._write_change(at, members, left, tokens, several, kv_used, kv_total, running, waiting)
        return step

    def write_done(
        self, step: int, tokens: bytes = b"", size: int = 0, discarded: int = 0, at: int = 0
    ) -> None:
        """States that the step's tokens are known to the engine, since `at` or now.

        `tokens` is empty if every member got one, else a u32 column of `size` members in the step's order (0 = a chunk
        of a prefill, or thrown away). `discarded` counts what was thrown away.
        """
        at = at or _now()
        writer = self._writer
        if tokens:
            head = events.DONE_HEAD.pack(at, step, events.COLUMN, size, discarded)
            writer.write_record(events.DONE_CODE, head + tokens)
            return
        writer.cells_written = counter = writer.cells_written + 1
        offset = writer.offset
        writer.offset = offset + 64 if offset < writer.last_offset else _PAGE
        pack_single_tokens(
            writer.memory,
            offset,
            counter,
            DONE_WORD,
            at,
            step,
            discarded,
            counter,
        )

    def write_done_except(self, step: int, exceptions: Iterable[tuple[int, int]], discarded: int = 0) -> None:
        """As `done`, for a few (position, tokens) that did not get exactly one token."""
        pairs = [number for pair in exceptions for number in pair]
        head = events.DONE_HEAD.pack(_now(), step, len(pairs) // 2, 0, discarded)
        self._writer.write_record(events.DONE_CODE, head + array("I", pairs).tobytes())

    def clear_batch(self) -> None:
        """The engine has nothing to run: let go of the last batch, so that finished requests are not kept alive."""
        self._members, self._ordinals, self._packed_handles = [], [], bytearray()
        self._ordinal_of.clear()
        self.force_keyframe()

    def force_keyframe(self) -> None:
        """The next step is stated whole."""
        self._next_keyframe_step = 0

    def find_position(self, member: Any) -> int:
        """Where a member stands in the batch that was stated last; -1 = nowhere.

        Members join at the end and leave anywhere, so the numbers they got on joining stay in order: a position is
        found by bisection, whatever `==` of a member costs.
        """
        ordinal = self._ordinal_of.get(id(member), -1)
        if ordinal >= 0:
            position = bisect_left(self._ordinals, ordinal)
            return position if self._members[position] is member else -1
        return self._find_equal(member)

    def _find_equal(self, member: Any) -> int:
        """Strings may come as equal copies."""
        return self._members.index(member) if isinstance(member, str) and member in self._members else -1

    def detach_ring(self) -> None:
        """The ring is no longer ours (a forked child): what is still stated goes nowhere."""
        self.alive = False
        nowhere = RingSizes(step_cells=8192)
        self._writer = StepWriter(MemoryArena(), "", "", nowhere)

    def _replace_batch(self, members: Sequence[Any]) -> None:
        """The batch is not what was expected: all are newcomers."""
        self._members, self._packed_handles = list(members), bytearray(self.pack_handles(members))
        self._ordinals, self._next_ordinal = list(range(len(members))), len(members)
        self._ordinal_of = dict(zip(map(id, members), self._ordinals))

    def _remove_members(self, left: Sequence[Any]) -> bytes:
        """Takes those who left out of the batch; the position of each at its removal."""
        members, ordinals, gone = self._members, self._ordinals, b""
        for member in left:
            ordinal = self._ordinal_of.pop(id(member), -1)
            if ordinal >= 0:
                position = bisect_left(ordinals, ordinal)
            else:
                position = self._find_equal(member)
                if position < 0:
                    continue
                del self._ordinal_of[id(members[position])]
            del ordinals[position], members[position], self._packed_handles[position * 4 : position * 4 + 4]
            gone += _pack_word(position)
        return gone

    def _append_members(self, joined: Sequence[Any]) -> bytes:
        """Adds newcomers at the end; their handles."""
        packed, ordinal, ordinal_of = self.pack_handles(joined), self._next_ordinal, self._ordinal_of
        self._packed_handles += packed
        self._members += joined
        for member in joined:
            self._ordinals.append(ordinal)
            ordinal_of[id(member)] = ordinal
            ordinal += 1
        self._next_ordinal = ordinal
        return packed

    def _write_change(
        self,
        at: int,
        members: list[Any],
        left: Sequence[Any],
        column: bytes,
        several: Sequence[tuple[Any, int]],
        kv_used: int,
        kv_total: int,
        running: int,
        waiting: int,
    ) -> None:
        """Says what changed, or the whole batch. One long function: it runs in every other step, and calls are what costs."""
        writer, step, size = self._writer, self._step, len(members)
        gone = handles = pairs = b""
        if len(left) <= MAX_CHANGES:
            if left:
                gone = self._remove_members(left)
            newcomers = members[len(self._members) :]
            if newcomers and len(newcomers) <= MAX_CHANGES:
                handles = self._append_members(newcomers)
        predicted = members == self._members
        keyframe = not predicted or step >= self._next_keyframe_step
        if at >= self._next_check_at:
            self._next_check_at, asked = at + KEYFRAME_CHECK_NS, writer.words[_KEYFRAME_REQUESTED]
            keyframe = keyframe or at >= self._next_keyframe_at or asked != self._keyframe_requests
            self._keyframe_requests = asked
        if keyframe:
            if not predicted:
                self._replace_batch(members)
            gone, handles = b"", bytes(self._packed_handles)
            self._next_keyframe_step = step + KEYFRAME_STEPS
            self._next_keyframe_at = at + KEYFRAME_NS
        for member, tokens in several:
            # A newcomer with its prompt stands last.
            position = size - 1 if member is members[-1] else self.find_position(member)
            if position >= 0:
                pairs += _pack_pair(position, tokens)
        change = gone + handles + (column or pairs)
        left_count, joined = len(gone) >> 2, len(handles) >> 2
        exceptions = events.COLUMN if column else len(pairs) >> 3
        words = len(change) >> 2
        if words >= len(CHANGE_LAYOUTS):
            head = events.SCHEDULED_HEAD.pack(
                at, step, keyframe, left_count, joined, exceptions, size, kv_used, kv_total, running, waiting
            )
            writer.write_record(events.SCHEDULED_CODE, head + change)
            return
        pack_into, head_word, cells = CHANGE_LAYOUTS[words]
        offset = writer.reserve_cells(cells)
        counter = writer.cells_written - cells + 1
        pack_into(
            writer.memory,
            offset,
            counter,
            head_word,
            at,
            step,
            keyframe,
            left_count,
            joined,
            exceptions,
            size,
            kv_used,
            kv_total,
            running,
            waiting,
            change,
            counter,
        )
