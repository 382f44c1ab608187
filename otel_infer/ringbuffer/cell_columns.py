"""Groups the cells of a request ring by code, so that numpy and `struct` handle many events in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.events import unpack_joined, unpack_requests

CellColumn = tuple[int, Sequence[int], Sequence[int], Any]
"""Events of one code: the positions of their (last) cells, their handles and their bodies."""


def split_by_code(codes: Any, handles: Any, at: Any, bodies: Any) -> Iterator[CellColumn]:
    """Yields the cells at these positions, by code."""
    of = codes[at]
    for code in set(of.tolist()):
        chosen = at[of == code]
        yield code, chosen.tolist(), handles[chosen].tolist(), bodies[chosen]


def are_pairs(octets: Any, first: Any, second: Any) -> bool:
    """Returns whether the cells at `second` are the second parts of events whose first parts precede them."""
    parts, part = octets[:, layout.CELL_PARTS_AT], octets[:, layout.CELL_PART_AT]
    begins = octets[:, layout.CELL_BODY][:, : layout.BODY_BYTES - layout.PART_BYTES]
    return bool(
        (second == first + 1).all()
        and (parts[first] == 2).all()
        and (parts[second] == 2).all()
        and (part[first] == 0).all()
        and (part[second] == 1).all()
        and (begins[first] == begins[second]).all()
    )


def unpack_bodies(code: int, bodies: Any, text_of: Callable[[int], str]) -> list[Any]:
    """Returns the events with this code. `bodies`: bytes, or rows of octets. Raises `ValueError` for an invalid one."""
    known = events.LAYOUT_BY_CODE.get(code)
    if known is None or isinstance(bodies, list) or bodies.shape[1] < known.packed.size:
        return unpack_requests(code, [bytes(body) for body in bodies], text_of)
    return unpack_joined(known, bodies[:, : known.packed.size].tobytes(), text_of)
