"""Keeps the resource of a server constant, for every sidecar that reads its rings.

A service name that is not configured follows from the engine, which is unknown until it has started. The name
and the instance id are stored beside the rings, for a sidecar that takes over. A second line of that file is
the given id that the instance id was made from.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from otel_infer import semconv
from otel_infer.config.private_files import read_private_text, write_private_text
from otel_infer.config.resource import find_given_instance_id
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import Value
from otel_infer.sidecar.instance_claim import InstanceClaim

log = logging.getLogger(__name__)

MAX_TEXT_BYTES = 4096


class ServiceResource:
    """Resource of the server whose rings are in `folder`.

    `resource`: the attributes from the server's process; the name is added when it is known.
    """

    def __init__(self, folder: Path, resource: Mapping[str, Value]) -> None:
        self._folder = folder
        stored = _read_text(folder / directory.INSTANCE_FILE)
        instance, _, given = stored.partition("\n")
        if not instance:
            given = find_given_instance_id(resource)
            instance = given or str(resource.get(semconv.SERVICE_INSTANCE_ID) or uuid.uuid4())
        self._claim = InstanceClaim(given, instance) if given else None
        instance = self._claim.id if self._claim is not None else instance
        text = f"{instance}\n{given}" if given else instance
        if text != stored:
            _write_text(folder / directory.INSTANCE_FILE, text)
        self.resource = {**resource, semconv.SERVICE_INSTANCE_ID: instance}
        name = _read_text(folder / directory.SERVICE_FILE)
        if name:
            self.resource.setdefault(semconv.SERVICE_NAME, name)
        self._saved_name = name

    def release(self) -> None:
        """Releases the instance id, because nothing more is sent."""
        if self._claim is not None:
            self._claim.release()

    def save(self) -> None:
        """Stores the service name once there is one, for the next sidecar or for crash recovery."""
        name = str(self.resource.get(semconv.SERVICE_NAME, ""))
        if name and name != self._saved_name:
            self._saved_name = name
            _write_text(self._folder / directory.SERVICE_FILE, name)


def _read_text(path: Path) -> str:
    """Returns the text of a file; "" if it is missing, unreadable, or empty because of a full disk."""
    try:
        return read_private_text(path, MAX_TEXT_BYTES)
    except (OSError, ValueError):
        return ""


def _write_text(path: Path, text: str) -> None:
    try:
        write_private_text(path, text)
    except OSError:
        log.warning("cannot write %s; a later sidecar may use another name or instance id", path)
