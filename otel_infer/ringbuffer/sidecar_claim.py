"""The right to start the sidecar of a server: one process of the server has it at a time.

It is a lock of `flock` on the file `starting`. Unlike a lock of `fcntl.lockf`, it belongs to the open file, so
the sidecar inherits it. The kernel releases it when the process that holds it is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from otel_infer.config import private_files

STARTING_FILE = "starting"
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that concern no file: this process, or the machine, has run out of a resource."""


def claim_sidecar_start(folder: Path) -> int | None:
    """Returns a descriptor that holds the right to start the sidecar; None while another process holds it.

    The descriptor is passed on to the sidecar, which closes it when it has its own lock. −1: no process can
    hold the right here.
    """
    try:
        descriptor = private_files.open_beside_rings(folder / STARTING_FILE, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        return None if error.errno in RESOURCE_ERRNOS else -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_starting(folder: Path) -> bool:
    """Returns whether a sidecar that any process started here may still take its lock."""
    try:
        descriptor = private_files.open_beside_rings(folder / STARTING_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
