"""Facts saved to a file: record where the GPU is, replay anywhere. Gzipped JSON lines, readable without us.

{"otel_infer tape": 1, …}                          the first line: format, who wrote it
[ring, handle, "StepDone", field, field, …]        one fact; bytes as {"hex": "…"}
["@", 123456789]                                   everything before this instant (monotonic ns) has been told
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from otel_infer.config import slo
from otel_infer.config.slo import Objectives
from otel_infer.ringbuffer import events

log = logging.getLogger(__name__)

FORMAT = 1
SYNC_NS = 5_000_000_000
"""A writer that is killed takes no more than this along."""
_HEADER_KEY = "otel_infer tape"
_TYPES_BY_NAME: Mapping[str, type] = {
    name: fact
    for name, fact in vars(events).items()
    if isinstance(fact, type) and hasattr(fact, "_fields") and name not in ("EventLayout", "RecordedEvent")
}
_BYTES_FIELDS: Mapping[str, tuple[bool, ...]] = {
    name: tuple(field is bytes for field in get_type_hints(fact).values())
    for name, fact in _TYPES_BY_NAME.items()
}
EVENT_TYPES: tuple[type[Any], ...] = tuple(_TYPES_BY_NAME.values())
"""Every kind of fact that a tape may hold."""


class InvalidRecording(ValueError):
    """The file is not a tape that we can read; the message says why."""


class EventBatch(NamedTuple):
    """Facts in order of time, and the instant up to which they are complete."""

    recorded_events: list[events.RecordedEvent]
    horizon: int


def unused_path(path: Path) -> Path:
    """This name, which nobody has from now on: what a sidecar wrote before, or another one writes, is kept beside it, numbered."""
    numbers = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    with contextlib.suppress(OSError):  # it may be a mount of its own, or its folder somebody else's
        if path.is_file() and path.stat().st_size:
            path.rename(next(other for other in numbers if not other.exists()))
    return path


class RecordingWriter:
    """Appends facts to a tape; raises `OSError` where the file cannot be written. Who else may read it is its owner's business."""

    def __init__(self, path: Path, **about: Any) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._raw = open(descriptor, "wb")
        self._file = gzip.open(self._raw, "wt", encoding="utf-8", compresslevel=1)
        self._file.write(json.dumps({_HEADER_KEY: FORMAT, **about}) + "\n")
        self._file.flush()  # whoever comes next sees that it is somebody's
        self._raw.flush()
        self._is_synced, self._synced_at = True, 0

    def write(self, said: Iterable[events.RecordedEvent], horizon: int) -> None:
        """Adds facts and the instant up to which they are complete."""
        for ring, handle, fact in said:
            fields = [{"hex": f.hex()} if isinstance(f, bytes) else f for f in fact]
            self._file.write(_format_line([ring, handle, type(fact).__name__, *fields]))
        self._file.write(_format_line(["@", horizon]))
        self._is_synced = False

    def sync_if_due(self, now: int) -> None:
        """Hands what was written to the file, now and then; `now`: monotonic ns."""
        if not self._is_synced and now - self._synced_at >= SYNC_NS:
            self._is_synced, self._synced_at = True, now
            self._file.flush()
            self._raw.flush()

    def close(self) -> None:
        """Finishes the file."""
        try:
            self._file.close()
        finally:
            self._raw.close()


def _format_line(said: list[Any]) -> str:
    try:
        return json.dumps(said, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_make_json_safe(said), default=str) + "\n"


def _make_json_safe(value: Any) -> Any:
    """With their text in the place of numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _make_json_safe(each) for key, each in value.items()}
    return [_make_json_safe(each) for each in value] if isinstance(value, (list, tuple)) else value


def open_writer(path: str) -> RecordingWriter | None:
    """Of a new tape there; None where none is wanted, or the log says why there is none."""
    try:
        return RecordingWriter(unused_path(Path(path))) if path else None
    except OSError as reason:
        log.error("there is no tape: %s", reason)
        return None


def read_header(path: Path) -> dict[str, Any]:
    """What a tape says of itself in its first line; raises `BadTape`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return _parse_header(lines)
    except (OSError, EOFError, ValueError, zlib.error) as reason:
        raise InvalidRecording(f"{path}: {reason}") from None


def read_objectives(path: Path) -> Objectives:
    """The objectives of the server, as its tape says them; none where it says nothing that we understand."""
    try:
        return slo.parse_objectives(str(read_header(path).get("slo", "")))
    except ValueError as reason:
        if isinstance(reason, InvalidRecording):
            raise
        return Objectives()


def read_began_at(path: Path) -> int:
    """The instant (monotonic ns) from which on a tape tells everything: of what ended before, it has only what explains the rest.

    0 where it begins with its server, or does not say; raises `BadTape`.
    """
    said = read_header(path).get("began_at")
    return said if isinstance(said, int) else 0


def read_batches(path: Path) -> Iterator[EventBatch]:
    """The passages of a tape; one whose end is missing is read as far as it goes, and a warning says so."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            _parse_header(lines)
            yield from _parse_batches(lines)
    except EOFError:
        log.warning("%s: its end is missing, and it is read as far as it goes", path)
    except InvalidRecording as reason:
        raise InvalidRecording(f"{path}: {reason}") from None
    except (OSError, ValueError, TypeError, LookupError, zlib.error) as reason:
        raise InvalidRecording(f"{path}: damaged, or not a tape: {reason}") from None


def _parse_header(lines: Iterator[str]) -> dict[str, Any]:
    said = json.loads(next(lines, "null"))
    if not isinstance(said, dict) or said.get(_HEADER_KEY) != FORMAT:
        raise InvalidRecording(f"not an otel_infer tape of format {FORMAT}")
    return said


def _parse_batches(lines: Iterable[str]) -> Iterator[EventBatch]:
    """Raises `EOFError` behind the last of those of which there is something."""
    said: list[events.RecordedEvent] = []
    cut: EOFError | None = None
    try:
        for line in lines:
            first, *rest = json.loads(line)
            if first == "@":
                yield EventBatch(said, rest[0])
                said = []
            else:
                said.append(_parse_event(first, *rest))
    except EOFError as reason:
        cut = reason
    if said:
        yield EventBatch(said, max(fact.event.at for fact in said))
    if cut is not None:
        raise cut


def _parse_event(ring: int, handle: int, name: str, *fields: Any) -> events.RecordedEvent:
    if name not in _TYPES_BY_NAME or len(fields) != len(_BYTES_FIELDS[name]):
        raise InvalidRecording(
            f"unknown fact {name!r} of {len(fields)} fields: recorded by another release of otel_infer?"
        )
    values = (bytes.fromhex(f["hex"]) if is_bytes else f for is_bytes, f in zip(_BYTES_FIELDS[name], fields))
    return events.RecordedEvent(ring, handle, _TYPES_BY_NAME[name](*values))
