"""Who is in a step: predicted from the step before, verified with one C-level `==`, written as a change.

An engine's scheduler may let members sit out, overtake or swap, so a count proves nothing. What is compared is the
engine's own ordered list against the list we expect: equal, or equal up to newcomers at its end → a change; anything
else → a keyframe, the whole batch as packed handles. Nothing here runs bytecode per sequence.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from otel_infer import clock, facts
from otel_infer.ring import layout
from otel_infer.ring.layout import Sizes
from otel_infer.ring.write import MemoryArena, StepWriter

KEYFRAME_STEPS = 256
KEYFRAME_NS = 1_000_000_000
MOST_LEFT = 16
"""If more left at once, a keyframe costs less than finding where each of them was."""

_SCHEDULED = struct.Struct("<QHBx" + facts.SCHEDULED_HEAD.format[1:] + "Q")
_DONE = struct.Struct("<QHBx" + facts.DONE_HEAD.format[1:] + "16xQ")
_UNKNOWN = bytes(4)


def _packed(numbers: list[int]) -> bytes:
    return array("I", numbers).tobytes()


class Handles(dict[Any, bytes]):
    """The engine's own key of a sequence → its request's handle as 4 bytes; 0 for what arrived before us."""

    def __missing__(self, key: Hashable) -> bytes:
        return _UNKNOWN

    def bind(self, key: Hashable, handle: int) -> None:
        """From here on this sequence belongs to that request."""
        self[key] = struct.pack("<I", handle)


class StepLog:
    """The steps of one engine thread.

    Members are whatever objects the engine lists; they are told apart by identity and by `==`. `handles` binds them to
    requests, or `pack` gives the handles of many, 4 bytes each, if members cannot be dictionary keys.
    """

    def __init__(self, writer: StepWriter, handles: Handles) -> None:
        self._writer = writer
        self._members: list[Any] = []
        self._ordinals: list[int] = []
        self._ordinal_of: dict[int, int] = {}
        self._next_ordinal = 0
        self.handles = handles
        self.pack: Callable[[Iterable[Any]], bytes] = lambda members: b"".join(
            map(handles.__getitem__, members)
        )
        self.alive = True
        self._step = 0
        self._next_keyframe_step = 0
        self._next_keyframe_at = 0
        self._asked = 0

    def scheduled(
        self,
        members: list[Any],
        left: Sequence[Any] = (),
        tokens: bytes = b"",
        kv_used: int = 0,
        kv_total: int = 0,
        running: int = 0,
        waiting: int = 0,
    ) -> int:
        """States that a batch was composed, and returns the step's number.

        `members` is the engine's ordered batch; it is kept, so it must not be changed afterwards. `left` are those who
        finished or were preempted since the last step. `tokens` is empty if every member is scheduled for one token,
        else a u32 column in the order of `members`.
        """
        at = clock.now()
        self._step = step = self._step + 1
        expected = self._members
        gone: list[int] = []
        if len(left) > MOST_LEFT:
            expected, self._next_keyframe_step = [], 0
        elif left:
            expected, gone = self._without(expected, left)
        writer = self._writer
        if (
            members == expected
            and not gone
            and not tokens
            and step < self._next_keyframe_step
            and at < self._next_keyframe_at
            and writer.words[layout.W_KEYFRAME_ASKED] == self._asked
        ):
            position = writer.cell % writer.cells
            writer.cell = counter = writer.cell + 1
            _SCHEDULED.pack_into(
                writer.memory,
                layout.PAGE + (position << 6),
                counter,
                64,
                facts.SCHEDULED_CODE,
                at,
                step,
                0,
                0,
                0,
                0,
                len(members),
                kv_used,
                kv_total,
                running,
                waiting,
                counter,
            )
            return step
        self._state_change(at, members, expected, gone, tokens, (kv_used, kv_total, running, waiting))
        return step

    def done(self, step: int, tokens: bytes = b"", size: int = 0, discarded: int = 0) -> None:
        """States that the step's tokens are known to the engine.

        `tokens` is empty if every member got one, else a u32 column of `size` members in the step's order (0 = a chunk
        of a prefill, or thrown away). `discarded` counts what was thrown away.
        """
        at = clock.now()
        writer = self._writer
        if tokens:
            head = facts.DONE_HEAD.pack(at, step, facts.COLUMN, size, discarded)
            writer.write(facts.DONE_CODE, head + tokens)
            return
        position = writer.cell % writer.cells
        writer.cell = counter = writer.cell + 1
        _DONE.pack_into(
            writer.memory,
            layout.PAGE + (position << 6),
            counter,
            64,
            facts.DONE_CODE,
            at,
            step,
            0,
            size,
            discarded,
            counter,
        )

    def done_except(self, step: int, exceptions: Iterable[tuple[int, int]], discarded: int = 0) -> None:
        """As `done`, for a few (position, tokens) that did not get exactly one token."""
        pairs = [number for pair in exceptions for number in pair]
        head = facts.DONE_HEAD.pack(clock.now(), step, len(pairs) // 2, 0, discarded)
        self._writer.write(facts.DONE_CODE, head + struct.pack(f"<{len(pairs)}I", *pairs))

    def idle(self) -> None:
        """The engine has nothing to run: let go of the last batch, so that finished requests are not kept alive."""
        self._members, self._ordinals = [], []
        self._ordinal_of.clear()
        self._next_keyframe_step = 0

    def retire(self) -> None:
        """The ring is no longer ours (a forked child): what is still stated goes nowhere."""
        self.alive = False
        nowhere = Sizes(step_cells=8192)
        self._writer = StepWriter(MemoryArena(), "", "", nowhere)

    def _without(self, expected: list[Any], left: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The batch without those who left, and the position of each at its removal.

        Members join at the end and leave anywhere, so the numbers they got on joining stay in order: a position is
        found by bisection, whatever `==` of a member costs.
        """
        expected, gone = expected.copy(), []
        for member in left:
            ordinal = self._ordinal_of.pop(id(member), -1)
            if ordinal < 0 and isinstance(member, str) and member in expected:
                member = expected[expected.index(member)]
                ordinal = self._ordinal_of.pop(id(member), -1)
            position = bisect_left(self._ordinals, ordinal)
            if ordinal < 0 or position >= len(expected) or expected[position] is not member:
                continue
            del expected[position], self._ordinals[position]
            gone.append(position)
        return expected, gone

    def _number(self, members: list[Any], joined: list[Any]) -> None:
        """Numbers newcomers; all of `members` anew if they are the newcomers."""
        if len(joined) == len(members):
            self._ordinals.clear()
            self._ordinal_of.clear()
            self._next_ordinal = 0
        numbers = range(self._next_ordinal, self._next_ordinal + len(joined))
        self._ordinals.extend(numbers)
        self._ordinal_of.update(zip(map(id, joined), numbers))
        self._next_ordinal = numbers.stop

    def _state_change(
        self,
        at: int,
        members: list[Any],
        expected: list[Any],
        gone: list[int],
        tokens: bytes,
        load: tuple[int, int, int, int],
    ) -> None:
        writer = self._writer
        asked = writer.words[layout.W_KEYFRAME_ASKED]
        known = len(expected)
        due = self._step >= self._next_keyframe_step or at >= self._next_keyframe_at or asked != self._asked
        predicted = members == expected or members[:known] == expected
        keyframe = due or not predicted
        self._number(members, members[known:] if predicted else members)
        if keyframe:
            gone, joined = [], members
            self._next_keyframe_step = self._step + KEYFRAME_STEPS
            self._next_keyframe_at = at + KEYFRAME_NS
            self._asked = asked
        else:
            joined = members[known:]
        self._members = members
        head = facts.SCHEDULED_HEAD.pack(
            at,
            self._step,
            keyframe,
            len(gone),
            len(joined),
            facts.COLUMN if tokens else 0,
            len(members),
            *load,
        )
        change = (_packed(gone) if gone else b"") + self.pack(joined)
        writer.write(facts.SCHEDULED_CODE, head + change + tokens)
