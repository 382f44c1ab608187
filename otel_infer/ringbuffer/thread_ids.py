"""Packs the two ids of a thread into one number, so that a reader never sees half of them.

The kernel's id finds the thread under /proc. The id of `threading.get_ident` finds its stack in a dump of faulthandler:
it is an address, aligned to 64 bytes by glibc.
"""

from __future__ import annotations

import mmap
import struct
import threading

from otel_infer.ringbuffer import layout

_KERNEL_BITS = 22
"""The kernel's ids are below 2^22 (`PID_MAX_LIMIT`)."""
_KERNEL_MASK = (1 << _KERNEL_BITS) - 1
_ALIGNMENT_BITS = 6
_MASK_64 = (1 << 64) - 1
_THREAD = struct.Struct("<Q")
_HANDLE_AND_THREAD = struct.Struct(f"<I{layout.LIVE_THREAD_AT - 4}xQ")


def pack_thread() -> int:
    """Returns the ids of the calling thread."""
    packed = threading.get_ident() >> _ALIGNMENT_BITS << _KERNEL_BITS | threading.get_native_id()
    return packed & _MASK_64


def kernel_id(packed: int) -> int:
    """Returns the kernel's id of a packed thread, as its own process sees it; 0 = unknown."""
    return packed & _KERNEL_MASK


def is_thread(packed: int, ident: int) -> bool:
    """Returns whether a packed thread has this `threading.get_ident`."""
    return packed != 0 and packed >> _KERNEL_BITS == (ident >> _ALIGNMENT_BITS) & (_MASK_64 >> _KERNEL_BITS)


def exchange_thread(memory: mmap.mmap, live_table: int, handle: int, known: int, thread: int) -> bool:
    """Stores in its live slot which thread works for a request alone, 0 = none, if `known` is stored there.

    `live_table`: offset of the slots. Returns whether it was stored; not for a request that has ended.
    """
    offset = live_table + (handle & layout.SLOT_MASK) * layout.LIVE_BYTES
    if not handle or _HANDLE_AND_THREAD.unpack_from(memory, offset) != (handle, known):
        return False
    _THREAD.pack_into(memory, offset + layout.LIVE_THREAD_AT, thread)
    return True
