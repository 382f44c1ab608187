"""Determines whether a server hangs: requests are in flight, and no step of an engine ends for a minute.

Requests count that an engine has, or that a thread works for. Without an engine, a server hangs if several such threads
do not return for a minute, and no request ends meanwhile: a single one may just take long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer.sidecar.probes.stalls.conditions import ProcessConditions

HUNG_NS = 60_000_000_000
CHECK_INTERVAL_NS = 5_000_000_000
MIN_STUCK_THREADS = 2


class Hang(NamedTuple):
    """A server that hangs since `since` (monotonic ns), with so many requests in flight."""

    since: int
    requests: int


def find_hang(processes: Sequence[ProcessConditions], now: int) -> Hang | None:
    """Returns since when a server hangs; None if it does not."""
    begun = sorted(at for process in processes for at in process.list_waiting_since())
    has_engines = any(process.process.engines for process in processes)
    progress_at = max(
        [process.last_step_at if has_engines else process.last_end_at for process in processes], default=0
    )
    stuck = [at for at in begun if now - at >= HUNG_NS]
    if len(stuck) < (1 if has_engines else MIN_STUCK_THREADS) or now - progress_at < HUNG_NS:
        return None
    return Hang(max(progress_at, stuck[0]), len(begun))
