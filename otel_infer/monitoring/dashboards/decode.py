"""What the engine does step by step, and what that does to those who read along."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, Board, Row
from otel_infer.monitoring.dashboards.panels import Query, Reading, legend
from otel_infer.monitoring.promql import each_per, equal, matches, per

_DECODE = equal(semconv.STEP_KIND, semconv.STEP_DECODE)
_PROMPTS = matches(semconv.STEP_KIND, f"{semconv.STEP_PREFILL}|{semconv.STEP_MIXED}")
_HOST = equal(semconv.CLOCK, semconv.CLOCK_HOST)


def _readers() -> Row:
    held = (
        semconv.CAUSE_BATCHING,
        semconv.CAUSE_INTERFERENCE,
        semconv.CAUSE_PREEMPTION,
        semconv.CAUSE_HOST,
        semconv.CAUSE_GPU_THROTTLED,
        *semconv.PAUSE_CAUSES,
    )
    which = matches(semconv.BLAME_CAUSE, "|".join(held))
    delayed = each_per(
        ASK.rate(semconv.BLAME_DURATION, which, by=(semconv.BLAME_CAUSE,)), ASK.rate(semconv.REQUEST_DURATION)
    )
    return Row(
        "Who reads along",
        [
            panels.heatmap(
                "Time between tokens",
                Reading(
                    "Every gap between two tokens of one stream.",
                    "a second band is an interruption: see what held them up.",
                ),
                ASK.buckets(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles(
                "Time between tokens",
                Reading("Over all gaps.", "p99 far above p50: some steps are interrupted."),
                ASK,
                semconv.INTER_TOKEN_LATENCY,
            ),
            panels.lines(
                "What held them up",
                Reading(
                    "Mean time that a request lost to others and to pauses.",
                    "`interference`: chunk prompts, or serve long ones apart; `batching`: a smaller batch; `preemption`: more KV cache; `gc`: freeze, or collect less often.",
                ),
                [Query(delayed, legend(semconv.BLAME_CAUSE))],
                unit="s",
                stacked="normal",
                size=(12, 8),
            ),
            panels.quantiles(
                "Time per output token",
                Reading(
                    "One value per request: its time after the first token, by the tokens that came in it.",
                    "it rises with the batch: that is the price of throughput.",
                ),
                ASK,
                semconv.TIME_PER_OUTPUT_TOKEN,
            ),
        ],
    )


def _steps() -> Row:
    by = (semconv.STEP_KIND,)
    tokens = each_per(ASK.rate(semconv.STEP_TOKENS_TOTAL, by=by), ASK.rate(semconv.STEP_DURATION, _HOST))
    return Row(
        "The engine",
        [
            panels.heatmap(
                "Step time",
                Reading(
                    "Scheduled to tokens known. Steps with prompts in them are longer.",
                    "a cloud above the band: steps that something held up; see pauses.",
                ),
                ASK.buckets(semconv.STEP_DURATION, _HOST),
            ),
            panels.lines(
                "Step time p99, with and without prompts",
                Reading(
                    "`decode`: no prompt in the step. `prefill`: nothing else. `mixed`: prompts beside those who read along.",
                    "mixed far above decode is what interference is made of: a lower limit of tokens per step.",
                ),
                [Query(ASK.quantile(0.99, semconv.STEP_DURATION, _HOST, by=by), legend(semconv.STEP_KIND))],
                unit="s",
                size=(12, 8),
            ),
            panels.lines(
                "Batch size",
                Reading(
                    "Sequences in a step.",
                    "at its limit while requests wait: the batch is full.",
                ),
                [
                    Query(ASK.quantile(0.5, semconv.STEP_BATCH_SIZE), "p50"),
                    Query(ASK.quantile(0.99, semconv.STEP_BATCH_SIZE), "p99"),
                    Query(ASK.mean(semconv.STEP_BATCH_SIZE), "mean"),
                ],
                unit="short",
            ),
            panels.lines(
                "Tokens per step",
                Reading(
                    "Mean, of prompts and of decoding.",
                    "few tokens per step leave the GPU idle; many of prompts hold up who reads along.",
                ),
                [Query(tokens, legend(semconv.STEP_KIND))],
                unit="short",
                stacked="normal",
            ),
            panels.lines(
                "Steps",
                Reading("Steps a second.", "fewer while the batch is the same: each takes longer."),
                [
                    Query(ASK.rate(semconv.STEP_DURATION, _HOST, _DECODE), "decode"),
                    Query(ASK.rate(semconv.STEP_DURATION, _HOST, _PROMPTS), "with prompts"),
                ],
                unit="ops",
            ),
            panels.lines(
                "Requests in flight",
                Reading(
                    "Queued: not taken up yet. Running: in the batch.",
                    "queued grows while running is flat: full.",
                ),
                [
                    Query(
                        ASK.value(semconv.REQUEST_ACTIVE, by=(semconv.REQUEST_STATE,)),
                        legend(semconv.REQUEST_STATE),
                    )
                ],
                unit="short",
            ),
            panels.lines(
                "Worker time p99 by rank",
                Reading(
                    "What each worker took for its part of a step; the slowest rank is what the others wait for.",
                    "one rank above the others: its GPU is throttled, shared, or further away.",
                ),
                [
                    Query(
                        ASK.quantile(
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
                        f"{legend('instance', semconv.ENGINE, semconv.PROCESS_PID)} rank {legend(semconv.WORKER_RANK)} "
                        f"{legend(semconv.CLOCK)}",
                    )
                ],
                unit="s",
                empty="no worker is told of",
            ),
            panels.lines(
                "Pauses p99",
                Reading(
                    "How long the process, or its event loop alone, was held up, by the cause.",
                    "`gc`: fewer objects, or freeze after start; `throttled`: more CPU quota; `event_loop`: a call that blocks; `compile`, `capture`: warm up before traffic.",
                ),
                [
                    Query(
                        ASK.quantile(0.99, semconv.PAUSES, by=(semconv.PAUSE_CAUSE,)),
                        legend(semconv.PAUSE_CAUSE),
                    )
                ],
                unit="s",
                empty="nothing paused",
            ),
        ],
    )


def _speculative() -> Row:
    accepted = per(ASK.rate(semconv.ACCEPTED), ASK.rate(semconv.DRAFTED))
    return Row(
        "Speculative decoding",
        [
            panels.lines(
                "Guesses that were right",
                Reading(
                    "Of the tokens that were guessed ahead, how many were right.",
                    "below a third, guessing costs more than it saves: fewer tokens ahead, or another draft.",
                ),
                [Query(accepted, "accepted")],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty="nothing is guessed ahead",
            ),
            panels.lines(
                "Guesses",
                Reading("Tokens a second.", "compare with the tokens of the output."),
                [Query(ASK.rate(semconv.DRAFTED), "drafted"), Query(ASK.rate(semconv.ACCEPTED), "accepted")],
                unit="short",
                size=(12, 8),
                empty="nothing is guessed ahead",
            ),
        ],
        closed=True,
    )


def board() -> Board:
    """The dashboard."""
    about = "Steps, batches and gaps between tokens: why streams stutter."
    return Board("decode", "Decode and batching", about, [_readers(), _steps(), _speculative()])
