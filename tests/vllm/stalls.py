"""Holds up a step of a server from outside: the test's side of `stalling`."""

from __future__ import annotations

import json
from typing import Any

from tests.support.served import Server
from tests.support.toy_server import until


def stall(server: Server, kind: str, length_ms: int, members: int = 1) -> None:
    """The next step of this kind, with so many members at least, takes so much longer, if the server's scheduler is one of
    `stalling`."""
    unseen = server.log.with_suffix(".new")
    unseen.write_text(f"{kind} {length_ms} {members}")
    unseen.rename(server.log.with_suffix(".stall"))


def stalling(server: Server) -> None:
    """Returns while that step is held up."""
    until(server.log.with_suffix(".stalling").exists)


def stalled(server: Server) -> dict[str, Any]:
    """Which step was held up, once it is over."""
    path = server.log.with_suffix(".done")
    until(path.exists)
    done: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return done
