"""Start a Python server with instrumentation, e.g. `otel-infer run -- transformers serve MODEL`.

The Python processes that the server starts are instrumented too. This command is the parent of the server,
and in a container its init process. It forwards signals, reaps children, waits until the recorded data is
exported, and returns the exit status of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from otel_infer import _clock
from otel_infer.cli.process_signals import (
    AWAITED_SIGNALS,
    FORWARDED_SIGNALS,
    SI_KERNEL,
    await_signal,
    become_reaper,
    is_in_foreground,
    mask_awaited_signals,
)
from otel_infer.config.environment import Config, child_environment, from_env, prepend_python_path
from otel_infer.config.private_files import (
    list_names,
    open_beside_rings,
    open_private_file,
    remove_beside_rings,
)
from otel_infer.config.resource import detect_resource
from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.arena import FileArena, RingUnavailable, choose_sizes
from otel_infer.sidecar import launcher
from otel_infer.sidecar.notices import NoticePrinter

FLUSH_S = 45.0
"""Longer than the sidecar's timeouts for spans, metrics and a tape together.

Usually the flush ends at once.
"""
ORPHANS_S = 2.0
"""How long the other processes of the server may run after its main process ended."""
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--show", action="store_true", help="print a line for each finished request")
    parser.add_argument(
        "--tape",
        metavar="FILE",
        help="save all events to FILE, for `otel-infer replay`; an existing FILE is renamed with a number",
    )
    parser.add_argument(
        "server", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the server and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the server and returns its exit status; 2 if the command line or the tape is invalid."""
    command = arguments.server[1:] if arguments.server[:1] == ["--"] else arguments.server
    if not command:
        print(
            "otel-infer run: missing command, e.g. `otel-infer run -- transformers serve MODEL`",
            file=sys.stderr,
        )
        return 2
    changes = {} if from_env().is_disabled else {"enabled": "on"}
    if arguments.show:
        changes["console"] = "on"
    if arguments.tape:
        changes["tape"] = os.path.abspath(arguments.tape)
        refusal = _find_write_error(changes["tape"])
        if refusal:
            print(f"otel-infer run: {changes['tape']}: {refusal}", file=sys.stderr)
            return 2
    return Supervisor(from_env(child_environment(**changes))).run(command, changes)


class Supervisor:
    """Owns the folder of the rings, the sidecar and the server.

    `status`: exit status of the server; None = running.
    """

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._owner_lock: directory.FileLock | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self._restarts = launcher.RestartBackoff()
        self._notices = NoticePrinter()
        self._early_signals: list[int] = []
        self._skips_flush = False

    def run(self, command: list[str], changes: dict[str, str]) -> int:
        """Starts the sidecar and the server, waits for the server, then for the flush.

        Returns the exit status.
        """
        status = self.start(command, changes)
        if status is not None:
            return status
        with mask_awaited_signals(signal.SIG_BLOCK):
            while self.status is None:
                self._reap_children()
                self._wait_for_signal()
                self._restart_dead_sidecar()
        self.wait_for_sidecar()
        return self.status

    def start(
        self, command: list[str], changes: dict[str, str], *, log: Path | None = None, **variables: str
    ) -> int | None:
        """Starts the sidecar and the server.

        Returns the exit status if the server cannot be started, else None. `log`: the file for the output of
        the server. `variables`: added to its environment.
        """
        become_reaper()
        # The server must inherit ignored signals (nohup, a background job), as it would without this command.
        ignored = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        for number in set(FORWARDED_SIGNALS).difference(ignored):
            signal.signal(number, self._handle_signal)
        environment = {**child_environment(), **variables}
        if self._settings.exports:
            environment = {**make_server_environment(self._prepare_sidecar(changes)), **variables}
        try:
            with open(log, "wb") if log else contextlib.nullcontext() as output:
                self._server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        except OSError as reason:
            print(f"otel-infer run: {command[0]}: {reason.strerror}", file=sys.stderr)
            self.status = 127 if isinstance(reason, FileNotFoundError) else 126
            self.wait_for_sidecar()
            return self.status
        for number in ignored:
            signal.signal(number, self._handle_signal)
        for early in self._early_signals:
            os.kill(self._server.pid, early)
        return None

    def _prepare_sidecar(self, changes: dict[str, str]) -> dict[str, str]:
        """Creates the folder and the sidecar, and returns the changed settings for the server.

        If this fails, the settings select in-process mode, unless the mode is `sidecar`.
        """
        if self._settings.mode == "in-process":
            return changes
        try:
            rings = self._settings.rings
            self._folder = (
                directory.resolve_rings_folder(Path(rings)) if rings else directory.create_server_folder()
            )
            self._owner_lock = directory.FileLock(self._folder / directory.OWNER_LOCK)
            if not self._owner_lock.acquire():
                taken, self._folder = self._folder, None
                changes = {**changes, "rings": ""}  # keeps this server from writing there
                raise RingUnavailable(
                    f"{taken} belongs to another server: set OTEL_INFER_RINGS to a different folder"
                )
            choose_sizes(FileArena(self._folder), lambda sizes: sizes.requests_bytes)  # raises if none fits
            remove_beside_rings(self._folder / directory.STOPPED_FILE)
            self._start_sidecar()
        except (RingUnavailable, OSError, launcher.SidecarStartError) as reason:
            print(f"otel-infer: no sidecar ({reason}); each process exports by itself", file=sys.stderr)
            if self._folder is not None:
                directory.remove_server_folder(self._folder)
            self._folder = None
            return changes if self._settings.mode == "sidecar" else {**changes, "mode": "in-process"}
        return {**changes, "rings": str(self._folder)}

    def is_alive(self) -> bool:
        """Returns whether the server is still running. Reaps children and restarts a dead sidecar."""
        self._reap_children()
        self._restart_dead_sidecar()
        return self.status is None

    def stop(self, timeout: float) -> None:
        """Stops the server and waits for the flush. Sends SIGTERM every second, and SIGKILL after `timeout` s.

        SIGTERM is repeated because some servers hang after their shutdown.
        """
        began = signalled_at = time.monotonic()
        while self._server is not None and self.is_alive():
            now = time.monotonic()
            if signalled_at == began or now - signalled_at > 1.0:
                signalled_at = now
                self._record_stop(signal.SIGTERM)
                os.kill(self._server.pid, signal.SIGKILL if now - began > timeout else signal.SIGTERM)
            time.sleep(POLL_S)
        self.wait_for_sidecar()

    def wait_for_sidecar(self) -> None:
        """Releases the owner lock and waits until the sidecar has exported everything and ended."""
        if self._owner_lock is not None:
            self._owner_lock.release()
        if self._is_without_sidecar():
            with contextlib.suppress(launcher.SidecarStartError):
                self._start_sidecar()  # the sidecar was killed, and the rings still hold events
        # If this is process 1 of a container, all other processes end with it.
        ended, patience = time.monotonic(), FLUSH_S if os.getpid() == 1 else ORPHANS_S
        while self._sidecar is not None and self._sidecar.poll() is None and not self._skips_flush:
            self._notices.print_new(self._folder)
            waited = time.monotonic() - ended
            if waited > patience and self._has_live_writer():
                print(
                    "otel-infer run: processes of the server still run; their sidecar stays with them",
                    file=sys.stderr,
                )
                return
            if waited > FLUSH_S:
                self._sidecar.kill()
            time.sleep(POLL_S / 2)

    def _wait_for_signal(self) -> None:
        """Waits `POLL_S` or until a signal, and forwards the signal."""
        if not AWAITED_SIGNALS:
            time.sleep(POLL_S)
            return
        number, code = await_signal(POLL_S)
        if number:
            self._forward_signal(number, sent_to_group=code == SI_KERNEL)

    def _handle_signal(self, number: int, frame: object) -> None:
        """Forwards a signal outside `sigtimedwait`.

        In the foreground, SIGINT and SIGQUIT are assumed to be the terminal's.
        """
        self._forward_signal(number, number in (signal.SIGINT, signal.SIGQUIT) and is_in_foreground())

    def _forward_signal(self, number: int, sent_to_group: bool) -> None:
        self._record_stop(number)
        if self._server is None:
            self._early_signals.append(number)
        elif self.status is not None:
            self._skips_flush = True
        elif not sent_to_group:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, number)

    def _record_stop(self, number: int) -> None:
        """Records a signal to stop: the end that follows is no death."""
        if self._folder is not None and number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            with contextlib.suppress(OSError):
                os.close(open_beside_rings(self._folder / directory.STOPPED_FILE, os.O_WRONLY | os.O_CREAT))

    def _reap_children(self) -> None:
        """Reaps every ended child: the server, the sidecar, and adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self.status is None:
                    self.status = 0
                return
            if pid == 0:
                return
            if self._server is not None and pid == self._server.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
                self._server.returncode = code
            elif self._sidecar is not None and pid == self._sidecar.pid:
                self._sidecar.returncode = os.waitstatus_to_exitcode(status)
                if self._sidecar.returncode > 0 and self._folder is not None:
                    print(launcher.describe_end(self._folder), file=sys.stderr)

    def _restart_dead_sidecar(self) -> None:
        """Restarts the sidecar if it died; one that crashes again and again, with growing delays."""
        self._notices.print_new(self._folder)
        exit_status = None if self._sidecar is None else self._sidecar.returncode
        if (
            self.status is None
            and self._is_without_sidecar()
            and self._restarts.is_due(_clock.now(), exit_status)
        ):
            with contextlib.suppress(launcher.SidecarStartError):
                self._start_sidecar()

    def _is_without_sidecar(self) -> bool:
        if self._folder is None or (self._sidecar is not None and self._sidecar.returncode is None):
            return False
        return self._folder.is_dir() and not directory.is_held(self._folder / directory.SIDECAR_LOCK)

    def _has_live_writer(self) -> bool:
        """Returns whether a live process writes to this server's rings."""
        assert self._folder is not None
        try:
            names = list_names(self._folder)
        except OSError:  # the sidecar has just removed the folder
            return False
        rings = [name for name in names if name.endswith(layout.SUFFIX_REQUESTS)]
        return any(directory.is_held(self._folder / name) for name in rings)

    def _start_sidecar(self) -> None:
        assert self._folder is not None
        self._restarts.record_start(_clock.now())
        with mask_awaited_signals(signal.SIG_UNBLOCK):  # a child inherits the signal mask
            self._sidecar = launcher.start_sidecar(self._folder, self._settings, detect_resource())


def make_server_environment(changes: dict[str, str]) -> dict[str, str]:
    """Returns the environment of the server: our variables, and our `sitecustomize` first on PYTHONPATH."""
    environment = child_environment(**changes)
    bootstrap = str(Path(__file__).parent.parent / "_bootstrap" / "site")
    environment["PYTHONPATH"] = prepend_python_path(environment, bootstrap)
    return environment


def _find_write_error(path: str) -> str:
    try:
        os.close(open_private_file(path))
        return ""
    except OSError as reason:
        return reason.strerror or str(reason)
