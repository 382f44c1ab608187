"""Is it well, and if not, what is it: the first dashboard to look at. Long, since it has most panels."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, UID, Board, Row
from otel_infer.monitoring.dashboards.panels import Query, Reading, legend
from otel_infer.monitoring.promql import equal, per, share, unlike
from otel_infer.semconv.prometheus import label

_REQUESTS = ASK.rate(semconv.REQUEST_DURATION)
_IS_ERROR = unlike(semconv.ERROR_TYPE, "|".join(semconv.NOT_ERRORS))
_FAILED = ASK.rate(semconv.REQUEST_DURATION, _IS_ERROR)
_LEFT = ASK.rate(semconv.REQUEST_ABANDONED, equal(semconv.ERROR_TYPE, semconv.ERROR_CLIENT_DISCONNECT))
_OUTPUT = ASK.rate(semconv.TOKENS, equal(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT))
_MODEL = label(semconv.REQUEST_MODEL)


def _of_model(metric: semconv.Metric) -> str:
    return ASK.quantile(0.99, metric, by=(semconv.REQUEST_MODEL,))


def _tiles() -> Row:
    tile = panels.tile
    return Row(
        "Is it well?",
        [
            tile(
                "Requests",
                Reading(
                    "Requests that ended, a second; whatever came of them.",
                    "nobody comes: look at what is in front of the server.",
                ),
                _REQUESTS,
                unit="reqps",
            ),
            tile(
                "Failed",
                Reading(
                    "Share of requests that ended with an error of the server, a time-out among them; not those whose client left.",
                    "look at `error.type` in the table of models, then at the slowest kept requests.",
                ),
                share(_FAILED, _REQUESTS),
                unit="percentunit",
                bad=((0.01, "orange"), (0.05, "red")),
            ),
            tile(
                "Clients that left",
                Reading(
                    "Share of requests whose client was gone before the end.",
                    "it mostly follows latency: look at TTFT first.",
                ),
                share(_LEFT, _REQUESTS),
                unit="percentunit",
                bad=((0.05, "orange"),),
            ),
            tile(
                "TTFT p99",
                Reading(
                    "The slowest hundredth waited at least so long for the first token.",
                    "before the first token it is queue or prefill: see the causes below.",
                ),
                ASK.quantile(0.99, semconv.TIME_TO_FIRST_TOKEN),
                unit="s",
            ),
            tile(
                "ITL p99",
                Reading(
                    "The longest hundredth of the gaps between tokens of one stream.",
                    "while it streams it is batching, others' prompts, preemption or a pause: see the causes below.",
                ),
                ASK.quantile(0.99, semconv.INTER_TOKEN_LATENCY),
                unit="s",
            ),
            tile(
                "E2E p99",
                Reading(
                    "The slowest hundredth took at least so long as a whole; long answers take long.",
                    "only if TTFT or ITL is bad as well.",
                ),
                ASK.quantile(0.99, semconv.REQUEST_DURATION),
                unit="s",
            ),
            tile(
                "TTFT within $ttft_slo s",
                Reading(
                    "Share of successful requests whose first token came in time; the bound is chosen above.",
                    "the burn-rate alert says how fast the budget goes.",
                ),
                ASK.within(semconv.TIME_TO_FIRST_TOKEN, "$ttft_slo"),
                unit="percentunit",
            ),
            tile(
                "ITL within $itl_slo s",
                Reading(
                    "Share of the gaps between tokens that were short enough.",
                    "streams stutter: see Decode and batching.",
                ),
                ASK.within(semconv.INTER_TOKEN_LATENCY, "$itl_slo"),
                unit="percentunit",
            ),
            tile(
                "Goodput",
                Reading(
                    "Share of requests that met every objective of `OTEL_INFER_SLO`.",
                    "the causes of slow requests below say where their time went.",
                ),
                share(
                    ASK.rate(semconv.REQUEST_OBJECTIVES, equal(semconv.SLO_MISSED, semconv.MISSED_NONE)),
                    ASK.rate(semconv.REQUEST_OBJECTIVES),
                ),
                unit="percentunit",
                empty="OTEL_INFER_SLO is not set",
            ),
            tile(
                "Output",
                Reading(
                    "Tokens made for finished requests, a second.",
                    "it falls while requests wait: look at KV cache and step time.",
                ),
                _OUTPUT,
                unit="short",
            ),
            tile(
                "Waiting",
                Reading(
                    "Requests that wait for the engine to take them up.",
                    "more come than are served: shed, spread, or scale earlier.",
                ),
                ASK.value(semconv.REQUEST_ACTIVE, equal(semconv.REQUEST_STATE, semconv.STATE_QUEUED)),
                unit="short",
            ),
            tile(
                "KV cache",
                Reading(
                    "The fullest engine's share of KV-cache blocks in use. Close to full is normal under load.",
                    "only together with preemptions or a queue: see KV cache and memory.",
                ),
                ASK.value(semconv.KV_UTILIZATION, take="max"),
                unit="percentunit",
                empty="no KV cache is told of",
            ),
        ],
    )


def _symptoms() -> Row:
    return Row(
        "What do people feel?",
        [
            panels.heatmap(
                "Time to first token",
                Reading(
                    "How long successful requests waited for the first token. A point is a request: a click opens its trace.",
                    "two bands are two kinds of requests; a band that rises is a queue; a cloud above is what only some meet: open one.",
                ),
                ASK.buckets(semconv.TIME_TO_FIRST_TOKEN),
            ),
            panels.heatmap(
                "Time between tokens",
                Reading(
                    "Every gap between two tokens of one stream.",
                    "a second band far above the first is an interruption: others' prompts, preemption, a pause.",
                ),
                ASK.buckets(semconv.INTER_TOKEN_LATENCY),
            ),
            panels.quantiles(
                "Time to first token",
                Reading(
                    "Over all servers that are chosen.",
                    "if p50 rises as well, everybody is slow: load or a slower model. If only p99 does, something hits some.",
                ),
                ASK,
                semconv.TIME_TO_FIRST_TOKEN,
                size=(8, 8),
            ),
            panels.quantiles(
                "Time between tokens",
                Reading("Over all gaps, so long answers weigh more.", "look at Decode and batching."),
                ASK,
                semconv.INTER_TOKEN_LATENCY,
                size=(8, 8),
            ),
            panels.quantiles(
                "Whole request",
                Reading(
                    "Arrival to last byte.",
                    "compare with the two beside it: whichever moved with it is to blame.",
                ),
                ASK,
                semconv.REQUEST_DURATION,
                size=(8, 8),
            ),
        ],
    )


def _causes() -> Row:
    by = (semconv.BLAME_CAUSE,)
    pair = (semconv.OFFENDER_CLASS, semconv.VICTIM_CLASS)
    reading = Reading(
        "Where the time of slow requests went: those that missed an objective, or are among the slowest of their size. The causes of "
        "a request sum to its duration.",
        "the largest band that is not `decode` or `prefill` is whose fault it is; the docs' page on `explain` says what to change first.",
    )
    return Row(
        "Whose fault is it?",
        [
            panels.lines(
                "Slow requests: their time by cause",
                reading,
                [Query(ASK.rate(semconv.BLAME_SLOW_DURATION, by=by), legend(semconv.BLAME_CAUSE))],
                unit="s",
                stacked="percent",
                size=(12, 9),
                empty="no request was slow",
            ),
            panels.lines(
                "All requests: their time by cause",
                Reading(
                    "The same for all finished requests, kept or not: what is usual.",
                    "a band that is wider on the left than here is what makes the slow ones slow.",
                ),
                [Query(ASK.rate(semconv.BLAME_DURATION, by=by), legend(semconv.BLAME_CAUSE))],
                unit="s",
                stacked="percent",
                size=(12, 9),
            ),
            panels.table(
                "Who holds up whom",
                Reading(
                    "Time a second that prompts of one class took from requests of another.",
                    "serve the heavy class apart, or chunk its prompts.",
                ),
                [("taken", ASK.rate(semconv.INTERFERENCE_DURATION, by=pair), "s")],
                by=[label(one) for one in pair],
                names={label(pair[0]): "offender", label(pair[1]): "victim"},
                size=(8, 8),
                empty="nobody held up anybody",
            ),
            panels.alerts(
                "Alerts", Reading("Ours that fire, or are about to.", "each has a link to what to do.")
            ),
            panels.lines(
                "Requests in flight",
                Reading(
                    "Queued: the engine has not taken them up. Running: it has.",
                    "a queue that grows while running stays flat is a full batch or a full KV cache.",
                ),
                [
                    Query(
                        ASK.value(semconv.REQUEST_ACTIVE, by=(semconv.REQUEST_STATE,)),
                        legend(semconv.REQUEST_STATE),
                    )
                ],
                unit="short",
            ),
        ],
    )


def _models() -> Row:
    url = f"/d/{UID}overview?${{datasource:queryparam}}&${{job:queryparam}}&var-model=${{__value.raw}}&${{__url_time_range}}"
    seconds = ASK.rate(semconv.DEVICE_ATTRIBUTED, by=(semconv.REQUEST_MODEL,))
    tokens = ASK.rate(
        semconv.TOKENS, equal(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT), by=(semconv.REQUEST_MODEL,)
    )
    by = (semconv.REQUEST_MODEL,)
    failed = ASK.rate(semconv.REQUEST_DURATION, _IS_ERROR, by=by)
    columns = [
        ("requests/s", ASK.rate(semconv.REQUEST_DURATION, by=by), "reqps"),
        ("failed", share(failed, ASK.rate(semconv.REQUEST_DURATION, by=by)), "percentunit"),
        ("TTFT p99", _of_model(semconv.TIME_TO_FIRST_TOKEN), "s"),
        ("ITL p99", _of_model(semconv.INTER_TOKEN_LATENCY), "s"),
        ("E2E p99", _of_model(semconv.REQUEST_DURATION), "s"),
        ("tokens/s", tokens, "short"),
    ]
    cost = [
        ("GPU-s per 1000 tokens", per(f"1000 * {seconds}", tokens), "s"),
        ("price per million tokens", per(f"($price + 0) / 3600 * 1e6 * {seconds}", tokens), "short"),
    ]
    return Row(
        "Which model?",
        [
            panels.table(
                "Models",
                Reading(
                    "One line for each model that is served; whatever else was asked for is `_OTHER`. A click on a name shows it alone.",
                    "begin with the line whose TTFT or ITL p99 is out of the ordinary.",
                ),
                columns,
                by=[_MODEL],
                names={_MODEL: "model"},
                links={_MODEL: {"title": "Only this model", "url": url}},
            ),
            panels.table(
                "What a model costs",
                Reading(
                    "GPU time attributed to requests by their tokens in each step (an estimate), by what they got for it. The price of a GPU-hour is entered above.",
                    "small batches and long prompts make tokens dear: see Decode and batching.",
                ),
                cost,
                by=[_MODEL],
                names={_MODEL: "model"},
                size=(24, 6),
                empty="no GPU is timed here",
            ),
        ],
    )


def board() -> Board:
    """The dashboard."""
    about = "From a symptom to its cause: is it well, what do people feel, whose fault is it, which model."
    return Board("overview", "Overview", about, [_tiles(), _symptoms(), _causes(), _models()])
