"""Where the time of requests goes, stage by stage, in the order in which it happens; then single requests."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import Json, PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_not_matches, ratio_to_total
from otel_infer.semconv import STAGE_DURATION
from otel_infer.semconv.prometheus import STAGE_BUDGET, label_name

STAGE_DESCRIPTIONS = {
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
PRIORITY_PATTERN = "|".join(
    (
        semconv.KEEP_REASON_SLO,
        semconv.KEEP_REASON_SLOW,
        semconv.KEEP_REASON_ERROR,
        semconv.KEEP_REASON_ABORTED,
        semconv.KEEP_REASON_PREEMPTED,
        semconv.KEEP_REASON_INTERFERER,
    )
)
"""Reasons for which a request is kept that make it worth a look."""


def _all_stages_row() -> DashboardRow:
    by = (semconv.STAGE,)
    stage = label_name(semconv.STAGE)
    host = label_equals(semconv.CLOCK, semconv.CLOCK_HOST)
    # Stacked, whatever lies in another stage would be there twice.
    apart = label_not_matches(semconv.STAGE, "|".join(semconv.NESTED_STAGES))
    mean = ratio_to_total(
        PROMQL.sum_rate(STAGE_DURATION, host, apart, by=by), PROMQL.rate(semconv.REQUEST_DURATION)
    )
    by_clock = (semconv.STAGE, semconv.CLOCK)
    clocks = legend_format(semconv.STAGE, semconv.CLOCK)
    spent = f"{PROMQL.quantile(0.99, STAGE_DURATION, host, by=by)} / on ({stage}) group_left max by ({stage}) ({STAGE_BUDGET})"
    return DashboardRow(
        "All stages",
        [
            panels.timeseries_panel(
                "Mean seconds of a request in each stage",
                PanelDescription(
                    "Stacked: what a request spends on average, by stage. Means hide the tail: see the rows below.",
                    "the band that grew is where to look.",
                ),
                [PanelQuery(mean, legend_format(semconv.STAGE))],
                unit="s",
                stacked="normal",
                size=(12, 9),
            ),
            panels.timeseries_panel(
                "p99 of each stage",
                PanelDescription(
                    "The slowest hundredth in each stage; they need not be the same requests.",
                    "the highest line is where the tail is made.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, STAGE_DURATION, host, by=by), legend_format(semconv.STAGE)
                    )
                ],
                unit="s",
                size=(12, 9),
            ),
            panels.timeseries_panel(
                "Wall beside GPU time",
                PanelDescription(
                    "Mean by the host's clock, and by marks on the GPU's streams where they are timed. On a CPU there is no device line.",
                    "a host line far above its device line is time that the GPU waited for the host, or for a turn.",
                ),
                [PanelQuery(PROMQL.mean(STAGE_DURATION, by=by_clock), clocks)],
                unit="s",
                size=(12, 8),
            ),
            panels.timeseries_panel(
                "Spent against budget",
                PanelDescription(
                    "p99 of a stage as a share of its budget in `slo.yaml`.",
                    "over 100 %: the stage alone takes more than it was given.",
                ),
                [PanelQuery(spent, legend_format(semconv.STAGE))],
                unit="percentunit",
                size=(12, 8),
                empty="no budgets are recorded: otel-infer alerts build slo.yaml",
            ),
        ],
    )


def _stage_panels(name: str) -> list[Json]:
    which = label_equals(semconv.STAGE, name), label_equals(semconv.CLOCK, semconv.CLOCK_HOST)
    reading = PanelDescription(*STAGE_DESCRIPTIONS[name])
    return [
        panels.heatmap_panel(
            name.capitalize(), reading, PROMQL.bucket_increase(STAGE_DURATION, *which), size=(12, 7)
        ),
        panels.quantiles_panel(
            f"{name.capitalize()}: quantiles", reading, PROMQL, STAGE_DURATION, *which, size=(12, 7)
        ),
    ]


def _requests_row() -> DashboardRow:
    # Whoever fails before a model is known has none.
    model = f'(span.{semconv.REQUEST_MODEL} =~ "$model" || status = error)'
    chosen = f'span.{semconv.KEEP_REASON} =~ "{PRIORITY_PATTERN}" && {model}'
    shown = ", ".join(
        f"span.{name}" for name in (semconv.KEEP_REASON, semconv.LATENCY_TOP_CAUSE, semconv.TTFT)
    )
    return DashboardRow(
        "Single requests",
        [
            panels.trace_search_panel(
                "Requests worth a look",
                PanelDescription(
                    "Request spans that were kept since they were slow, missed an objective, failed, were left, preempted, or held up another.",
                    "open one: its largest `infer.latency.*` is where its time went.",
                ),
                f"{{ {chosen} }} | select({shown})",
            ),
            panels.trace_panel(
                "Trace",
                PanelDescription(
                    "The trace whose id is entered above.",
                    "look at the longest stage, then at the links of the request.",
                ),
                "$trace_id",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """The dashboard."""
    stages = [DashboardRow(name.capitalize(), _stage_panels(name)) for name in STAGE_DESCRIPTIONS]
    about = "Each stage of a request: how its time is distributed, wall beside GPU time, and the requests behind it."
    return Dashboard("anatomy", "Request anatomy", about, [_all_stages_row(), *stages, _requests_row()])
