"""The dashboard Latency breakdown: the time of requests by stage, in order, and single requests."""

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
        "From the server's call of the application until the request is handed over to the engine.",
        "check work before the engine: lookups, authentication, a blocked event loop.",
    ),
    semconv.SPAN_TOKENIZE: (
        "Tokenization of the prompt.",
        "usual reasons are very long prompts, or a tokenizer without its compiled implementation.",
    ),
    semconv.SPAN_QUEUE: (
        "From hand-over to the engine until the request is first scheduled.",
        "the batch or the KV cache is full: add replicas, limit concurrency in front, or shorten prompts.",
    ),
    semconv.SPAN_PREFILL: (
        "From the first scheduling to the first token.",
        "prompts are long: limit them, use the prefix cache, or chunk them.",
    ),
    semconv.SPAN_DECODE: (
        "From the first to the last token. Long outputs take long.",
        "compare with the time between tokens on Decode and batching.",
    ),
    semconv.SPAN_POSTPROCESS: (
        "From the last token until the last byte is handed to the socket.",
        "usual reasons are slow clients, or work after the response.",
    ),
}
"""The meaning of each stage, and the usual reason when it is long."""


def _all_stages_row() -> DashboardRow:
    by = (semconv.STAGE,)
    stage = label_name(semconv.STAGE)
    host = label_equals(semconv.CLOCK, semconv.CLOCK_HOST)
    # A stack would count nested stages twice.
    not_nested = label_not_matches(semconv.STAGE, "|".join(semconv.NESTED_STAGES))
    mean = ratio_to_total(
        PROMQL.sum_rate(STAGE_DURATION, host, not_nested, by=by), PROMQL.rate(semconv.REQUEST_DURATION)
    )
    by_clock = (semconv.STAGE, semconv.CLOCK)
    clocks = legend_format(semconv.STAGE, semconv.CLOCK)
    budget_share = f"{PROMQL.quantile(0.99, STAGE_DURATION, host, by=by)} / on ({stage}) group_left max by ({stage}) ({STAGE_BUDGET})"
    return DashboardRow(
        "All stages",
        [
            panels.timeseries_panel(
                "Mean time per stage",
                PanelDescription(
                    "Mean time of a request in each stage, stacked. Means hide slow requests: see the rows below.",
                    "open the row of the stage that grew.",
                ),
                [PanelQuery(mean, legend_format(semconv.STAGE))],
                unit="s",
                stacked="normal",
                size=(12, 9),
            ),
            panels.timeseries_panel(
                "p99 of each stage",
                PanelDescription(
                    "p99 of the time in each stage. Each stage may have different slowest requests.",
                    "the highest line is the stage that makes requests slow.",
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
                "Host and GPU time",
                PanelDescription(
                    "Mean by the host's clock, and by events on the GPU's streams if they are timed. On a CPU there is no device line.",
                    "where host is far above device, the GPU waited for the host or for other work.",
                ),
                [PanelQuery(PROMQL.mean(STAGE_DURATION, by=by_clock), clocks)],
                unit="s",
                size=(12, 8),
            ),
            panels.timeseries_panel(
                "p99 as a share of the stage budget",
                PanelDescription(
                    "p99 of a stage as a share of its budget in `slo.yaml`.",
                    "above 100 % the stage exceeds its budget.",
                ),
                [PanelQuery(budget_share, legend_format(semconv.STAGE))],
                unit="percentunit",
                size=(12, 8),
                empty="no budgets are recorded; see otel-infer alerts build slo.yaml",
            ),
        ],
    )


def _stage_panels(name: str) -> list[Json]:
    matchers = label_equals(semconv.STAGE, name), label_equals(semconv.CLOCK, semconv.CLOCK_HOST)
    description = PanelDescription(*STAGE_DESCRIPTIONS[name])
    return [
        panels.heatmap_panel(
            name.capitalize(), description, PROMQL.bucket_increase(STAGE_DURATION, *matchers), size=(12, 7)
        ),
        panels.quantiles_panel(
            f"{name.capitalize()}: quantiles", description, PROMQL, STAGE_DURATION, *matchers, size=(12, 7)
        ),
    ]


def _requests_row() -> DashboardRow:
    # A request that fails early has no model.
    model = f'(span.{semconv.REQUEST_MODEL} =~ "$model" || status = error)'
    filters = f'span.{semconv.KEEP_REASON} =~ "{"|".join(semconv.NOTABLE_REASONS)}" && {model}'
    selected = ", ".join(
        f"span.{name}" for name in (semconv.KEEP_REASON, semconv.LATENCY_TOP_CAUSE, semconv.TTFT)
    )
    return DashboardRow(
        "Single requests",
        [
            panels.trace_search_panel(
                "Slow, failed and interfering requests",
                PanelDescription(
                    "Requests that were slow, missed an objective, failed, were aborted or preempted, or delayed other requests.",
                    "open a request: its largest `infer.latency.*` shows where its time went.",
                ),
                f"{{ {filters} }} | select({selected})",
            ),
            panels.trace_panel(
                "Trace",
                PanelDescription(
                    "The trace with the id set above.",
                    "check the longest stage, then the links of the request.",
                ),
                "$trace_id",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """Returns the dashboard Latency breakdown."""
    stages = [DashboardRow(name.capitalize(), _stage_panels(name)) for name in STAGE_DESCRIPTIONS]
    description = "The time of requests in each stage, by host and GPU clock, and single requests."
    return Dashboard(
        "latency-breakdown", "Latency breakdown", description, [_all_stages_row(), *stages, _requests_row()]
    )
