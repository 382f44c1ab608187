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

from otel_infer import facts, semconv
from otel_infer.crowding import Crowd
from otel_infer.records import RequestRecord
from otel_infer.tail import (
    MS,
    application_before_token,
    late_before_token,
    late_while_streaming,
    slowest,
    spent,
    ttft,
    typical_gap,
)

FEWEST = 12
"""Requests without which nothing is said."""
MOST_UNEXPLAINED = 0.5


class Complaint(NamedTuple):
    """A row of the table: how people say it, what happens, what to change first."""

    said: str
    happens: str
    change: str


COMPLAINTS = {
    "before_the_engine": Complaint(
        "slow even for tiny prompts",
        "time goes before inference starts",
        "look at what runs before the engine: body reads, tokenizing, look-ups; make them fewer, nearer, or concurrent",
    ),
    "queueing": Complaint(
        "fine locally, bad in production",
        "requests wait for their turn at any time of the load",
        "limit concurrency where requests come in, give the engine a larger batch or another replica, separate traffic",
    ),
    "prefill": Complaint(
        "nothing for a while, then fast",
        "prompts are expensive",
        "shorten or cap prompts, switch the prefix cache on, prefill in smaller batches",
    ),
    "stutter": Complaint(
        "starts, then freezes or stutters",
        "decode is interrupted",
        "find out what stops the process: other work on its cores, a lock, a slow disk",
    ),
    "peak": Complaint(
        "explodes at peak hours",
        "for a time more is accepted than served",
        "shed or spread load at the peak, scale up earlier, shorten the queue's limit",
    ),
    "big_and_small": Complaint(
        "big customers slow down small ones",
        "light requests wait behind heavy ones",
        "serve heavy requests apart, or limit how many of them run at once; priorities for short ones",
    ),
    "batching": Complaint(
        "cheap batch mode is fine, live is slow",
        "batches are made large, or waited for, at the cost of each request",
        "batch only where nobody waits: no batching delay and a smaller batch for live traffic",
    ),
}


_BY_CAUSE = {
    semconv.CAUSE_MEDIA: "have media fetched by the client or from nearby, smaller, and processed by more API servers",
    semconv.CAUSE_GRAMMAR: "simpler schemas, and the same ones again: compiled grammars are kept; one of each before serving",
    semconv.CAUSE_KV_TRANSFER: "a faster way for KV blocks, or compute short prompts where they arrive",
    semconv.CAUSE_INTERFERENCE: "chunked prefill with fewer prompt tokens a step; long prompts apart",
    semconv.CAUSE_PREEMPTION: "more KV cache, or fewer and shorter sequences at once",
    semconv.CAUSE_GC: "gc.freeze() once the server is warm, a higher threshold, fewer objects that live long",
    semconv.CAUSE_COMPILE: "warm up all shapes before the first request",
    semconv.CAUSE_CAPTURE: "capture the graphs of all batch sizes before the first request",
    semconv.CAUSE_FIRST_USE: "run a batch and a prompt of each size once, before the server says that it is ready",
    semconv.CAUSE_THROTTLED: "raise the CPU quota of the container",
    semconv.CAUSE_GPU_THROTTLED: "cool the GPU, and look at its power supply (nvidia-smi -q -d PERFORMANCE)",
    semconv.CAUSE_STARVED: "more cores, or fewer threads and processes on them (OMP_NUM_THREADS, workers, neighbours)",
    semconv.CAUSE_FAULTS: "keep freed memory: MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ at 1 GiB, or jemalloc",
    semconv.CAUSE_BLOCKED: "find the lock: work of other threads that holds the GIL, a slow disk (py-spy dump)",
    semconv.CAUSE_EVENT_LOOP: "take what blocks the event loop off it: `def` instead of `async def`, or asyncio.to_thread",
}
"""What to change first where streams are interrupted, or the first token is late, by what does it."""


class Finding(NamedTuple):
    """One complaint that fits. `weight`: share of its slow requests' whole time."""

    complaint: str
    cause: str
    weight: float
    evidence: list[str]

    @property
    def change(self) -> str:
        """What to change first."""
        said = COMPLAINTS[self.complaint].change
        return _BY_CAUSE.get(self.cause, said)


class Diagnosis(NamedTuple):
    """`verdict`: name of a complaint, `healthy` or `insufficient`. `findings`: heaviest first."""

    verdict: str
    requests: int
    findings: list[Finding]
    causes: dict[str, float]
    note: str


def diagnose(records: Sequence[RequestRecord]) -> Diagnosis:
    """What these requests amount to."""
    served = [r for r in records if r.blame is not None and r.generative and r.operation and r.duration_ns]
    served = [r for r in served if r.outcome != facts.ERROR]
    causes = _shares(served)
    if len(served) < FEWEST:
        said = f"{len(served)} requests; at least {FEWEST} are needed"
        return Diagnosis("insufficient", len(served), [], causes, said)
    found = [finding for rule in _RULES for finding in rule(served)]
    found.sort(key=lambda finding: -finding.weight)
    if found:
        return Diagnosis(found[0].complaint, len(served), found, causes, "")
    if slowest(served, lambda r: r.duration_ns).share(semconv.CAUSE_UNEXPLAINED) > MOST_UNEXPLAINED:
        said = "most of the slow requests' time was not seen: is the engine instrumented (otel-infer doctor)?"
        return Diagnosis("insufficient", len(served), [], causes, said)
    said = "the slow requests did their own work; what else their readers felt is not in this server"
    return Diagnosis("healthy", len(served), [], causes, said)


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
    gap, usual = typical_gap(served), np.median([spent(record, semconv.CAUSE_PREFILL) for record in served])
    typical = float(np.median([spent(record, semconv.CAUSE_PREFILL) / ttft(record) for record in served]))
    tail = slowest(served, ttft, whole=ttft)
    share, each = tail.share(semconv.CAUSE_PREFILL), tail.each(semconv.CAUSE_PREFILL)
    is_usual = typical >= 0.5 and usual / MS >= max(20, 5 * gap)
    if not is_usual and (share < 0.5 or each < max(20, 5 * gap)):
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


def _stutter(served: list[RequestRecord]) -> list[Finding]:
    streamed = [record for record in served if record.summary.gaps >= 3]
    if len(streamed) < FEWEST // 2:
        return []
    tail = slowest(streamed, lambda r: r.summary.gap_max, whole=lambda r: r.summary.gaps_total)
    gap, longest = typical_gap(streamed), float(np.median([r.summary.gap_max for r in tail.records])) / MS
    weight = min(tail.share(*_STALLS), 1.0)
    if weight < 0.15 or longest < 4 * gap or longest < 15:
        return []
    cause = max(_STALLS, key=tail.total)
    evidence = [
        f"the longest pause between tokens of the slowest {len(tail.records)} is {longest:.0f} ms; usual is {gap:.1f} ms",
        f"{cause}: {min(tail.share(cause), 1.0):.0%} of their streaming time, {tail.each(cause):.0f} ms each",
    ]
    offenders: Counter[str] = Counter()
    for offender in [r.blame.offender for r in tail.records if r.blame and r.blame.offender]:
        offenders[offender.trace_id.hex()] += offender.length
    if cause == semconv.CAUSE_INTERFERENCE and offenders:
        worst = max(offenders, key=lambda trace: offenders[trace])
        evidence.append(f"held up most by trace {worst} ({len(offenders)} such requests)")
    return [Finding("stutter", cause, tail.weight(*_STALLS), evidence)]


def _frozen(served: list[RequestRecord]) -> list[Finding]:
    """Streams that stand still while the engine goes on, since the event loop does not send what there is."""
    streamed = [record for record in served if record.summary.gaps >= 3]
    if len(streamed) < FEWEST // 2:
        return []
    tail = slowest(streamed, lambda r: sum(late_while_streaming(r)), whole=lambda r: r.summary.gaps_total)
    late = [late_while_streaming(record) for record in tail.records]
    total, longest = sum(map(sum, late)), float(np.median([max(one, default=0) for one in late])) / MS
    if total < 0.15 * tail.whole or longest < max(4 * typical_gap(streamed), 15):
        return []
    return [Finding("stutter", semconv.CAUSE_EVENT_LOOP, total / tail.lives, [
        f"the event loop stood still for {longest:.0f} ms while the slowest {len(tail.records)} were streamed",
        f"{total / tail.whole:.0%} of their streaming time; the engine went on meanwhile",
    ])]  # fmt: skip


def _queue(served: list[RequestRecord]) -> list[Finding]:
    """Who waits for a turn: because of a peak, of heavy requests, of batches that are waited for, or always."""
    tail = slowest(served, ttft, whole=ttft)
    weight, each = tail.share(*_QUEUES), tail.each(*_QUEUES)
    if weight < 0.4 or each < 20 or each < 3 * typical_gap(served):
        return []
    cause, weighs = max(_QUEUES, key=tail.total), tail.weight(*_QUEUES)
    crowd = Crowd(served)
    said = f"{weight:.0%} of the time to the first token of the slowest {len(tail.records)} is queue, {each:.0f} ms each"
    idle, heavy, peak = crowd.idle_share(), crowd.behind_heavy(), crowd.peak()
    if idle > 0.5:
        return [
            Finding(
                "batching", cause, weight, [said, f"{idle:.0%} of the waiting while no request was running"]
            )
        ]
    if heavy is not None:
        return [Finding("big_and_small", cause, weighs, [said, heavy])]
    if peak is not None:
        return [Finding("peak", cause, weighs, [said, peak])]
    return [Finding("queueing", cause, weighs, [said, "at any time of the load, not at a peak"])]


def _batching(served: list[RequestRecord]) -> list[Finding]:
    tail = slowest(served, lambda r: r.summary.gaps_total, whole=lambda r: r.summary.gaps_total)
    weight, own = tail.share(semconv.CAUSE_BATCHING), tail.share(semconv.CAUSE_DECODE)
    if weight < 0.5 or weight < 2 * own:
        return []
    size = max(record.summary.batch_size_max for record in tail.records)
    return [Finding("batching", semconv.CAUSE_BATCHING, tail.weight(semconv.CAUSE_BATCHING), [
        f"{weight:.0%} of the streaming time is what the other sequences add to each step, {own:.0%} the request's own",
        f"up to {size} sequences in a step",
    ])]  # fmt: skip


_RULES: tuple[Callable[[list[RequestRecord]], list[Finding]], ...] = (
    _before, _prefill, _stutter, _frozen, _queue, _batching, _cold,
)  # fmt: skip


def _shares(served: list[RequestRecord]) -> dict[str, float]:
    """Of the time of the slowest tenth, by cause, largest first."""
    total: dict[str, int] = defaultdict(int)
    for record in slowest(served, lambda r: r.duration_ns).records if served else []:
        for cause, length in record.blame.causes.items() if record.blame is not None else ():
            total[cause] += length
    whole = sum(total.values()) or 1
    return {cause: length / whole for cause, length in sorted(total.items(), key=lambda item: -item[1])}
