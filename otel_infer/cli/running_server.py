"""The window of a running server, for commands: which server is meant, and the tape of it, for as long as it is read."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from otel_infer.config import environment
from otel_infer.ringbuffer import directory
from otel_infer.sidecar.recording import dump_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which server is meant."""
    parser.add_argument(
        "--rings",
        metavar="DIR",
        help="the folder that the server writes to, if it has one (OTEL_INFER_RINGS); as root, of another user's servers: "
        "/dev/shm/otel_infer-UID",
    )
    parser.add_argument("--server", metavar="PID", help="of several servers, the one with this process")


def find_server_folder(rings: str | None, server: str | None) -> Path:
    """The folder of the server that is meant; raises `NoTape` unless there is exactly one."""
    given = rings or environment.from_env().rings
    looked_in = Path(given) if given else directory.BASE
    found = {
        folder: directory.list_writer_pids(folder) for folder in directory.find_served_folders(looked_in)
    }
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
        raise dump_request.DumpFailed(
            f"no sidecar{whose} is at work below {looked_in}; it starts with the first request of an instrumented "
            "server, and there is none in in-process mode"
        )
    lines = [
        f"  --server {_server_label(folder, pids)}   {_read_command_line(pids)}"
        for folder, pids in found.items()
    ]
    raise dump_request.DumpFailed("several servers run here, choose one:\n" + "\n".join(lines))


@contextlib.contextmanager
def open_dump(folder: Path) -> Iterator[Path]:
    """A tape of what the sidecar of this folder holds, there until the block ends; raises `NoTape`."""
    told = dump_request.request_dump(folder)
    try:
        yield told
    finally:
        told.unlink(missing_ok=True)


def _server_label(folder: Path, pids: Sequence[int]) -> str:
    return str(pids[0]) if pids else folder.name.partition("-")[0]


def _read_command_line(pids: Sequence[int]) -> str:
    """What runs under the first of these, as far as can be seen from here."""
    try:
        said = Path(f"/proc/{pids[0]}/cmdline").read_bytes() if pids else b""
    except OSError:
        said = b""
    return said.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:100]
