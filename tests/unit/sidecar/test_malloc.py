"""Memory that is free is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from otel_infer.sidecar.malloc import TRIM_INTERVAL_NS, MallocTrimmer


def test_it_is_asked_for_once_in_a_while() -> None:
    asked: list[int] = []
    heap = MallocTrimmer(asked.append)
    for now in (1, 2, TRIM_INTERVAL_NS, TRIM_INTERVAL_NS + 1, TRIM_INTERVAL_NS + 2, 3 * TRIM_INTERVAL_NS):
        heap.tick(now)
    assert len(asked) == 3


needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library: it is left alone"
)


@needs_glibc
def test_what_lies_free_between_what_stays_is_given_back() -> None:
    def held() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks = [bytearray(20_000) for _ in range(4000)]  # 80 MB, in the C library's heap
    del blocks[::2]
    before = held()
    MallocTrimmer().tick(1)
    assert before - held() > 20_000_000
    assert len(blocks) == 2000


SMALL_ARRAYS = """
import ctypes, random, sys
import numpy as np
from otel_infer.sidecar.malloc import fill_numpy_cache

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used".split()]
    _fields_ += [("free", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]

held = ctypes.CDLL(None).mallinfo2
held.restype = Info
if sys.argv[1:]:
    fill_numpy_cache()
draw, before = random.Random(1), held().used
for _ in range(3000):
    arrays = [np.empty(draw.randrange(1, 1024), np.uint8) for _ in range(draw.randrange(8))]
    del arrays
print(held().used - before)
"""


@needs_glibc
def test_arrays_of_all_sizes_that_come_and_go_leave_nothing_behind() -> None:
    def left_by_arrays(*arguments: str) -> int:
        command = [sys.executable, "-c", SMALL_ARRAYS, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert left_by_arrays("taken before") < 10_000
    assert left_by_arrays() > 100_000, "numpy keeps none: nothing need be taken before"
