"""From finished requests to the complaint they amount to, the evidence for it, and what to change first. Pure.

Seven complaints about latency, told apart by where the time of the slowest requests went (`blame`). Nothing is guessed: with too
few requests, or where most of the time is unexplained, the answer is that the evidence is insufficient; where the slow
requests only did their own work, that nothing in this server held them up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.queueing import QueueAnalysis
from otel_infer.analysis.diagnosis.slow_requests import (
    NS_PER_MS,
    SlowRequests,
    app_time_before_token,
    client_backpressure,
    filter_generating,
    longest_gap,
    loop_delay_before_token,
    loop_delays_while_streaming,
    median_gap_ms,
    nonstreaming_time_in,
    select_slowest,
    streaming_time,
    streaming_time_in,
    time_in,
    ttft_or_duration,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.engine.step_table import CAPACITY
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from otel_infer.semconv import causes

MIN_REQUESTS = 12
"""Requests without which nothing is said."""
MAX_UNEXPLAINED_SHARE = 0.5
MAX_UNCLASSIFIED_SHARE = 0.4
"""Share of the slow requests' time that one cause may have without being in any row of the table."""
NOTICEABLE_MS = 100
"""Before that nobody says that nothing happens."""


class Diagnosis(NamedTuple):
    """`verdict`: name of a complaint, `healthy` or `insufficient`. `findings`: heaviest first."""

    verdict: str
    requests: int
    findings: list[Finding]
    causes: dict[str, float]
    note: str


def diagnose(records: Sequence[RequestRecord], since: int = 0, unfinished: Sequence[int] = ()) -> Diagnosis:
    """What these requests amount to. `since`: the instant from which on all are there (monotonic ns); of those that came before
    it, only who was still there then. `unfinished`: since when others run that have not ended."""
    served = [record for record in records if _is_served(record)]
    causes = _cause_shares(served)
    if len(served) < MIN_REQUESTS:
        said = f"{len(served)} requests; at least {MIN_REQUESTS} are needed"
        if len(served) < len(records):
            said += f" (of {len(records)}, the others failed or generate nothing)"
        return Diagnosis("insufficient", len(served), [], causes, said)
    found = [finding for rule in _RULES for finding in rule(served)]
    others = [record for record in records if not _is_served(record)]
    found += _find_queueing(served, QueueAnalysis(served, others, since, unfinished))
    found.sort(key=lambda finding: -finding.weight)
    if found:
        return Diagnosis(found[0].symptom, len(served), found, causes, "")
    tail = select_slowest(served, lambda r: r.duration_ns)
    if tail.reference_share(semconv.CAUSE_UNEXPLAINED) > MAX_UNEXPLAINED_SHARE:
        said = "most of the slow requests' time was not seen: is the engine instrumented (otel-infer doctor)?"
        if sum(record.steps_evicted > 0 for record in tail.records) > len(tail.records) / 2:
            said = f"the slow requests are older than the last {CAPACITY:,} steps of their engine, which are remembered"
        return Diagnosis("insufficient", len(served), [], causes, said)
    cause, share = _largest_unclassified_cause(served)
    if share > MAX_UNCLASSIFIED_SHARE:
        said = f"no complaint of the table fits, but {share:.0%} of the slow requests' time is {cause}"
        return Diagnosis("insufficient", len(served), [], causes, said)
    said = "the slow requests did their own work; what else their readers felt is not in this server"
    return Diagnosis("healthy", len(served), [], causes, said)


def _is_served(record: RequestRecord) -> bool:
    said = record.breakdown is not None and record.generative and record.operation and record.duration_ns
    return bool(said) and record.outcome != events.ERROR


# ── one rule for each part of a request's life ───────────────────────────────────────────────────────────────────

_PRE_ENGINE_CAUSES = causes.causes_of(causes.GROUP_PRE_ENGINE)
_QUEUE_CAUSES = causes.causes_of(causes.GROUP_QUEUE)
_STALL_CAUSES = causes.causes_of(causes.GROUP_STALL, causes.GROUP_UNKNOWN)
_OWN_WORK_CAUSES = causes.causes_of(causes.GROUP_OWN_WORK, causes.GROUP_UNKNOWN)
_WARMUP_CAUSES = tuple(row.name for row in causes.CAUSE_TABLE if row.is_warmup)


def _find_pre_engine_delay(served: list[RequestRecord]) -> list[Finding]:
    tail = select_slowest(served, ttft_or_duration, whole=ttft_or_duration)
    parts = {cause: tail.total_ns(cause) for cause in _PRE_ENGINE_CAUSES}
    parts[semconv.CAUSE_APPLICATION] = float(sum(map(app_time_before_token, tail.records)))
    parts[semconv.CAUSE_EVENT_LOOP] = float(sum(map(loop_delay_before_token, tail.records)))
    total, many = sum(parts.values()), len(tail.records)
    if total < 0.4 * tail.reference_ns or total / many / NS_PER_MS < 20:
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    return [Finding("pre_engine", cause, total / tail.lifetime_ns, [
        f"{total / tail.reference_ns:.0%} of the time to the first token of the slowest {many} lies before the engine",
        f"{cause}: {parts[cause] / many / NS_PER_MS:.0f} ms each",
    ])]  # fmt: skip


def _find_cold_start(served: list[RequestRecord]) -> list[Finding]:
    """Who comes first waits for what every later request finds ready."""
    tail = select_slowest(served, lambda r: r.duration_ns)
    share, each = tail.reference_share(*_WARMUP_CAUSES), tail.mean_ms(*_WARMUP_CAUSES)
    if share < 0.4 or each < 20:
        return []
    cause = max(_WARMUP_CAUSES, key=tail.total_ns)
    return [Finding("prefill", cause, share, [
        f"{share:.0%} of the time of the slowest {len(tail.records)} is what the server does once only, {each:.0f} ms each",
        f"{cause}: {tail.mean_ms(cause):.0f} ms each",
    ])]  # fmt: skip


def _find_expensive_prefill(served: list[RequestRecord]) -> list[Finding]:
    """Prompts that cost more than all else before the first token; that others wait for them then follows from it."""
    served = filter_generating(served)
    if len(served) < MIN_REQUESTS:
        return []
    gap, usual = (
        median_gap_ms(served),
        np.median([nonstreaming_time_in(record, semconv.CAUSE_PREFILL) for record in served]),
    )
    typical = float(
        np.median(
            [
                nonstreaming_time_in(record, semconv.CAUSE_PREFILL) / ttft_or_duration(record)
                for record in served
            ]
        )
    )
    tail = select_slowest(served, ttft_or_duration, whole=ttft_or_duration, of=nonstreaming_time_in)
    share, each = tail.reference_share(semconv.CAUSE_PREFILL), tail.mean_ms(semconv.CAUSE_PREFILL)
    felt = max(NOTICEABLE_MS, 5 * gap)
    is_usual = typical >= 0.5 and usual / NS_PER_MS >= felt and share >= 0.25
    if not is_usual and (share < 0.5 or each < felt):
        return []
    followed = (semconv.CAUSE_INTERFERENCE, *_QUEUE_CAUSES) if is_usual else ()
    tokens = np.median([record.input_tokens for record in tail.records])
    evidence = [
        f"{share:.0%} of the time to the first token of the slowest {len(tail.records)} is their own prompt",
        f"{typical:.0%} of the usual one's",
        f"{each:.0f} ms for {tokens:.0f} prompt tokens; then a token every {gap:.1f} ms",
    ]
    return [
        Finding(
            "prefill", semconv.CAUSE_PREFILL, tail.lifetime_share(semconv.CAUSE_PREFILL, *followed), evidence
        )
    ]


def _find_prefill_interference(served: list[RequestRecord]) -> list[Finding]:
    """First tokens that are late since others' prompts are computed in the same steps."""
    served = filter_generating(served)
    if len(served) < MIN_REQUESTS:
        return []
    tail = select_slowest(served, ttft_or_duration, whole=ttft_or_duration, of=nonstreaming_time_in)
    share, each = tail.reference_share(semconv.CAUSE_INTERFERENCE), tail.mean_ms(semconv.CAUSE_INTERFERENCE)
    if share < 0.5 or each < max(NOTICEABLE_MS, 5 * median_gap_ms(served)):
        return []
    return [Finding("prefill", semconv.CAUSE_INTERFERENCE, tail.lifetime_share(semconv.CAUSE_INTERFERENCE), [
        f"{share:.0%} of the time to the first token of the slowest {len(tail.records)} is the prompts of others",
        f"{each:.0f} ms each",
    ])]  # fmt: skip


def _find_stream_stalls(served: list[RequestRecord]) -> list[Finding]:
    some = [record for record in served if record.summary.gaps >= 3]
    if len(some) < MIN_REQUESTS // 2:
        return []
    tail = select_slowest(some, longest_gap, whole=streaming_time, of=streaming_time_in)
    gap, longest = median_gap_ms(some), float(np.median([longest_gap(r) for r in tail.records])) / NS_PER_MS
    parts = {cause: tail.total_ns(cause) for cause in _STALL_CAUSES}
    parts[semconv.CAUSE_HOST_BUBBLE] = _excess_over_median(some, tail, semconv.CAUSE_HOST_BUBBLE)
    total = sum(parts.values())
    if total < 0.15 * tail.reference_ns or longest < 4 * gap or longest < 15:
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    each = parts[cause] / len(tail.records) / NS_PER_MS
    evidence = [
        f"the longest pause between tokens of the slowest {len(tail.records)} is {longest:.0f} ms; usual is {gap:.1f} ms",
        f"{cause}: {min(parts[cause] / tail.reference_ns, 1.0):.0%} of their streaming time, {each:.0f} ms each",
    ]
    offenders: Counter[str] = Counter()
    for offender in [r.breakdown.stalled_by for r in tail.records if r.breakdown and r.breakdown.stalled_by]:
        offenders[offender.trace_id.hex()] += offender.length
    if cause == semconv.CAUSE_INTERFERENCE and offenders:
        worst = max(offenders, key=lambda trace: offenders[trace])
        others = len(offenders) - 1
        evidence.append(f"held up most by trace {worst}" + (f" and by {others} more" if others else ""))
    return [Finding("stutter", cause, total / tail.lifetime_ns, evidence)]


def _excess_over_median(some: list[RequestRecord], tail: SlowRequests, cause: str) -> float:
    """What these streams had of it beyond what is always a part of streaming; ns. Each is held against those of which as much is
    known: only some may have been timed on a device."""
    more = 0.0
    for timed in (True, False):
        alike = [record for record in some if (record.device_idle is not None) == timed]
        if alike:
            shares = [streaming_time_in(record, cause) / max(streaming_time(record), 1) for record in alike]
            usual = float(np.median(shares))
            slow = [record for record in tail.records if (record.device_idle is not None) == timed]
            more += sum(streaming_time_in(record, cause) - usual * streaming_time(record) for record in slow)
    return max(more, 0.0)


def _find_event_loop_stalls(served: list[RequestRecord]) -> list[Finding]:
    """Streams that stand still while the engine goes on, since the event loop does not send what there is."""
    some = [record for record in served if record.summary.gaps >= 3]
    if len(some) < MIN_REQUESTS // 2:
        return []
    tail = select_slowest(some, lambda r: sum(loop_delays_while_streaming(r)), whole=streaming_time)
    late = [loop_delays_while_streaming(record) for record in tail.records]
    total, longest = sum(map(sum, late)), float(np.median([max(one, default=0) for one in late])) / NS_PER_MS
    if total < 0.15 * tail.reference_ns or longest < max(4 * median_gap_ms(some), 15):
        return []
    return [Finding("stutter", semconv.CAUSE_EVENT_LOOP, total / tail.lifetime_ns, [
        f"the event loop stood still for {longest:.0f} ms while the slowest {len(tail.records)} were streamed",
        f"{total / tail.reference_ns:.0%} of their streaming time; the engine went on meanwhile",
    ])]  # fmt: skip


def _find_queueing(served: list[RequestRecord], crowd: QueueAnalysis) -> list[Finding]:
    """Who waits for a turn: because of a peak, of heavy requests, of batches that are waited for, or always."""
    tail = select_slowest(served, ttft_or_duration, whole=ttft_or_duration, of=nonstreaming_time_in)
    weight, each = tail.reference_share(*_QUEUE_CAUSES), tail.mean_ms(*_QUEUE_CAUSES)
    if weight < 0.4 or each < 20 or each < 3 * median_gap_ms(served):
        return []
    cause, weighs = max(_QUEUE_CAUSES, key=tail.total_ns), tail.lifetime_share(*_QUEUE_CAUSES)
    said = f"{weight:.0%} of the time to the first token of the slowest {len(tail.records)} is queue, {each:.0f} ms each"
    idle, heavy, peak = crowd.idle_wait_share(), crowd.waiting_behind_large(), crowd.describe_peak()
    if idle > 0.5:
        waited = f"{idle:.0%} of the waiting while no request was running"
        return [Finding("batching", cause, weighs, [said, waited])]
    if heavy is not None:
        return [Finding("head_of_line_blocking", cause, weighs, [said, heavy])]
    if peak is not None:
        return [Finding("peak", cause, weighs, [said, peak])]
    return [Finding("queueing", cause, weighs, [said, "at any time of the load, not at a peak"])]


def _find_batching_delay(served: list[RequestRecord]) -> list[Finding]:
    tail = select_slowest(served, streaming_time, whole=streaming_time, of=streaming_time_in)
    weight, own = tail.reference_share(semconv.CAUSE_BATCHING), tail.reference_share(semconv.CAUSE_DECODE)
    if weight < 0.5 or weight < 2 * own:
        return []
    size = max(record.summary.batch_size_max for record in tail.records)
    return [Finding("batching", semconv.CAUSE_BATCHING, tail.lifetime_share(semconv.CAUSE_BATCHING), [
        f"{weight:.0%} of the streaming time is what the other sequences add to each step, {own:.0%} the request's own",
        f"up to {size} sequences in a step",
    ])]  # fmt: skip


_RULES: tuple[Callable[[list[RequestRecord]], list[Finding]], ...] = (
    _find_pre_engine_delay, _find_expensive_prefill, _find_prefill_interference, _find_stream_stalls, _find_event_loop_stalls, _find_batching_delay, _find_cold_start,
)  # fmt: skip


def _largest_unclassified_cause(served: list[RequestRecord]) -> tuple[str, float]:
    """What of the slow requests' time is neither their own work nor their readers', the largest part of it, if anybody feels it."""
    tail = select_slowest(served, lambda r: r.duration_ns)
    parts = {cause: tail.total_ns(cause) for cause in semconv.CAUSES if cause not in _OWN_WORK_CAUSES}
    parts[semconv.CAUSE_EGRESS] -= sum(map(client_backpressure, tail.records))
    # Who is computed together with others, and has no token to wait for, is done when they are.
    answers = sum(time_in(record, semconv.CAUSE_INTERFERENCE) for record in filter_generating(tail.records))
    parts[semconv.CAUSE_INTERFERENCE] = float(answers)
    cause = max(parts, key=lambda cause: parts[cause])
    return cause, parts[cause] / tail.lifetime_ns if parts[cause] / len(
        tail.records
    ) / NS_PER_MS >= NOTICEABLE_MS else 0.0


def _cause_shares(served: list[RequestRecord]) -> dict[str, float]:
    """Of the time of the slowest tenth, by cause, largest first."""
    total: dict[str, int] = defaultdict(int)
    for record in select_slowest(served, lambda r: r.duration_ns).records if served else []:
        for cause, length in record.breakdown.causes.items() if record.breakdown is not None else ():
            total[cause] += length
    whole = sum(total.values()) or 1
    return {cause: length / whole for cause, length in sorted(total.items(), key=lambda item: -item[1])}
