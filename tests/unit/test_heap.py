"""Memory that is free is given back."""

from __future__ import annotations

import platform

import pytest

from otel_infer.heap import EVERY_NS, Heap


def test_it_is_asked_for_once_in_a_while() -> None:
    asked: list[int] = []
    heap = Heap(asked.append)
    for now in (1, 2, EVERY_NS, EVERY_NS + 1, EVERY_NS + 2, 3 * EVERY_NS):
        heap.look(now)
    assert len(asked) == 3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: it is left alone")
def test_what_lies_free_between_what_stays_is_given_back() -> None:
    def held() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    blocks = [bytearray(20_000) for _ in range(4000)]  # 80 MB, in the C library's heap
    del blocks[::2]
    before = held()
    Heap().look(1)
    assert before - held() > 20_000_000
    assert len(blocks) == 2000
