"""What this plugin itself does, loses and costs."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_not_matches, ratio_or_absent
from otel_infer.semconv.prometheus import label_name

_DAY_S = 86_400
_NO_DROPS = "nothing"


def _hooks_and_drops_row() -> DashboardRow:
    hooks = (semconv.INTEGRATION, semconv.HOOK_STATE)
    missing = PROMQL.aggregate_gauge(
        semconv.SELF_HOOKS, label_equals(semconv.HOOK_STATE, semconv.HOOK_MISSING)
    )
    return DashboardRow(
        "Does it see everything?",
        [
            panels.stat_panel(
                "Hooks missing",
                PanelDescription(
                    "Places in libraries that it should hold and does not.",
                    "`otel-infer doctor` says which, and what is lost without.",
                ),
                missing,
                unit="short",
                bad=((1, "orange"),),
                empty="nothing is hooked yet",
            ),
            panels.stat_panel(
                "Lost",
                PanelDescription(
                    "Facts and spans that did not arrive, a second, whatever the reason.",
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
                PanelDescription("Probes of ours that raised; each is off since.", "please report it."),
                PROMQL.aggregate_gauge(semconv.SELF_ERRORS),
                unit="short",
                bad=((1, "red"),),
            ),
            panels.stat_panel(
                "Steps that may be spans",
                PanelDescription(
                    "The governor's share: 100 % unless the sidecar is over `OTEL_INFER_BUDGET`.",
                    "raise the budget, or lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                PROMQL.aggregate_gauge(semconv.SELF_SHARE, take="min"),
                unit="percentunit",
            ),
            panels.stat_panel(
                "Spans a day",
                PanelDescription(
                    "At the present rate, as accepted by the destination.",
                    "`OTEL_INFER_STEPS=off` leaves the stages.",
                ),
                f"{_DAY_S} * {PROMQL.rate(semconv.SELF_SPANS)}",
                unit="short",
                empty="no spans are sent",
            ),
            panels.stat_panel(
                "Uncompressed, a day",
                PanelDescription(
                    "Bytes of spans at the present rate; on the wire a tenth of it, about.",
                    "a lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                f"{_DAY_S} * {PROMQL.rate(semconv.SELF_BYTES)}",
                unit="bytes",
                empty="no spans are sent",
            ),
            panels.table_panel(
                "Hooks",
                PanelDescription(
                    "By integration: bound (active), or not (missing).", "`otel-infer doctor` says which."
                ),
                [("hooks", PROMQL.aggregate_gauge(semconv.SELF_HOOKS, by=hooks), "short")],
                by=[label_name(one) for one in hooks],
                names={label_name(hooks[0]): "integration", label_name(hooks[1]): "state"},
                size=(12, 8),
                empty="nothing is hooked yet",
            ),
            panels.timeseries_panel(
                "Lost, by reason",
                PanelDescription(
                    "A second. `steps_over_budget`: step spans that there was no room for; the requests are there.",
                    "`events_overwritten`: the sidecar gets no CPU. Refused or given up: look at the collector.",
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
    left = ratio_or_absent(
        PROMQL.rate(semconv.SELF_STEPS_DROPPED),
        f"{PROMQL.rate(semconv.SELF_STEPS_DROPPED)} + {PROMQL.rate(semconv.SELF_SPANS)}",
    )
    return DashboardRow(
        "What does it keep, and cost?",
        [
            panels.timeseries_panel(
                "CPU of the sidecar",
                PanelDescription(
                    "Cores.", "over `OTEL_INFER_BUDGET` it makes fewer step spans, and says so."
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
                PanelDescription("Resident.", "it should not grow for hours: please report it."),
                [PanelQuery(PROMQL.aggregate_gauge(semconv.SELF_MEMORY, by=("instance",)), "{{instance}}")],
                unit="bytes",
            ),
            panels.timeseries_panel(
                "Requests by why they were kept",
                PanelDescription(
                    "A second. `none`: without their steps; `unsampled`: not exported.",
                    "mostly `slo` or `slow`: see Overview.",
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
                "Step spans left out",
                PanelDescription(
                    "Step spans that the budget had no room for, as a share of those and all spans that were accepted.",
                    "it is meant to be; for more, raise `OTEL_INFER_STEP_BUDGET`.",
                ),
                [PanelQuery(left, "left out")],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty="none was left out",
            ),
            panels.timeseries_panel(
                "Spans accepted",
                PanelDescription(
                    "By the destination, a second.", "zero while requests come: look at what is lost."
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
        "Starts",
        [
            panels.timeseries_panel(
                "What starts took",
                PanelDescription(
                    "By phase: the longest of the servers that are there, all its starts together.",
                    "`weights`: a nearer disk; `compile`, `capture`: a cache that outlives the container.",
                ),
                [PanelQuery(longest, legend_format(semconv.STARTUP_PHASE))],
                unit="s",
                size=(24, 8),
                empty="no start was seen",
            ),
        ],
        collapsed=True,
    )


def build_dashboard() -> Dashboard:
    """The dashboard."""
    about = "Hooks, losses, budget and cost of otel_infer itself."
    return Dashboard("health", "Our own health", about, [_hooks_and_drops_row(), _cost_row(), _startup_row()])
