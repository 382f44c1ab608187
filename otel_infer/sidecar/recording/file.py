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
from typing import Any, NamedTuple, TextIO

from otel_infer.config import slo
from otel_infer.config.private_files import open_private_file
from otel_infer.config.slo import Objectives
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording.event_parser import check_number, parse_event

log = logging.getLogger(__name__)

FORMAT = 1
SYNC_NS = 5_000_000_000
"""A writer that is killed loses the events of at most this time."""
_HEADER_KEY = "otel_infer tape"
MAX_LINE = 16 << 20
"""Characters of a line: a step of the largest batch."""
MAX_RATIO, MIN_LIMIT = 50, 8 << 20
"""A tape holds at most so many times its own size, or so many bytes; writers reach 3 to 5 times."""


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

    The file has mode 0600. A link, and a file of another user, are refused.
    """

    def __init__(self, path: Path, **about: Any) -> None:
        descriptor = open_private_file(path, os.O_WRONLY | os.O_TRUNC)
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


def read_header(path: Path) -> dict[str, Any]:
    """Returns the first line of a tape; raises `InvalidRecording`."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return _parse_header(lines)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
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
    """Yields the batches of a tape. A truncated or damaged tape is read as far as possible, with a warning.

    Raises `InvalidRecording` for a file that is no tape, or whose first event is damaged.
    """
    has_events = False
    try:
        limit = max(MAX_RATIO * path.stat().st_size, MIN_LIMIT)
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            _parse_header(lines)
            for batch in _parse_batches(_iter_lines(lines, limit)):
                has_events = True
                yield batch
    except EOFError:
        log.warning("%s: its end is missing; read as far as possible", path)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, zlib.error) as error:
        if not has_events or isinstance(error, FileNotFoundError):
            reason = error if isinstance(error, InvalidRecording) else f"damaged, or not a tape: {error}"
            raise InvalidRecording(f"{path}: {reason}") from None
        log.warning("%s: damaged after its first part, which was read: %s", path, error)


def _iter_lines(lines: TextIO, limit: int) -> Iterator[str]:
    """Yields the lines of a tape, up to `limit` characters in all."""
    while line := lines.readline(MAX_LINE):
        limit -= len(line)
        if limit < 0:
            raise InvalidRecording("it holds far more than a tape of its size")
        yield line


def _parse_header(lines: TextIO) -> dict[str, Any]:
    header = json.loads(lines.readline(MAX_LINE) or "null")
    if not isinstance(header, dict) or header.get(_HEADER_KEY) != FORMAT:
        raise InvalidRecording(f"not an otel_infer tape of format {FORMAT}")
    return header


def _parse_batches(lines: Iterable[str]) -> Iterator[EventBatch]:
    """Yields the batches, and what is whole before a damage or a missing end; then raises its error."""
    batch: list[events.RecordedEvent] = []
    failure: Exception | None = None
    try:
        for line in lines:
            decoded = json.loads(line)
            if isinstance(decoded, list) and decoded[:1] == ["@"]:
                yield EventBatch(batch, check_number(decoded[1]))
                batch = []
            else:
                batch.append(parse_event(decoded))
    except (EOFError, OSError, ValueError, TypeError, LookupError, RecursionError, zlib.error) as error:
        failure = error
    if batch:
        yield EventBatch(batch, max(recorded.event.at for recorded in batch))
    if failure is not None:
        raise failure
