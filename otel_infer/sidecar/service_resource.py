"""Keeps the resource of a server constant, for every sidecar that reads its rings.

A service name that is not configured follows from the engine, which is unknown until it has started. The name
and the instance id are stored beside the rings, for a sidecar that takes over. So is the number of sidecars.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from otel_infer import semconv
from otel_infer.config.private_files import open_private_file, read_private_text
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import Value

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 4096


class ServiceResource:
    """Resource of the server whose rings are in `folder`.

    `resource`: the attributes from the server's process; the name is added when it is known.
    """

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
        """Stores the service name once there is one, for the next sidecar or for crash recovery."""
        name = str(self.resource.get(semconv.SERVICE_NAME, ""))
        if name and name != self._saved_name:
            self._saved_name = name
            _write_text(self._folder / directory.SERVICE_FILE, name)


def count_restarts(folder: Path) -> int:
    """Counts this start of a sidecar, and returns how many sidecars read these rings before."""
    before = _read_text(folder / directory.STARTS_FILE)
    restarts = int(before) if before.isascii() and before.isdigit() and len(before) < 10 else 0
    _write_text(folder / directory.STARTS_FILE, str(restarts + 1))
    return restarts


def _read_text(path: Path) -> str:
    """Returns the text of a file; "" if it is missing, unreadable, or empty because of a full disk."""
    try:
        return read_private_text(path, MAX_TEXT_BYTES)
    except (OSError, ValueError):
        return ""


def _write_text(path: Path, text: str) -> None:
    try:
        with open(open_private_file(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        log.warning("cannot write %s; a later sidecar may use another name or instance id", path)
