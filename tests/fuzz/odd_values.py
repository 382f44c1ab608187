"""Values that programs do not expect, and mutations of bytes."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (0, 1, -1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30, 1.5, -0.0, 1e308)
TEXTS = (
    "",
    "0",
    "x" * 5000,
    "\udce9",
    "\x00",
    "\x1b[31m",
    "é",
    "😀" * 50,
    "null",
    "-1",
    "a=b,c",
    "../..",
    "%s%n",
)


def draw_value(draw: random.Random, depth: int = 3) -> Any:
    """Returns a JSON value."""
    kind = draw.randrange(7 if depth else 5)
    if kind == 0:
        return draw.choice(NUMBERS)
    if kind == 1:
        return draw.choice(TEXTS)
    if kind == 2:
        return draw.choice((None, True, False))
    if kind == 3:
        return {"hex": draw.choice(("", "00", "zz", "ab" * 16, 5))}
    if kind == 4:
        return draw.randint(-(2**40), 2**40)
    if kind == 5:
        return [draw_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(TEXTS): draw_value(draw, depth - 1) for _ in range(draw.randrange(3))}


def mutate_bytes(draw: random.Random, data: bytes, most: int = 8) -> bytes:
    """Returns the bytes with some of them changed, removed or repeated."""
    found = bytearray(data)
    for _ in range(draw.randint(1, most)):
        if not found:
            break
        at = draw.randrange(len(found))
        change = draw.randrange(4)
        if change == 0:
            found[at] = draw.randrange(256)
        elif change == 1:
            del found[at : at + draw.randint(1, 64)]
        elif change == 2:
            found[at:at] = found[at : at + draw.randint(1, 64)]
        else:
            found[at : at + 8] = draw.randbytes(8)
    return bytes(found)
