"""What this plugin itself does, loses and costs."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, Board, Row
from otel_infer.monitoring.dashboards.panels import Query, Reading, legend
from otel_infer.monitoring.promql import equal, per, unlike
from otel_infer.semconv.prometheus import label

_DAY = 86_400
_NOTHING = "nothing"


def _state() -> Row:
    hooks = (semconv.INTEGRATION, semconv.HOOK_STATE)
    missing = ASK.value(semconv.SELF_HOOKS, equal(semconv.HOOK_STATE, semconv.HOOK_MISSING))
    return Row(
        "Does it see everything?",
        [
            panels.tile(
                "Hooks missing",
                Reading(
                    "Places in libraries that it should hold and does not.",
                    "`otel-infer doctor` says which, and what is lost without.",
                ),
                missing,
                unit="short",
                bad=((1, "orange"),),
                empty="nothing is hooked yet",
            ),
            panels.tile(
                "Lost",
                Reading(
                    "Facts and spans that did not arrive, a second, whatever the reason.",
                    "see the reasons below.",
                ),
                ASK.rate(semconv.SELF_LOST, unlike(semconv.LOSS_REASON, semconv.LOSS_OVER_BUDGET)),
                unit="short",
                bad=((0.1, "orange"),),
            ),
            panels.tile(
                "Errors",
                Reading("Probes of ours that raised; each is off since.", "please report it."),
                ASK.value(semconv.SELF_ERRORS),
                unit="short",
                bad=((1, "red"),),
            ),
            panels.tile(
                "Steps that may be spans",
                Reading(
                    "The governor's share: 100 % unless the sidecar is over `OTEL_INFER_BUDGET`.",
                    "raise the budget, or lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                ASK.value(semconv.SELF_SHARE, take="min"),
                unit="percentunit",
            ),
            panels.tile(
                "Spans a day",
                Reading(
                    "At the present rate, as accepted by the destination.",
                    "`OTEL_INFER_STEPS=off` leaves the stages.",
                ),
                f"{_DAY} * {ASK.rate(semconv.SELF_SPANS)}",
                unit="short",
                empty="no spans are sent",
            ),
            panels.tile(
                "Uncompressed, a day",
                Reading(
                    "Bytes of spans at the present rate; on the wire a tenth of it, about.",
                    "a lower `OTEL_INFER_STEP_BUDGET`.",
                ),
                f"{_DAY} * {ASK.rate(semconv.SELF_BYTES)}",
                unit="bytes",
                empty="no spans are sent",
            ),
            panels.table(
                "Hooks",
                Reading(
                    "By integration: bound (active), or not (missing).", "`otel-infer doctor` says which."
                ),
                [("hooks", ASK.value(semconv.SELF_HOOKS, by=hooks), "short")],
                by=[label(one) for one in hooks],
                names={label(hooks[0]): "integration", label(hooks[1]): "state"},
                size=(12, 8),
                empty="nothing is hooked yet",
            ),
            panels.lines(
                "Lost, by reason",
                Reading(
                    "A second. `steps_over_budget`: step spans that there was no room for; the requests are there.",
                    "`facts_overwritten`: the sidecar gets no CPU. Refused or given up: look at the collector.",
                ),
                [Query(ASK.rate(semconv.SELF_LOST, by=(semconv.LOSS_REASON,)), legend(semconv.LOSS_REASON))],
                unit="short",
                size=(12, 8),
                empty=_NOTHING,
            ),
        ],
    )


def _cost() -> Row:
    left = per(
        ASK.rate(semconv.SELF_LEFT_OUT), f"{ASK.rate(semconv.SELF_LEFT_OUT)} + {ASK.rate(semconv.SELF_SPANS)}"
    )
    return Row(
        "What does it keep, and cost?",
        [
            panels.lines(
                "CPU of the sidecar",
                Reading("Cores.", "over `OTEL_INFER_BUDGET` it makes fewer step spans, and says so."),
                [
                    Query(
                        ASK.rate(semconv.SELF_CPU, by=(semconv.CPU_MODE,)),
                        legend(semconv.CPU_MODE),
                    )
                ],
                unit="short",
                stacked="normal",
            ),
            panels.lines(
                "Memory of the sidecar",
                Reading("Resident.", "it should not grow for hours: please report it."),
                [Query(ASK.value(semconv.SELF_MEMORY, by=("instance",)), "{{instance}}")],
                unit="bytes",
            ),
            panels.lines(
                "Requests by why they were kept",
                Reading(
                    "A second. `none`: without their steps; `unsampled`: not exported.",
                    "mostly `slo` or `slow`: see Overview.",
                ),
                [
                    Query(
                        ASK.rate(semconv.REQUEST_KEPT, by=(semconv.KEEP_REASON,)), legend(semconv.KEEP_REASON)
                    )
                ],
                unit="reqps",
                stacked="normal",
            ),
            panels.lines(
                "Step spans left out",
                Reading(
                    "Step spans that the budget had no room for, as a share of those and all spans that were accepted.",
                    "it is meant to be; for more, raise `OTEL_INFER_STEP_BUDGET`.",
                ),
                [Query(left, "left out")],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty="none was left out",
            ),
            panels.lines(
                "Spans accepted",
                Reading("By the destination, a second.", "zero while requests come: look at what is lost."),
                [Query(ASK.rate(semconv.SELF_SPANS), "spans")],
                unit="short",
                size=(12, 8),
                empty="no spans are sent",
            ),
        ],
    )


def _starts() -> Row:
    phase = label(semconv.STARTUP_PHASE)
    longest = (
        f"max by ({phase}) (sum by ({phase}, instance) ({ASK.pick(semconv.STARTUP_DURATION, series='_sum')}))"
    )
    return Row(
        "Starts",
        [
            panels.lines(
                "What starts took",
                Reading(
                    "By phase: the longest of the servers that are there, all its starts together.",
                    "`weights`: a nearer disk; `compile`, `capture`: a cache that outlives the container.",
                ),
                [Query(longest, legend(semconv.STARTUP_PHASE))],
                unit="s",
                size=(24, 8),
                empty="no start was seen",
            ),
        ],
        closed=True,
    )


def board() -> Board:
    """The dashboard."""
    about = "Hooks, losses, budget and cost of otel_infer itself."
    return Board("health", "Our own health", about, [_state(), _cost(), _starts()])
