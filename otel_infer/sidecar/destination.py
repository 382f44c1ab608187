"""Identifies where, and as which resource, a server exports, so that its rings are not sent elsewhere.

Servers of one user share a folder, and servers with the same `OTEL_INFER_RINGS` share rings. A sidecar that
finds the rings of a dead server sends them only if that server had the same endpoints, protocols, credentials
and resource, apart from its own name and instance id. The folder holds a salted digest of these, because
headers contain secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_infer import semconv
from otel_infer.config import environment
from otel_infer.config.environment import Config
from otel_infer.config.private_files import read_private_text, write_private_text
from otel_infer.ringbuffer import directory

MAX_BYTES = 256
OWN_ATTRIBUTES = (semconv.SERVICE_NAME, semconv.SERVICE_INSTANCE_ID)
"""Attributes that each server stores beside its rings (`service_resource`); a recovered server keeps them."""
_VARYING_PREFIXES = ("process.", "telemetry.")


class Destination:
    """Destination of a server with these settings and this resource."""

    def __init__(self, settings: Config, resource: Mapping[str, Any]) -> None:
        attributes = {
            key: value
            for key, value in resource.items()
            if key not in OWN_ATTRIBUTES and not key.startswith(_VARYING_PREFIXES)
        }
        described = [environment.read_destination(settings), attributes]
        self._text = json.dumps(described, sort_keys=True, default=str).encode("utf-8", "replace")

    def record(self, folder: Path) -> None:
        """Stores the digest beside the rings, in place of another one."""
        with contextlib.suppress(OSError):
            write_private_text(folder / directory.DESTINATION_FILE, self._digest(secrets.token_hex(16)))

    def is_recorded(self, folder: Path) -> bool:
        """Returns whether the rings in this folder were recorded for this destination."""
        recorded = _read_digest(folder)
        return recorded != "" and recorded == self._digest(recorded.partition(" ")[0])

    def _digest(self, salt: str) -> str:
        return f"{salt} {hashlib.sha256(salt.encode() + self._text).hexdigest()}"


def has_destination(folder: Path) -> bool:
    """Returns whether a destination is recorded for the rings in this folder."""
    return _read_digest(folder) != ""


def _read_digest(folder: Path) -> str:
    try:
        return read_private_text(folder / directory.DESTINATION_FILE, MAX_BYTES)
    except (OSError, ValueError):
        return ""
