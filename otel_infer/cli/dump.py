"""Write a tape of the last two minutes of a running server: the events of every step and request.

otel-infer dump                                   the only server that runs here
otel-infer dump --server 4711 --out slow.tape     the server with this process, if several run
otel-infer dump --rings /rings                    a server in another container, by the folder that both mount
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

from otel_infer.cli import running_server
from otel_infer.cli.errors import CommandError
from otel_infer.config.private_files import open_private_file
from otel_infer.sidecar.recording import dump_request, file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dump`."""
    parser.add_argument(
        "--out", metavar="FILE", help="the tape to write (default: otel_infer-TIME.tape in this folder)"
    )
    running_server.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Requests a tape from the sidecar, waits for it and copies it.

    Returns 2 if the tape cannot be written. Raises `CommandError`.
    """
    out = Path(arguments.out or f"otel_infer-{datetime.now():%Y%m%d-%H%M%S}.tape")
    try:
        folder = running_server.find_server_folder(arguments.rings, arguments.server)
        if not os.access(out.parent, os.W_OK | os.X_OK) or out.is_dir():
            raise CommandError(f"{out}: cannot be written")
        with running_server.open_dump(folder) as tape:
            _copy_recording(tape, out)
        header = file.read_header(out)
    except (dump_request.DumpFailed, file.InvalidRecording, OSError) as reason:
        print(f"otel-infer dump: {reason}", file=sys.stderr)
        return 2
    print(f"{out}: {header.get('events', 0)} events of the last {header.get('seconds', 0.0):.0f} s")
    if header.get("dropped_requests"):
        print(f"{header['dropped_requests']} in-flight requests exceeded the memory limit and were dropped")
    print(f"next: otel-infer explain {out}")
    return 0


def _copy_recording(tape: Path, out: Path) -> None:
    """Copies the tape to `out`, readable by its owner only."""
    with (
        open(tape, "rb") as source,
        open(open_private_file(out, os.O_WRONLY | os.O_TRUNC), "wb") as target,
    ):
        shutil.copyfileobj(source, target)
