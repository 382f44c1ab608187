"""Byte layout of ring files, shared by writer and reader.

There are two kinds of file. Each has a fixed size and begins with one header page:

    NAME.requests   header | request ring: cells of 64 B | live table: 80 B a slot | string table: 128 B each
    NAME.steps      header | step ring: records of n × 64 B; small rings of equal size follow each other

A third file, NAME.stacks, is text without a header (`stack_signal`).

A *cell* is written by one `pack_into`: sequence, code, part, parts, handle, 40 bytes of body, the sequence
again. An event longer than a cell takes several cells. The first 4 bytes of each body are then the low word
of the sequence of the first cell.

A *record* begins with a counter, its length in bytes and its code. Its body follows, and the counter again in
the last 8 bytes. The counter is the number of its first cell + 1. A record never wraps: the rest of the ring
is padded with a record of code 0.

A reader checks both ends. Python has no memory barriers, so it also leaves alone data that is younger than
its previous poll, and checks again after copying.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import NamedTuple

MAGIC = 0x4F54454C_494E4652  # "OTELINFR"
MAGIC_BYTES = MAGIC.to_bytes(8, sys.byteorder)
"""First bytes of a ring; they are written after the rest of its header."""
VERSION = 5
PAGE = 4096
SUFFIX_REQUESTS = ".requests"
SUFFIX_STEPS = ".steps"
SUFFIX_STACKS = ".stacks"

# ── header: u64 words, then a JSON text ──────────────────────────────────────────────────────────────────────────
W_MAGIC, W_VERSION, W_PID, W_STARTED_AT, W_STARTED_WALL = range(5)
W_CELLS = 5
W_LIVE_SLOTS = 6
W_STRINGS = 7
W_LOST = 8
"""Events that the writer failed to write, of any request; in a step ring, events longer than the ring allows.
"""
W_ERRORS = 9
"""Probes of this process that raised."""
W_KEYFRAME_REQUESTED = 10
"""Written by the reader: counts its requests for a keyframe."""
W_UNRECORDED = 11
"""Requests and engines that found no room; everything that was recorded is complete."""
W_VALUES_CUT = 12
"""Texts that were longer than an event allows: their values were cut."""
W_PROCESSED_UNTIL = 13
"""Written by the reader: requests that ended well before this instant were exported. The next reader does not
export them again.
"""
W_FLUSH_REQUESTED = 14
"""Written by the writer: counts its requests to export everything."""
W_FLUSH_DONE = 15
"""Written by the reader: the last of these requests that it completed."""
W_THREAD = 16
"""In a step ring: the kernel's id of the thread that writes it; 0 = unknown."""
W_OFFERED = 17
"""Requests that this process offered for recording, recorded or not. A fragment of another process's request is none."""
W_NOT_RECORDED = 18
"""Those of them that were not recorded: no free slot, or an error."""
W_STRINGS_REUSED = 19
"""Counts how often ids of the string table became free for other texts."""
W_NUMBER = 20
"""In a step ring: its number among those of its process, from 1."""
W_FLUSH_REFUSED = 21
"""Written by the reader: the last request after which something was refused that was recorded since the
request before it.
"""
W_STACK_SIGNAL, W_STACK_FILE = 22, 23
"""The signal on which a thread of this process writes its stack, 0 = none, and the descriptor that it writes to."""
W_LOOPS = 24
"""Event loops with requests, two words each: when the next check of the loop is due (monotonic ns; 0 = none), and the
kernel's id of its thread.
"""
WATCHED_LOOPS = 4
HEADER_WORDS = 32
TEXT_OFFSET = HEADER_WORDS * 8
TEXT_LENGTH = struct.Struct("<I")
THREADS, THREAD_WORDS = 64, 3
"""In the header page of a request ring: threads that work for one request. An entry has the request's handle (0 = free),
the kernel's id of the thread, and since when (monotonic ns).
"""
THREADS_AT = PAGE - THREADS * THREAD_WORDS * 8
PYTHON_THREADS = 128
"""Before it: the kernel's ids of threads that Python has started, 4 bytes each; 0 = free."""
PYTHON_THREADS_AT = THREADS_AT - PYTHON_THREADS * 4
TEXT_MAX = PYTHON_THREADS_AT - TEXT_OFFSET - TEXT_LENGTH.size

# ── request ring ─────────────────────────────────────────────────────────────────────────────────────────────────
CELL = struct.Struct("<QBBBxI40sQ")
CELL_BYTES = 64
BODY_BYTES = 40
CELL_CODE_AT, CELL_PART_AT, CELL_PARTS_AT, CELL_HANDLE_WORD = 8, 9, 10, 3
"""Byte positions in a cell, and that of the handle in words of 4 bytes."""
CELL_BODY = slice(16, 16 + BODY_BYTES)
PART_BYTES = 36
CELL_PIECE = slice(CELL_BODY.stop - PART_BYTES, CELL_BODY.stop)
PART = struct.Struct("<I36s")
PART_CELL = struct.Struct("<QBBBxII36sQ")
"""A cell whose body is a part of a longer event."""
MAX_PARTS = 64
VOID_CODE = 0
"""Code of an empty cell, whose event could not be packed into it."""

# ── live table ───────────────────────────────────────────────────────────────────────────────────────────────────
LIVE = struct.Struct("<IHHqq16s8s8s8sqI")
"""handle, flags, unused, arrived_at, wall_at, trace id, span id, parent id, server span id, unused, handle
again.
"""

LIVE_BYTES = 80
SLOT_BITS = 12
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATIONS = 1 << (32 - SLOT_BITS)

# ── string table ─────────────────────────────────────────────────────────────────────────────────────────────────
STRING = struct.Struct("<126sH")
STRING_BYTES = 128
STRING_MAX = 126
STRING_OTHER = 0xFFFF
"""Id of a string that found the table full of texts in use; no table is long enough for it. It is read as `_OTHER`."""

# ── step ring ────────────────────────────────────────────────────────────────────────────────────────────────────
RECORD_HEAD = struct.Struct("<QHBx")
RECORD_TAIL = struct.Struct("<Q")
RECORD_OVERHEAD = RECORD_HEAD.size + RECORD_TAIL.size
RECORD_MAX = 0xFFFF
PAD_CODE = 0


def record_struct(cells: int) -> struct.Struct:
    """Returns the layout of a record of `cells` cells: counter, length, code, body (zero-padded), counter."""
    return struct.Struct(f"<QHBx{max(cells * CELL_BYTES - RECORD_OVERHEAD, 0)}sQ")


class RingSizes(NamedTuple):
    """Sizes of one process's rings: cells (64 B), live slots (80 B), strings (128 B), step cells (64 B)."""

    cells: int = 16384
    live_slots: int = 4096
    strings: int = 1024
    step_cells: int = 16384

    def scale_down(self, halvings: int) -> RingSizes:
        """Returns the same proportions, 2^halvings times smaller."""
        return RingSizes(*(size >> halvings for size in self))

    @property
    def requests_bytes(self) -> int:
        return PAGE + self.cells * CELL_BYTES + self.live_slots * LIVE_BYTES + self.strings * STRING_BYTES

    @property
    def steps_bytes(self) -> int:
        return PAGE + self.step_cells * CELL_BYTES


class RequestFileOffsets(NamedTuple):
    """Byte offsets inside a `.requests` file."""

    ring: int
    live_table: int
    strings: int
    end: int


def request_offsets(cells: int, live_slots: int, strings: int) -> RequestFileOffsets:
    """Returns the offsets that follow from the sizes in the header."""
    live = PAGE + cells * CELL_BYTES
    table = live + live_slots * LIVE_BYTES
    return RequestFileOffsets(PAGE, live, table, table + strings * STRING_BYTES)


def read_boot_id() -> str:
    """Returns the id of the current boot of this kernel; "" where it is not available.

    Rings of another boot are invalid.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
