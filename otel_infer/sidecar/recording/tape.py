"""Writes the tape that OTEL_INFER_TAPE names. An error ends the tape, not the sidecar."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from otel_infer.ringbuffer.events import RecordedEvent
from otel_infer.sidecar.recording.file import RecordingWriter, rotate_tape

log = logging.getLogger(__name__)


class Tape:
    """The tape of a sidecar. Errors are logged, and nothing is written after them."""

    def __init__(self, writer: RecordingWriter) -> None:
        self._writer: RecordingWriter | None = writer

    def add_events(self, recorded: Sequence[RecordedEvent], horizon: int) -> None:
        """Adds the events of one cycle, which are complete up to `horizon` (monotonic ns)."""
        try:
            if self._writer is not None:
                if recorded:
                    self._writer.write(recorded, horizon)
                self._writer.sync_if_due(horizon)
        except OSError as error:
            self._writer = None
            log.error("cannot write the tape, it ends here: %s", error)

    def close(self) -> None:
        """Completes the tape."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:  # a full disk, for example; the rest must be closed too
            log.error("cannot complete the tape, its end is missing: %s", error)


def open_tape(path: str, slo: str = "") -> Tape | None:
    """Returns a new tape; None if `path` is "", or after a logged failure. `slo`: the objectives of the server."""
    about = {"slo": slo} if slo else {}
    try:
        return Tape(RecordingWriter(rotate_tape(Path(path)), **about)) if path else None
    except OSError as error:
        log.error("cannot open the tape, nothing is recorded: %s", error)
        return None
