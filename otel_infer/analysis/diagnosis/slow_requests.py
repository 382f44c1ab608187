"""The slow requests, and what of their time went where: what a diagnosis compares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.intervals import subtract_interval, uncovered_length
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

SLOW_SHARE = 0.1
"""Share of the requests that are the slow ones."""
NS_PER_MS = 1_000_000
MEDIAN_SAMPLES = 2000
"""Requests, evenly spread, that a median is taken of."""
_SERVER_STAGES = (*semconv.STAGES, *semconv.NESTED_STAGES)
"""Stages that are not the application's own."""


def time_in(record: RequestRecord, *causes: str) -> int:
    """ns that its blame gives to these."""
    return (
        sum(record.breakdown.causes.get(cause, 0) for cause in causes) if record.breakdown is not None else 0
    )


class SlowRequests(NamedTuple):
    """Requests that stand for what people complain about, what their time is compared with, and what counts of their blame."""

    records: list[RequestRecord]
    reference_ns: float
    measure_time: Callable[..., int]

    def reference_share(self, *causes: str) -> float:
        """Of that part of their lives that the complaint is about."""
        return self.total_ns(*causes) / self.reference_ns if self.reference_ns else 0.0

    def lifetime_share(self, *causes: str) -> float:
        """Of their whole lives, so that one complaint can be compared with another."""
        return self.total_ns(*causes) / self.lifetime_ns

    @property
    def lifetime_ns(self) -> int:
        """ns from arrival to end, of all of them."""
        return max(sum(record.duration_ns for record in self.records), 1)

    def total_ns(self, *causes: str) -> float:
        """ns of all of them."""
        return float(sum(self.measure_time(record, *causes) for record in self.records))

    def mean_ms(self, *causes: str) -> float:
        """ms for one of them, on average."""
        return self.total_ns(*causes) / max(len(self.records), 1) / NS_PER_MS


def select_slowest(
    served: list[RequestRecord],
    key: Callable[[RequestRecord], int],
    whole: Callable[[RequestRecord], int] = lambda r: r.duration_ns,
    of: Callable[..., int] = time_in,
) -> SlowRequests:
    """The slowest tenth, three at least."""
    many = max(round(len(served) * SLOW_SHARE), 3)
    records = sorted(served, key=key)[-many:]
    return SlowRequests(records, float(sum(map(whole, records))), of)


def streaming_time_in(record: RequestRecord, *causes: str) -> int:
    """ns that its blame gives to these between its first token and its last."""
    return (
        sum(record.breakdown.streaming.get(cause, 0) for cause in causes)
        if record.breakdown is not None
        else 0
    )


def nonstreaming_time_in(record: RequestRecord, *causes: str) -> int:
    """The rest of them, ns."""
    return time_in(record, *causes) - streaming_time_in(record, *causes)


def streaming_time(record: RequestRecord) -> int:
    """From its first token to its last, or to when it was given up in the middle; ns."""
    return record.summary.gaps_total + record.final_wait_ns


def longest_gap(record: RequestRecord) -> int:
    """Between two tokens, or from the last one to when it was given up; ns."""
    return max(record.summary.gap_max, record.final_wait_ns)


def client_backpressure(record: RequestRecord) -> int:
    """What of its egress its reader did not take what there was; ns, at most: of a wait it is not known when it was."""
    stage = record.find_stage(semconv.SPAN_POSTPROCESS)
    said = stage.attributes.get(semconv.SEND_WAIT, 0.0) if stage is not None else 0.0
    waited = int(said * 1e9) if isinstance(said, (int, float)) else 0
    return min(waited, time_in(record, semconv.CAUSE_EGRESS))


def filter_generating(served: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that had a token, or were to have one: of an embedding the prompt is all there is to do."""
    return [record for record in served if record.first_token_at or record.outcome != events.OK]


def ttft_or_duration(record: RequestRecord) -> int:
    """To the first token, or to the end of one that never had any."""
    return record.ttft_ns or record.duration_ns


def median_gap_ms(served: list[RequestRecord]) -> float:
    """ms between two tokens as most requests see it, of so many of them; 0 where nothing was streamed."""
    some = served[:: max(len(served) // MEDIAN_SAMPLES, 1)]
    usual = [float(np.median(record.gaps_ns())) for record in some if record.summary.gaps]
    return float(np.median(usual)) / NS_PER_MS if usual else 0.0


def app_time_before_token(record: RequestRecord) -> int:
    """What stages of the application's own took of its time to the first token, as far as they were blamed; ns."""
    until = record.arrived_at + ttft_or_duration(record)
    free, after = [(until, max(record.ended_at, until))], 0
    # As blame has it: what a stage of the server's own covers is that one's.
    for stage in sorted(record.stages, key=lambda one: one.name not in _SERVER_STAGES):
        free, taken = subtract_interval(free, stage.started_at, stage.ended_at)
        after += taken * (stage.name not in _SERVER_STAGES)
    return max(time_in(record, semconv.CAUSE_APPLICATION) - after, 0)


# ── the event loop ───────────────────────────────────────────────────────────────────────────────────────────────


def loop_delay_before_token(record: RequestRecord) -> int:
    """What of its time to the first token the event loop was late, and was blamed for it; ns."""
    before = sum(_loop_delays(record, record.arrived_at, record.arrived_at + ttft_or_duration(record)))
    return min(before, time_in(record, semconv.CAUSE_EVENT_LOOP))


def loop_delays_while_streaming(record: RequestRecord) -> list[int]:
    """How long its reader got nothing since the event loop was late, each time, ns; the engine went on meanwhile."""
    if not record.first_token_at or not record.last_token_at:
        return []
    return _loop_delays(record, record.first_token_at, record.last_token_at)


def _loop_delays(record: RequestRecord, begin: int, end: int) -> list[int]:
    """Without what held up the whole process."""
    lengths = []
    for pause in record.loop_pauses:
        since, until = max(pause.started_at, begin), min(pause.ended_at, end)
        if since < until:
            lengths.append(uncovered_length(record.pauses, since, until))
    return [length for length in lengths if length > 0]
