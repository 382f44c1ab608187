"""The dashboard Services: servers that call a model once for a request or a batch, such as classifiers and embedders."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_matches
from otel_infer.semconv.prometheus import label_name

_OPERATION = (semconv.OPERATION_NAME,)
_OPERATION_LABEL = label_name(semconv.OPERATION_NAME)
_WAITS = (
    semconv.SPAN_ACCEPT, semconv.SPAN_POOL_WAIT, semconv.SPAN_LOCK_WAIT, semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT,
)  # fmt: skip
_IS_WAIT = label_matches(semconv.STAGE, "|".join(_WAITS))
_HOST = label_equals(semconv.CLOCK, semconv.CLOCK_HOST)


def _operations_row() -> DashboardRow:
    return DashboardRow(
        "By operation",
        [
            panels.timeseries_panel(
                "Time to result p99",
                PanelDescription(
                    "From arrival to last byte, by operation: inference, embeddings, chat and others.",
                    "find the stage that grew with it in the panels below.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.REQUEST_DURATION, by=_OPERATION),
                        legend_format(semconv.OPERATION_NAME),
                    )
                ],
                unit="s",
                size=(12, 8),
            ),
            panels.table_panel(
                "Operations",
                PanelDescription(
                    "One line per operation of all selected servers and models.",
                    "p99 far above p50 means that few requests are affected: see the waits.",
                ),
                [
                    ("requests/s", PROMQL.rate(semconv.REQUEST_DURATION, by=_OPERATION), "reqps"),
                    ("p50", PROMQL.quantile(0.5, semconv.REQUEST_DURATION, by=_OPERATION), "s"),
                    ("p95", PROMQL.quantile(0.95, semconv.REQUEST_DURATION, by=_OPERATION), "s"),
                    ("p99", PROMQL.quantile(0.99, semconv.REQUEST_DURATION, by=_OPERATION), "s"),
                ],
                by=[_OPERATION_LABEL],
                names={_OPERATION_LABEL: "operation"},
                size=(12, 8),
            ),
        ],
    )


def _waits_row() -> DashboardRow:
    return DashboardRow(
        "Waits and batches",
        [
            panels.timeseries_panel(
                "Waits p99",
                PanelDescription(
                    "p99 of each wait before the model is called: in the socket, for a thread, for a lock, in a queue, for a batch.",
                    "`queue wait`: the worker is busy, so use larger batches or more workers. `batch wait`: shorten the window. "
                    "`pool wait`: more threads. `accept`: the event loop or all workers are busy.",
                ),
                [
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.STAGE_DURATION, _IS_WAIT, _HOST, by=(semconv.STAGE,)),
                        legend_format(semconv.STAGE),
                    )
                ],
                unit="s",
                size=(12, 8),
                empty="no request has waited",
            ),
            panels.timeseries_panel(
                "Batch size",
                PanelDescription(
                    "Items of the model call that served a request, of requests that waited in a queue.",
                    "1 at all times: the batcher batches nothing. At its limit while `queue wait` grows: the batch is full.",
                ),
                panels.list_size_queries(PROMQL, semconv.REQUEST_BATCH_SIZE),
                unit="short",
                size=(12, 8),
                empty="no request was served by a worker",
            ),
            panels.quantiles_panel(
                "Queue wait",
                PanelDescription(
                    "Time of a request in a queue of the application, until a worker took it.",
                    "it grows with the load before anything else does: the worker is the bottleneck.",
                ),
                PROMQL, semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_QUEUE_WAIT), _HOST,
            ),
            panels.quantiles_panel(
                "Batch wait",
                PanelDescription(
                    "Time of a request between its worker and the call of the model: the batch was not complete.",
                    "at low load it is the window of the batcher, which every request pays.",
                ),
                PROMQL, semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_BATCH_WAIT), _HOST,
            ),
            panels.quantiles_panel(
                "Model call",
                PanelDescription(
                    "Time of the call of the model, alone or for a whole batch.",
                    "it grows with the batch size; at equal size the processor is short.",
                ),
                PROMQL, semconv.STAGE_DURATION, label_equals(semconv.STAGE, semconv.SPAN_FORWARD), _HOST,
            ),
            panels.heatmap_panel(
                "Time to result",
                PanelDescription(
                    "Distribution of whole requests. A point is a request: click it to open its trace.",
                    "two bands are two kinds of requests, or batches that wait for their window.",
                ),
                PROMQL.bucket_increase(semconv.REQUEST_DURATION),
                size=(12, 8),
            ),
        ],
    )  # fmt: skip


def build_dashboard() -> Dashboard:
    """Returns the dashboard Services."""
    description = (
        "Classifiers, embedders and other models without generation: time to result, waits and batches."
    )
    return Dashboard("services", "Services", description, [_operations_row(), _waits_row()])
