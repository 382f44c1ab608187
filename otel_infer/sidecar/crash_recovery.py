"""Exports what dead servers left beside this one, under their own names, then removes their folders.

Each dead server has its own pipeline, so that its data is never mixed with a living server's. All of them run
in a separate thread, so that a destination that does not respond blocks no reading.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from otel_infer import _clock
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.service_resource import ServiceResource

log = logging.getLogger(__name__)

_SERVICE_PREFIX = "service."
SEND_TIMEOUT_S = 5.0


class CrashRecovery(threading.Thread):
    """Thread that takes over the folders beside `folder` that no process holds.

    `resource`: this server's; a dead server shares its attributes unless they begin with `service.`.
    `make_pipeline` returns a pipeline with running senders.
    """

    def __init__(
        self,
        folder: Path,
        resource: Mapping[str, Value],
        make_pipeline: Callable[[dict[str, Value], MergedReader], Pipeline],
    ) -> None:
        super().__init__(name="otel_infer-recovery", daemon=True)
        self._folder, self._make_pipeline = folder, make_pipeline
        self._shared = {key: value for key, value in resource.items() if not key.startswith(_SERVICE_PREFIX)}

    def run(self) -> None:
        for sibling, lock in directory.claim_dead_servers(self._folder):
            try:
                self._export(sibling)
            except Exception:  # a failure with one server must not affect the others
                log.exception(
                    "rings of a dead server in %s were not exported completely; they are removed", sibling
                )
            directory.remove_server_folder(sibling)
            lock.release()

    def _export(self, sibling: Path) -> None:
        rings = MergedReader()
        rings.discover_rings(sibling, _clock.now())
        for rejection in rings.rejected:
            log.warning("ring rejected: %s", rejection)
        if not rings.count_writers():
            return
        service = ServiceResource(sibling, self._shared)
        try:
            pipeline = self._make_pipeline(service.resource, rings)
            pipeline.run_cycle(_clock.now(), final=True)
            pipeline.close(SEND_TIMEOUT_S)
        finally:
            service.release()
        rings.close(remove=True)
