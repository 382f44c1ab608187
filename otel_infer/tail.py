"""The slow requests, and what of their time went where: what a diagnosis compares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.intervals import take_out
from otel_infer.records import Pause, RequestRecord

TAIL = 0.1
"""Share of the requests that are the slow ones."""
MS = 1_000_000
_SERVERS = (*semconv.STAGES, *semconv.STAGES_INSIDE)
"""Stages that are not the application's own."""


class Tail(NamedTuple):
    """Requests that stand for what people complain about, and what their time is compared with."""

    records: list[RequestRecord]
    whole: float

    def share(self, *causes: str) -> float:
        """Of that part of their lives that the complaint is about."""
        return self.total(*causes) / self.whole if self.whole else 0.0

    def weight(self, *causes: str) -> float:
        """Of their whole lives, so that one complaint can be compared with another."""
        return self.total(*causes) / self.lives

    @property
    def lives(self) -> int:
        """ns from arrival to end, of all of them."""
        return max(sum(record.duration_ns for record in self.records), 1)

    def total(self, *causes: str) -> float:
        """ns of all of them."""
        return float(sum(spent(record, *causes) for record in self.records))

    def each(self, *causes: str) -> float:
        """ms for one of them, on average."""
        return self.total(*causes) / max(len(self.records), 1) / MS


def slowest(
    served: list[RequestRecord],
    key: Callable[[RequestRecord], int],
    whole: Callable[[RequestRecord], int] = lambda r: r.duration_ns,
) -> Tail:
    """The slowest tenth, three at least."""
    many = max(round(len(served) * TAIL), 3)
    records = sorted(served, key=key)[-many:]
    return Tail(records, float(sum(map(whole, records))))


def spent(record: RequestRecord, *causes: str) -> int:
    """ns that its blame gives to these."""
    return sum(record.blame.causes.get(cause, 0) for cause in causes) if record.blame is not None else 0


def ttft(record: RequestRecord) -> int:
    """To the first token, or to the end of one that never had any."""
    return record.ttft_ns or record.duration_ns


def typical_gap(served: list[RequestRecord]) -> float:
    """ms between two tokens as most requests see it; 0 where nothing was streamed."""
    usual = [float(np.median(record.gaps_ns())) for record in served if record.summary.gaps]
    return float(np.median(usual)) / MS if usual else 0.0


def application_before_token(record: RequestRecord) -> int:
    """What stages of the application's own took of its time to the first token, as far as they were blamed; ns."""
    until = record.arrived_at + ttft(record)
    free, after = [(until, max(record.ended_at, until))], 0
    # As blame has it: what a stage of the server's own covers is that one's.
    for stage in sorted(record.stages, key=lambda one: one.name not in _SERVERS):
        free, taken = take_out(free, stage.started_at, stage.ended_at)
        after += taken * (stage.name not in _SERVERS)
    return max(spent(record, semconv.CAUSE_APPLICATION) - after, 0)


# ── the event loop ───────────────────────────────────────────────────────────────────────────────────────────────


def late_before_token(record: RequestRecord) -> int:
    """What of its time to the first token the event loop was late, and was blamed for it; ns."""
    before = sum(_late(record, record.arrived_at, record.arrived_at + ttft(record)))
    return min(before, spent(record, semconv.CAUSE_EVENT_LOOP))


def late_while_streaming(record: RequestRecord) -> list[int]:
    """How long its reader got nothing since the event loop was late, each time, ns; the engine went on meanwhile."""
    if not record.first_token_at or not record.last_token_at:
        return []
    return _late(record, record.first_token_at, record.last_token_at)


def _late(record: RequestRecord, begin: int, end: int) -> list[int]:
    """Without what held up the whole process."""
    lengths = []
    for pause in record.loop_pauses:
        since, until = max(pause.started_at, begin), min(pause.ended_at, end)
        if since < until:
            lengths.append(until - since - _covered(record.pauses, since, until))
    return [length for length in lengths if length > 0]


def _covered(pauses: Sequence[Pause], begin: int, end: int) -> int:
    covered, at = 0, begin
    for pause in sorted(pauses):
        since, until = max(pause.started_at, at), min(pause.ended_at, end)
        if since < until:
            covered += until - since
            at = until
    return covered
