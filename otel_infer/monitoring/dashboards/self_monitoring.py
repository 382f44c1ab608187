"""The dashboard Self-monitoring: hooks, losses, sampling and cost of otel_infer."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_not_matches, ratio_or_absent
from otel_infer.semconv.prometheus import label_name

_DAY_S = 86_400
_NO_DROPS = "no losses"


def _hooks_and_drops_row() -> DashboardRow:
    hooks = (semconv.INTEGRATION, semconv.HOOK_STATE)
    missing = PROMQL.aggregate_gauge(
        semconv.SELF_HOOKS, label_equals(semconv.HOOK_STATE, semconv.HOOK_MISSING)
    )
    return DashboardRow(
        "Hooks and losses",
        [
            panels.stat_panel(
                "Hooks missing",
                PanelDescription(
                    "Hooks of loaded libraries that are not installed.",
                    "run `otel-infer doctor`: it lists them, and the data that is missing.",
                ),
                missing,
                unit="short",
                bad=((1, "orange"),),
                empty="no hooks yet",
            ),
            panels.stat_panel(
                "Lost",
                PanelDescription(
                    "Lost events and spans per second, for any reason except the step budget.",
                    "see the reasons below.",
                ),
                PROMQL.rate(
                    semconv.SELF_LOST, label_not_matches(semconv.LOSS_REASON, semconv.LOSS_OVER_BUDGET)
                ),
                unit="short",
                bad=((0.1, "orange"),),
            ),
            panels.stat_panel(
                "Errors",
                PanelDescription(
                    "Probes of otel_infer that raised an exception. Each is disabled after that.",
                    "please report it.",
                ),
                PROMQL.aggregate_gauge(semconv.SELF_ERRORS),
                unit="short",
                bad=((1, "red"),),
            ),
            panels.stat_panel(
                "Step spans allowed",
                PanelDescription(
                    "Share of the step spans that the CPU budget allows: 100 % unless the sidecar exceeds `OTEL_INFER_BUDGET`.",
                    "raise that budget, or lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                PROMQL.aggregate_gauge(semconv.SELF_SHARE, aggregation="min"),
                unit="percentunit",
            ),
            panels.stat_panel(
                "Spans per day",
                PanelDescription(
                    "Spans per day that the destination accepts, at the current rate.",
                    "set `OTEL_INFER_STEPS=off` to export stages without steps.",
                ),
                f"{_DAY_S} * {PROMQL.rate(semconv.SELF_SPANS)}",
                unit="short",
                empty="no spans are sent",
            ),
            panels.stat_panel(
                "Raw bytes per day",
                PanelDescription(
                    "Bytes of spans per day at the current rate. Compressed, it is about a tenth.",
                    "lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                f"{_DAY_S} * {PROMQL.rate(semconv.SELF_BYTES)}",
                unit="bytes",
                empty="no spans are sent",
            ),
            panels.table_panel(
                "Hooks",
                PanelDescription(
                    "Hooks by instrumentor: installed (active), or not (missing).",
                    "run `otel-infer doctor`, which lists them.",
                ),
                [("hooks", PROMQL.aggregate_gauge(semconv.SELF_HOOKS, by=hooks), "short")],
                by=[label_name(attribute) for attribute in hooks],
                names={label_name(hooks[0]): "instrumentor", label_name(hooks[1]): "state"},
                size=(12, 8),
                empty="no hooks yet",
            ),
            panels.timeseries_panel(
                "Requests by what became of them",
                PanelDescription(
                    "Requests per second: offered, exported, not sampled, redundant, and lost by reason. Offered is the sum of the "
                    "others, but for requests that are still open.",
                    "where lost grows, `otel-infer doctor` shows the counts and what to do.",
                ),
                [
                    PanelQuery(PROMQL.rate(semconv.SELF_REQUESTS_OFFERED), "offered"),
                    PanelQuery(
                        PROMQL.rate(semconv.SELF_REQUESTS, by=(semconv.EXPORT_RESULT,)),
                        legend_format(semconv.EXPORT_RESULT),
                    ),
                    PanelQuery(
                        PROMQL.rate(semconv.SELF_REQUESTS_LOST, by=(semconv.LOSS_REASON,)),
                        f"lost: {legend_format(semconv.LOSS_REASON)}",
                    ),
                ],
                unit="reqps",
                size=(12, 8),
            ),
            panels.timeseries_panel(
                "Requests that are open",
                PanelDescription(
                    "Requests in flight, held for a decision, or waiting to be sent.",
                    "if it only grows, requests never end; above 4,096 in a process further ones are not recorded.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.SELF_REQUESTS_OPEN, by=("instance",)), "{{instance}}"
                    )
                ],
                unit="short",
                size=(12, 8),
            ),
            panels.timeseries_panel(
                "Lost, by reason",
                PanelDescription(
                    "Lost per second. `steps_over_budget`: step spans beyond the budget; their requests are exported.",
                    "`events_overwritten`: give the sidecar more CPU. Refused or given up: check the collector.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(semconv.SELF_LOST, by=(semconv.LOSS_REASON,)),
                        legend_format(semconv.LOSS_REASON),
                    )
                ],
                unit="short",
                size=(12, 8),
                empty=_NO_DROPS,
            ),
        ],
    )


def _cost_row() -> DashboardRow:
    dropped = ratio_or_absent(
        PROMQL.rate(semconv.SELF_STEPS_DROPPED),
        f"{PROMQL.rate(semconv.SELF_STEPS_DROPPED)} + {PROMQL.rate(semconv.SELF_SPANS)}",
    )
    return DashboardRow(
        "Sampling and cost",
        [
            panels.timeseries_panel(
                "CPU of the sidecar",
                PanelDescription(
                    "CPU cores used.",
                    "above `OTEL_INFER_BUDGET` it exports fewer step spans, and counts the dropped ones.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(semconv.SELF_CPU, by=(semconv.CPU_MODE,)),
                        legend_format(semconv.CPU_MODE),
                    )
                ],
                unit="short",
                stacked="normal",
            ),
            panels.timeseries_panel(
                "Memory of the sidecar",
                PanelDescription("Resident memory.", "if it grows for hours, please report it."),
                [PanelQuery(PROMQL.aggregate_gauge(semconv.SELF_MEMORY, by=("instance",)), "{{instance}}")],
                unit="bytes",
            ),
            panels.timeseries_panel(
                "Requests by keep reason",
                PanelDescription(
                    "Requests per second. `none`: exported without steps. `unsampled`: not exported.",
                    "if most are `slo` or `slow`, see Overview.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(semconv.REQUEST_KEPT, by=(semconv.KEEP_REASON,)),
                        legend_format(semconv.KEEP_REASON),
                    )
                ],
                unit="reqps",
                stacked="normal",
            ),
            panels.timeseries_panel(
                "Dropped step spans",
                PanelDescription(
                    "Step spans dropped by the budget, as a share of dropped step spans and accepted spans.",
                    "it is intended; to export more, raise `OTEL_INFER_STEP_BUDGET`.",
                ),
                [PanelQuery(dropped, "dropped")],
                unit="percentunit",
                size=(12, 8),
                axis_max=1,
                empty="no step spans dropped",
            ),
            panels.timeseries_panel(
                "Spans accepted",
                PanelDescription(
                    "Spans per second that the destination accepts.",
                    "if it is zero while requests arrive, check the losses.",
                ),
                [PanelQuery(PROMQL.rate(semconv.SELF_SPANS), "spans")],
                unit="short",
                size=(12, 8),
                empty="no spans are sent",
            ),
        ],
    )


def _startup_row() -> DashboardRow:
    phase = label_name(semconv.STARTUP_PHASE)
    longest = f"max by ({phase}) (sum by ({phase}, instance) ({PROMQL.select_series(semconv.STARTUP_DURATION, series='_sum')}))"
    return DashboardRow(
        "Server starts",
        [
            panels.timeseries_panel(
                "Start duration by phase",
                PanelDescription(
                    "Duration by phase, summed over all starts of a server; the longest server counts.",
                    "`weights`: use a faster disk. `compile`, `capture`: use a cache that outlives the container.",
                ),
                [PanelQuery(longest, legend_format(semconv.STARTUP_PHASE))],
                unit="s",
                size=(24, 8),
                empty="no start was recorded",
            ),
        ],
        collapsed=True,
    )


def build_dashboard() -> Dashboard:
    """Returns the dashboard Self-monitoring."""
    description = "Hooks, losses, budget and cost of otel_infer itself."
    return Dashboard(
        "self-monitoring",
        "Self-monitoring",
        description,
        [_hooks_and_drops_row(), _cost_row(), _startup_row()],
    )
