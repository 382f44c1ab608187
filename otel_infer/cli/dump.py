"""Write a tape of the last two minutes of a running server: what its sidecar holds of every step and request.

otel-infer dump                                   of the one server that runs here
otel-infer dump --server 4711 --out slow.tape     of several, the one with this process
otel-infer dump --rings /rings                    of a sidecar in another container, by the folder that both mount
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from otel_infer import config, tape
from otel_infer.flight import asking
from otel_infer.ring import place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dump`."""
    parser.add_argument("--out", metavar="FILE", help="where to (otel_infer-TIME.tape, here)")
    parser.add_argument(
        "--rings",
        metavar="DIR",
        help="the folder that the server writes to, if it has one (OTEL_INFER_RINGS)",
    )
    parser.add_argument("--server", metavar="PID", help="of several servers, the one with this process")


def run(arguments: argparse.Namespace) -> int:
    """Asks, waits, fetches; 2 where there is nobody to ask."""
    out = Path(arguments.out or f"otel_infer-{datetime.now():%Y%m%d-%H%M%S}.tape")
    given = arguments.rings or config.from_env().rings
    looked_in = Path(given) if given else place.BASE
    try:
        folder = _chosen(place.served(looked_in), looked_in, arguments.server)
        if not os.access(out.parent, os.W_OK | os.X_OK) or out.is_dir():
            raise asking.NoTape(f"{out}: cannot be written")
        told = asking.ask(folder)
        try:
            shutil.copyfile(told, out)
        finally:
            told.unlink(missing_ok=True)
        about = tape.head(out)
    except (asking.NoTape, tape.BadTape, OSError) as reason:
        print(f"otel-infer dump: {reason}", file=sys.stderr)
        return 2
    print(f"{out}: {about.get('facts', 0)} facts of the last {about.get('seconds', 0.0):.0f} s")
    if about.get("requests_left_out"):
        print(f"{about['requests_left_out']} requests in flight were too much to remember, and are not in it")
    print(f"next: otel-infer explain {out}")
    return 0


def _chosen(folders: Sequence[Path], looked_in: Path, server: str | None) -> Path:
    """The folder of the server that is meant; raises `NoTape` unless there is exactly one."""
    found = {folder: place.writers(folder) for folder in folders}
    if server is not None:
        found = {
            folder: pids
            for folder, pids in found.items()
            if server in map(str, pids) or server == folder.name.partition("-")[0]
        }
    if len(found) == 1:
        return next(iter(found))
    if not found:
        whose = f" of a server with process {server}" if server is not None else ""
        raise asking.NoTape(
            f"no sidecar{whose} is at work below {looked_in}; it starts with the first request of an instrumented "
            "server, and there is none in in-process mode"
        )
    lines = [f"  --server {_name(folder, pids)}   {_command(pids)}" for folder, pids in found.items()]
    raise asking.NoTape("several servers run here, choose one:\n" + "\n".join(lines))


def _name(folder: Path, pids: Sequence[int]) -> str:
    return str(pids[0]) if pids else folder.name.partition("-")[0]


def _command(pids: Sequence[int]) -> str:
    """What runs under the first of these, as far as can be seen from here."""
    try:
        said = Path(f"/proc/{pids[0]}/cmdline").read_bytes() if pids else b""
    except OSError:
        said = b""
    return said.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:100]
