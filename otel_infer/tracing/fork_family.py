"""What a process and the processes that it forks share: they are one server."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import uuid

_PID = struct.Struct("<q")


class ForkFamily:
    """Created before a process forks for the first time, so that its children inherit it.

    `start_ids`: trace, span and parent span id of the start of the server. `folder_token`: the name of the folder
    for the rings of all. `instance_id`: the `service.instance.id` of all.
    """

    def __init__(self, start_ids: tuple[bytes, bytes, bytes]) -> None:
        self.start_ids = start_ids
        self.folder_token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.instance_id = str(uuid.uuid4())
        self._founder, self._user = os.getpid(), os.getuid()
        self._claim = mmap.mmap(-1, mmap.PAGESIZE)  # anonymous memory that all of them share

    @property
    def is_shared(self) -> bool:
        """Whether this process runs as the user of the others. Another user cannot read their rings."""
        return os.getuid() == self._user

    def claim_start(self, joins: bool = True) -> bool:
        """Returns whether this process may report the start of the server.

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
