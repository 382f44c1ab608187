"""The processes of one server: a process, and the processes that it forks or spawns."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import sys
import uuid

_PID = struct.Struct("<q")
_IDS_SIZE = 24
"""Bytes of a trace id and a span id."""


class ProcessFamily:
    """The processes of one server, as a spawned process knows them from its environment.

    `start_ids`: trace, span and parent span id of the start of the server. `instance_id`: the `service.instance.id`
    of all; empty = the sidecar has one already. `folder_token`: the name
    of the folder for the rings of all; empty = it is exported as a setting.
    """

    folder_token, is_spawned = "", True

    def __init__(self, start_ids: tuple[bytes, bytes, bytes], instance_id: str = "") -> None:
        self.start_ids, self.instance_id = start_ids, instance_id

    @classmethod
    def from_environment(cls, exported: str) -> ProcessFamily | None:
        """Returns the family of a process that multiprocessing has spawned; None for any other process.

        `exported`: by the process that has spawned this one, as in the property `exported`.
        """
        if not _is_spawned():
            return None
        try:
            values = bytes.fromhex(exported)
        except ValueError:
            return None
        if len(values) not in (_IDS_SIZE, _IDS_SIZE + 16):
            return None
        instance = values[_IDS_SIZE:]
        return cls(
            (values[:16], values[16:_IDS_SIZE], bytes(8)), str(uuid.UUID(bytes=instance)) if instance else ""
        )

    @property
    def exported(self) -> str:
        """The start ids and the instance id in hex, for the environment of spawned processes."""
        trace_id, span_id, _ = self.start_ids
        instance = uuid.UUID(self.instance_id).hex if self.instance_id else ""
        return (trace_id + span_id).hex() + instance

    @property
    def is_shared(self) -> bool:
        """Whether this process runs as the user of the others. Another user cannot read their rings."""
        return True

    def claim_start(self, joins: bool = True) -> bool:
        """Returns whether this process may report the start of the server, as a part of it. `joins`: one reader reads all."""
        return joins


_SPAWNED = (
    "--multiprocessing-fork", "multiprocessing.forkserver", "_bentoml_impl.worker.", "ray/_private/workers/default_worker.py",
)  # fmt: skip
"""In the arguments of interpreters that multiprocessing starts, or a library for its workers."""


def _is_spawned() -> bool:
    """Returns whether a server has started this interpreter, for a worker or for a program that forks them."""
    arguments = " ".join(sys.orig_argv)
    return any(part in arguments for part in _SPAWNED)


class ForkFamily(ProcessFamily):
    """Created before a process starts another one for the first time, so that forked children inherit it."""

    is_spawned = False

    def __init__(self, start_ids: tuple[bytes, bytes, bytes]) -> None:
        super().__init__(start_ids, str(uuid.uuid4()))
        self.folder_token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._founder, self._user = os.getpid(), os.getuid()
        self._claim = mmap.mmap(-1, mmap.PAGESIZE)  # anonymous memory that all of them share

    @property
    def is_shared(self) -> bool:
        return os.getuid() == self._user

    def claim_start(self, joins: bool = True) -> bool:
        """Returns whether this process may report the start of the server, as a part of it.

        The first one to record claims it. Others join it while that process lives. Later ones, such as a process
        for each job, are no start of a server. `joins`: one reader reads the rings of all.
        """
        if not self.is_shared:
            return False
        own, (claimer,) = os.getpid(), _PID.unpack_from(self._claim)
        if not claimer or own == self._founder:
            _PID.pack_into(self._claim, 0, own)
            return True
        return claimer == own or (joins and _is_alive(claimer))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True
