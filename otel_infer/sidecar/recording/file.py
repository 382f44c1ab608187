"""Reads and writes tapes: files of events, recorded on one machine and replayed on any other.

A tape is gzipped JSON lines, readable without otel_infer:

    {"otel_infer tape": 1, …}                          the first line: format and writer
    [ring, handle, "StepDone", field, field, …]        one event; bytes as {"hex": "…"}
    ["@", 123456789]                                   all events before this instant (monotonic ns) are above
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
"""A writer that is killed loses the events of at most this time."""
_HEADER_KEY = "otel_infer tape"
_TYPES_BY_NAME: Mapping[str, type[Any]] = {event.__name__: event for event in events.EVENT_TYPES}
_BYTES_FIELDS: Mapping[str, tuple[bool, ...]] = {
    name: tuple(field is bytes for field in get_type_hints(event).values())
    for name, event in _TYPES_BY_NAME.items()
}


class InvalidRecording(ValueError):
    """Failure to read a tape; the message states why."""


class EventBatch(NamedTuple):
    """Events in order of time, and the instant up to which they are complete."""

    recorded_events: list[events.RecordedEvent]
    horizon: int


def rotate_tape(path: Path) -> Path:
    """Returns `path` for a new tape; a tape that exists there is first renamed with a number."""
    numbers = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    with contextlib.suppress(OSError):  # it may be a mount point, or its folder not writable
        if path.is_file() and path.stat().st_size:
            path.rename(next(other for other in numbers if not other.exists()))
    return path


class RecordingWriter:
    """Writer that appends events to a tape; raises `OSError` where the file cannot be written.

    A new file has mode 0600; an existing file keeps its mode.
    """

    def __init__(self, path: Path, **about: Any) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._raw = open(descriptor, "wb")
        self._file = gzip.open(self._raw, "wt", encoding="utf-8", compresslevel=1)
        self._file.write(json.dumps({_HEADER_KEY: FORMAT, **about}) + "\n")
        self._file.flush()  # so that another writer finds the path in use
        self._raw.flush()
        self._is_synced, self._synced_at = True, 0

    def write(self, recorded: Iterable[events.RecordedEvent], horizon: int) -> None:
        """Adds events and the instant up to which they are complete."""
        for ring, handle, event in recorded:
            fields = [{"hex": f.hex()} if isinstance(f, bytes) else f for f in event]
            self._file.write(_format_line([ring, handle, type(event).__name__, *fields]))
        self._file.write(_format_line(["@", horizon]))
        self._is_synced = False

    def sync_if_due(self, now: int) -> None:
        """Flushes to the file if `SYNC_NS` has passed; `now`: monotonic ns."""
        if not self._is_synced and now - self._synced_at >= SYNC_NS:
            self._is_synced, self._synced_at = True, now
            self._file.flush()
            self._raw.flush()

    def close(self) -> None:
        """Completes the file."""
        try:
            self._file.close()
        finally:
            self._raw.close()


def _format_line(line: list[Any]) -> str:
    try:
        return json.dumps(line, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_make_json_safe(line), default=str) + "\n"


def _make_json_safe(value: Any) -> Any:
    """Returns the value with the text of numbers that JSON lacks (NaN, infinity) in their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _make_json_safe(each) for key, each in value.items()}
    return [_make_json_safe(each) for each in value] if isinstance(value, (list, tuple)) else value


def open_writer(path: str) -> RecordingWriter | None:
    """Returns the writer of a new tape; None if `path` is "", or after a logged failure."""
    try:
        return RecordingWriter(rotate_tape(Path(path))) if path else None
    except OSError as error:
        log.error("cannot open the tape, nothing is recorded: %s", error)
        return None


def read_header(path: Path) -> dict[str, Any]:
    """Returns the first line of a tape; raises `InvalidRecording`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return _parse_header(lines)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidRecording(f"{path}: {error}") from None


def read_objectives(path: Path) -> Objectives:
    """Returns the objectives in the header of a tape; none if they are absent or invalid."""
    try:
        return slo.parse_objectives(str(read_header(path).get("slo", "")))
    except ValueError as error:
        if isinstance(error, InvalidRecording):
            raise
        return Objectives()


def read_began_at(path: Path) -> int:
    """Returns the instant (monotonic ns) from which a tape is complete.

    Earlier events are in it only to explain later ones. 0 if the tape begins with its server or its header
    has no such instant. Raises `InvalidRecording`.
    """
    began_at = read_header(path).get("began_at")
    return began_at if isinstance(began_at, int) else 0


def read_batches(path: Path) -> Iterator[EventBatch]:
    """Yields the batches of a tape; a truncated tape is read as far as possible, with a warning."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            _parse_header(lines)
            yield from _parse_batches(lines)
    except EOFError:
        log.warning("%s: its end is missing; read as far as possible", path)
    except InvalidRecording as error:
        raise InvalidRecording(f"{path}: {error}") from None
    except (OSError, ValueError, TypeError, LookupError, zlib.error) as error:
        raise InvalidRecording(f"{path}: damaged, or not a tape: {error}") from None


def _parse_header(lines: Iterator[str]) -> dict[str, Any]:
    header = json.loads(next(lines, "null"))
    if not isinstance(header, dict) or header.get(_HEADER_KEY) != FORMAT:
        raise InvalidRecording(f"not an otel_infer tape of format {FORMAT}")
    return header


def _parse_batches(lines: Iterable[str]) -> Iterator[EventBatch]:
    """Yields the batches; after a truncated tape's last events it raises `EOFError`."""
    batch: list[events.RecordedEvent] = []
    truncation: EOFError | None = None
    try:
        for line in lines:
            first, *rest = json.loads(line)
            if first == "@":
                yield EventBatch(batch, rest[0])
                batch = []
            else:
                batch.append(_parse_event(first, *rest))
    except EOFError as error:
        truncation = error
    if batch:
        yield EventBatch(batch, max(recorded.event.at for recorded in batch))
    if truncation is not None:
        raise truncation


def _parse_event(ring: int, handle: int, name: str, *fields: Any) -> events.RecordedEvent:
    if name not in _TYPES_BY_NAME or len(fields) != len(_BYTES_FIELDS[name]):
        raise InvalidRecording(
            f"unknown event {name!r} with {len(fields)} fields; use the otel_infer release that recorded it"
        )
    values = (bytes.fromhex(f["hex"]) if is_bytes else f for is_bytes, f in zip(_BYTES_FIELDS[name], fields))
    return events.RecordedEvent(ring, handle, _TYPES_BY_NAME[name](*values))
