"""Allocates the memory of rings: files on tmpfs, or memory of this process.

Files are allocated with `posix_fallocate` before they are mapped, because a store into a full tmpfs is an
uncatchable SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from otel_infer.config import private_files
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.layout import RingSizes

MAX_TOTAL_BYTES = 16 << 20
"""Limit for all rings of one server together."""
FREE_DIVISOR = 4
"""A ring takes at most this part (1/4) of the free shared memory."""
REMAINING_DIVISOR = 11
"""A ring takes at most this part (1/11) of the remaining bytes. This allows a process with rings of full size, then
ever smaller ones. In total 35 processes fit, with one request ring and one step ring each.
"""
SIZE_CLASSES = 7
_SMALLEST = RingSizes().scale_down(SIZE_CLASSES - 1)
MIN_RING_BYTES = max(_SMALLEST.requests_bytes, _SMALLEST.steps_bytes)
"""A ring up to this size, as all of the smallest size class, may exceed its share of the remaining bytes."""
_SUFFIXES = (layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS)


class RingUnavailable(Exception):
    """Failure to get shared memory; the message states where, why, and what to change."""


class NotOnTmpfs(RingUnavailable):
    """The folder for rings is on a disk."""


class ForeignFolder(RingUnavailable):
    """The folder for rings belongs to another user."""


class RingLimitReached(RingUnavailable):
    """The memory that one server's rings may take is used up."""


class SharedMemoryFull(RingUnavailable):
    """The tmpfs has too little free space for the smallest rings."""


class Arena(Protocol):
    """Allocator of ring memory: files on tmpfs, or memory of this process."""

    def allocate(self, name: str, size: int) -> mmap.mmap:
        """Returns zeroed, writable, prefaulted memory of exactly `size` bytes; raises `RingUnavailable`."""
        ...

    def can_allocate(self, size: int) -> bool:
        """Returns whether `size` more bytes stay within the limits."""
        ...

    def remaining_bytes(self) -> int:
        """Returns how many bytes of the limit are unused."""
        ...

    def is_visible(self) -> bool:
        """Returns whether a reader that starts now would find the rings."""
        ...

    def close(self) -> None:
        """Ends writing: from now on the reader may treat this process as dead."""
        ...


class FileArena:
    """Ring files in one 0700 directory; the writer holds a lock on each file while it lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptors: list[int] = []
        self._paths: list[Path] = []

    def can_allocate(self, size: int) -> bool:
        """Returns whether `size` more bytes fit: up to 16 MiB in total and up to a quarter of the free space.

        A ring takes a small share of the remaining bytes, so that processes that start later find room. Only
        the smallest rings may use up the rest.
        """
        remaining = self.remaining_bytes()
        share = max(remaining // REMAINING_DIVISOR, MIN_RING_BYTES)
        try:
            with private_files.open_private_folder(self.directory) as folder:
                free = os.statvfs(folder)
        except OSError as error:
            raise RingUnavailable(f"{self.directory}: {error.strerror}") from None
        available = free.f_bavail * free.f_frsize
        return size <= min(remaining, share, available // FREE_DIVISOR)

    def remaining_bytes(self) -> int:
        try:
            with (
                private_files.open_private_folder(self.directory) as folder,
                os.scandir(folder) as entries,
            ):
                return MAX_TOTAL_BYTES - sum(map(_ring_bytes, entries))
        except OSError as error:
            raise RingUnavailable(f"{self.directory}: {error.strerror}") from None

    def allocate(self, name: str, size: int) -> mmap.mmap:
        path = self.directory / name
        try:
            descriptor = private_files.open_beside_rings(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise RingUnavailable(f"{path}: {error.strerror}") from None
        try:
            os.posix_fallocate(descriptor, 0, size)
            # The kernel releases the lock when the writer ends, however it ends. Closing another descriptor
            # of this file in this process would release it too, so this one must stay the only one.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                private_files.remove_beside_rings(path)
            kind = SharedMemoryFull if error.errno == errno.ENOSPC else RingUnavailable
            raise kind(f"{path}: {error.strerror}") from None
        self._descriptors.append(descriptor)
        self._paths.append(path)
        return memory

    def is_visible(self) -> bool:
        return all(private_files.read_status(path) is not None for path in self._paths)

    def close(self) -> None:
        """Releases the locks: from now on the reader treats this writer as dead."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class MemoryArena:
    """Rings in the memory of this process, for the in-process mode; the reader gets the buffers directly."""

    def __init__(self) -> None:
        self._rings: list[tuple[str, mmap.mmap]] = []

    @property
    def buffers(self) -> list[tuple[str, mmap.mmap]]:
        """Returns name and memory of each ring whose header is complete."""
        length = len(layout.MAGIC_BYTES)
        return [(name, memory) for name, memory in self._rings if memory[:length] == layout.MAGIC_BYTES]

    def can_allocate(self, size: int) -> bool:
        return size <= self.remaining_bytes()

    def remaining_bytes(self) -> int:
        return MAX_TOTAL_BYTES - sum(len(memory) for _, memory in self._rings)

    def allocate(self, name: str, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size)
        self._rings.append((name, memory))
        return memory

    def is_visible(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing, because the reader lives in the same process."""


def choose_sizes(arena: Arena, size_of: Callable[[RingSizes], int]) -> RingSizes:
    """Returns the largest sizes that fit; raises `RingUnavailable` if not even the smallest do."""
    for halvings in range(SIZE_CLASSES):
        sizes = RingSizes().scale_down(halvings)
        if arena.can_allocate(size_of(sizes)):
            return sizes
    smallest = size_of(_SMALLEST)
    if arena.remaining_bytes() < smallest:
        raise RingLimitReached(
            f"the {MAX_TOTAL_BYTES >> 20} MiB allowed for one server's rings are used up "
            "(set OTEL_INFER_RINGS to another folder for some of its processes)"
        )
    raise SharedMemoryFull(
        f"less than {smallest * FREE_DIVISOR >> 10} KiB of shared memory is free "
        "(increase it: Docker --shm-size, Kubernetes emptyDir with medium Memory)"
    )


def _ring_bytes(entry: os.DirEntry[str]) -> int:
    """Returns the size of a ring file; 0 for other files and for a ring that its reader has just removed."""
    if not entry.name.endswith(_SUFFIXES):
        return 0
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
