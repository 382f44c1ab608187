"""The dashboard Decode and batching: the engine's steps, and their effect on token latency."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import (
    BY_WORKER,
    WORKER_LEGEND,
    PanelDescription,
    PanelQuery,
    legend_format,
)
from otel_infer.monitoring.promql import label_equals, label_matches, ratio_or_absent, ratio_to_total

_DECODE_STEPS = label_equals(semconv.STEP_KIND, semconv.STEP_DECODE)
_PREFILL_STEPS = label_matches(semconv.STEP_KIND, f"{semconv.STEP_PREFILL}|{semconv.STEP_MIXED}")
_HOST_CLOCK = label_equals(semconv.CLOCK, semconv.CLOCK_HOST)


def _token_latency_row() -> DashboardRow:
    causes = [row.name for row in semconv.CAUSE_TABLE if row.slows_decode]
    matcher = label_matches(semconv.LATENCY_CAUSE, "|".join(causes))
    delay = ratio_to_total(
        PROMQL.rate(semconv.LATENCY_DURATION, matcher, by=(semconv.LATENCY_CAUSE,)),
        PROMQL.rate(semconv.REQUEST_DURATION),
    )
    return DashboardRow(
        "Token latency",
        [
            panels.heatmap_panel(
                "Time between tokens",
                PanelDescription(
                    "Distribution of all gaps between two tokens of a stream.",
                    "a second band shows interruptions: see the delay by cause.",
                ),
                PROMQL.bucket_increase(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles_panel(
                "Time between tokens",
                PanelDescription(
                    "Quantiles of all gaps between two tokens.",
                    "p99 far above p50 means that single steps are interrupted.",
                ),
                PROMQL,
                semconv.INTER_TOKEN_LATENCY,
            ),
            panels.timeseries_panel(
                "Decode delay by cause",
                PanelDescription(
                    "Mean time that a request lost to other requests and to pauses.",
                    "`interference`: chunk prompts, or serve long prompts separately. `batching`: use a smaller batch. `preemption`: add KV cache. `gc`: freeze objects, or collect less often.",
                ),
                [PanelQuery(delay, legend_format(semconv.LATENCY_CAUSE))],
                unit="s",
                stacked="normal",
                size=(12, 8),
            ),
            panels.quantiles_panel(
                "Time per output token",
                PanelDescription(
                    "One value per request: its time after the first token, divided by the number of later tokens.",
                    "it rises with the batch size, which is the price of throughput.",
                ),
                PROMQL,
                semconv.TIME_PER_OUTPUT_TOKEN,
            ),
        ],
    )


def _engine_steps_row() -> DashboardRow:
    by = (semconv.STEP_KIND,)
    tokens = ratio_to_total(
        PROMQL.rate(semconv.STEP_TOKENS_TOTAL, by=by), PROMQL.rate(semconv.STEP_DURATION, _HOST_CLOCK)
    )
    return DashboardRow(
        "Engine steps",
        [
            panels.heatmap_panel(
                "Step time",
                PanelDescription(
                    "From scheduled until the tokens are known. Steps with prompts are longer.",
                    "points above the band are interrupted steps: see pauses.",
                ),
                PROMQL.bucket_increase(semconv.STEP_DURATION, _HOST_CLOCK),
            ),
            panels.timeseries_panel(
                "Step time p99, with and without prompts",
                PanelDescription(
                    "`decode`: no prompt in the step. `prefill`: only prompts. `mixed`: prompts and decoding sequences.",
                    "`mixed` far above `decode` causes interference: lower the limit of tokens per step.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.STEP_DURATION, _HOST_CLOCK, by=by),
                        legend_format(semconv.STEP_KIND),
                    )
                ],
                unit="s",
                size=(12, 8),
            ),
            panels.timeseries_panel(
                "Batch size",
                PanelDescription(
                    "Sequences in a step.",
                    "at its limit while requests wait, the batch is full.",
                ),
                panels.list_size_queries(PROMQL, semconv.STEP_BATCH_SIZE),
                unit="short",
            ),
            panels.timeseries_panel(
                "Tokens per step",
                PanelDescription(
                    "Mean tokens per step, by kind of step.",
                    "few tokens per step leave the GPU idle. Many prompt tokens delay decoding sequences.",
                ),
                [PanelQuery(tokens, legend_format(semconv.STEP_KIND))],
                unit="short",
                stacked="normal",
            ),
            panels.timeseries_panel(
                "Steps",
                PanelDescription(
                    "Steps per second.", "fewer steps with the same batch size: each takes longer."
                ),
                [
                    PanelQuery(PROMQL.rate(semconv.STEP_DURATION, _HOST_CLOCK, _DECODE_STEPS), "decode"),
                    PanelQuery(
                        PROMQL.rate(semconv.STEP_DURATION, _HOST_CLOCK, _PREFILL_STEPS), "with prompts"
                    ),
                ],
                unit="ops",
            ),
            panels.timeseries_panel(
                "Requests in flight",
                PanelDescription(
                    "Queued: not scheduled yet. Running: in the batch.",
                    "if queued grows while running stays flat, the batch or the KV cache is full.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.REQUEST_ACTIVE, by=(semconv.REQUEST_STATE,)),
                        legend_format(semconv.REQUEST_STATE),
                    )
                ],
                unit="short",
            ),
            panels.timeseries_panel(
                "Worker time p99 by rank",
                PanelDescription(
                    "Time of each worker for its part of a step. All ranks wait for the slowest.",
                    "if one rank is above the others, its GPU is throttled, shared or badly connected.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(
                            0.99,
                            semconv.STEP_EXECUTION,
                            by=(*BY_WORKER, semconv.CLOCK),
                        ),
                        f"{WORKER_LEGEND} {legend_format(semconv.CLOCK)}",
                    )
                ],
                unit="s",
                empty="no worker is reported",
            ),
            panels.timeseries_panel(
                "Pauses p99",
                PanelDescription(
                    "Pauses of the process, or of its event loop alone, by cause.",
                    "`gc`: create fewer objects, or freeze them after start. `throttled`: raise the CPU quota. `event_loop`: find the blocking call. `compile`, `capture`: warm up before traffic.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.PAUSES, by=(semconv.PAUSE_CAUSE,)),
                        legend_format(semconv.PAUSE_CAUSE),
                    )
                ],
                unit="s",
                empty="no pauses",
            ),
        ],
    )


def _speculative_row() -> DashboardRow:
    accepted = ratio_or_absent(PROMQL.rate(semconv.ACCEPTED_TOKENS), PROMQL.rate(semconv.DRAFTED_TOKENS))
    return DashboardRow(
        "Speculative decoding",
        [
            panels.timeseries_panel(
                "Acceptance rate",
                PanelDescription(
                    "Share of the drafted tokens that were accepted.",
                    "below a third, drafting costs more than it saves: draft fewer tokens, or use another draft model.",
                ),
                [PanelQuery(accepted, "accepted")],
                unit="percentunit",
                size=(12, 8),
                axis_max=1,
                empty="nothing is guessed ahead",
            ),
            panels.timeseries_panel(
                "Drafted and accepted tokens",
                PanelDescription(
                    "Tokens per second.", "compare with the output tokens per second on Overview."
                ),
                [
                    PanelQuery(PROMQL.rate(semconv.DRAFTED_TOKENS), "drafted"),
                    PanelQuery(PROMQL.rate(semconv.ACCEPTED_TOKENS), "accepted"),
                ],
                unit="short",
                size=(12, 8),
                empty="nothing is guessed ahead",
            ),
        ],
        collapsed=True,
    )


def build_dashboard() -> Dashboard:
    """Returns the dashboard Decode and batching."""
    description = "Steps, batches and gaps between tokens: why streams stutter."
    return Dashboard(
        "decode",
        "Decode and batching",
        description,
        [_token_latency_row(), _engine_steps_row(), _speculative_row()],
    )
