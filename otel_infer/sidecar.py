"""The sidecar process: reads a server's rings until its last writer is gone, then flushes and exits.

It ignores SIGINT and SIGTERM while a writer lives, holds none of the server's descriptors, and never instruments itself.
It is told what it needs as JSON on its standard input; what it sends, and where, follows from the standard environment.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from otel_infer import clock
from otel_infer.config import Config, from_plain
from otel_infer.facts import Value
from otel_infer.pipeline import WAKE_NS, MetricsOutlet, Pipeline, RequestSink
from otel_infer.ring import place
from otel_infer.ring.folder import Rings
from otel_infer.sinks import transport
from otel_infer.sinks.console import ConsoleSink
from otel_infer.sinks.spans import Sender, SpanSink, encoded_identity

log = logging.getLogger(__name__)

IDLE_AFTER_NS = 2_000_000_000
IDLE_WAKE_NS = 200_000_000
"""While nothing happens there is no hurry."""
DISCOVER_NS = 250_000_000
LINGER_NS = 1_000_000_000
"""After the last writer: wait this long for one that is just starting (a reload, a fork)."""
ORPHAN_NS = 60_000_000_000
FLUSH_S = 5.0


def main(boot: dict[str, Any]) -> None:
    """The whole life of the sidecar process; exits 0, or 1 if it broke."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = from_plain(boot["config"])
    _log_to(settings.log)
    folder = Path(boot["folder"])
    lock = place.Lock(folder / place.SIDECAR_LOCK)
    try:
        if not lock.acquire():
            sys.exit(0)
        Sidecar(folder, settings, boot["resource"], show=boot.get("show", False)).run()
    except Exception:
        log.exception("the sidecar broke")
        sys.exit(1)
    sys.exit(0)


def make_pipeline(settings: Config, resource: dict[str, Value], rings: Rings, *, show: bool) -> Pipeline:
    """Pipeline and senders as configured, running."""
    sinks: list[RequestSink] = []
    sender = outlet = None
    if settings.sends_spans:
        sender = Sender(transport.transport(settings.traces_protocol), lambda: encoded_identity(resource))
        sender.start()
        sinks.append(SpanSink(sender, settings.latency_attributes))
    if settings.sends_metrics:
        outlet = MetricsOutlet(settings.metrics_protocol)
        outlet.start()
    if show or settings.console:
        sinks.append(ConsoleSink())
    return Pipeline(settings, rings, sinks, sender, resource, outlet, clock.wall_pair()[1])


class Sidecar:
    """Finds rings, wakes the pipeline, and knows when it is over."""

    def __init__(
        self,
        folder: Path,
        settings: Config,
        resource: dict[str, Value],
        *,
        show: bool = False,
        stays: bool = False,
    ) -> None:
        """`stays`: it does not end with its last writer, but when it is told to."""
        self._folder, self._stays, self._stopped = folder, stays, False
        self._rings = Rings()
        self._pipeline = make_pipeline(settings, resource, self._rings, show=show)
        self._recovered: list[tuple[Path, place.Lock]] = []
        self._discovered_at = 0
        self._alone_since = 0
        self._busy_at = 0

    def run(self) -> None:
        """Until the last writer is gone."""
        self._recover()
        while True:
            began = clock.now()
            self._wake(began)
            if self._is_over(began):
                break
            pause = WAKE_NS if began - self._busy_at < IDLE_AFTER_NS else IDLE_WAKE_NS
            time.sleep(max(pause - (clock.now() - began), WAKE_NS // 10) / 1e9)
        # Only a sidecar that ended well removes rings: the next one goes on with those of one that broke.
        self._pipeline.wake(clock.now(), final=True)
        self._pipeline.close(FLUSH_S)
        self._rings.close(remove=not self._stays)
        if not self._stays:
            place.remove(self._folder)

    def stop(self) -> None:
        """Ends a sidecar that stays."""
        self._stopped = True

    def _wake(self, now: int) -> None:
        if now - self._discovered_at > DISCOVER_NS:
            self._discovered_at = now
            self._rings.discover(self._folder, now)
            for refusal in self._rings.refused:
                log.warning("ring refused: %s", refusal)
            self._rings.refused.clear()
        asked = self._rings.flushes_asked()
        if self._pipeline.wake(now):
            self._busy_at = now
        if asked:
            self._flush(asked)
        if self._recovered and self._rings.alive() == 0:
            self._forget_recovered()

    def _flush(self, asked: list[tuple[int, int]]) -> None:
        """A writer waits: two more wakes hand out all that it stated before it asked."""
        for _ in range(2):
            time.sleep(WAKE_NS / 1e9)
            self._pipeline.wake(clock.now())
        self._pipeline.settle(clock.now())
        self._pipeline.flush(FLUSH_S)
        self._rings.flush_done(asked)

    def _is_over(self, now: int) -> bool:
        if self._stays:
            return self._stopped
        if self._rings.alive() or place.is_held(self._folder / place.OWNER_LOCK):
            self._alone_since = 0
            return False
        self._alone_since = self._alone_since or now
        return now - self._alone_since > (LINGER_NS if self._rings.seen_any else ORPHAN_NS)

    def _recover(self) -> None:
        """Takes over what dead servers left beside us: their requests in flight are told, then removed."""
        for sibling, lock in place.dead_servers(self._folder):
            self._rings.discover(sibling, clock.now())
            self._recovered.append((sibling, lock))

    def _forget_recovered(self) -> None:
        for sibling, lock in self._recovered:
            place.remove(sibling)
            lock.release()
        self._recovered.clear()


def _log_to(path: str) -> None:
    if path:
        layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(filename=path, level=logging.INFO, format=layout)
    else:
        logging.basicConfig(handlers=[logging.NullHandler()], level=logging.CRITICAL)
