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
from otel_infer.analysis.diagnosis.queueing import Crowd
from otel_infer.analysis.diagnosis.slow_requests import (
    MS,
    Tail,
    answering,
    application_before_token,
    late_before_token,
    late_while_streaming,
    longest_gap,
    slowest,
    spent,
    spent_before,
    spent_streaming,
    streamed,
    ttft,
    typical_gap,
    waited_for_reader,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.engine.step_table import CAPACITY
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

FEWEST = 12
"""Requests without which nothing is said."""
MOST_UNEXPLAINED = 0.5
MOST_UNNAMED = 0.4
"""Share of the slow requests' time that one cause may have without being in any row of the table."""
FELT_MS = 100
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
    causes = _shares(served)
    if len(served) < FEWEST:
        said = f"{len(served)} requests; at least {FEWEST} are needed"
        if len(served) < len(records):
            said += f" (of {len(records)}, the others failed or generate nothing)"
        return Diagnosis("insufficient", len(served), [], causes, said)
    found = [finding for rule in _RULES for finding in rule(served)]
    others = [record for record in records if not _is_served(record)]
    found += _queue(served, Crowd(served, others, since, unfinished))
    found.sort(key=lambda finding: -finding.weight)
    if found:
        return Diagnosis(found[0].complaint, len(served), found, causes, "")
    tail = slowest(served, lambda r: r.duration_ns)
    if tail.share(semconv.CAUSE_UNEXPLAINED) > MOST_UNEXPLAINED:
        said = "most of the slow requests' time was not seen: is the engine instrumented (otel-infer doctor)?"
        if sum(record.steps_forgotten > 0 for record in tail.records) > len(tail.records) / 2:
            said = f"the slow requests are older than the last {CAPACITY:,} steps of their engine, which are remembered"
        return Diagnosis("insufficient", len(served), [], causes, said)
    cause, share = _unnamed(served)
    if share > MOST_UNNAMED:
        said = f"no complaint of the table fits, but {share:.0%} of the slow requests' time is {cause}"
        return Diagnosis("insufficient", len(served), [], causes, said)
    said = "the slow requests did their own work; what else their readers felt is not in this server"
    return Diagnosis("healthy", len(served), [], causes, said)


def _is_served(record: RequestRecord) -> bool:
    said = record.blame is not None and record.generative and record.operation and record.duration_ns
    return bool(said) and record.outcome != events.ERROR


# ── one rule for each part of a request's life ───────────────────────────────────────────────────────────────────

_BEFORE = (
    semconv.CAUSE_INGRESS, semconv.CAUSE_TOKENIZE, semconv.CAUSE_MEDIA, semconv.CAUSE_GRAMMAR,
    semconv.CAUSE_KV_TRANSFER, semconv.CAUSE_APPLICATION,
)  # fmt: skip
_QUEUES = (semconv.CAUSE_HIDDEN_QUEUE, semconv.CAUSE_SCHEDULER_QUEUE)
_STALLS = (
    semconv.CAUSE_INTERFERENCE, semconv.CAUSE_PREEMPTION, semconv.CAUSE_GC, semconv.CAUSE_COMPILE,
    semconv.CAUSE_CAPTURE, semconv.CAUSE_FIRST_USE, semconv.CAUSE_THROTTLED, semconv.CAUSE_STARVED,
    semconv.CAUSE_FAULTS, semconv.CAUSE_BLOCKED, semconv.CAUSE_GPU_THROTTLED, semconv.CAUSE_PAUSE,
    semconv.CAUSE_UNEXPLAINED,
)  # fmt: skip
_OWN = (semconv.CAUSE_PREFILL, semconv.CAUSE_DECODE, semconv.CAUSE_BATCHING, semconv.CAUSE_UNEXPLAINED)
_COLD = (semconv.CAUSE_FIRST_USE, semconv.CAUSE_COMPILE, semconv.CAUSE_CAPTURE)


def _before(served: list[RequestRecord]) -> list[Finding]:
    tail = slowest(served, ttft, whole=ttft)
    parts = {cause: tail.total(cause) for cause in _BEFORE}
    parts[semconv.CAUSE_APPLICATION] = float(sum(map(application_before_token, tail.records)))
    parts[semconv.CAUSE_EVENT_LOOP] = float(sum(map(late_before_token, tail.records)))
    total, many = sum(parts.values()), len(tail.records)
    if total < 0.4 * tail.whole or total / many / MS < 20:
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    return [Finding("before_the_engine", cause, total / tail.lives, [
        f"{total / tail.whole:.0%} of the time to the first token of the slowest {many} lies before the engine",
        f"{cause}: {parts[cause] / many / MS:.0f} ms each",
    ])]  # fmt: skip


def _cold(served: list[RequestRecord]) -> list[Finding]:
    """Who comes first waits for what every later request finds ready."""
    tail = slowest(served, lambda r: r.duration_ns)
    share, each = tail.share(*_COLD), tail.each(*_COLD)
    if share < 0.4 or each < 20:
        return []
    cause = max(_COLD, key=tail.total)
    return [Finding("prefill", cause, share, [
        f"{share:.0%} of the time of the slowest {len(tail.records)} is what the server does once only, {each:.0f} ms each",
        f"{cause}: {tail.each(cause):.0f} ms each",
    ])]  # fmt: skip


def _prefill(served: list[RequestRecord]) -> list[Finding]:
    """Prompts that cost more than all else before the first token; that others wait for them then follows from it."""
    served = answering(served)
    if len(served) < FEWEST:
        return []
    gap, usual = (
        typical_gap(served),
        np.median([spent_before(record, semconv.CAUSE_PREFILL) for record in served]),
    )
    typical = float(
        np.median([spent_before(record, semconv.CAUSE_PREFILL) / ttft(record) for record in served])
    )
    tail = slowest(served, ttft, whole=ttft, of=spent_before)
    share, each = tail.share(semconv.CAUSE_PREFILL), tail.each(semconv.CAUSE_PREFILL)
    felt = max(FELT_MS, 5 * gap)
    is_usual = typical >= 0.5 and usual / MS >= felt and share >= 0.25
    if not is_usual and (share < 0.5 or each < felt):
        return []
    followed = (semconv.CAUSE_INTERFERENCE, *_QUEUES) if is_usual else ()
    tokens = np.median([record.input_tokens for record in tail.records])
    evidence = [
        f"{share:.0%} of the time to the first token of the slowest {len(tail.records)} is their own prompt",
        f"{typical:.0%} of the usual one's",
        f"{each:.0f} ms for {tokens:.0f} prompt tokens; then a token every {gap:.1f} ms",
    ]
    return [
        Finding("prefill", semconv.CAUSE_PREFILL, tail.weight(semconv.CAUSE_PREFILL, *followed), evidence)
    ]


def _others_prompts(served: list[RequestRecord]) -> list[Finding]:
    """First tokens that are late since others' prompts are computed in the same steps."""
    served = answering(served)
    if len(served) < FEWEST:
        return []
    tail = slowest(served, ttft, whole=ttft, of=spent_before)
    share, each = tail.share(semconv.CAUSE_INTERFERENCE), tail.each(semconv.CAUSE_INTERFERENCE)
    if share < 0.5 or each < max(FELT_MS, 5 * typical_gap(served)):
        return []
    return [Finding("prefill", semconv.CAUSE_INTERFERENCE, tail.weight(semconv.CAUSE_INTERFERENCE), [
        f"{share:.0%} of the time to the first token of the slowest {len(tail.records)} is the prompts of others",
        f"{each:.0f} ms each",
    ])]  # fmt: skip


def _stutter(served: list[RequestRecord]) -> list[Finding]:
    some = [record for record in served if record.summary.gaps >= 3]
    if len(some) < FEWEST // 2:
        return []
    tail = slowest(some, longest_gap, whole=streamed, of=spent_streaming)
    gap, longest = typical_gap(some), float(np.median([longest_gap(r) for r in tail.records])) / MS
    parts = {cause: tail.total(cause) for cause in _STALLS}
    parts[semconv.CAUSE_HOST] = _more_than_usual(some, tail, semconv.CAUSE_HOST)
    total = sum(parts.values())
    if total < 0.15 * tail.whole or longest < 4 * gap or longest < 15:
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    each = parts[cause] / len(tail.records) / MS
    evidence = [
        f"the longest pause between tokens of the slowest {len(tail.records)} is {longest:.0f} ms; usual is {gap:.1f} ms",
        f"{cause}: {min(parts[cause] / tail.whole, 1.0):.0%} of their streaming time, {each:.0f} ms each",
    ]
    offenders: Counter[str] = Counter()
    for offender in [r.blame.stalled_by for r in tail.records if r.blame and r.blame.stalled_by]:
        offenders[offender.trace_id.hex()] += offender.length
    if cause == semconv.CAUSE_INTERFERENCE and offenders:
        worst = max(offenders, key=lambda trace: offenders[trace])
        others = len(offenders) - 1
        evidence.append(f"held up most by trace {worst}" + (f" and by {others} more" if others else ""))
    return [Finding("stutter", cause, total / tail.lives, evidence)]


def _more_than_usual(some: list[RequestRecord], tail: Tail, cause: str) -> float:
    """What these streams had of it beyond what is always a part of streaming; ns. Each is held against those of which as much is
    known: only some may have been timed on a device."""
    more = 0.0
    for timed in (True, False):
        alike = [record for record in some if (record.device_idle is not None) == timed]
        if alike:
            shares = [spent_streaming(record, cause) / max(streamed(record), 1) for record in alike]
            usual = float(np.median(shares))
            slow = [record for record in tail.records if (record.device_idle is not None) == timed]
            more += sum(spent_streaming(record, cause) - usual * streamed(record) for record in slow)
    return max(more, 0.0)


def _frozen(served: list[RequestRecord]) -> list[Finding]:
    """Streams that stand still while the engine goes on, since the event loop does not send what there is."""
    some = [record for record in served if record.summary.gaps >= 3]
    if len(some) < FEWEST // 2:
        return []
    tail = slowest(some, lambda r: sum(late_while_streaming(r)), whole=streamed)
    late = [late_while_streaming(record) for record in tail.records]
    total, longest = sum(map(sum, late)), float(np.median([max(one, default=0) for one in late])) / MS
    if total < 0.15 * tail.whole or longest < max(4 * typical_gap(some), 15):
        return []
    return [Finding("stutter", semconv.CAUSE_EVENT_LOOP, total / tail.lives, [
        f"the event loop stood still for {longest:.0f} ms while the slowest {len(tail.records)} were streamed",
        f"{total / tail.whole:.0%} of their streaming time; the engine went on meanwhile",
    ])]  # fmt: skip


def _queue(served: list[RequestRecord], crowd: Crowd) -> list[Finding]:
    """Who waits for a turn: because of a peak, of heavy requests, of batches that are waited for, or always."""
    tail = slowest(served, ttft, whole=ttft, of=spent_before)
    weight, each = tail.share(*_QUEUES), tail.each(*_QUEUES)
    if weight < 0.4 or each < 20 or each < 3 * typical_gap(served):
        return []
    cause, weighs = max(_QUEUES, key=tail.total), tail.weight(*_QUEUES)
    said = f"{weight:.0%} of the time to the first token of the slowest {len(tail.records)} is queue, {each:.0f} ms each"
    idle, heavy, peak = crowd.idle_share(), crowd.behind_heavy(), crowd.peak()
    if idle > 0.5:
        waited = f"{idle:.0%} of the waiting while no request was running"
        return [Finding("batching", cause, weighs, [said, waited])]
    if heavy is not None:
        return [Finding("big_and_small", cause, weighs, [said, heavy])]
    if peak is not None:
        return [Finding("peak", cause, weighs, [said, peak])]
    return [Finding("queueing", cause, weighs, [said, "at any time of the load, not at a peak"])]


def _batching(served: list[RequestRecord]) -> list[Finding]:
    tail = slowest(served, streamed, whole=streamed, of=spent_streaming)
    weight, own = tail.share(semconv.CAUSE_BATCHING), tail.share(semconv.CAUSE_DECODE)
    if weight < 0.5 or weight < 2 * own:
        return []
    size = max(record.summary.batch_size_max for record in tail.records)
    return [Finding("batching", semconv.CAUSE_BATCHING, tail.weight(semconv.CAUSE_BATCHING), [
        f"{weight:.0%} of the streaming time is what the other sequences add to each step, {own:.0%} the request's own",
        f"up to {size} sequences in a step",
    ])]  # fmt: skip


_RULES: tuple[Callable[[list[RequestRecord]], list[Finding]], ...] = (
    _before, _prefill, _others_prompts, _stutter, _frozen, _batching, _cold,
)  # fmt: skip


def _unnamed(served: list[RequestRecord]) -> tuple[str, float]:
    """What of the slow requests' time is neither their own work nor their readers', the largest part of it, if anybody feels it."""
    tail = slowest(served, lambda r: r.duration_ns)
    parts = {cause: tail.total(cause) for cause in semconv.CAUSES if cause not in _OWN}
    parts[semconv.CAUSE_EGRESS] -= sum(map(waited_for_reader, tail.records))
    # Who is computed together with others, and has no token to wait for, is done when they are.
    answers = sum(spent(record, semconv.CAUSE_INTERFERENCE) for record in answering(tail.records))
    parts[semconv.CAUSE_INTERFERENCE] = float(answers)
    cause = max(parts, key=lambda cause: parts[cause])
    return cause, parts[cause] / tail.lives if parts[cause] / len(tail.records) / MS >= FELT_MS else 0.0


def _shares(served: list[RequestRecord]) -> dict[str, float]:
    """Of the time of the slowest tenth, by cause, largest first."""
    total: dict[str, int] = defaultdict(int)
    for record in slowest(served, lambda r: r.duration_ns).records if served else []:
        for cause, length in record.blame.causes.items() if record.blame is not None else ():
            total[cause] += length
    whole = sum(total.values()) or 1
    return {cause: length / whole for cause, length in sorted(total.items(), key=lambda item: -item[1])}
