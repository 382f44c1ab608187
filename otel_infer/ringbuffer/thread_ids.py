"""Packs the two ids of a thread into one number, and notes which thread works for a request.

The kernel's id finds the thread under /proc. The id of `threading.get_ident` finds its stack in a dump of faulthandler:
it is an address, aligned to 64 bytes by glibc. One number is never seen half.
"""

from __future__ import annotations

import threading

from otel_infer.ringbuffer import layout

_KERNEL_BITS = 22
"""The kernel's ids are below 2^22 (`PID_MAX_LIMIT`)."""
_KERNEL_MASK = (1 << _KERNEL_BITS) - 1
_ALIGNMENT_BITS = 6
_MASK_64 = (1 << 64) - 1


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


def note_thread(words: memoryview, handle: int, at: int) -> int:
    """Notes that the calling thread works for a request from `at` on; returns the entry of the table.

    `words`: of the table. Returns -1, and notes nothing, if a thread is noted for the request, or the entry is taken.
    """
    entry = handle % layout.THREADS * layout.THREAD_WORDS
    if not handle or words[entry]:
        return -1
    words[entry + 1], words[entry + 2] = pack_thread(), at
    words[entry] = handle
    return entry
