"""The composition root: the only module that connects all parts.

`instrument()` installs hooks and starts nothing. The rings are created and the sidecar is started when an
engine is imported or the first event is recorded, and only if an output is configured.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_infer import _clock
from otel_infer._bootstrap import startup_message
from otel_infer._bootstrap.exit_signal import ExitSignalHandler
from otel_infer._bootstrap.sidecar_starter import SidecarStarter
from otel_infer._bootstrap.startup_message import print_stderr
from otel_infer.config import environment, propagators
from otel_infer.config.environment import Config
from otel_infer.config.resource import detect_resource
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation import registry
from otel_infer.instrumentation.hooks import probe
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor, InstrumentorStatus
from otel_infer.instrumentation.multiprocessing import process
from otel_infer.instrumentation.torch import cuda_graphs
from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.arena import Arena, FileArena, MemoryArena, RingUnavailable
from otel_infer.ringbuffer.flush_request import request_flush
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.ringbuffer.recorder import SERVER, recorder
from otel_infer.ringbuffer.stack_signal import stack_signal
from otel_infer.sidecar import launcher
from otel_infer.tracing import process_start, request_span, start
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.process_family import ProcessFamily
from otel_infer.tracing.sampler import create_span_factory
from otel_infer.tracing.user_mistakes import count_mistakes, to_seconds

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from otel_infer.sidecar.in_process import InProcessReader


FLUSH_S = 5.0
SITE = str(Path(__file__).with_name("site"))
"""The folder that instruments a process in whose PYTHONPATH it is."""


class _Installation:
    """The instrumentation of this process, and the reader of its rings."""

    def __init__(self) -> None:
        self.settings = Config()
        self.installed: list[Instrumentor] = []
        self.provider: TracerProvider | None = None
        self.folder: Path | None = None
        self.reader: InProcessReader | None = None
        self.why_in_process = self._sidecar_error = ""
        self._exported_folder, self._is_startup_reported = "", False
        self._exit_finalizer: Any = None
        self._sidecars = SidecarStarter()
        self._exit_signal = ExitSignalHandler(self._close_reader)
        family = ProcessFamily.from_environment(environment.inherited_startup_ids())
        self._lock, self._start_recorder = threading.Lock(), process_start.ProcessStartRecorder(family)
        call_in_child(self._reset_after_fork, before=self._prepare_fork)

    # ── install and remove ───────────────────────────────────────────────────────────────────────────────────────

    def instrument(self, provider: TracerProvider | None, names: Sequence[str]) -> bool:
        """Installs hooks. Returns False if it installed none: nothing to export, installed already, or an
        error.
        """
        if self.installed:
            return False
        try:
            return self._install_hooks(provider, names)
        except Exception as reason:  # for example a bad standard variable; the server runs uninstrumented
            self.uninstrument()
            message = environment.mask_configured_secrets(f"{type(reason).__name__}: {reason}")
            print_stderr(f"otel_infer: not instrumented: {message}")
            return False

    def _install_hooks(self, provider: TracerProvider | None, names: Sequence[str]) -> bool:
        self.settings, messages = environment.from_env_or_defaults()
        for message in filter(None, (*messages, propagators.describe_unusable())):
            print_stderr(f"otel_infer: {message}")
        self.provider = provider
        exports = self.settings.exports or (provider is not None and not self.settings.is_disabled)
        if environment.is_sidecar() or not exports:
            return False
        registry.configure_instrumentors(self.settings, self._on_engine_imported)
        process.prepare_child = self._prepare_child
        integrations = registry.load_instrumentors()
        if registry.runs_as_helper(integrations):
            return False
        request_span.span_factory = create_span_factory(provider, self.settings)
        stack_signal.is_enabled = self.settings.stacks
        recorder.start(
            self._create_arena,
            self._ensure_reader,
            self._create_fallback_arena,
            self._detect_role,
            lambda: self._start_recorder.make_event(joins=self.folder is not None),
        )
        selected, disabled = (
            set(names or self.settings.integrations),
            set(self.settings.disabled_integrations),
        )
        for integration in integrations:
            off = {integration.name, f"otel_infer_{integration.name}"} & disabled
            if (not selected or integration.name in selected) and not off:
                self.installed.append(integration)
        # A device query breaks a CUDA graph capture, and only the CUDA graphs instrumentor detects captures.
        timing.is_on = self.settings.device_timing != "off" and cuda_graphs.instrumentor in self.installed
        for integration in self.installed:
            integration.install()
        if provider is not None or self.settings.mode == "in-process":
            self._exit_signal.install()
        return True

    def uninstrument(self) -> None:
        """Removes the hooks and lets the reader finish."""
        for integration in reversed(self.installed):
            integration.remove()
        self.installed.clear()
        timing.stop()
        recorder.stop()
        self._start_recorder.mark_recorded()
        request_span.span_factory = None
        self._exit_signal.remove()
        reader, self.reader = self.reader, None
        if reader is not None:
            atexit.unregister(reader.close)
            if self._exit_finalizer is not None:
                self._exit_finalizer.cancel()
            reader.close()
        environment.unset_ringbuffer_dir(self._exported_folder)
        self._sidecars.release()
        self.folder = None
        self.why_in_process = self._sidecar_error = ""
        self._exported_folder, self._is_startup_reported = "", False

    def _close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()

    @property
    def sidecar(self) -> Any:
        """The process of the sidecar that this process started; None if it started none."""
        return self._sidecars.sidecar

    def list_statuses(self) -> list[InstrumentorStatus]:
        """Returns the status of each installed integration."""
        return [integration.status for integration in self.installed]

    def flush(self, timeout: float) -> bool:
        """Sends everything; False if `timeout` s were not enough, or if a receiver refused something."""
        timeout = to_seconds(timeout, FLUSH_S)
        if self.reader is not None:
            return self.reader.flush(timeout)
        if recorder.requests is not None:
            self._ensure_reader()
        writer = recorder.requests
        if writer is None:
            return True
        accepted = request_flush(writer.words, timeout)
        if accepted is False:
            self._ensure_reader()  # it prints what was refused
        return bool(accepted)

    # ── rings and their reader ───────────────────────────────────────────────────────────────────────────────────

    def _create_arena(self) -> Arena:
        if self.provider is not None:
            return self._use_memory_arena("a tracer_provider was given")
        if self.settings.mode == "in-process":
            return self._use_memory_arena("OTEL_INFER_MODE=in-process")
        if not sys.executable or getattr(sys, "frozen", False):
            return self._use_memory_arena("the interpreter is frozen or embedded")
        if self._sidecar_error:
            raise RingUnavailable(f"the sidecar cannot be started ({self._sidecar_error})")
        self.folder = self._resolve_folder()
        if not self.settings.rings:
            self._export_folder(self.folder)
        self.why_in_process = ""
        return FileArena(self.folder)

    def _resolve_folder(self) -> Path:
        if self.settings.rings:
            return directory.resolve_rings_folder(Path(self.settings.rings))
        if self.folder is not None:  # from the parent that forked this process: one sidecar reads both
            with contextlib.suppress(RingUnavailable):  # this process runs as another user
                return directory.ensure_private_folder(self.folder)
        family = self._find_family()
        return directory.create_server_folder(token=family.folder_token if family is not None else "")

    def _create_fallback_arena(self, reason: str) -> Arena | None:
        if self.folder is not None and not self.settings.rings:
            environment.unset_ringbuffer_dir(str(self.folder))
            directory.remove_server_folder(self.folder)
        if self.settings.mode == "sidecar":
            print_stderr(
                f"otel_infer: disabled, because OTEL_INFER_MODE=sidecar and {reason}; "
                "set OTEL_INFER_MODE=auto to export in-process"
            )
            return None
        return self._use_memory_arena(reason)

    def _use_memory_arena(self, reason: str) -> Arena:
        self.folder, self.why_in_process = None, reason
        self._is_startup_reported = False
        return MemoryArena()

    def _ensure_reader(self) -> None:
        """Starts a reader if there is none.

        Called when rings were created, then at most once a second while requests arrive.
        """
        if recorder.requests is not None:
            recorder.requests.words[layout.W_ERRORS] = probe.count_errors() + count_mistakes()
        with self._lock:
            if isinstance(recorder.arena, MemoryArena):
                self._ensure_reader_thread(recorder.arena)
            elif self.folder is not None:
                self._ensure_sidecar(self.folder)
        # Without rings the sidecar could not be started; the fallback that follows has its own message.
        if not self._is_startup_reported and recorder.requests is not None:
            self._is_startup_reported = True
            atexit.unregister(process_start.record_process_exit)
            # atexit calls the last registered function first, so the reader still runs then.
            atexit.register(process_start.record_process_exit)
            if recorder.role == SERVER and not self._is_reported_by_server():
                environment.export_startup_reported()
                has_provider = self.provider is not None
                print_stderr(
                    startup_message.format_message(
                        self.settings, self.list_statuses(), has_provider, self.why_in_process
                    )
                )

    def _ensure_reader_thread(self, arena: MemoryArena) -> None:
        if self.reader is None:
            from otel_infer.sidecar.in_process import InProcessReader

            self.reader = InProcessReader(self.settings, arena, self.provider, detect_resource())
            self.reader.start()
            atexit.register(self.reader.close)
            multiprocessing_util = sys.modules.get("multiprocessing.util")
            if multiprocessing_util is not None:  # its child processes exit without the functions of `atexit`
                self._exit_finalizer = multiprocessing_util.Finalize(None, self.reader.close, exitpriority=0)

    def _ensure_sidecar(self, folder: Path) -> None:
        if self._sidecars.is_running():
            self._sidecars.print_notices(folder)
            if recorder.are_rings_unreachable():  # another user renamed their folder before they were read
                recorder.discard_rings()
            return
        if directory.is_held(folder / directory.SIDECAR_LOCK) or directory.is_held(
            folder / directory.OWNER_LOCK
        ):
            self._sidecars.had_reader = True
            return
        if recorder.arena is not None and not recorder.arena.is_visible():
            self._start_recorder.mark_recorded()
            recorder.discard_rings()
        elif recorder.role != SERVER:  # the server kills an engine process together with its children
            return
        elif self._sidecars.is_start_due(_clock.now()):
            self._start_sidecar(folder)

    def _detect_role(self) -> str:
        """Returns the role of this process in its server, by the process name that its library set."""
        multiprocessing_process = sys.modules.get("multiprocessing.process")
        name = multiprocessing_process.current_process().name if multiprocessing_process is not None else ""
        roles = [
            role
            for integration in self.installed
            for prefix, role in integration.processes.items()
            if name.startswith(prefix)
        ]
        return roles[0] if roles else SERVER

    def _start_sidecar(self, folder: Path) -> None:
        family = self._find_family()
        resource = detect_resource(family.instance_id if family is not None else "")
        try:
            self._sidecars.start(folder, self.settings, resource)
        except launcher.SidecarStartError as reason:
            if self._sidecars.had_reader:  # a sidecar ran here before, so this failure may be temporary
                return
            self._sidecar_error = str(reason)
            recorder.discard_rings()
            directory.remove_server_folder(folder)

    def _on_engine_imported(self, integration: Instrumentor) -> None:
        status = integration.status
        recorder.report_hooks(status.name, status.hooks_active, status.hooks_due)
        if integration.is_engine:
            recorder.ensure_rings()

    def _find_family(self) -> ProcessFamily | None:
        """Returns the processes that this one is one server with; None if there are none."""
        family = self._start_recorder.family
        return family if family is not None and family.is_shared else None

    def _is_reported_by_server(self) -> bool:
        """Returns whether this process was spawned by one that has printed the startup message."""
        family = self._find_family()
        return family is not None and family.is_spawned and environment.is_startup_reported()

    def _prepare_fork(self) -> None:
        if self.installed and self.provider is None:
            self._start_recorder.prepare_fork()

    @contextlib.contextmanager
    def _prepare_child(self) -> Iterator[None]:
        """Exports to a process that is spawned meanwhile this server's start, the folder of its rings and the hooks."""
        if not self.installed or self.provider is not None or self.settings.mode == "in-process":
            yield
            return
        family = self._start_recorder.prepare_fork()
        if family is not None and family.folder_token and self.folder is None and not self.settings.rings:
            self._export_folder(directory.get_user_folder() / family.folder_token)
        with environment.put_on_python_path(SITE):
            yield

    def _export_folder(self, folder: Path) -> None:
        self._exported_folder = str(folder)
        environment.export_to_children(rings=self._exported_folder)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._start_recorder = process_start.ProcessStartRecorder(self._start_recorder.family)
        self._sidecars.reset_after_fork()
        self.reader = self._exit_finalizer = None
        request = start.find_request()
        if isinstance(request, DeferredRequest):
            request.discard_after_fork()
        elif request is not None:
            # The parent process records the rest of this request; this process opens requests separately.
            request.ended = request.is_forked = True


installation = _Installation()
