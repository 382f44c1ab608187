"""Start a server instrumented: `otel-infer run -- transformers serve MODEL`, or any other Python server.

Every Python process that it starts is instrumented too. This command is the parent (and inside a container the init) of
what it runs: it forwards signals, reaps, waits until everything recorded was sent, and returns the server's exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer import _clock
from otel_infer._bootstrap.install import detect_resource
from otel_infer.config.environment import Config, child_environment, from_env, prepend_python_path
from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.writer import RingUnavailable
from otel_infer.sidecar import launcher

FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
AWAITED_SIGNALS = FORWARDED_SIGNALS if hasattr(signal, "sigtimedwait") else ()
"""Taken one by one while the server runs, where that can be: a handler is not told who sent a signal."""
SI_KERNEL = 0x80
"""Sent by a terminal, to the whole foreground group: to pass it on would make it two."""
FLUSH_S = 45.0
"""Longer than a sidecar waits for its destination, its metrics and a tape together; it mostly ends at once."""
ORPHANS_S = 2.0
"""How long processes of a server that ended may take to end as well."""
POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `run`."""
    parser.add_argument("--show", action="store_true", help="print a line for each finished request")
    parser.add_argument(
        "--tape",
        metavar="FILE",
        help="save all facts to FILE, for `otel-infer replay`; one that is there already is kept beside it, numbered",
    )
    parser.add_argument(
        "server", nargs=argparse.REMAINDER, metavar="-- CMD …", help="the server and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the server to its end."""
    command = arguments.server[1:] if arguments.server[:1] == ["--"] else arguments.server
    if not command:
        print(
            "otel-infer run: what? For example: otel-infer run -- transformers serve MODEL", file=sys.stderr
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
    """Owns a server's folder, its sidecar and the server itself."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._owner_lock: directory.FileLock | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        self._restarts = launcher.RestartBackoff()
        self._early_signals: list[int] = []
        self._skips_flush = False

    def run(self, command: list[str], changes: dict[str, str]) -> int:
        """Starts everything, waits for the server, then for the flush."""
        status = self.start(command, changes)
        if status is not None:
            return status
        with _mask_signals(signal.SIG_BLOCK):
            while self.status is None:
                self._reap_children()
                self._wait_for_signal()
                self._restart_dead_sidecar()
        self.wait_for_sidecar()
        return self.status

    def start(
        self, command: list[str], changes: dict[str, str], *, log: Path | None = None, **variables: str
    ) -> int | None:
        """Starts sidecar and server (its output into `log`); the exit status if it could not."""
        _become_reaper()
        # What is ignored (by nohup, by a shell in the background) the server is to inherit, as it would without us.
        ignored = [number for number in FORWARDED_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        for number in set(FORWARDED_SIGNALS).difference(ignored):
            signal.signal(number, self._handle_signal)
        environment = {**child_environment(), **variables}
        if self._settings.exports:
            environment = {**server_environment(self._prepare_sidecar(changes)), **variables}
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
        """Folder and sidecar, and what the server is told of them."""
        if self._settings.mode == "in-process":
            return changes
        try:
            given = self._settings.rings
            self._folder = (
                directory.resolve_rings_folder(Path(given)) if given else directory.create_server_folder()
            )
            self._owner_lock = directory.FileLock(self._folder / directory.OWNER_LOCK)
            if not self._owner_lock.acquire():
                whose, self._folder = self._folder, None
                changes = {**changes, "rings": ""}  # nor are the processes of this server to join that one
                raise RingUnavailable(
                    f"{whose} is another server's: set OTEL_INFER_RINGS to a folder of its own"
                )
            self._start_sidecar()
        except (RingUnavailable, OSError, launcher.SidecarStartError) as reason:
            print(f"otel-infer: no sidecar ({reason}); each process exports by itself", file=sys.stderr)
            if self._folder is not None:
                directory.remove_server_folder(self._folder)
            self._folder = None
            return changes if self._settings.mode == "sidecar" else {**changes, "mode": "in-process"}
        return {**changes, "rings": str(self._folder)}

    def is_alive(self) -> bool:
        """Whether the server still runs."""
        self._reap_children()
        self._restart_dead_sidecar()
        return self.status is None

    def stop(self, timeout: float) -> None:
        """Asks the server to end, again every second (some hang after they have shut down), and insists after `timeout` s.

        Then waits for the flush.
        """
        began = asked = time.monotonic()
        while self._server is not None and self.is_alive():
            now = time.monotonic()
            if asked == began or now - asked > 1.0:
                asked = now
                os.kill(self._server.pid, signal.SIGKILL if now - began > timeout else signal.SIGTERM)
            time.sleep(POLL_S)
        self.wait_for_sidecar()

    def wait_for_sidecar(self) -> None:
        """Lets the sidecar go and waits until it has sent what there was."""
        if self._owner_lock is not None:
            self._owner_lock.release()
        if self._is_without_sidecar():
            with contextlib.suppress(launcher.SidecarStartError):
                self._start_sidecar()  # the last one was killed; somebody has to read what is left
        # Where we are the first process all others end with us.
        ended, patience = time.monotonic(), FLUSH_S if os.getpid() == 1 else ORPHANS_S
        while self._sidecar is not None and self._sidecar.poll() is None and not self._skips_flush:
            waited = time.monotonic() - ended
            if waited > patience and self._has_live_writer():
                print(
                    "otel-infer run: processes of the server still run, and their sidecar with them",
                    file=sys.stderr,
                )
                return
            if waited > FLUSH_S:
                self._sidecar.kill()
            time.sleep(POLL_S / 2)

    def _wait_for_signal(self) -> None:
        """Waits a moment, or until there is a signal."""
        if not AWAITED_SIGNALS:
            time.sleep(POLL_S)
            return
        came = signal.sigtimedwait(AWAITED_SIGNALS, POLL_S)
        if came is not None:
            self._forward_signal(came.si_signo, is_the_groups=came.si_code == SI_KERNEL)

    def _handle_signal(self, number: int, frame: object) -> None:
        """What comes while none are taken: whoever sends it, on a terminal it is most likely that."""
        self._forward_signal(number, number in (signal.SIGINT, signal.SIGQUIT) and _is_in_foreground())

    def _forward_signal(self, number: int, is_the_groups: bool) -> None:
        if self._server is None:
            self._early_signals.append(number)
        elif self.status is not None:
            self._skips_flush = True
        elif not is_the_groups:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.pid, number)

    def _reap_children(self) -> None:
        """Collects every child that ended: the server, the sidecar, and orphans that fell to us."""
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

    def _restart_dead_sidecar(self) -> None:
        """Starts the sidecar again if it died."""
        if self.status is None and self._is_without_sidecar() and self._restarts.is_due(_clock.now()):
            with contextlib.suppress(launcher.SidecarStartError):
                self._start_sidecar()

    def _is_without_sidecar(self) -> bool:
        if self._folder is None or (self._sidecar is not None and self._sidecar.returncode is None):
            return False
        return self._folder.is_dir() and not directory.is_held(self._folder / directory.SIDECAR_LOCK)

    def _has_live_writer(self) -> bool:
        """Whether a process lives that writes to this server's rings."""
        assert self._folder is not None
        try:
            rings = [path for path in self._folder.iterdir() if path.suffix == layout.SUFFIX_REQUESTS]
        except OSError:  # the sidecar has just removed it
            return False
        return any(map(directory.is_held, rings))

    def _start_sidecar(self) -> None:
        assert self._folder is not None
        self._restarts.record_start(_clock.now())
        with _mask_signals(signal.SIG_UNBLOCK):  # a child inherits what is blocked
            self._sidecar = launcher.start_sidecar(self._folder, self._settings, detect_resource())


def server_environment(changes: dict[str, str]) -> dict[str, str]:
    """What the server is started with: our variables, and our `sitecustomize` first on its path."""
    environment = child_environment(**changes)
    bootstrap = str(Path(__file__).parent.parent / "_bootstrap" / "site")
    environment["PYTHONPATH"] = prepend_python_path(environment, bootstrap)
    return environment


@contextlib.contextmanager
def _mask_signals(how: signal.Sigmasks) -> Iterator[None]:
    """Has those that are taken one by one wait until they are, or not wait meanwhile."""
    before = signal.pthread_sigmask(how, AWAITED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_in_foreground() -> bool:
    """Whether we have a terminal that sends its signals to our group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _find_write_error(path: str) -> str:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return ""
    except OSError as reason:
        return reason.strerror or str(reason)


def _become_reaper() -> None:
    """Orphans of the server become our children, so that nobody stays a zombie (Linux)."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass
