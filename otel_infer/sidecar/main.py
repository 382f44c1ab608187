"""The sidecar process: reads a server's rings until its last writer is gone, then flushes and exits.

It ignores SIGINT and SIGTERM while a writer lives, holds none of the server's descriptors, and never
instruments itself. It reads its configuration as JSON from its standard input. The exported telemetry and
its destinations follow from the standard environment.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_infer import _clock
from otel_infer.config.environment import Config, from_json_dict, hide_refused_values
from otel_infer.config.private_files import read_status
from otel_infer.export.console import Console
from otel_infer.export.interfaces import RequestExporter
from otel_infer.export.metrics.sender import MetricsSender
from otel_infer.export.otlp import transport
from otel_infer.export.spans.batch_sender import BatchSender
from otel_infer.export.spans.exporter import OtlpSpanExporter, encode_resource_and_scope
from otel_infer.ringbuffer import directory, ledger
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.folder_watch import FolderWatch
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar import launcher
from otel_infer.sidecar.crash_recovery import SEND_TIMEOUT_S, make_recovery, take_over_rings
from otel_infer.sidecar.destination import Destination
from otel_infer.sidecar.flushes import FlushRequests
from otel_infer.sidecar.log_file import configure_logging
from otel_infer.sidecar.malloc import MallocTrimmer, fill_numpy_cache, use_single_arena
from otel_infer.sidecar.notices import READ_S, RefusalReporter, write_notices
from otel_infer.sidecar.pipeline import CYCLE_NS, Pipeline
from otel_infer.sidecar.probes.cpu_throttling import CpuThrottlingProbe
from otel_infer.sidecar.probes.cpu_usage import CpuUsageProbe
from otel_infer.sidecar.probes.stalls.sampler import StallSampler
from otel_infer.sidecar.probes.thread_stats import EngineThreadProbe, ThreadIds
from otel_infer.sidecar.read_schedule import LIVE_READ_INTERVAL_NS, READ_INTERVAL_NS, ReadSchedule
from otel_infer.sidecar.recording.flight_recorder import FlightRecorder
from otel_infer.sidecar.service_resource import ServiceResource

if TYPE_CHECKING:
    from otel_infer.sidecar.recording.webhook import Webhook

log = logging.getLogger(__name__)

MAINTENANCE_NS = 2_000_000_000
"""Interval of what is not urgent: free memory, the webhook's port, the service name, notices and the budget."""
LINGER_NS = 1_000_000_000
"""After the last writer: time to wait for another one that is just starting (a reload, a fork)."""
ORPHAN_NS = 60_000_000_000
FLUSH_S = 5.0
WEBHOOK_RETRY_NS = 2_000_000_000
RECORDING_TIMEOUT_S = 30.0
"""Longest wait at exit for tapes that are being written, because a full window takes time."""
NICENESS = 10
"""Where cores are short the server goes first, because the rings hold the events meanwhile."""
GC_THRESHOLD = 50_000
"""Allocations between two garbage collections; records form no reference cycles and are freed without them.
"""


def main(boot: dict[str, Any]) -> None:
    """Runs the sidecar process until its end; exits 0, or 1 after a crash."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    use_single_arena()
    settings = from_json_dict(boot["config"])
    configure_logging(settings.log)
    lock = directory.FileLock(Path(boot["folder"]) / directory.SIDECAR_LOCK)
    try:
        if not _acquire_lock(lock, boot["claim"]):
            sys.exit(0)
        Sidecar(lock, settings, boot["resource"]).run()
    except Exception as error:
        log.exception("sidecar crashed")
        launcher.write_end_reason(lock.path.parent, error)
        sys.exit(1)
    sys.exit(0)


def _acquire_lock(lock: directory.FileLock, claim: int) -> bool:
    """Takes the sidecar's lock, then releases the right to start it (`sidecar_claim.claim_sidecar_start`)."""
    try:
        return lock.acquire()
    finally:
        if claim >= 0:
            os.close(claim)


def make_pipeline(
    settings: Config,
    resource: dict[str, Value],
    rings: MergedReader,
    *,
    show: bool,
    flight: FlightRecorder | None = None,
) -> Pipeline:
    """Returns the pipeline as configured; its senders are running."""
    exporters: list[RequestExporter] = []
    sender = metrics_sender = None
    with hide_refused_values():  # the SDK's exporters read the environment, and raise
        if settings.exports_spans:
            sender = BatchSender(
                transport.make_transport(settings.traces_protocol, settings.traces_compression),
                lambda: encode_resource_and_scope(resource),
                rings.ledger,
            )
        if settings.exports_metrics:
            metrics_sender = MetricsSender(settings.metrics_protocol, settings.metrics_compression)
    if sender is not None:
        sender.start()
        exporters.append(OtlpSpanExporter(sender, settings.latency_attributes))
    if metrics_sender is not None:
        metrics_sender.start()
    listeners = [Console()] if show or settings.console else []
    return Pipeline(
        settings,
        rings,
        exporters,
        sender,
        resource,
        metrics_sender,
        _clock.read_clocks()[1],
        listeners,
        flight,
    )


class Sidecar:
    """Main loop of the sidecar: discovers rings, runs the pipeline, and determines when to exit."""

    def __init__(
        self,
        lock: directory.FileLock,
        settings: Config,
        resource: dict[str, Value],
        *,
        show: bool = False,
        stays: bool = False,
    ) -> None:
        """Prepares the loop.

        `lock`: the folder's lock, held. `stays`: it ends on `stop`, not after its last writer.
        """
        self._lock, self._folder = lock, lock.path.parent
        self._is_persistent, self._stopped = stays, False
        self._rings = MergedReader(ledger.open_ledger(self._folder))
        destination = Destination(settings, resource)
        take_over_rings(self._folder, destination, self._rings)
        self._service = ServiceResource(self._folder, resource)
        self._flight_recorder = FlightRecorder(
            self._folder, settings.dump_on_slo, bool(settings.dump_on_slo), settings.slo
        )
        self._dump_port, self._webhook_tried_at = settings.dump_port, 0
        self._sends_metrics = settings.exports_metrics and not settings.scrape_address
        self._webhook: Webhook | None = None
        self._start_webhook(_clock.now())
        self._pipeline = make_pipeline(
            settings, self._service.resource, self._rings, show=show, flight=self._flight_recorder
        )
        self._throttling_probe, self._thread_probe = CpuThrottlingProbe(), EngineThreadProbe()
        self._cpu_probe, self._malloc_trimmer = CpuUsageProbe(), MallocTrimmer()
        self._stalls = StallSampler(
            lambda: self._rings.processes,
            self._rings.add_event,
            self._flight_recorder.record_hang,
            settings.stacks,
        )
        self._flushes = FlushRequests(self._rings, self._pipeline)
        self._refusals = RefusalReporter(self._pipeline.delivery.describe_refusals, self._report_lines)
        self._recovery = make_recovery(
            self._folder, settings, self._service.resource, make_pipeline, destination, self._rings
        )
        self._folder_watch = FolderWatch(self._folder)
        interval = LIVE_READ_INTERVAL_NS if show or settings.console else READ_INTERVAL_NS
        self._schedule = ReadSchedule(self._rings, interval)
        self._maintained_at = self._no_writers_since = 0

    def run(self) -> None:
        """Runs until the last writer is gone."""
        fill_numpy_cache()
        gc.freeze()  # objects that exist now stay alive
        gc.set_threshold(GC_THRESHOLD)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._on_sigusr2)
        if self._recovery is not None:
            self._recovery.start()
        while True:
            began = _clock.now()
            self._run_cycle(began)
            if self._is_over(began):
                break
            interval = self._schedule.wake_interval(began)
            self._stalls.sleep(max(interval - (_clock.now() - began), CYCLE_NS // 10))
        # Only an orderly exit removes rings: after a crash, the next sidecar continues with them.
        if self._webhook is not None:  # the next sidecar of this server may be waiting for the port
            self._webhook.close()
        self._pipeline.assembler.processes.stop_requested = (
            read_status(self._folder / directory.STOPPED_FILE) is not None
        )
        self._pipeline.run_cycle(_clock.now(), final=True)
        self._pipeline.close(FLUSH_S)
        if self._refusals.report_new() and (self._folder / directory.OWNER_LOCK).exists():
            time.sleep(READ_S)
        self._flight_recorder.close(RECORDING_TIMEOUT_S)
        if self._recovery is not None:
            self._recovery.join(SEND_TIMEOUT_S)
        self._service.release()
        self._folder_watch.close()
        self._thread_probe.close()
        self._throttling_probe.close()
        self._stalls.close()
        self._rings.close(remove=not self._is_persistent)
        if not self._is_persistent:
            directory.remove_server_folder(self._folder)

    def stop(self) -> None:
        """Ends a sidecar that does not end with its last writer."""
        self._stopped = True

    def _report_lines(self, lines: list[str]) -> None:
        if self._is_persistent:  # it has a terminal or a log of its own, and no process that started it
            print(*(f"otel_infer: {line}" for line in lines), sep="\n", file=sys.stderr)
        else:
            write_notices(self._folder, lines)

    def _on_sigusr2(self, *_: object) -> None:
        self._flight_recorder.signalled = True

    def _run_cycle(self, now: int) -> None:
        folder_changed = self._folder_watch.has_changed(now)
        if folder_changed:
            self._discover_rings(now)
        is_idle = self._schedule.is_idle(now)
        if not is_idle:
            self._rings.add_rings_of_known_files()
        if now - self._maintained_at >= MAINTENANCE_NS:
            self._maintain(now)
        for recorded in (
            *self._throttling_probe.read_events(self._rings.list_writers, is_idle),
            *self._thread_probe.read_events(self._rings.list_engine_threads, is_idle),
            *self._cpu_probe.read_events(
                self._rings.list_writers, self._list_model_threads, self._list_python_threads, is_idle
            ),
        ):
            self._rings.add_event(recorded)
        flushes = self._rings.list_pending_flushes()
        has_dump = self._flight_recorder.has_due_requests(now, folder_changed)
        is_urgent = has_dump or bool(flushes) or self._flushes.are_pending
        if self._schedule.is_due(now, is_urgent) or self._pipeline.has_due_metrics(now):
            self._read_rings(now, flushes)

    def _list_model_threads(self) -> list[ThreadIds]:
        """Returns the threads that run engines, or work for a request."""
        of_requests = [
            thread for process in self._rings.processes for thread in process.list_request_threads()
        ]
        return self._rings.list_engine_threads() + of_requests

    def _list_python_threads(self) -> list[tuple[int, int]]:
        return [thread for process in self._rings.processes for thread in process.list_python_threads()]

    def _read_rings(self, now: int, flushes: list[tuple[int, int]]) -> None:
        """Reads the rings. `flushes`: the flushes that writers wait for."""
        self._pipeline.run_cycle(now)
        self._schedule.record_read(now)
        self._flight_recorder.process_dump_requests(now, folder_changed=False)
        self._flushes.complete(now, flushes)

    def _maintain(self, now: int) -> None:
        if self._schedule.busy_at >= self._maintained_at:  # else there is nothing to return
            self._malloc_trimmer.tick(now)
        self._maintained_at = now
        self._rings.add_rings_of_known_files()
        self._start_webhook(now)
        self._service.save()
        self._refusals.report_new()
        self._pipeline.enforce_budget(now)

    def _discover_rings(self, now: int) -> None:
        # If the folder was removed and created again, another sidecar may be reading it.
        if self._lock.ensure_held():
            self._rings.discover_rings(self._folder, now)
        for rejection in self._rings.rejected:
            log.warning("ring rejected: %s", rejection)
        self._rings.rejected.clear()
        self._flushes.add_writers()

    def _start_webhook(self, now: int) -> None:
        """Starts the webhook for dump requests, if configured.

        The port may still be in use, for example by the previous sidecar of this server; then it is tried
        again later.
        """
        is_first = not self._webhook_tried_at
        if (
            not self._dump_port
            or self._webhook is not None
            or now - self._webhook_tried_at < WEBHOOK_RETRY_NS
        ):
            return
        from otel_infer.sidecar.recording.webhook import Webhook

        self._webhook_tried_at = now
        try:
            resource = self._service.resource if self._sends_metrics else {}
            self._webhook = Webhook(self._dump_port, self._flight_recorder, resource)
        except OSError as error:
            if is_first:
                log.error("no webhook at %s yet, trying again every 2 s: %s", self._dump_port, error)

    def _is_over(self, now: int) -> bool:
        if self._is_persistent:
            return self._stopped
        if self._rings.processes or directory.is_held(self._folder / directory.OWNER_LOCK):
            self._no_writers_since = 0
            return False
        self._no_writers_since = self._no_writers_since or now
        if now - self._no_writers_since < self._exit_delay_ns():
            return False
        self._discover_rings(now)
        return not self._rings.processes

    def _exit_delay_ns(self) -> int:
        if read_status(self._folder / directory.OWNER_LOCK) is not None:
            return 0  # `otel-infer run` and its children have ended
        return LINGER_NS if self._rings.has_seen_rings else ORPHAN_NS
