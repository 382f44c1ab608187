"""What dead servers left beside this one: told under their own names, then removed.

Each in a pipeline of its own and all in a thread of their own, so that nothing of theirs is mixed with what lives, and a destination
that does not answer keeps nobody from reading.
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
    """Takes over the folders beside `folder` that nobody holds. `resource`: this server's, of which the dead share what is not
    about the service. `make_pipeline`: with senders that run."""

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
            except Exception:  # one server's must not cost all others
                log.exception("what is left of a dead server in %s was not told whole", sibling)
            directory.remove_server_folder(sibling)
            lock.release()

    def _export(self, sibling: Path) -> None:
        rings = MergedReader()
        rings.discover_rings(sibling, _clock.now())
        for refusal in rings.rejected:
            log.warning("ring refused: %s", refusal)
        if not rings.count_writers():
            return
        pipeline = self._make_pipeline(ServiceResource(sibling, self._shared).resource, rings)
        pipeline.run_cycle(_clock.now(), final=True)
        pipeline.close(SEND_TIMEOUT_S)
        rings.close(remove=True)
