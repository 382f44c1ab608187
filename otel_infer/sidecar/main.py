"""The sidecar process: reads a server's rings until its last writer is gone, then flushes and exits.

It ignores SIGINT and SIGTERM while a writer lives, holds none of the server's descriptors, and never instruments itself.
It is told what it needs as JSON on its standard input; what it sends, and where, follows from the standard environment.
"""

from __future__ import annotations

import dataclasses
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
from otel_infer.config.environment import Config, from_plain
from otel_infer.export.console import Console
from otel_infer.export.interfaces import RequestSink
from otel_infer.export.metrics.sender import MetricsOutlet
from otel_infer.export.otlp import transport
from otel_infer.export.spans.exporter import Sender, SpanSink, encoded_identity
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import Rings
from otel_infer.sidecar.crash_recovery import SEND_S, Recovery
from otel_infer.sidecar.malloc import Heap, share_one, take_small_blocks
from otel_infer.sidecar.pipeline import CONCLUDE_NS, WAKE_NS, Pipeline
from otel_infer.sidecar.probes.cpu_throttling import Throttling
from otel_infer.sidecar.probes.thread_stats import EngineThreads
from otel_infer.sidecar.recording.flight_recorder import FlightRecorder
from otel_infer.sidecar.service_resource import Service

if TYPE_CHECKING:
    from otel_infer.sidecar.recording.webhook import Webhook

log = logging.getLogger(__name__)

IDLE_AFTER_NS = 2_000_000_000
IDLE_WAKE_NS = 200_000_000
"""While nothing happens, not even the kernel is asked more often."""
CALM_WAKE_NS = 100_000_000
"""Whoever wakes finds the processor's caches empty, which is most of what it costs, so where nothing presses it is half as often."""
CALM_READ_NS = CONCLUDE_NS
"""What comes in many small portions costs more than the same at once: the processor's caches are somebody else's by then."""
CALM_FILL = 1 / 8
"""Rings that would be fuller than this after so long are read at each wake instead, and those that are, at the next one."""
LISTEN_NS = 2_000_000_000
DISCOVER_NS = 250_000_000
LINGER_NS = 1_000_000_000
"""After the last writer: wait this long for one that is just starting (a reload, a fork)."""
ORPHAN_NS = 60_000_000_000
FLUSH_S = 5.0
TAPE_S = 30.0
"""How long the end waits for tapes that are being written: a full window takes its time."""
NICENESS = 10
"""Where cores are short the server goes first: the rings hold what comes meanwhile."""
YOUNG = 50_000
"""Objects between two looks for garbage: records are no circles, and go without."""


def main(boot: dict[str, Any]) -> None:
    """The whole life of the sidecar process; exits 0, or 1 if it broke."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    share_one()
    settings = from_plain(boot["config"])
    log_to(settings.log)
    lock = directory.Lock(Path(boot["folder"]) / directory.SIDECAR_LOCK)
    try:
        if not _take(lock):
            sys.exit(0)
        Sidecar(lock, settings, boot["resource"], show=boot.get("show", False)).run()
    except Exception:
        log.exception("the sidecar broke")
        sys.exit(1)
    sys.exit(0)


def _take(lock: directory.Lock) -> bool:
    try:
        return lock.acquire()
    finally:
        (lock.path.parent / directory.STARTING).unlink(missing_ok=True)


def make_pipeline(
    settings: Config,
    resource: dict[str, Value],
    rings: Rings,
    *,
    show: bool,
    flight: FlightRecorder | None = None,
) -> Pipeline:
    """Pipeline and senders as configured, running."""
    sinks: list[RequestSink] = []
    sender = outlet = None
    if settings.sends_spans:
        sender = Sender(
            transport.transport(settings.traces_protocol, settings.traces_compression),
            lambda: encoded_identity(resource),
        )
        sender.start()
        sinks.append(SpanSink(sender, settings.latency_attributes))
    if settings.sends_metrics:
        outlet = MetricsOutlet(settings.metrics_protocol)
        outlet.start()
    watchers = [Console()] if show or settings.console else []
    return Pipeline(settings, rings, sinks, sender, resource, outlet, _clock.wall_pair()[1], watchers, flight)


class Sidecar:
    """Finds rings, wakes the pipeline, and knows when it is over."""

    def __init__(
        self,
        lock: directory.Lock,
        settings: Config,
        resource: dict[str, Value],
        *,
        show: bool = False,
        stays: bool = False,
    ) -> None:
        """`lock`: that of the folder, held. `stays`: it does not end with its last writer, but when it is told to."""
        self._lock, self._folder = lock, lock.path.parent
        self._stays, self._stopped = stays, False
        self._rings = Rings()
        self._service = Service(self._folder, resource)
        self._flight = FlightRecorder(
            self._folder, settings.dump_on_slo, bool(settings.dump_on_slo), settings.slo
        )
        self._dump_port, self._webhook_tried_at = settings.dump_port, 0
        self._webhook: Webhook | None = None
        self._listen(_clock.now())
        self._pipeline = make_pipeline(
            settings, self._service.resource, self._rings, show=show, flight=self._flight
        )
        self._throttling, self._threads, self._heap = Throttling(), EngineThreads(), Heap()
        self._asked: list[tuple[int, int]] = []
        self._wakes_since_asked = 0
        self._recovery = _recovery(self._folder, settings, self._service.resource)
        self._discovered_at = 0
        self._alone_since = 0
        self._busy_at = self._read_at = self._read_due = 0

    def run(self) -> None:
        """Until the last writer is gone."""
        take_small_blocks()
        gc.freeze()  # what is here now stays
        gc.set_threshold(YOUNG)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self._signalled)
        if self._recovery is not None:
            self._recovery.start()
        while True:
            began = _clock.now()
            self._wake(began)
            if self._is_over(began):
                break
            time.sleep(max(self._pause(began) - (_clock.now() - began), WAKE_NS // 10) / 1e9)
        # Only a sidecar that ended well removes rings: the next one goes on with those of one that broke.
        if self._webhook is not None:  # the next sidecar of this server may be waiting for the port
            self._webhook.close()
        self._pipeline.wake(_clock.now(), final=True)
        self._pipeline.close(FLUSH_S)
        self._flight.close(TAPE_S)
        if self._recovery is not None:
            self._recovery.join(SEND_S)
        self._threads.close()
        self._throttling.close()
        self._rings.close(remove=not self._stays)
        if not self._stays:
            directory.remove(self._folder)

    def stop(self) -> None:
        """Ends a sidecar that stays."""
        self._stopped = True

    def _pause(self, now: int) -> int:
        """From one wake to the next, ns."""
        if now - self._busy_at >= IDLE_AFTER_NS:
            return IDLE_WAKE_NS
        return CALM_WAKE_NS if now < self._read_due and not self._asked else WAKE_NS

    def _signalled(self, *_: object) -> None:
        self._flight.signalled = True

    def _wake(self, now: int) -> None:
        if now - self._discovered_at > DISCOVER_NS:
            self._discover(now)
            self._listen(now)
            self._heap.look(now)
            self._service.remember()
            self._pipeline.govern(now)
        looked = self._throttling.look(self._rings.writers) + self._threads.look(self._rings.engine_threads)
        for said in looked:
            self._rings.say(said)
        asked = self._rings.flushes_asked()
        if now >= self._read_due or asked or self._rings.are_fuller(CALM_FILL):
            self._read(now, asked)

    def _read(self, now: int, asked: list[tuple[int, int]]) -> None:
        """Reads the rings. `asked`: the flushes that writers wait for, which are read for at each wake."""
        before, self._read_at = self._read_at, now
        if self._pipeline.wake(now) or asked:
            self._busy_at = now
        is_calm = self._rings.filled * CALM_READ_NS <= CALM_FILL * (now - before)
        # Half a wake early: a wake that comes a little too soon is the one that is meant.
        self._read_due = now + (CALM_READ_NS - WAKE_NS // 2 if is_calm else 0)
        self._flight.look(now)
        self._answer_flushes(now, asked)

    def _discover(self, now: int) -> None:
        self._discovered_at = now
        # Where the folder was removed and made anew, another sidecar may be reading it.
        if self._lock.is_ours():
            self._rings.discover(self._folder, now)
        for refusal in self._rings.refused:
            log.warning("ring refused: %s", refusal)
        self._rings.refused.clear()

    def _listen(self, now: int) -> None:
        """For whoever wants a tape. The port may be somebody else's for now: the last sidecar's of this server, say."""
        is_first = not self._webhook_tried_at
        if not self._dump_port or self._webhook is not None or now - self._webhook_tried_at < LISTEN_NS:
            return
        from otel_infer.sidecar.recording.webhook import Webhook

        self._webhook_tried_at = now
        try:
            self._webhook = Webhook(self._dump_port, self._flight)
        except OSError as reason:
            if is_first:
                log.error("no webhook at %s yet: %s", self._dump_port, reason)

    def _answer_flushes(self, now: int, asked: list[tuple[int, int]]) -> None:
        """Writers wait: two more wakes hand out what they stated before they asked, then it has to be sent.

        They wait, we do not: rings fill meanwhile.
        """
        if not self._asked:
            self._asked, self._wakes_since_asked = asked, 0
            return
        self._wakes_since_asked += 1
        if self._wakes_since_asked == 2:
            self._pipeline.settle(now)
            self._pipeline.flush(0.0)
        if self._wakes_since_asked >= 2 and self._pipeline.is_sent():
            self._rings.flush_done(self._asked)
            self._asked = []

    def _is_over(self, now: int) -> bool:
        if self._stays:
            return self._stopped
        if self._rings.alive() or directory.is_held(self._folder / directory.OWNER_LOCK):
            self._alone_since = 0
            return False
        self._alone_since = self._alone_since or now
        if now - self._alone_since < self._patience_ns():
            return False
        self._discover(now)
        return not self._rings.alive()

    def _patience_ns(self) -> int:
        if (self._folder / directory.OWNER_LOCK).exists():
            return 0  # `otel-infer run` and all that it started are gone
        return LINGER_NS if self._rings.seen_any else ORPHAN_NS


def _recovery(folder: Path, settings: Config, resource: dict[str, Value]) -> Recovery | None:
    """None where nothing is sent: what dead servers left is for whoever sends. No tape, port or line of this server is theirs."""
    if not (settings.sends_spans or settings.sends_metrics):
        return None
    theirs = dataclasses.replace(
        settings, tape="", metrics_port="", gpu_metrics=False, console=False, request_log=""
    )
    return Recovery(folder, resource, lambda named, rings: make_pipeline(theirs, named, rings, show=False))


def log_to(path: str) -> None:
    """What the sidecar has to say goes to this file; nowhere if there is none."""
    silent = logging.NullHandler()
    try:
        handler = logging.FileHandler(path) if path else silent
    except OSError:
        handler = silent
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(
        handlers=[handler], level=logging.CRITICAL if handler is silent else logging.INFO, format=layout
    )
