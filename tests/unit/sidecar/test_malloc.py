"""Free memory is returned to the kernel, and small numpy arrays do not grow the heap."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from otel_infer.sidecar.malloc import TRIM_INTERVAL_NS, MallocTrimmer


def test_memory_is_trimmed_once_per_interval() -> None:
    trims: list[int] = []
    trimmer = MallocTrimmer(trims.append)
    for now in (1, 2, TRIM_INTERVAL_NS, TRIM_INTERVAL_NS + 1, TRIM_INTERVAL_NS + 2, 3 * TRIM_INTERVAL_NS):
        trimmer.tick(now)
    assert len(trims) == 3


needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is trimmed")


@needs_glibc
def test_free_memory_between_live_blocks_is_returned() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks = [bytearray(20_000) for _ in range(4000)]  # 80 MB, in the C library's heap
    del blocks[::2]
    before = resident_bytes()
    MallocTrimmer().tick(1)
    assert before - resident_bytes() > 20_000_000
    assert len(blocks) == 2000


SMALL_ARRAYS = """
import ctypes, random, sys
import numpy as np
from otel_infer.sidecar.malloc import fill_numpy_cache

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used".split()]
    _fields_ += [("free", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
if sys.argv[1:]:
    fill_numpy_cache()
draw, before = random.Random(1), mallinfo().used
for _ in range(3000):
    arrays = [np.empty(draw.randrange(1, 1024), np.uint8) for _ in range(draw.randrange(8))]
    del arrays
print(mallinfo().used - before)
"""


@needs_glibc
def test_a_filled_numpy_cache_limits_heap_growth() -> None:
    def heap_growth(*arguments: str) -> int:
        command = [sys.executable, "-c", SMALL_ARRAYS, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert heap_growth("filled") < 10_000
    assert heap_growth() > 100_000, "numpy keeps no small blocks, so that filling its cache is unnecessary"
