"""Read the rings of servers in another container: `otel-infer sidecar --rings /rings`.

DIR is a folder on a memory volume that both containers mount. The server's OTEL_INFER_RINGS names it too.
Runs until SIGTERM or SIGINT. Requests that a dead server left in flight are exported as errors
(`process_died`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from otel_infer.config import environment
from otel_infer.config.resource import detect_resource
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.arena import RingUnavailable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `sidecar`."""
    parser.add_argument("--rings", metavar="DIR", required=True, help="the folder that the server writes to")
    parser.add_argument("--show", action="store_true", help="print a line for each finished request")


def run(arguments: argparse.Namespace) -> int:
    """Reads the rings in the folder until a signal.

    Returns 2 if the folder or its lock is not available, else 0.
    """
    from otel_infer.sidecar.log_file import configure_logging
    from otel_infer.sidecar.main import Sidecar
    from otel_infer.sidecar.malloc import use_single_arena

    settings = environment.from_env(environment.child_environment(enabled="on"))
    if settings.log:
        configure_logging(settings.log)
    use_single_arena()
    try:
        folder = directory.resolve_rings_folder(Path(arguments.rings))
        lock = directory.FileLock(folder / directory.SIDECAR_LOCK)
        taken = lock.acquire()
    except (RingUnavailable, OSError) as reason:
        print(f"otel-infer sidecar: {reason}", file=sys.stderr)
        return 2
    if not taken:
        print(f"otel-infer sidecar: {folder} already has a sidecar", file=sys.stderr)
        return 2
    sidecar = Sidecar(lock, settings, detect_resource(), show=arguments.show, stays=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sidecar.stop())
    sidecar.run()
    return 0
