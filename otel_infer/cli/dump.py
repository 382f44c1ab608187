"""Write a tape of the last two minutes of a running server: what its sidecar holds of every step and request.

otel-infer dump                                   of the one server that runs here
otel-infer dump --server 4711 --out slow.tape     of several, the one with this process
otel-infer dump --rings /rings                    of a sidecar in another container, by the folder that both mount
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
import sys
from datetime import datetime
from pathlib import Path

from otel_infer.cli import running_server
from otel_infer.sidecar.recording import dump_request, file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dump`."""
    parser.add_argument("--out", metavar="FILE", help="where to (otel_infer-TIME.tape, here)")
    running_server.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, waits, fetches; 2 where there is nobody to ask."""
    out = Path(arguments.out or f"otel_infer-{datetime.now():%Y%m%d-%H%M%S}.tape")
    try:
        folder = running_server.find_server_folder(arguments.rings, arguments.server)
        if not os.access(out.parent, os.W_OK | os.X_OK) or out.is_dir():
            raise dump_request.DumpFailed(f"{out}: cannot be written")
        with running_server.open_dump(folder) as told:
            _copy_recording(told, out)
        about = file.read_header(out)
    except (dump_request.DumpFailed, file.InvalidRecording, OSError) as reason:
        print(f"otel-infer dump: {reason}", file=sys.stderr)
        return 2
    print(f"{out}: {about.get('facts', 0)} facts of the last {about.get('seconds', 0.0):.0f} s")
    if about.get("requests_left_out"):
        print(f"{about['requests_left_out']} requests in flight were too much to remember, and are not in it")
    print(f"next: otel-infer explain {out}")
    return 0


def _copy_recording(told: Path, out: Path) -> None:
    """Follows no link that somebody may have put there, and lets nobody else read what servers did."""
    with (
        open(os.open(told, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source,
        open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as target,
    ):
        if stat.S_ISREG(os.fstat(target.fileno()).st_mode):  # it may have been there
            with contextlib.suppress(OSError):  # and be somebody else's, who lets us write it
                os.fchmod(target.fileno(), 0o600)
        shutil.copyfileobj(source, target)
