"""Notices of the sidecar, one line each; the process that started it prints each once on its stderr.

The sidecar has no stderr of its own, because it must not hold the server's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from otel_infer.config.private_files import read_private_text, write_private_text
from otel_infer.ringbuffer import directory

MAX_CHARS = 1000
READ_S = 0.5
"""Time for the other process to read the last notices, before their folder is removed."""


def write_notices(folder: Path, lines: list[str]) -> None:
    """Adds notices to those of the sidecar of this folder, and of earlier sidecars of it."""
    with contextlib.suppress(OSError):
        notices = dict.fromkeys([*_read_notices(folder), *lines])
        write_private_text(folder / directory.NOTICES_FILE, "\n".join(notices)[:MAX_CHARS])


def _read_notices(folder: Path) -> list[str]:
    try:
        return read_private_text(folder / directory.NOTICES_FILE, MAX_CHARS).splitlines()
    except (OSError, ValueError):
        return []


class NoticePrinter:
    """Prints the notices of the sidecar that this process started."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def print_new(self, folder: Path | None) -> None:
        """Prints the notices in this folder that were not printed yet."""
        lines = _read_notices(folder) if folder is not None else []
        for line in (line for line in lines if line not in self._printed):
            self._printed.add(line)
            with contextlib.suppress(OSError, ValueError):
                print(f"otel_infer: {line}", file=sys.stderr, flush=True)


class RefusalReporter:
    """Reports what the receivers refuse, each signal once.

    `describe`: returns a line per signal that was refused so far. `report`: receives the new ones.
    """

    def __init__(self, describe: Callable[[], dict[str, str]], report: Callable[[list[str]], None]) -> None:
        self._describe, self._report = describe, report
        self._reported: set[str] = set()

    def report_new(self) -> bool:
        """Reports if a signal was refused for the first time; returns whether it was."""
        lines = {signal: line for signal, line in self._describe().items() if signal not in self._reported}
        if lines:
            self._reported.update(lines)
            self._report(list(lines.values()))
        return bool(lines)
