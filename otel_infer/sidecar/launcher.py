"""Starts the sidecar from a process that must not import the sidecar's dependencies (numpy, exporters)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from otel_infer.config import environment
from otel_infer.config.environment import Config
from otel_infer.config.private_files import read_private_text, write_private_text
from otel_infer.config.redaction import replace_controls
from otel_infer.config.settings import STDERR
from otel_infer.ringbuffer import directory
from otel_infer.sidecar.destination import Destination, has_destination
from otel_infer.sidecar.service_resource import ServiceResource

PROCESS_NAME = "otel_infer-sidecar"
_BOOT = (
    "import sys, json; boot = json.load(sys.stdin); sys.path += [p for p in boot['path'] if p not in sys.path]; "
    "from otel_infer.sidecar.main import main; main(boot)"
)


INITIAL_BACKOFF_NS = 1_000_000_000
MAX_BACKOFF_NS = 60_000_000_000
MAX_REASON_CHARS = 300


class SidecarStartError(Exception):
    """Failure to start a child process; the message states why."""


class RestartBackoff:
    """Delay until a sidecar that ended may be restarted: a second, and longer while each crashes soon."""

    def __init__(self) -> None:
        self._started_at = 0
        self._backoff_ns = 0

    def is_due(self, now: int, exit_status: int | None) -> bool:
        """Returns whether a start is due at `now` (monotonic ns).

        `exit_status`: of the sidecar that ended, negative if it was killed. Only a crash delays the next start.
        """
        has_crashed = exit_status is not None and exit_status > 0
        delay = self._backoff_ns if has_crashed else min(self._backoff_ns, INITIAL_BACKOFF_NS)
        return now - self._started_at >= delay

    def record_start(self, now: int) -> None:
        """Records a start at `now` (monotonic ns)."""
        is_stable = not self._started_at or now - self._started_at > MAX_BACKOFF_NS
        self._backoff_ns = INITIAL_BACKOFF_NS if is_stable else min(2 * self._backoff_ns, MAX_BACKOFF_NS)
        self._started_at = now


def write_end_reason(folder: Path, error: Exception) -> None:
    """Writes why the sidecar of this folder ends, for `describe_end`."""
    with contextlib.suppress(OSError):
        text = environment.mask_configured_secrets(f"{type(error).__name__}: {error}")[:MAX_REASON_CHARS]
        write_private_text(folder / directory.ERROR_FILE, text)


def describe_end(folder: Path) -> str:
    """Returns one line for the server's stderr after its sidecar crashed."""
    try:
        text = read_private_text(folder / directory.ERROR_FILE, 4 * MAX_REASON_CHARS)
        reason = " ".join(replace_controls(text).split())
    except (OSError, ValueError):
        reason = ""
    return (
        f"otel_infer: the sidecar crashed{f' ({reason})' if reason else ''}; telemetry is off until its restart, "
        "see `otel-infer doctor`"
    )


def start_sidecar(
    folder: Path, settings: Config, resource: dict[str, Any], claim: int = -1
) -> subprocess.Popen[bytes]:
    """Starts the sidecar of the server whose rings are in `folder`; raises `SidecarStartError`.

    It is isolated (`-I`), in its own session, without the server's descriptors. Its configuration goes
    through its standard input, never through argv. `claim`: from `sidecar_claim.claim_sidecar_start`; the sidecar
    inherits and closes it.
    """
    if not has_destination(folder):
        Destination(settings, resource).record(folder)
        service = ServiceResource(folder, resource)
        service.save()
        service.release()  # the sidecar claims the same id
    boot = {
        "folder": str(folder),
        "config": environment.to_json_dict(settings),
        "resource": resource,
        "claim": claim,
        "path": [os.path.abspath(entry) for entry in sys.path if entry],
    }
    uses_stderr = settings.console or settings.request_log == STDERR
    child: subprocess.Popen[bytes] | None = None
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, PROCESS_NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if uses_stderr else subprocess.DEVNULL,
            close_fds=True,
            pass_fds=(claim,) if claim >= 0 else (),
            start_new_session=True,
            env=environment.sidecar_environment(),
            cwd="/",
        )
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(json.dumps(boot).encode())
    except OSError as error:
        if child is not None:  # it ended before it read its configuration
            child.kill()
            child.wait()
        raise SidecarStartError(str(error)) from None
    return child
