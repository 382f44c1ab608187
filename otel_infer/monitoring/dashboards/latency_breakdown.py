"""Where the time of requests goes, stage by stage, in the order in which it happens; then single requests."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, Board, Row
from otel_infer.monitoring.dashboards.panels import Json, Query, Reading, legend
from otel_infer.monitoring.promql import each_per, equal, unlike
from otel_infer.semconv import STAGE_DURATION
from otel_infer.semconv.prometheus import STAGE_BUDGET, label

STAGES = {
    semconv.SPAN_INGRESS: (
        "First byte in to handed over to the engine.",
        "what runs before the engine: look-ups, authentication, an event loop that is blocked.",
    ),
    semconv.SPAN_TOKENIZE: (
        "Text to tokens.",
        "very long prompts, or a tokenizer without its compiled part.",
    ),
    semconv.SPAN_QUEUE: (
        "Handed over to the engine to first scheduled.",
        "a full batch or a full KV cache: more replicas, a limit in front, shorter prompts.",
    ),
    semconv.SPAN_PREFILL: (
        "First scheduled to first token.",
        "long prompts: cap them, use the prefix cache, chunk them.",
    ),
    semconv.SPAN_DECODE: (
        "First to last token; long answers take long.",
        "divide by tokens: the time between tokens is on Decode and batching.",
    ),
    semconv.SPAN_POSTPROCESS: (
        "Last token to last byte handed over.",
        "slow readers, or work after the answer.",
    ),
}
"""What each stage is, and what it is mostly when it is long."""
SLOW = "|".join(
    (
        semconv.KEEP_REASON_SLO,
        semconv.KEEP_REASON_SLOW,
        semconv.KEEP_REASON_ERROR,
        semconv.KEEP_REASON_ABORTED,
        semconv.KEEP_REASON_PREEMPTED,
        semconv.KEEP_REASON_OFFENDER,
    )
)
"""Reasons for which a request is kept that make it worth a look."""


def _summary() -> Row:
    by = (semconv.STAGE,)
    stage = label(semconv.STAGE)
    host = equal(semconv.CLOCK, semconv.CLOCK_HOST)
    # Stacked, whatever lies in another stage would be there twice.
    apart = unlike(semconv.STAGE, "|".join(semconv.STAGES_INSIDE))
    mean = each_per(ASK.spent(STAGE_DURATION, host, apart, by=by), ASK.rate(semconv.REQUEST_DURATION))
    by_clock = (semconv.STAGE, semconv.CLOCK)
    clocks = legend(semconv.STAGE, semconv.CLOCK)
    spent = f"{ASK.quantile(0.99, STAGE_DURATION, host, by=by)} / on ({stage}) group_left max by ({stage}) ({STAGE_BUDGET})"
    return Row(
        "All stages",
        [
            panels.lines(
                "Mean seconds of a request in each stage",
                Reading(
                    "Stacked: what a request spends on average, by stage. Means hide the tail: see the rows below.",
                    "the band that grew is where to look.",
                ),
                [Query(mean, legend(semconv.STAGE))],
                unit="s",
                stacked="normal",
                size=(12, 9),
            ),
            panels.lines(
                "p99 of each stage",
                Reading(
                    "The slowest hundredth in each stage; they need not be the same requests.",
                    "the highest line is where the tail is made.",
                ),
                [Query(ASK.quantile(0.99, STAGE_DURATION, host, by=by), legend(semconv.STAGE))],
                unit="s",
                size=(12, 9),
            ),
            panels.lines(
                "Wall beside GPU time",
                Reading(
                    "Mean by the host's clock, and by marks on the GPU's streams where they are timed. On a CPU there is no device line.",
                    "a host line far above its device line is time that the GPU waited for the host, or for a turn.",
                ),
                [Query(ASK.mean(STAGE_DURATION, by=by_clock), clocks)],
                unit="s",
                size=(12, 8),
            ),
            panels.lines(
                "Spent against budget",
                Reading(
                    "p99 of a stage as a share of its budget in `slo.yaml`.",
                    "over 100 %: the stage alone takes more than it was given.",
                ),
                [Query(spent, legend(semconv.STAGE))],
                unit="percentunit",
                size=(12, 8),
                empty="no budgets are recorded: otel-infer alerts build slo.yaml",
            ),
        ],
    )


def _stage(name: str) -> list[Json]:
    which = equal(semconv.STAGE, name), equal(semconv.CLOCK, semconv.CLOCK_HOST)
    reading = Reading(*STAGES[name])
    return [
        panels.heatmap(name.capitalize(), reading, ASK.buckets(STAGE_DURATION, *which), size=(12, 7)),
        panels.quantiles(
            f"{name.capitalize()}: quantiles", reading, ASK, STAGE_DURATION, *which, size=(12, 7)
        ),
    ]


def _requests() -> Row:
    # Whoever fails before a model is known has none.
    model = f'(span.{semconv.REQUEST_MODEL} =~ "$model" || status = error)'
    chosen = f'span.{semconv.KEEP_REASON} =~ "{SLOW}" && {model}'
    shown = ", ".join(f"span.{name}" for name in (semconv.KEEP_REASON, semconv.BLAME_TOP, semconv.TTFT))
    return Row(
        "Single requests",
        [
            panels.slowest(
                "Requests worth a look",
                Reading(
                    "Request spans that were kept since they were slow, missed an objective, failed, were left, preempted, or held up another.",
                    "open one: its largest `infer.blame.*` is where its time went.",
                ),
                f"{{ {chosen} }} | select({shown})",
            ),
            panels.trace(
                "Trace",
                Reading(
                    "The trace whose id is entered above.",
                    "look at the longest stage, then at the links of the request.",
                ),
                "$trace_id",
            ),
        ],
    )


def board() -> Board:
    """The dashboard."""
    stages = [Row(name.capitalize(), _stage(name)) for name in STAGES]
    about = "Each stage of a request: how its time is distributed, wall beside GPU time, and the requests behind it."
    return Board("anatomy", "Request anatomy", about, [_summary(), *stages, _requests()])
