"""What a server is called, for as long as it lives: whoever reads its rings next calls it the same.

A name that was not given follows from the engine, which is not known before it has started. Both that and the id of the instance
are remembered beside the rings, for a sidecar that takes over.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from otel_infer import semconv
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import Value

log = logging.getLogger(__name__)


class ServiceResource:
    """The server whose rings are in `folder`. `resource`: what its process told of it; the name comes in when it is known."""

    def __init__(self, folder: Path, resource: Mapping[str, Value]) -> None:
        self._folder = folder
        instance = _read_text(folder / directory.INSTANCE_FILE)
        if not instance:
            instance = str(resource.get(semconv.SERVICE_INSTANCE_ID) or uuid.uuid4())
            _write_text(folder / directory.INSTANCE_FILE, instance)
        self.resource = {**resource, semconv.SERVICE_INSTANCE_ID: instance}
        name = _read_text(folder / directory.SERVICE_FILE)
        if name:
            self.resource.setdefault(semconv.SERVICE_NAME, name)
        self._saved_name = name

    def save(self) -> None:
        """Its name, once there is one: for a sidecar that takes over, and for the one of another server that finds it dead."""
        name = str(self.resource.get(semconv.SERVICE_NAME, ""))
        if name and name != self._saved_name:
            self._saved_name = name
            _write_text(self._folder / directory.SERVICE_FILE, name)


def _read_text(path: Path) -> str:
    """Empty where there is none; a full disk makes it an empty one."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _write_text(path: Path, text: str) -> None:
    try:
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    except OSError:
        log.warning("%s cannot be written", path)
