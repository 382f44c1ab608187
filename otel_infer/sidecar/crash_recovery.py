"""Exports what dead servers left beside this one, under their own names, then removes their folders.

Only rings that were recorded for the destination of this server are exported. The requests in others are counted
as lost (`other_destination`).

Each dead server has its own pipeline, so that its data is never mixed with a living server's. All of them run
in a separate thread, so that a destination that does not respond blocks no reading.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from otel_infer import _clock
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import dead_servers, directory
from otel_infer.ringbuffer.events import Value
from otel_infer.ringbuffer.ledger import open_ledger
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.destination import OWN_ATTRIBUTES, Destination, has_destination
from otel_infer.sidecar.pipeline import Pipeline
from otel_infer.sidecar.service_resource import ServiceResource

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 5.0


class CrashRecovery(threading.Thread):
    """Thread that takes over the folders beside `folder` that no process holds.

    `resource`: this server's; a dead server with this destination has the same attributes, except its own name
    and instance id.
    `make_pipeline` returns a pipeline with running senders. `rings` counts the requests that are not exported.
    """

    def __init__(
        self,
        folder: Path,
        resource: Mapping[str, Value],
        make_pipeline: Callable[[dict[str, Value], MergedReader], Pipeline],
        destination: Destination,
        rings: MergedReader,
    ) -> None:
        super().__init__(name="otel_infer-recovery", daemon=True)
        self._folder, self._make_pipeline = folder, make_pipeline
        self._destination, self._rings = destination, rings
        self._shared = {key: value for key, value in resource.items() if key not in OWN_ATTRIBUTES}

    def run(self) -> None:
        for sibling, lock in dead_servers.claim_dead_servers(self._folder):
            try:
                if self._destination.is_recorded(sibling):
                    self._export(sibling)
                else:
                    discard_dead_rings(sibling, self._rings)
            except Exception:  # a failure with one server must not affect the others
                log.exception(
                    "rings of a dead server in %s were not exported completely; they are removed", sibling
                )
            directory.remove_server_folder(sibling)
            lock.release()

    def _export(self, sibling: Path) -> None:
        rings = MergedReader(open_ledger(sibling))
        rings.discover_rings(sibling, _clock.now())
        for rejection in rings.rejected:
            log.warning("ring rejected: %s", rejection)
        if not rings.processes:
            return
        service = ServiceResource(sibling, self._shared)
        try:
            pipeline = self._make_pipeline(service.resource, rings)
            pipeline.run_cycle(_clock.now(), final=True)
            pipeline.close(SEND_TIMEOUT_S)
        finally:
            service.release()
        rings.close(remove=True)


def make_recovery(
    folder: Path,
    settings: Config,
    resource: Mapping[str, Value],
    make_pipeline: Callable[..., Pipeline],
    destination: Destination,
    rings: MergedReader,
) -> CrashRecovery | None:
    """Returns the recovery of dead servers; None if nothing is exported.

    Dead servers are then left to a sidecar that exports. The recovery uses no tape, port or console output of
    this server. `make_pipeline`: of settings, resource and rings, with `show`.
    """
    if not (settings.exports_spans or settings.exports_metrics):
        return None
    without_local = dataclasses.replace(
        settings, tape="", metrics_port="", gpu_metrics=False, console=False, request_log=""
    )
    return CrashRecovery(
        folder,
        resource,
        lambda server_resource, dead: make_pipeline(without_local, server_resource, dead, show=False),
        destination,
        rings,
    )


def take_over_rings(folder: Path, destination: Destination, rings: MergedReader) -> None:
    """Records the destination of a sidecar that begins to read this folder.

    If the folder was read for another destination, the rings of dead writers are discarded.
    """
    if destination.is_recorded(folder):
        return
    if has_destination(folder):
        discard_dead_rings(folder, rings)
        rings.ledger.reset()
    destination.record(folder)


def discard_dead_rings(folder: Path, counting: MergedReader) -> None:
    """Removes the rings of dead writers; `counting` counts the requests that were not exported yet."""
    rings = MergedReader()
    for prefix in dead_servers.list_dead_writers(folder):
        rings.discover_rings(folder, _clock.now(), prefix)
    if rings.processes:
        unexported = Pipeline(Config(), rings, [], None, {}, None, 0)
        unexported.run_cycle(_clock.now(), final=True)
        counting.count_discarded(unexported.requests)
        log.warning(
            "%d requests in rings of a dead server were discarded, because it had another destination",
            unexported.requests,
        )
    rings.close(remove=True)
