"""Selects a running server and reads a temporary tape of its last two minutes, for the commands."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from otel_infer.cli.errors import CommandError
from otel_infer.config import environment
from otel_infer.config.redaction import replace_controls
from otel_infer.ringbuffer import directory
from otel_infer.sidecar.recording import dump_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select a running server."""
    parser.add_argument(
        "--rings",
        metavar="DIR",
        help="the folder of the server's rings, if it has set one (OTEL_INFER_RINGS); as root, for servers of another user: "
        "/dev/shm/otel_infer-UID",
    )
    parser.add_argument("--server", metavar="PID", help="the server with this process, if several run")


def find_server_folder(rings: str | None, server: str | None) -> Path:
    """Returns the folder of the selected server; raises `CommandError` unless exactly one matches."""
    configured = rings or environment.from_env().rings
    base = Path(configured) if configured else directory.BASE
    servers = {folder: directory.list_writer_pids(folder) for folder in directory.find_served_folders(base)}
    if server is not None:
        servers = {
            folder: pids
            for folder, pids in servers.items()
            if server in map(str, pids) or server == folder.name.partition("-")[0]
        }
    if len(servers) == 1:
        return next(iter(servers))
    if not servers:
        of_server = f" of a server with process {server}" if server is not None else ""
        raise CommandError(
            f"no sidecar{of_server} is running below {base}; it starts with the first request of an instrumented "
            "server, and in-process mode has none"
        )
    lines = [
        f"  --server {_server_label(folder, pids)}   {_read_command_line(pids)}"
        for folder, pids in servers.items()
    ]
    raise CommandError("several servers run here, select one:\n" + "\n".join(lines))


@contextlib.contextmanager
def open_dump(folder: Path) -> Iterator[Path]:
    """Yields a tape of the events that the sidecar of this folder holds; raises `DumpFailed`.

    The tape is removed when the block ends.
    """
    with dump_request.open_tape(dump_request.request_dump(folder)) as tape:
        yield tape


def _server_label(folder: Path, pids: Sequence[int]) -> str:
    return str(pids[0]) if pids else folder.name.partition("-")[0]


def _read_command_line(pids: Sequence[int]) -> str:
    """Returns the command line of the first process, at most 100 characters; empty if it cannot be read."""
    try:
        command = Path(f"/proc/{pids[0]}/cmdline").read_bytes() if pids else b""
    except OSError:
        command = b""
    return replace_controls(command.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:100])
