"""Writes the batch of each engine step as a change to the batch before, or as a keyframe.

The batch is predicted from the previous step and verified with one C-level `==`. An engine's scheduler may
let members sit out, overtake or swap, so comparing counts proves nothing. The engine's own ordered list is
compared with the expected list. If they are equal, or equal except for newcomers at the end, a change is
written. Otherwise a keyframe is written: the whole batch as packed handles. Bytecode runs per change, never
per member of the batch.
"""

from __future__ import annotations

import struct
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.step_writer import CHANGE_LAYOUTS, StepWriter

KEYFRAME_STEPS = 256
KEYFRAME_NS = 1_000_000_000
MAX_CHANGES = 16
"""If more members left, or more joined, in one step, a keyframe costs less than the single changes."""
_UNKNOWN_HANDLE = bytes(4)

_now = _clock.now
_pack_word = struct.Struct("<I").pack
_pack_pair = struct.Struct("<II").pack


class HandleTable(dict[Any, bytes]):
    """Map of the engine's own key of a sequence to its request's handle, packed in 4 bytes.

    The handle is 0 for a sequence that arrived before the instrumentation.
    """

    def __missing__(self, key: Hashable) -> bytes:
        return _UNKNOWN_HANDLE

    def bind_handle(self, key: Hashable, handle: int) -> None:
        """Binds this sequence to that request from now on."""
        self[key] = struct.pack("<I", handle)


class PythonBatchState:
    """What is known of the batch that was written last, for compiled code as well."""

    _members: list[Any]
    _packed_handles: bytearray
    _ordinals: list[int]
    _ordinal_of: dict[int, int]
    _next_ordinal: int


if TYPE_CHECKING:
    BatchState = PythonBatchState
else:
    BatchState = PythonBatchState if native is None else native.BatchState


class BatchWriter(BatchState):
    """Writer of the steps of one engine thread.

    Members are the objects that the engine lists; they are compared by identity and by `==`. `handles` binds
    them to requests. If members cannot be dictionary keys, `pack_handles` is replaced: it returns the handles
    of many members, 4 bytes each. `number`: the number of its ring among those of this process.
    """

    def __init__(self, writer: StepWriter, handles: HandleTable, number: int = 0) -> None:
        self.number = number
        self._use_writer(writer)
        self._members, self._packed_handles = [], bytearray()
        self._ordinals, self._ordinal_of, self._next_ordinal = [], {}, 0
        self.handles = handles
        self.pack_handles: Callable[[Iterable[Any]], bytes] = lambda members: b"".join(
            map(handles.__getitem__, members)
        )
        self.alive = True

    def _use_writer(self, writer: StepWriter) -> None:
        """Uses this ring; its two frequent records are written without a call in between."""
        self._writer = writer
        self.write_unchanged, self.write_single_tokens = writer.write_unchanged, writer.write_single_tokens

    @property
    def ring(self) -> StepWriter:
        """The ring that is written, until it is detached."""
        return self._writer

    def assign_to_thread(self) -> BatchWriter:
        """Records the calling thread as the writer from now on; returns the writer."""
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
        at: int = 0,
    ) -> int:
        """Records that a batch was composed; returns the step's number.

        `members` is the engine's ordered batch; the engine may change the list afterwards. `left`: the
        members that finished or were preempted after the last step. Every member is scheduled for one token,
        except those in `several`: a few (member, tokens). For many exceptions, `tokens` is a u32 column in
        the order of `members`. `kv_used` and `kv_total` count KV blocks, 0 of 0 = unknown.
        """
        at, writer = at or _now(), self._writer
        if not (left or tokens or several) and members == self._members:
            step = writer.write_unchanged(len(members), kv_used, kv_total, running, waiting, at)
            if step:
                return step
        if at >= writer.next_check_at:
            writer.check_keyframe(at)
        writer.step = step = writer.step + 1
        removed = handles = b""
        if len(left) <= MAX_CHANGES:
            if left:
                removed = self._remove_members(left)
            newcomers = members[len(self._members) :]
            if newcomers and len(newcomers) <= MAX_CHANGES:
                handles = self._append_members(newcomers)
        keyframe = members != self._members or step >= writer.next_keyframe_step
        if keyframe:
            removed, handles = b"", self._begin_keyframe(at, members)
        column = tokens or (self._pack_several(several) if several else b"")
        load = kv_used, kv_total, running, waiting
        self._write_record(at, keyframe, removed, handles, column, bool(tokens), *load)
        return step

    def write_changed(
        self,
        size: int,
        left: Sequence[Any],
        joined: Sequence[Any],
        several: Sequence[tuple[Any, int]],
        kv_used: int,
        kv_total: int,
        running: int,
        waiting: int,
    ) -> int:
        """Records a batch of which the engine reports who left and who joined at its end, as `write_unchanged`.

        Only the number of members is verified. `several`: as in `write_scheduled`.
        """
        at, writer = _now(), self._writer
        if at >= writer.next_check_at:
            writer.check_keyframe(at)
        if writer.step + 1 >= writer.next_keyframe_step or max(len(left), len(joined)) > MAX_CHANGES:
            return 0
        removed = self._remove_members(left)
        if len(self._members) + len(joined) != size:
            self.force_keyframe()  # `left` is no longer among the members of which the next change would be
            return 0
        handles = self._append_members(joined)
        writer.step += 1
        load = kv_used, kv_total, running, waiting
        pairs = self._pack_several(several) if several else b""
        self._write_record(at, False, removed, handles, pairs, False, *load)
        return writer.step

    def write_done(
        self, step: int, tokens: bytes = b"", size: int = 0, discarded: int = 0, at: int = 0
    ) -> None:
        """Records that the step's tokens are known to the engine, at `at` (monotonic ns; 0 = now).

        `tokens` is empty if every member got one token. Otherwise it is a u32 column of `size` members in the
        step's order, where 0 = a chunk of a prefill or a discarded result. `discarded` counts the discarded
        results.
        """
        if tokens:
            head = events.DONE_HEAD.pack(at or _now(), step, events.COLUMN, size, discarded)
            self._writer.write_record(events.DONE_CODE, head + tokens)
        else:
            self.write_single_tokens(step, at or _now(), discarded)

    def write_done_except(self, step: int, exceptions: Iterable[tuple[int, int]]) -> None:
        """Records a done step; `exceptions`: (position, tokens) of members without exactly one token."""
        pairs = [number for pair in exceptions for number in pair]
        head = events.DONE_HEAD.pack(_now(), step, len(pairs) // 2, 0, 0)
        self._writer.write_record(events.DONE_CODE, head + array("I", pairs).tobytes())

    def clear_batch(self) -> None:
        """Drops the last batch, so that finished requests are not kept alive while the engine is idle."""
        self._members, self._ordinals, self._packed_handles = [], [], bytearray()
        self._writer.size = 0
        self._ordinal_of.clear()
        self.force_keyframe()

    def force_keyframe(self) -> None:
        """Makes the next step a keyframe."""
        self._writer.next_keyframe_step = 0

    def find_position(self, member: Any) -> int:
        """Returns the position of a member in the batch that was written last; -1 = not in it.

        Members join at the end and leave anywhere, so the ordinals that they got on joining stay sorted.
        Bisection finds the position, whatever `==` of a member costs.
        """
        ordinal = self._ordinal_of.get(id(member), -1)
        if ordinal >= 0:
            position = bisect_left(self._ordinals, ordinal)
            return position if self._members[position] is member else -1
        return self._find_equal(member)

    def _find_equal(self, member: Any) -> int:
        """Returns the position of an equal string, because strings may come as copies; -1 = none."""
        return self._members.index(member) if isinstance(member, str) and member in self._members else -1

    def detach_ring(self) -> None:
        """Detaches from a ring that this process no longer owns, as in a forked child.

        Later steps go to memory that is never read.
        """
        self.alive, self._writer.retired = False, True
        sizes = RingSizes(step_cells=8192)
        self._use_writer(StepWriter(MemoryArena(), "", "", sizes))

    def _replace_batch(self, members: Sequence[Any]) -> None:
        """Replaces the whole batch, because it differs from the expected one."""
        self._members, self._packed_handles = list(members), bytearray(self.pack_handles(members))
        self._ordinals, self._next_ordinal = list(range(len(members))), len(members)
        self._ordinal_of = dict(zip(map(id, members), self._ordinals))

    def _remove_members(self, left: Sequence[Any]) -> bytes:
        """Removes the members that left; returns the position of each at its removal, packed."""
        members, ordinals, positions = self._members, self._ordinals, b""
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
            positions += _pack_word(position)
        return positions

    def _append_members(self, joined: Sequence[Any]) -> bytes:
        """Appends newcomers; returns their packed handles."""
        packed, ordinal, ordinal_of = self.pack_handles(joined), self._next_ordinal, self._ordinal_of
        self._packed_handles += packed
        self._members += joined
        for member in joined:
            self._ordinals.append(ordinal)
            ordinal_of[id(member)] = ordinal
            ordinal += 1
        self._next_ordinal = ordinal
        return packed

    def _begin_keyframe(self, at: int, members: list[Any]) -> bytes:
        """Takes over the members if they are not those predicted; returns the handles of all."""
        if members != self._members:
            self._replace_batch(members)
        self._writer.next_keyframe_step = self._writer.step + KEYFRAME_STEPS
        self._writer.next_keyframe_at = at + KEYFRAME_NS
        return bytes(self._packed_handles)

    def _pack_several(self, several: Sequence[tuple[Any, int]]) -> bytes:
        """Returns position and tokens of these members, packed; members that are not in the batch are left out."""
        pairs, members = b"", self._members
        for member, tokens in several:
            # Fast path: a newcomer with its prompt is usually the last member.
            position = len(members) - 1 if member is members[-1] else self.find_position(member)
            if position >= 0:
                pairs += _pack_pair(position, tokens)
        return pairs

    def _write_record(
        self,
        at: int,
        keyframe: bool,
        removed: bytes,
        handles: bytes,
        tokens: bytes,
        is_column: bool,
        *load: int,
    ) -> None:
        """Writes a change or a keyframe of the members as they are now.

        `tokens`: a u32 column, or (position, tokens) of some.
        """
        change = removed + handles + tokens
        words, exceptions = len(change) >> 2, events.COLUMN if is_column else len(tokens) >> 3
        counts = len(removed) >> 2, len(handles) >> 2, exceptions, len(self._members)
        writer = self._writer
        writer.size, step = len(self._members), writer.step
        if words >= len(CHANGE_LAYOUTS):
            head = events.SCHEDULED_HEAD.pack(at, step, keyframe, *counts, *load)
            writer.write_record(events.SCHEDULED_CODE, head + change)
            return
        pack_into, head_word, cells = CHANGE_LAYOUTS[words]
        offset = writer.offset
        behind = offset + (cells << 6)
        if behind <= writer.last_offset:  # as `reserve_cells`, without its call
            writer.offset = behind
            writer.cells_written += cells
        else:
            offset = writer.reserve_cells(cells)
        counter = writer.cells_written - cells + 1
        pack_into(
            writer.memory, offset, counter, head_word, at, step, keyframe, *counts, *load, change, counter
        )
