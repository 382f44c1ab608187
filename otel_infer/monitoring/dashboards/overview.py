"""The dashboard Overview, the first to open: health, latency, causes of slow requests, and models."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.names import UID_PREFIX
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
        "Health",
        [
            tile(
                "Requests",
                PanelDescription(
                    "Finished requests per second, with any outcome.",
                    "without requests, check the load balancer or proxy in front of the server.",
                ),
                _REQUEST_RATE,
                unit="reqps",
            ),
            tile(
                "Failed",
                PanelDescription(
                    "Share of requests that ended with a server error or a timeout. Requests of disconnected clients are excluded.",
                    "find the model in the table of models, then open its failed requests in Latency breakdown.",
                ),
                ratio_or_zero(_FAILURE_RATE, _REQUEST_RATE),
                unit="percentunit",
                bad=((0.01, "orange"), (0.05, "red")),
            ),
            tile(
                "Client disconnects",
                PanelDescription(
                    "Share of requests whose client disconnected before the end.",
                    "the usual reason is latency: check TTFT first.",
                ),
                ratio_or_zero(_DISCONNECT_RATE, _REQUEST_RATE),
                unit="percentunit",
                bad=((0.05, "orange"),),
            ),
            tile(
                "TTFT p99",
                PanelDescription(
                    "99 % of successful requests got their first token within this time.",
                    "the time goes to queue or prefill: see the causes below.",
                ),
                PROMQL.quantile(0.99, semconv.TIME_TO_FIRST_TOKEN),
                unit="s",
            ),
            tile(
                "ITL p99",
                PanelDescription(
                    "99 % of the gaps between two tokens of a stream are at most this long.",
                    "the time goes to batching, prompts of other requests, preemption or pauses: see the causes below.",
                ),
                PROMQL.quantile(0.99, semconv.INTER_TOKEN_LATENCY),
                unit="s",
            ),
            tile(
                "E2E p99",
                PanelDescription(
                    "99 % of requests ended within this time. Long outputs take long.",
                    "it matters only if TTFT or ITL is bad as well.",
                ),
                PROMQL.quantile(0.99, semconv.REQUEST_DURATION),
                unit="s",
            ),
            tile(
                "TTFT within $ttft_slo s",
                PanelDescription(
                    "Share of successful requests whose first token came within the bound set above.",
                    "the burn-rate alert shows how fast the error budget burns.",
                ),
                PROMQL.share_below(semconv.TIME_TO_FIRST_TOKEN, "$ttft_slo"),
                unit="percentunit",
            ),
            tile(
                "ITL within $itl_slo s",
                PanelDescription(
                    "Share of the gaps between tokens within the bound set above.",
                    "streams stutter: see Decode and batching.",
                ),
                PROMQL.share_below(semconv.INTER_TOKEN_LATENCY, "$itl_slo"),
                unit="percentunit",
            ),
            tile(
                "Goodput",
                PanelDescription(
                    "Share of requests that met every objective of `OTEL_INFER_SLO`.",
                    "the causes of slow requests below show where their time went.",
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
                "Output tokens",
                PanelDescription(
                    "Output tokens per second, of finished requests.",
                    "if it falls while requests wait, check KV cache and step time.",
                ),
                _OUTPUT_TOKEN_RATE,
                unit="short",
            ),
            tile(
                "Queued requests",
                PanelDescription(
                    "Requests in the queue of the engine.",
                    "requests arrive faster than they are served: shed or spread load, or scale earlier.",
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
                    "it matters only with preemptions or a queue: see KV cache and memory.",
                ),
                PROMQL.aggregate_gauge(semconv.KV_UTILIZATION, aggregation="max"),
                unit="percentunit",
                empty="no KV cache is reported",
            ),
        ],
    )


def _latency_row() -> DashboardRow:
    return DashboardRow(
        "Latency",
        [
            panels.heatmap_panel(
                "Time to first token",
                PanelDescription(
                    "Distribution of TTFT of successful requests. A point is a request: click it to open its trace.",
                    "two bands are two kinds of requests. A rising band is a queue. Open one of the points above a band.",
                ),
                PROMQL.bucket_increase(semconv.TIME_TO_FIRST_TOKEN),
            ),
            panels.heatmap_panel(
                "Time between tokens",
                PanelDescription(
                    "Distribution of all gaps between two tokens of a stream.",
                    "a second band far above the first shows interruptions: prompts of other requests, preemption or pauses.",
                ),
                PROMQL.bucket_increase(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles_panel(
                "Time to first token",
                PanelDescription(
                    "TTFT over all selected servers.",
                    "if p50 rises as well, all requests are slow: load, or a slower model. If only p99 rises, few requests are affected.",
                ),
                PROMQL,
                semconv.TIME_TO_FIRST_TOKEN,
                size=(8, 8),
            ),
            panels.quantiles_panel(
                "Time between tokens",
                PanelDescription(
                    "Gaps between two tokens of a stream. Long outputs weigh more, because each gap counts.",
                    "see Decode and batching.",
                ),
                PROMQL,
                semconv.INTER_TOKEN_LATENCY,
                size=(8, 8),
            ),
            panels.quantiles_panel(
                "Whole request",
                PanelDescription(
                    "From arrival to last byte.",
                    "compare with the two panels beside it: the latency that rose with it is the reason.",
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
    description = PanelDescription(
        "Time of slow requests by cause. A request is slow if it missed an objective, or is among the slowest of its size. "
        "The causes of a request sum to its duration.",
        "the largest band other than `decode` and `prefill` is the cause. The docs on `explain` list what to change first.",
    )
    return DashboardRow(
        "Causes of slow requests",
        [
            panels.timeseries_panel(
                "Slow requests: time by cause",
                description,
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
                "All requests: time by cause",
                PanelDescription(
                    "Time of all finished requests by cause, exported or not, for comparison.",
                    "a band that is wider in the left panel than here is what makes requests slow.",
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
                "Interference by class",
                PanelDescription(
                    "Time per second by which prompts of one class delayed requests of another class.",
                    "serve the interfering class separately, or chunk its prompts.",
                ),
                [("delay", PROMQL.rate(semconv.INTERFERENCE_DURATION, by=pair), "s")],
                by=[label_name(attribute) for attribute in pair],
                names={label_name(pair[0]): "interfering", label_name(pair[1]): "delayed"},
                size=(8, 8),
                empty="no interference",
            ),
            panels.alert_list_panel(
                "Alerts",
                PanelDescription(
                    "Alerts of otel_infer that fire or are pending.", "follow the runbook link of the alert."
                ),
            ),
            panels.timeseries_panel(
                "Requests in flight",
                PanelDescription(
                    "Queued: not scheduled by the engine yet. Running: scheduled.",
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
        "By model",
        [
            panels.table_panel(
                "Models",
                PanelDescription(
                    "One line per served model; requests for other names are `_OTHER`. Click a name to show that model alone.",
                    "begin with the model whose TTFT or ITL p99 differs from the others.",
                ),
                columns,
                by=[_MODEL_LABEL],
                names={_MODEL_LABEL: "model"},
                links={_MODEL_LABEL: {"title": "Show only this model", "url": url}},
            ),
            panels.table_panel(
                "Cost by model",
                PanelDescription(
                    "GPU time per output token, an estimate: each step's time is divided by the tokens of its requests. The price of a GPU-hour is set above.",
                    "small batches and long prompts make tokens expensive: see Decode and batching.",
                ),
                cost,
                by=[_MODEL_LABEL],
                names={_MODEL_LABEL: "model"},
                size=(24, 6),
                empty="no GPU is timed",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """Returns the dashboard Overview."""
    description = "From a symptom to its cause: health, latency, causes of slow requests, and models."
    return Dashboard(
        "overview", "Overview", description, [_status_row(), _latency_row(), _causes_row(), _models_row()]
    )
