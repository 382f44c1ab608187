"""Is it well, and if not, what is it: the first dashboard to look at. Long, since it has most panels."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, UID_PREFIX, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_not_matches, ratio_or_absent, ratio_or_zero
from otel_infer.semconv.prometheus import label_name

_REQUEST_RATE = PROMQL.rate(semconv.REQUEST_DURATION)
_IS_ERROR = label_not_matches(semconv.ERROR_TYPE, "|".join(semconv.NON_ERROR_TYPES))
_FAILURE_RATE = PROMQL.rate(semconv.REQUEST_DURATION, _IS_ERROR)
_DISCONNECT_RATE = PROMQL.rate(
    semconv.REQUEST_ABANDONED, label_equals(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT)
)
_OUTPUT_TOKEN_RATE = PROMQL.rate(
    semconv.REQUEST_TOKENS, label_equals(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT)
)
_MODEL_LABEL = label_name(semconv.REQUEST_MODEL)


def _p99_by_model(metric: semconv.Metric) -> str:
    return PROMQL.quantile(0.99, metric, by=(semconv.REQUEST_MODEL,))


def _status_row() -> DashboardRow:
    tile = panels.stat_panel
    return DashboardRow(
        "Is it well?",
        [
            tile(
                "Requests",
                PanelDescription(
                    "Requests that ended, a second; whatever came of them.",
                    "nobody comes: look at what is in front of the server.",
                ),
                _REQUEST_RATE,
                unit="reqps",
            ),
            tile(
                "Failed",
                PanelDescription(
                    "Share of requests that ended with an error of the server, a time-out among them; not those whose client left.",
                    "look at `error.type` in the table of models, then at the slowest kept requests.",
                ),
                ratio_or_zero(_FAILURE_RATE, _REQUEST_RATE),
                unit="percentunit",
                bad=((0.01, "orange"), (0.05, "red")),
            ),
            tile(
                "Clients that left",
                PanelDescription(
                    "Share of requests whose client was gone before the end.",
                    "it mostly follows latency: look at TTFT first.",
                ),
                ratio_or_zero(_DISCONNECT_RATE, _REQUEST_RATE),
                unit="percentunit",
                bad=((0.05, "orange"),),
            ),
            tile(
                "TTFT p99",
                PanelDescription(
                    "The slowest hundredth waited at least so long for the first token.",
                    "before the first token it is queue or prefill: see the causes below.",
                ),
                PROMQL.quantile(0.99, semconv.TIME_TO_FIRST_TOKEN),
                unit="s",
            ),
            tile(
                "ITL p99",
                PanelDescription(
                    "The longest hundredth of the gaps between tokens of one stream.",
                    "while it streams it is batching, others' prompts, preemption or a pause: see the causes below.",
                ),
                PROMQL.quantile(0.99, semconv.INTER_TOKEN_LATENCY),
                unit="s",
            ),
            tile(
                "E2E p99",
                PanelDescription(
                    "The slowest hundredth took at least so long as a whole; long answers take long.",
                    "only if TTFT or ITL is bad as well.",
                ),
                PROMQL.quantile(0.99, semconv.REQUEST_DURATION),
                unit="s",
            ),
            tile(
                "TTFT within $ttft_slo s",
                PanelDescription(
                    "Share of successful requests whose first token came in time; the bound is chosen above.",
                    "the burn-rate alert says how fast the budget goes.",
                ),
                PROMQL.share_below(semconv.TIME_TO_FIRST_TOKEN, "$ttft_slo"),
                unit="percentunit",
            ),
            tile(
                "ITL within $itl_slo s",
                PanelDescription(
                    "Share of the gaps between tokens that were short enough.",
                    "streams stutter: see Decode and batching.",
                ),
                PROMQL.share_below(semconv.INTER_TOKEN_LATENCY, "$itl_slo"),
                unit="percentunit",
            ),
            tile(
                "Goodput",
                PanelDescription(
                    "Share of requests that met every objective of `OTEL_INFER_SLO`.",
                    "the causes of slow requests below say where their time went.",
                ),
                ratio_or_zero(
                    PROMQL.rate(
                        semconv.REQUEST_OBJECTIVES, label_equals(semconv.SLO_MISSED, semconv.SLO_MISSED_NONE)
                    ),
                    PROMQL.rate(semconv.REQUEST_OBJECTIVES),
                ),
                unit="percentunit",
                empty="OTEL_INFER_SLO is not set",
            ),
            tile(
                "Output",
                PanelDescription(
                    "Tokens made for finished requests, a second.",
                    "it falls while requests wait: look at KV cache and step time.",
                ),
                _OUTPUT_TOKEN_RATE,
                unit="short",
            ),
            tile(
                "Waiting",
                PanelDescription(
                    "Requests that wait for the engine to take them up.",
                    "more come than are served: shed, spread, or scale earlier.",
                ),
                PROMQL.aggregate_gauge(
                    semconv.REQUEST_ACTIVE, label_equals(semconv.REQUEST_STATE, semconv.STATE_QUEUED)
                ),
                unit="short",
            ),
            tile(
                "KV cache",
                PanelDescription(
                    "The fullest engine's share of KV-cache blocks in use. Close to full is normal under load.",
                    "only together with preemptions or a queue: see KV cache and memory.",
                ),
                PROMQL.aggregate_gauge(semconv.KV_UTILIZATION, take="max"),
                unit="percentunit",
                empty="no KV cache is told of",
            ),
        ],
    )


def _latency_row() -> DashboardRow:
    return DashboardRow(
        "What do people feel?",
        [
            panels.heatmap_panel(
                "Time to first token",
                PanelDescription(
                    "How long successful requests waited for the first token. A point is a request: a click opens its trace.",
                    "two bands are two kinds of requests; a band that rises is a queue; a cloud above is what only some meet: open one.",
                ),
                PROMQL.bucket_increase(semconv.TIME_TO_FIRST_TOKEN),
            ),
            panels.heatmap_panel(
                "Time between tokens",
                PanelDescription(
                    "Every gap between two tokens of one stream.",
                    "a second band far above the first is an interruption: others' prompts, preemption, a pause.",
                ),
                PROMQL.bucket_increase(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles_panel(
                "Time to first token",
                PanelDescription(
                    "Over all servers that are chosen.",
                    "if p50 rises as well, everybody is slow: load or a slower model. If only p99 does, something hits some.",
                ),
                PROMQL,
                semconv.TIME_TO_FIRST_TOKEN,
                size=(8, 8),
            ),
            panels.quantiles_panel(
                "Time between tokens",
                PanelDescription(
                    "Over all gaps, so long answers weigh more.", "look at Decode and batching."
                ),
                PROMQL,
                semconv.INTER_TOKEN_LATENCY,
                size=(8, 8),
            ),
            panels.quantiles_panel(
                "Whole request",
                PanelDescription(
                    "Arrival to last byte.",
                    "compare with the two beside it: whichever moved with it is to blame.",
                ),
                PROMQL,
                semconv.REQUEST_DURATION,
                size=(8, 8),
            ),
        ],
    )


def _causes_row() -> DashboardRow:
    by = (semconv.LATENCY_CAUSE,)
    pair = (semconv.INTERFERENCE_CLASS, semconv.INTERFERENCE_WAITING_CLASS)
    reading = PanelDescription(
        "Where the time of slow requests went: those that missed an objective, or are among the slowest of their size. The causes of "
        "a request sum to its duration.",
        "the largest band that is not `decode` or `prefill` is whose fault it is; the docs' page on `explain` says what to change first.",
    )
    return DashboardRow(
        "Whose fault is it?",
        [
            panels.timeseries_panel(
                "Slow requests: their time by cause",
                reading,
                [
                    PanelQuery(
                        PROMQL.rate(semconv.LATENCY_SLOW_DURATION, by=by),
                        legend_format(semconv.LATENCY_CAUSE),
                    )
                ],
                unit="s",
                stacked="percent",
                size=(12, 9),
                empty="no request was slow",
            ),
            panels.timeseries_panel(
                "All requests: their time by cause",
                PanelDescription(
                    "The same for all finished requests, kept or not: what is usual.",
                    "a band that is wider on the left than here is what makes the slow ones slow.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(semconv.LATENCY_DURATION, by=by), legend_format(semconv.LATENCY_CAUSE)
                    )
                ],
                unit="s",
                stacked="percent",
                size=(12, 9),
            ),
            panels.table_panel(
                "Who holds up whom",
                PanelDescription(
                    "Time a second that prompts of one class took from requests of another.",
                    "serve the heavy class apart, or chunk its prompts.",
                ),
                [("taken", PROMQL.rate(semconv.INTERFERENCE_DURATION, by=pair), "s")],
                by=[label_name(one) for one in pair],
                names={label_name(pair[0]): "offender", label_name(pair[1]): "victim"},
                size=(8, 8),
                empty="nobody held up anybody",
            ),
            panels.alert_list_panel(
                "Alerts",
                PanelDescription("Ours that fire, or are about to.", "each has a link to what to do."),
            ),
            panels.timeseries_panel(
                "Requests in flight",
                PanelDescription(
                    "Queued: the engine has not taken them up. Running: it has.",
                    "a queue that grows while running stays flat is a full batch or a full KV cache.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.REQUEST_ACTIVE, by=(semconv.REQUEST_STATE,)),
                        legend_format(semconv.REQUEST_STATE),
                    )
                ],
                unit="short",
            ),
        ],
    )


def _models_row() -> DashboardRow:
    url = f"/d/{UID_PREFIX}overview?${{datasource:queryparam}}&${{job:queryparam}}&var-model=${{__value.raw}}&${{__url_time_range}}"
    seconds = PROMQL.rate(semconv.DEVICE_ATTRIBUTED, by=(semconv.REQUEST_MODEL,))
    tokens = PROMQL.rate(
        semconv.REQUEST_TOKENS,
        label_equals(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT),
        by=(semconv.REQUEST_MODEL,),
    )
    by = (semconv.REQUEST_MODEL,)
    failed = PROMQL.rate(semconv.REQUEST_DURATION, _IS_ERROR, by=by)
    columns = [
        ("requests/s", PROMQL.rate(semconv.REQUEST_DURATION, by=by), "reqps"),
        ("failed", ratio_or_zero(failed, PROMQL.rate(semconv.REQUEST_DURATION, by=by)), "percentunit"),
        ("TTFT p99", _p99_by_model(semconv.TIME_TO_FIRST_TOKEN), "s"),
        ("ITL p99", _p99_by_model(semconv.INTER_TOKEN_LATENCY), "s"),
        ("E2E p99", _p99_by_model(semconv.REQUEST_DURATION), "s"),
        ("tokens/s", tokens, "short"),
    ]
    cost = [
        ("GPU-s per 1000 tokens", ratio_or_absent(f"1000 * {seconds}", tokens), "s"),
        (
            "price per million tokens",
            ratio_or_absent(f"($price + 0) / 3600 * 1e6 * {seconds}", tokens),
            "short",
        ),
    ]
    return DashboardRow(
        "Which model?",
        [
            panels.table_panel(
                "Models",
                PanelDescription(
                    "One line for each model that is served; whatever else was asked for is `_OTHER`. A click on a name shows it alone.",
                    "begin with the line whose TTFT or ITL p99 is out of the ordinary.",
                ),
                columns,
                by=[_MODEL_LABEL],
                names={_MODEL_LABEL: "model"},
                links={_MODEL_LABEL: {"title": "Only this model", "url": url}},
            ),
            panels.table_panel(
                "What a model costs",
                PanelDescription(
                    "GPU time attributed to requests by their tokens in each step (an estimate), by what they got for it. The price of a GPU-hour is entered above.",
                    "small batches and long prompts make tokens dear: see Decode and batching.",
                ),
                cost,
                by=[_MODEL_LABEL],
                names={_MODEL_LABEL: "model"},
                size=(24, 6),
                empty="no GPU is timed here",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """The dashboard."""
    about = "From a symptom to its cause: is it well, what do people feel, whose fault is it, which model."
    return Dashboard(
        "overview", "Overview", about, [_status_row(), _latency_row(), _causes_row(), _models_row()]
    )
