"""Encodes thousands of decode-step spans at a time: a row is a template with holes, filled column by column.

Integers are varints padded to one width per batch. Every protobuf parser accepts padded varints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from otel_infer.export.otlp.span_encoder import encode_field, encode_key, encode_number, encode_string

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

_INTERNAL = 1


class StepColumns(NamedTuple):
    """Decode-step spans, one per row.

    `owner`: row of `StepOwners`. `start`, `end`: unix ns. `tokens`: delivered to the owner.
    `others_prefill_tokens`: prompt tokens of other requests in the step. `device_span`: ns, 0 = not timed.
    """

    owner: npt.NDArray[np.uint32]
    start: Ints
    end: Ints
    step: Ints
    batch_size: Ints
    tokens: Ints
    others_prefill_tokens: Ints
    device_span: Ints

    def select_rows(self, rows: npt.NDArray[np.intp]) -> StepColumns:
        """Returns these rows, in this order."""
        columns: list[Any] = [column[rows] for column in self]
        return StepColumns(*columns)


class StepOwners(NamedTuple):
    """The requests that the steps belong to, one per row.

    `trace_id`: (m, 16). `parent_span_id`: parent of the step spans (m, 8). `request_span_id`: the ids of the
    step spans are derived from it (m, 8).
    """

    trace_id: Bytes
    parent_span_id: Bytes
    request_span_id: Bytes


_GOLDEN_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)


def _mix_bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Applies the finaliser of splitmix64, a bijection: each output bit depends on every input bit."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58_476D_1CE4_E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D0_49BB_1331_11EB)
    values ^= values >> np.uint64(31)
    return values


def derive_step_span_ids(request_span_id: Bytes, step: Ints) -> Bytes:
    """Returns span ids (n, 8), derived from the request's span id and the step.

    A resend carries the same ids. The ids of a request's steps differ from each other. They are the same on every machine, and never zero.
    """
    return _derive_step_ids(_hash_request_ids(request_span_id), step).view(np.uint8).reshape(-1, 8)


def _hash_request_ids(request_span_id: Bytes) -> npt.NDArray[np.uint64]:
    return _mix_bits(np.ascontiguousarray(request_span_id).view("<u8").ravel().astype(np.uint64))


def _derive_step_ids(seeds: npt.NDArray[np.uint64], step: Ints) -> npt.NDArray[np.uint64]:
    ids = _mix_bits(seeds + step.astype(np.int64).view(np.uint64) * _GOLDEN_GAMMA)
    if not ids.all():
        ids[ids == 0] = _GOLDEN_GAMMA
    return ids.astype("<u8", copy=False)


def _varint_width(values: Ints) -> int:
    """Returns the length in bytes of the longest varint of these values; 0 if there are none."""
    if not len(values):
        return 0
    return max(1, -(-int(values.view(np.uint64).max()).bit_length() // 7))


def _pad_varints(values: Ints, width: int) -> Rows:
    """Returns one varint of exactly `width` bytes per value, each as a single item."""
    if width > 4:
        return _pad_long_varints(values, width).view(f"V{width}").ravel()
    rest = values.astype("<u4")
    out = rest & np.uint32(127)
    for place in range(1, width):
        out |= np.uint32(128 << 8 * (place - 1))
        out |= (rest << np.uint32(place)) & np.uint32(127 << 8 * place)
    item: Any = {"names": ["varint"], "formats": [f"V{width}"], "itemsize": 4}
    return out.view(item)["varint"]  # type: ignore[no-any-return]


def _pad_long_varints(values: Ints, width: int) -> Bytes:
    out = np.empty((len(values), width), np.uint8)
    rest = values.view(np.uint64)
    for place in range(width):
        out[:, place] = rest & np.uint64(127)
        rest = rest >> np.uint64(7)
    out[:, :-1] |= 128
    return out


def _sort_by_request(columns: StepColumns, owners: int) -> StepColumns:
    """Sorts rows by request; the sort is stable, so the rows of a request keep their order.

    Neighbouring rows with the same ids compress to half the bytes.
    """
    owner = columns.owner
    if bool((owner[1:] >= owner[:-1]).all()):
        return columns
    # numpy sorts 16-bit integers by radix, several times faster.
    order = np.argsort(owner.astype(np.uint16) if owners <= 1 << 16 else owner, kind="stable")
    return columns.select_rows(order)


class StepEncoder:
    """Encodes decode-step spans called `name`, with these attribute names.

    A row always has its step and batch size. It has its tokens if they are not 1, others' prefill tokens if
    there are any, and the device span if it was timed.
    """

    def __init__(
        self, name: str, step_key: str, batch_key: str, tokens_key: str, prefill_key: str, device_key: str
    ) -> None:
        self._name_and_kind = encode_string(5, name) + encode_number(6, _INTERNAL)
        self._templates: dict[tuple[int, ...], tuple[bytes, np.dtype[Any]]] = {}
        self._wire_names = {
            "step": step_key,
            "batch_size": batch_key,
            "tokens": tokens_key,
            "others_prefill_tokens": prefill_key,
            "device_span": device_key,
        }

    def encode_steps(self, columns: StepColumns, owners: StepOwners) -> tuple[bytes | memoryview, int]:
        """Returns all rows as entries of `ScopeSpans`, request by request, and their number."""
        count = len(columns.owner)
        if not count:
            return b"", 0
        numbers: list[Any] = [np.asarray(column, np.int64) for column in columns[1:]]
        columns = _sort_by_request(StepColumns(columns.owner, *numbers), len(owners.trace_id))
        several, mixed, timed = (
            columns.tokens != 1,
            columns.others_prefill_tokens > 0,
            columns.device_span > 0,
        )
        step, batch = _varint_width(columns.step), _varint_width(columns.batch_size)
        tokens, prefill = (
            _varint_width(columns.tokens),
            _varint_width(np.maximum(columns.others_prefill_tokens, 0)),
        )
        device = _varint_width(np.maximum(columns.device_span, 0)) if timed.any() else 0
        shape = several | mixed.view(np.uint8) << 1
        if device:
            shape |= timed.view(np.uint8) << 2
        shapes = []
        for form in range(shape.min(), shape.max() + 1):
            at = np.flatnonzero(shape == form)
            if len(at):
                widths = (step, batch, tokens * (form & 1), prefill * (form >> 1 & 1), device * (form >> 2))
                selected = columns.select_rows(at) if len(at) < count else columns
                shapes.append((at, self._build_rows(selected, owners, widths)))
        return _interleave_rows(shapes, count), count

    def _build_rows(self, columns: StepColumns, owners: StepOwners, widths: tuple[int, ...]) -> Rows:
        """Returns encoded rows of one shape.

        `widths`: bytes of each attribute's value; 0 = the rows lack the attribute.
        """
        template = self._templates.get(widths)
        if template is None:  # widths are few: each is at most 10
            template = self._templates[widths] = self._build_template(widths)
        counts = np.diff(columns.owner.searchsorted(np.arange(len(owners.trace_id) + 1, dtype=np.uint32)))
        rows = _repeat_per_owner(*template, owners, counts)
        rows["span_id"] = _derive_step_ids(
            _hash_request_ids(owners.request_span_id).repeat(counts), columns.step
        )
        rows["start"], rows["end"] = columns.start, columns.end
        for name, column, width in zip(self._wire_names, columns[3:], widths):
            if width:
                rows[name] = _pad_varints(column, width)
        return rows

    def _build_template(self, widths: Sequence[int]) -> tuple[bytes, np.dtype[Any]]:
        """Returns a row with zeros in its holes, and a dtype with the positions of the holes."""
        holes = [
            ("trace_id", b"\x0a\x10", "(16,)u1"),
            ("span_id", b"\x12\x08", "<u8"),
            ("parent_span_id", b"\x22\x08", "(8,)u1"),
            ("start", self._name_and_kind + b"\x39", "<i8"),
            ("end", b"\x41", "<i8"),
        ]
        for (name, wire_name), width in zip(self._wire_names.items(), widths):
            if width:
                attribute = encode_field(9, encode_key(wire_name) + encode_field(2, b"\x18" + bytes(width)))
                holes.append((name, attribute[:-width], f"V{width}"))
        names, befores, formats = zip(*holes)
        lengths = [np.dtype(field_format).itemsize for field_format in formats]
        body = b"".join(before + bytes(length) for before, length in zip(befores, lengths))
        row = encode_field(2, body)
        ends = len(row) - len(body) + np.cumsum(lengths) + np.cumsum([len(before) for before in befores])
        offsets = [int(end) - length for end, length in zip(ends, lengths)]
        layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": len(row)}
        return row, np.dtype(layout)


def _repeat_per_owner(
    template: bytes, holes: np.dtype[Any], owners: StepOwners, counts: npt.NDArray[np.intp]
) -> Rows:
    """Returns `counts` rows per owner with their shared fields set.

    That is cheaper than to fill these fields as columns.
    """
    owner_rows = np.frombuffer(bytearray(template) * len(counts), holes)
    owner_rows["trace_id"], owner_rows["parent_span_id"] = owners.trace_id, owners.parent_span_id
    # Plain bytes are copied whole, not field by field.
    return owner_rows.view(f"V{holes.itemsize}").repeat(counts).view(holes)


def _interleave_rows(shapes: Sequence[tuple[npt.NDArray[np.intp], Rows]], count: int) -> memoryview:
    """Returns rows of different lengths as one run of bytes. `shapes`: positions and rows of each length."""
    if len(shapes) == 1:
        return shapes[0][1].view(np.uint8).data
    lengths = np.empty(count, np.intp)
    for at, rows in shapes:
        lengths[at] = rows.itemsize
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for at, rows in shapes:
        # A view with a row at every offset of `out`, so that one indexed store copies each row whole.
        window = np.ndarray((len(out) - rows.itemsize + 1,), f"V{rows.itemsize}", out, strides=(1,))
        window[starts[at]] = rows.view(f"V{rows.itemsize}")
    return out.data
