"""Starts the sidecar of this process's server, and another one if it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from otel_infer import _clock
from otel_infer._bootstrap.startup_message import print_stderr
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import sidecar_claim
from otel_infer.sidecar import launcher
from otel_infer.sidecar.notices import NoticePrinter

DEATH_S = 1.0
"""How long the exit of a process waits for the death of its sidecar, once that was killed."""
PF_EXITING = 4


class SidecarStarter:
    """The sidecars that this process started. `had_reader`: whether a sidecar of anybody read its rings."""

    def __init__(self) -> None:
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.had_reader = False
        self._old_sidecars: list[subprocess.Popen[bytes]] = []
        self._restarts, self._notices = launcher.RestartBackoff(), NoticePrinter()
        self._claim: int | None = None

    def is_running(self) -> bool:
        """Returns whether the sidecar that this process started runs."""
        return self.sidecar is not None and self.sidecar.poll() is None

    def is_start_due(self, now: int) -> bool:
        """Returns whether a sidecar may be started at `now` (monotonic ns)."""
        return self._restarts.is_due(now, None if self.sidecar is None else self.sidecar.returncode)

    def print_notices(self, folder: Path) -> None:
        """Prints what the sidecar has to say since the last call, to stderr."""
        self._notices.print_new(folder)

    def start(self, folder: Path, settings: Config, resource: dict[str, Any]) -> None:
        """Starts a sidecar unless another process is starting one; raises `launcher.SidecarStartError`."""
        self._claim = sidecar_claim.claim_sidecar_start(folder)
        if self._claim is None:
            return
        try:
            if self.sidecar is not None and (self.sidecar.returncode or 0) > 0:
                print_stderr(launcher.describe_end(folder))
            self._restarts.record_start(_clock.now())
            self.sidecar = launcher.start_sidecar(folder, settings, resource, self._claim)
            self.had_reader = True
        finally:
            self._close_claim()
        atexit.unregister(self._replace_killed)
        atexit.register(self._replace_killed, folder, settings, resource)

    def _replace_killed(self, folder: Path, settings: Config, resource: dict[str, Any]) -> None:
        """Starts a sidecar for what is in the rings, at the exit of a process whose sidecar was killed.

        SGLang's engine kills all children of its process when it ends (0.5.23, srt/utils/common.py, `kill_process_tree`).
        """
        if self.sidecar is None or (self.is_running() and not _is_dying(self.sidecar.pid)):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.sidecar.wait(
                DEATH_S
            )  # sets `returncode`: 0 if the program itself has waited for its children
        if self.sidecar.returncode is None or self.sidecar.returncode > 0 or not folder.is_dir():
            return
        with contextlib.suppress(OSError, launcher.SidecarStartError):
            self.start(folder, settings, resource)

    def release(self) -> None:
        """Leaves the sidecar to its end, which it finds by itself; `poll()` reaps it."""
        sidecars = [*self._old_sidecars, *filter(None, (self.sidecar,))]
        self._old_sidecars = [sidecar for sidecar in sidecars if sidecar.poll() is None]
        self.sidecar, self.had_reader, self._restarts = None, False, launcher.RestartBackoff()

    def reset_after_fork(self) -> None:
        """Forgets the parent's sidecars, which the parent reaps, and its claim."""
        self._close_claim()
        for child in (*self._old_sidecars, *filter(None, (self.sidecar,))):
            child.returncode = 0
        self._old_sidecars, self.sidecar, self.had_reader = [], None, False
        self._restarts, self._notices = launcher.RestartBackoff(), NoticePrinter()

    def _close_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and claim >= 0:
            os.close(claim)


def _is_dying(pid: int) -> bool:
    """Whether a process was killed and has not ended yet. Source: proc(5); PF_EXITING in Linux 6.1, include/linux/sched.h."""
    try:
        process = Path(f"/proc/{pid}")
        flags = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[6])
        pending = process.joinpath("status").read_text().partition("SigPnd:")[2].split()[0]
        return bool(flags & PF_EXITING or int(pending, 16) >> (signal.SIGKILL - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False
