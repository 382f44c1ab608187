"""The slow requests, and what of their time went where: what a diagnosis compares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.intervals import outside, take_out
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

TAIL = 0.1
"""Share of the requests that are the slow ones."""
MS = 1_000_000
ENOUGH = 2000
"""Requests, evenly spread, that a median is taken of."""
_SERVERS = (*semconv.STAGES, *semconv.STAGES_INSIDE)
"""Stages that are not the application's own."""


def spent(record: RequestRecord, *causes: str) -> int:
    """ns that its blame gives to these."""
    return sum(record.blame.causes.get(cause, 0) for cause in causes) if record.blame is not None else 0


class Tail(NamedTuple):
    """Requests that stand for what people complain about, what their time is compared with, and what counts of their blame."""

    records: list[RequestRecord]
    whole: float
    of: Callable[..., int]

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
        return float(sum(self.of(record, *causes) for record in self.records))

    def each(self, *causes: str) -> float:
        """ms for one of them, on average."""
        return self.total(*causes) / max(len(self.records), 1) / MS


def slowest(
    served: list[RequestRecord],
    key: Callable[[RequestRecord], int],
    whole: Callable[[RequestRecord], int] = lambda r: r.duration_ns,
    of: Callable[..., int] = spent,
) -> Tail:
    """The slowest tenth, three at least."""
    many = max(round(len(served) * TAIL), 3)
    records = sorted(served, key=key)[-many:]
    return Tail(records, float(sum(map(whole, records))), of)


def spent_streaming(record: RequestRecord, *causes: str) -> int:
    """ns that its blame gives to these between its first token and its last."""
    return sum(record.blame.streaming.get(cause, 0) for cause in causes) if record.blame is not None else 0


def spent_before(record: RequestRecord, *causes: str) -> int:
    """The rest of them, ns."""
    return spent(record, *causes) - spent_streaming(record, *causes)


def streamed(record: RequestRecord) -> int:
    """From its first token to its last, or to when it was given up in the middle; ns."""
    return record.summary.gaps_total + record.left_waiting_ns


def longest_gap(record: RequestRecord) -> int:
    """Between two tokens, or from the last one to when it was given up; ns."""
    return max(record.summary.gap_max, record.left_waiting_ns)


def waited_for_reader(record: RequestRecord) -> int:
    """What of its egress its reader did not take what there was; ns, at most: of a wait it is not known when it was."""
    stage = record.stage(semconv.SPAN_POSTPROCESS)
    said = stage.attributes.get(semconv.SEND_WAIT, 0.0) if stage is not None else 0.0
    waited = int(said * 1e9) if isinstance(said, (int, float)) else 0
    return min(waited, spent(record, semconv.CAUSE_EGRESS))


def answering(served: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that had a token, or were to have one: of an embedding the prompt is all there is to do."""
    return [record for record in served if record.first_token_at or record.outcome != events.OK]


def ttft(record: RequestRecord) -> int:
    """To the first token, or to the end of one that never had any."""
    return record.ttft_ns or record.duration_ns


def typical_gap(served: list[RequestRecord]) -> float:
    """ms between two tokens as most requests see it, of so many of them; 0 where nothing was streamed."""
    some = served[:: max(len(served) // ENOUGH, 1)]
    usual = [float(np.median(record.gaps_ns())) for record in some if record.summary.gaps]
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
            lengths.append(outside(record.pauses, since, until))
    return [length for length in lengths if length > 0]
