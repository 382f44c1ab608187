"""Selects the slow requests and measures their time by cause. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.intervals import subtract_interval, uncovered_length
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

SLOW_SHARE = 0.1
"""Share of the requests that count as slow."""
MIN_REQUESTS = 12
"""Requests below which the verdict is `insufficient`."""
NS_PER_MS = 1_000_000
NOTICEABLE_MS = 100
"""Delays below this are too short for a client to notice."""
WAIT_SHARE, MIN_WAIT_MS = 0.4, 20
"""Least share of the time, and least length, of waiting that counts. Other waits are no single complaint."""
MEDIAN_SAMPLES = 2000
"""Evenly spaced requests from which a median is computed."""
_SERVER_STAGES = (*semconv.STAGES, *semconv.NESTED_STAGES)
"""The built-in stages. Others are recorded by the application."""


def sum_cause_time(record: RequestRecord, *causes: str) -> int:
    """Returns the ns of the request that are attributed to these causes."""
    return (
        sum(record.breakdown.causes.get(cause, 0) for cause in causes) if record.breakdown is not None else 0
    )


class SlowRequests(NamedTuple):
    """The slow requests and their time by cause.

    `reference_ns`: the part of their time that the symptom is about, summed over them. `measure_time`: the
    function that returns the ns of some causes in a request.
    """

    records: list[RequestRecord]
    reference_ns: float
    measure_time: Callable[..., int]

    def reference_share(self, *causes: str) -> float:
        """Returns the share of these causes in the time that the symptom is about."""
        return self.total_ns(*causes) / self.reference_ns if self.reference_ns else 0.0

    def lifetime_share(self, *causes: str) -> float:
        """Returns the share of these causes in the requests' whole time, which makes symptoms comparable."""
        return self.total_ns(*causes) / self.lifetime_ns

    @property
    def lifetime_ns(self) -> int:
        """ns from arrival to end, summed over all of them; at least 1."""
        return max(sum(record.duration_ns for record in self.records), 1)

    def total_ns(self, *causes: str) -> float:
        """Returns the ns of these causes, summed over all of them."""
        return float(sum(self.measure_time(record, *causes) for record in self.records))

    def mean_ms(self, *causes: str) -> float:
        """Returns the ms of these causes per request."""
        return self.total_ns(*causes) / max(len(self.records), 1) / NS_PER_MS


def select_slowest(
    served: list[RequestRecord],
    key: Callable[[RequestRecord], int],
    whole: Callable[[RequestRecord], int] = lambda r: r.duration_ns,
    measure: Callable[..., int] = sum_cause_time,
) -> SlowRequests:
    """Returns the slowest tenth, at least three.

    `whole`: the part of a request's time that the symptom is about. `measure`: the ns of a request by cause.
    """
    count = max(round(len(served) * SLOW_SHARE), 3)
    records = sorted(served, key=key)[-count:]
    return SlowRequests(records, float(sum(map(whole, records))), measure)


def is_main_part(length_ns: float, slow: SlowRequests) -> bool:
    """Returns whether a wait of this length, summed over the slow requests, is a complaint by itself."""
    is_long = length_ns / len(slow.records) / NS_PER_MS >= MIN_WAIT_MS
    return is_long and length_ns >= WAIT_SHARE * slow.reference_ns


def find_rows(served: Sequence[RequestRecord], chosen: Sequence[RequestRecord]) -> list[int]:
    """Returns the positions of the chosen requests among those that were served."""
    row_of = {id(record): row for row, record in enumerate(served)}
    return [row_of[id(record)] for record in chosen]


def sum_streaming_cause_time(record: RequestRecord, *causes: str) -> int:
    """Returns the ns between the first and the last token that are attributed to these causes."""
    return (
        sum(record.breakdown.streaming.get(cause, 0) for cause in causes)
        if record.breakdown is not None
        else 0
    )


def sum_nonstreaming_cause_time(record: RequestRecord, *causes: str) -> int:
    """Returns the ns outside streaming that are attributed to these causes."""
    return sum_cause_time(record, *causes) - sum_streaming_cause_time(record, *causes)


def streaming_time(record: RequestRecord) -> int:
    """Returns the ns from the first token to the last, or to the end if it failed while streaming."""
    return record.summary.gaps_total + record.final_wait_ns


def longest_gap(record: RequestRecord) -> int:
    """Returns the longest time between two tokens, or from the last one to a failure, ns."""
    return max(record.summary.gap_max, record.final_wait_ns)


def input_size(record: RequestRecord) -> int:
    """Returns the input tokens, as the engine or the tokenizer counted them; 0 = unknown."""
    counted = [
        stage.attributes.get(semconv.ITEMS, 0)
        for stage in record.stages
        if stage.name == semconv.SPAN_TOKENIZE
    ]
    return record.input_tokens or sum(int(items) for items in counted if isinstance(items, (int, float)))


def hung_time(record: RequestRecord) -> int:
    """Returns the ns that a stream hung until it failed, as far as no cause is known."""
    return min(record.final_wait_ns, sum_streaming_cause_time(record, semconv.CAUSE_UNEXPLAINED))


def client_backpressure(record: RequestRecord) -> int:
    """Returns how long `egress` waited for the client to read, ns.

    An upper bound, because the instants of the waits are not recorded.
    """
    stage = record.find_stage(semconv.SPAN_POSTPROCESS)
    seconds = stage.attributes.get(semconv.SEND_WAIT, 0.0) if stage is not None else 0.0
    waited = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
    return min(waited, sum_cause_time(record, semconv.CAUSE_EGRESS))


def filter_generating(served: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Returns the requests that had a token, or failed before they had one. An embedding is only prefill."""
    return [record for record in served if record.first_token_at or record.outcome != events.OK]


def ttft_or_duration(record: RequestRecord) -> int:
    """Returns the ns to the first token, or to the end of a request without one."""
    return record.ttft_ns or record.duration_ns


def median_gap_ms(served: list[RequestRecord]) -> float:
    """Returns the median over requests of their median time between tokens, ms; 0 where nothing was streamed."""
    sample = served[:: max(len(served) // MEDIAN_SAMPLES, 1)]
    medians = [
        float(np.median(gaps)) for record in sample if record.summary.gaps and len(gaps := record.gaps_ns())
    ]
    return float(np.median(medians)) / NS_PER_MS if medians else 0.0


def name_first_latency(records: Sequence[RequestRecord]) -> str:
    """Returns the words for `ttft_or_duration` of these requests: a request that generates nothing has a result only."""
    has_tokens = any(record.ttft_ns for record in records)
    return "the time to the first token" if has_tokens else "the time to the result"


def name_last_output(records: Sequence[RequestRecord]) -> str:
    """Returns the words for the end of the model's work on these requests."""
    return "their last token" if any(record.ttft_ns for record in records) else "the model's result"


def app_time_before_token(record: RequestRecord) -> int:
    """Returns the ns of `application` before the first token."""
    until = record.arrived_at + ttft_or_duration(record)
    free, after = [(until, max(record.ended_at, until))], 0
    # As in attribution, a built-in stage takes precedence over the application's stages.
    for stage in sorted(record.stages, key=lambda stage: stage.name not in _SERVER_STAGES):
        free, taken = subtract_interval(free, stage.started_at, stage.ended_at)
        after += taken * (stage.name not in _SERVER_STAGES)
    return max(sum_cause_time(record, semconv.CAUSE_APPLICATION) - after, 0)


# ── the event loop ──────────────────────────────────────────────────────────────────────────────────────────


def loop_delay_before_token(record: RequestRecord) -> int:
    """Returns the ns of `event_loop` from the call of the application to the first token."""
    accept = record.find_stage(semconv.SPAN_ACCEPT)
    called_at = accept.ended_at if accept is not None else record.arrived_at
    before = sum(
        _measure_delays(record, record.loop_pauses, called_at, record.arrived_at + ttft_or_duration(record))
    )
    return min(before, sum_cause_time(record, semconv.CAUSE_EVENT_LOOP))


def loop_delays_while_streaming(record: RequestRecord) -> list[int]:
    """Returns the lengths of the delays of the event loop between the first and the last token, ns.

    The client received nothing during them, and the engine continued. A delay that ends after the last token is
    not counted: the generation itself may have blocked the loop.
    """
    if not record.first_token_at or not record.last_token_at:
        return []
    over = [pause for pause in record.loop_pauses if pause.ended_at < record.last_token_at]
    return _measure_delays(record, over, record.first_token_at, record.last_token_at)


def _measure_delays(record: RequestRecord, delays: Sequence[Pause], begin: int, end: int) -> list[int]:
    """Returns the parts of the delays in this interval, without pauses of the whole process, ns."""
    lengths = []
    for pause in delays:
        since, until = max(pause.started_at, begin), min(pause.ended_at, end)
        if since < until:
            lengths.append(uncovered_length(record.pauses, since, until))
    return [length for length in lengths if length > 0]
