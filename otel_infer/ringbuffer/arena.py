"""Where rings are made: files on tmpfs, or memory of this process.

Files are allocated with `posix_fallocate` before they are mapped, because a store into a full tmpfs is an uncatchable
SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.layout import RingSizes

MAX_TOTAL_BYTES = 16 << 20
"""Of all rings of one server."""
MAX_SHARE_OF_FREE = 4
MAX_SHARE_OF_REMAINING = 14
"""Three rings of full size, then ever smaller ones: 33 processes with a ring of requests and one of steps each."""
SIZE_CLASSES = 5
MIN_RING_BYTES = RingSizes().scale_down(SIZE_CLASSES - 1).steps_bytes
"""No ring is smaller than it would be at this size."""
_SUFFIXES = (layout.SUFFIX_REQUESTS, layout.SUFFIX_STEPS)


class RingUnavailable(Exception):
    """No shared memory to be had; the message says where, why, and what to change."""


class Arena(Protocol):
    """Where rings are made: files on tmpfs, or memory of this process."""

    def allocate(self, name: str, size: int) -> mmap.mmap:
        """Zeroed, writable, prefaulted memory of exactly `size` bytes; raises `RingRefused`."""
        ...

    def can_allocate(self, size: int) -> bool:
        """Whether so many more bytes stay inside what we allow ourselves."""
        ...

    def remaining_bytes(self) -> int:
        """How many bytes of what we allow ourselves are not used."""
        ...

    def is_visible(self) -> bool:
        """Whether a reader that comes now would find the rings."""
        ...

    def close(self) -> None:
        """No more writing: the reader may take this process for gone."""
        ...


class FileArena:
    """Ring files in one 0700 directory, each locked by its writer for as long as the writer lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptors: list[int] = []
        self._paths: list[Path] = []

    def can_allocate(self, size: int) -> bool:
        """At most 16 MiB in all, and at most a quarter of what the file system has free.

        Of the 16 MiB a ring takes a small share of what is left, so that whoever comes later finds some; the smallest take the
        last of it.
        """
        left = self.remaining_bytes()
        share = max(left // MAX_SHARE_OF_REMAINING, MIN_RING_BYTES)
        try:
            free = os.statvfs(self.directory)
        except OSError as refusal:
            raise RingUnavailable(f"{self.directory}: {refusal.strerror}") from None
        available = free.f_bavail * free.f_frsize
        return size <= min(left, share, available // MAX_SHARE_OF_FREE)

    def remaining_bytes(self) -> int:
        try:
            with os.scandir(self.directory) as entries:
                return MAX_TOTAL_BYTES - sum(map(_ring_bytes, entries))
        except OSError as refusal:
            raise RingUnavailable(f"{self.directory}: {refusal.strerror}") from None

    def allocate(self, name: str, size: int) -> mmap.mmap:
        path = self.directory / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except OSError as refusal:
            raise RingUnavailable(f"{path}: {refusal.strerror}") from None
        try:
            os.posix_fallocate(descriptor, 0, size)
            # The lock dies with the writer, whatever kills it; the descriptor must stay the only one of this file.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except OSError as refusal:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise RingUnavailable(f"{path}: {refusal.strerror}") from None
        self._descriptors.append(descriptor)
        self._paths.append(path)
        return memory

    def is_visible(self) -> bool:
        return all(path.exists() for path in self._paths)

    def close(self) -> None:
        """Releases the locks: from here on the reader takes this writer for dead."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class MemoryArena:
    """Rings in this process's own memory, for the in-process mode; the reader is handed the buffers."""

    def __init__(self) -> None:
        self._rings: list[tuple[str, mmap.mmap]] = []

    @property
    def buffers(self) -> list[tuple[str, mmap.mmap]]:
        """Name and memory of each ring that can be read: its writer may still be about to write its header."""
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
        """Nothing to release: the reader lives in the same process."""


def choose_sizes(arena: Arena, size_of: Callable[[RingSizes], int]) -> RingSizes:
    """The largest sizes that fit; raises `RingRefused` when even the smallest do not."""
    for halvings in range(SIZE_CLASSES):
        sizes = RingSizes().scale_down(halvings)
        if arena.can_allocate(size_of(sizes)):
            return sizes
    smallest = size_of(RingSizes().scale_down(SIZE_CLASSES - 1))
    if arena.remaining_bytes() < smallest:
        raise RingUnavailable(
            f"the {MAX_TOTAL_BYTES >> 20} MiB that one server's rings may take are used up "
            "(give some of its processes another folder: OTEL_INFER_RINGS)"
        )
    raise RingUnavailable(
        f"less than {smallest * MAX_SHARE_OF_FREE >> 10} KiB of shared memory is free "
        "(Docker: --shm-size, pod: emptyDir Memory)"
    )


def _ring_bytes(entry: os.DirEntry[str]) -> int:
    """The size of a ring; of any other file 0, and of one that its reader has just removed."""
    if not entry.name.endswith(_SUFFIXES):
        return 0
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
