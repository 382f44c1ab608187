"""Finds the rings of servers that have ended, for a sidecar that recovers them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from otel_infer.config import private_files
from otel_infer.ringbuffer import directory, layout
from otel_infer.ringbuffer.directory import FileLock
from otel_infer.ringbuffer.sidecar_claim import is_starting

ABANDONED_S = 3600.0
"""Age of a folder without rings after which it is removed."""


def claim_dead_servers(folder: Path) -> Iterator[tuple[Path, FileLock]]:
    """Yields the folders beside `folder` whose server and sidecar have ended, each with its sidecar lock.

    The lock is held from then on. Beside a folder that the operator named there are none, because its
    neighbours are not created by otel_infer.
    """
    if folder.parent.name != directory.user_folder_name():
        return
    try:
        siblings = [name for name in private_files.list_names(folder.parent) if name != folder.name]
    except OSError:
        return
    for sibling in map(folder.parent.joinpath, siblings):
        lock = FileLock(sibling / directory.SIDECAR_LOCK)
        try:
            if not _is_abandoned(sibling) or not lock.acquire():
                continue
        except OSError:
            continue
        yield sibling, lock


def holds_dead_server(folder: Path) -> bool:
    """Returns whether a folder holds the rings of a server that has ended, and no sidecar reads them."""
    try:
        rings = _list_complete_rings(folder)
        return (
            bool(rings)
            and not _is_in_use(folder, rings)
            and not directory.is_held(folder / directory.SIDECAR_LOCK)
        )
    except OSError:
        return False


def list_dead_writers(folder: Path) -> list[str]:
    """Returns the name prefixes (PID-TOKEN) of complete rings whose writers have ended."""
    try:
        rings = _list_complete_rings(folder)
    except OSError:
        return []
    return [ring.stem for ring in rings if not directory.is_held(ring)]


def _is_abandoned(folder: Path) -> bool:
    rings = _list_complete_rings(folder)
    if _is_in_use(folder, rings):
        return False
    status = private_files.read_status(folder)
    return bool(rings) or (status is not None and time.time() - status.st_mtime > ABANDONED_S)


def _list_complete_rings(folder: Path) -> list[Path]:
    paths = [folder / name for name in private_files.list_names(folder)]
    return [path for path in paths if path.suffix == layout.SUFFIX_REQUESTS and _is_written(path)]


def _is_in_use(folder: Path, rings: list[Path]) -> bool:
    """Returns whether a server or a starting sidecar uses the folder. A living process holds a lock."""
    return (
        is_starting(folder)
        or directory.is_held(folder / directory.OWNER_LOCK)
        or any(directory.is_held(ring) for ring in rings)
    )


def _is_written(ring: Path) -> bool:
    """Returns whether the ring is complete.

    Its writer takes the lock before it completes the ring. An incomplete ring without a lock may have a
    living writer.
    """
    with open(private_files.open_beside_rings(ring, os.O_RDONLY), "rb") as file:
        return file.read(len(layout.MAGIC_BYTES)) == layout.MAGIC_BYTES
