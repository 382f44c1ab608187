"""What the engine does step by step, and what that does to those who read along."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_matches, ratio_or_absent, ratio_to_total

_DECODE_STEPS = label_equals(semconv.STEP_KIND, semconv.STEP_DECODE)
_PREFILL_STEPS = label_matches(semconv.STEP_KIND, f"{semconv.STEP_PREFILL}|{semconv.STEP_MIXED}")
_HOST_CLOCK = label_equals(semconv.CLOCK, semconv.CLOCK_HOST)


def _token_latency_row() -> DashboardRow:
    held = [row.name for row in semconv.CAUSE_TABLE if row.slows_decode]
    which = label_matches(semconv.LATENCY_CAUSE, "|".join(held))
    delayed = ratio_to_total(
        PROMQL.rate(semconv.LATENCY_DURATION, which, by=(semconv.LATENCY_CAUSE,)),
        PROMQL.rate(semconv.REQUEST_DURATION),
    )
    return DashboardRow(
        "Who reads along",
        [
            panels.heatmap_panel(
                "Time between tokens",
                PanelDescription(
                    "Every gap between two tokens of one stream.",
                    "a second band is an interruption: see what held them up.",
                ),
                PROMQL.bucket_increase(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles_panel(
                "Time between tokens",
                PanelDescription("Over all gaps.", "p99 far above p50: some steps are interrupted."),
                PROMQL,
                semconv.INTER_TOKEN_LATENCY,
            ),
            panels.timeseries_panel(
                "What held them up",
                PanelDescription(
                    "Mean time that a request lost to others and to pauses.",
                    "`interference`: chunk prompts, or serve long ones apart; `batching`: a smaller batch; `preemption`: more KV cache; `gc`: freeze, or collect less often.",
                ),
                [PanelQuery(delayed, legend_format(semconv.LATENCY_CAUSE))],
                unit="s",
                stacked="normal",
                size=(12, 8),
            ),
            panels.quantiles_panel(
                "Time per output token",
                PanelDescription(
                    "One value per request: its time after the first token, by the tokens that came in it.",
                    "it rises with the batch: that is the price of throughput.",
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
        "The engine",
        [
            panels.heatmap_panel(
                "Step time",
                PanelDescription(
                    "Scheduled to tokens known. Steps with prompts in them are longer.",
                    "a cloud above the band: steps that something held up; see pauses.",
                ),
                PROMQL.bucket_increase(semconv.STEP_DURATION, _HOST_CLOCK),
            ),
            panels.timeseries_panel(
                "Step time p99, with and without prompts",
                PanelDescription(
                    "`decode`: no prompt in the step. `prefill`: nothing else. `mixed`: prompts beside those who read along.",
                    "mixed far above decode is what interference is made of: a lower limit of tokens per step.",
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
                    "at its limit while requests wait: the batch is full.",
                ),
                [
                    PanelQuery(PROMQL.quantile(0.5, semconv.STEP_BATCH_SIZE), "p50"),
                    PanelQuery(PROMQL.quantile(0.99, semconv.STEP_BATCH_SIZE), "p99"),
                    PanelQuery(PROMQL.mean(semconv.STEP_BATCH_SIZE), "mean"),
                ],
                unit="short",
            ),
            panels.timeseries_panel(
                "Tokens per step",
                PanelDescription(
                    "Mean, of prompts and of decoding.",
                    "few tokens per step leave the GPU idle; many of prompts hold up who reads along.",
                ),
                [PanelQuery(tokens, legend_format(semconv.STEP_KIND))],
                unit="short",
                stacked="normal",
            ),
            panels.timeseries_panel(
                "Steps",
                PanelDescription("Steps a second.", "fewer while the batch is the same: each takes longer."),
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
                    "Queued: not taken up yet. Running: in the batch.",
                    "queued grows while running is flat: full.",
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
                    "What each worker took for its part of a step; the slowest rank is what the others wait for.",
                    "one rank above the others: its GPU is throttled, shared, or further away.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(
                            0.99,
                            semconv.STEP_EXECUTION,
                            by=(
                                "instance",
                                semconv.ENGINE,
                                semconv.PROCESS_PID,
                                semconv.WORKER_RANK,
                                semconv.CLOCK,
                            ),
                        ),
                        f"{legend_format('instance', semconv.ENGINE, semconv.PROCESS_PID)} rank {legend_format(semconv.WORKER_RANK)} "
                        f"{legend_format(semconv.CLOCK)}",
                    )
                ],
                unit="s",
                empty="no worker is told of",
            ),
            panels.timeseries_panel(
                "Pauses p99",
                PanelDescription(
                    "How long the process, or its event loop alone, was held up, by the cause.",
                    "`gc`: fewer objects, or freeze after start; `throttled`: more CPU quota; `event_loop`: a call that blocks; `compile`, `capture`: warm up before traffic.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.PAUSES, by=(semconv.PAUSE_CAUSE,)),
                        legend_format(semconv.PAUSE_CAUSE),
                    )
                ],
                unit="s",
                empty="nothing paused",
            ),
        ],
    )


def _speculative_row() -> DashboardRow:
    accepted = ratio_or_absent(PROMQL.rate(semconv.ACCEPTED_TOKENS), PROMQL.rate(semconv.DRAFTED_TOKENS))
    return DashboardRow(
        "Speculative decoding",
        [
            panels.timeseries_panel(
                "Guesses that were right",
                PanelDescription(
                    "Of the tokens that were guessed ahead, how many were right.",
                    "below a third, guessing costs more than it saves: fewer tokens ahead, or another draft.",
                ),
                [PanelQuery(accepted, "accepted")],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty="nothing is guessed ahead",
            ),
            panels.timeseries_panel(
                "Guesses",
                PanelDescription("Tokens a second.", "compare with the tokens of the output."),
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
    """The dashboard."""
    about = "Steps, batches and gaps between tokens: why streams stutter."
    return Dashboard(
        "decode",
        "Decode and batching",
        about,
        [_token_latency_row(), _engine_steps_row(), _speculative_row()],
    )
