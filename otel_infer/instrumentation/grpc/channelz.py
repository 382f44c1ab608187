"""Reads what gRPC's core counts of a server: channelz, the statistics that are on unless `grpc.enable_channelz` is 0.

A query takes 0.1 to 0.2 ms, because the core writes JSON. See `accept_wait`, which limits their number.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NamedTuple

_MODULE = "grpc._cython.cygrpc"
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


class CallCounts(NamedTuple):
    """The calls of a server since its start.

    `started`: the core has received their headers. `over`: they have ended, also while they waited to be accepted.
    `last_started_at`: when the last of them started, unix ns. Its resolution is 1 ms. The core is off by a constant
    number of seconds, which differs by process.
    """

    started: int
    over: int
    last_started_at: int


def read_counts(server_id: int) -> CallCounts | None:
    """Returns the counts of a server; None if the server is gone, had no call, or channelz has another form."""
    try:
        data = json.loads(_get("channelz_get_server")(server_id))["server"]["data"]
        over = int(data.get("callsSucceeded", 0)) + int(data.get("callsFailed", 0))
        started_at = _parse_time(data["lastCallStartedTimestamp"])
        return CallCounts(int(data["callsStarted"]), over, started_at)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def list_servers(first_id: int = 0) -> list[int]:
    """Returns the ids of the servers of this process from `first_id` on, at most 100; none where channelz is off."""
    try:
        servers = json.loads(_get("channelz_get_servers")(first_id)).get("server", ())
        return [int(server["ref"]["serverId"]) for server in servers]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _get(name: str) -> Any:
    return getattr(sys.modules.get(_MODULE), name)


def _parse_time(text: str) -> int:
    """Returns the unix ns of a timestamp of JSON's form of protobuf, to 1 µs."""
    since = datetime.fromisoformat(text) - _EPOCH
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
