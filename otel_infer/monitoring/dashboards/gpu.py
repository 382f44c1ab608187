"""The dashboard GPU: all GPUs, their utilization, and what limits them."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer._version import GPU_TIMING_STATUS
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import (
    BY_WORKER,
    WORKER_LEGEND,
    PanelDescription,
    PanelQuery,
    legend_format,
)
from otel_infer.monitoring.names import UID_PREFIX
from otel_infer.monitoring.promql import TARGET_LABELS, label_equals, ratio_or_absent
from otel_infer.semconv.prometheus import label_name

_NO_GPU = "no GPU is monitored"
_GPU_LABELS = (semconv.HW_ID, semconv.HW_NAME, semconv.HW_MODEL)
_GPU_LEGEND = legend_format(semconv.HW_NAME, semconv.HW_ID)
_BY_GPU = (semconv.HW_ID, semconv.HW_NAME)


def _max_by_gpu(metric: semconv.Metric, *matchers: str) -> str:
    return PROMQL.aggregate_gauge(metric, *matchers, by=_BY_GPU, aggregation="max")


def _all_gpus_row() -> DashboardRow:
    sm = label_equals(semconv.GPU_UNIT, "sm")
    columns = [
        (
            "busy time",
            PROMQL.aggregate_gauge(semconv.GPU_UTILIZATION, by=_GPU_LABELS, aggregation="max"),
            "percentunit",
        ),
        (
            "SM activity",
            PROMQL.aggregate_gauge(semconv.GPU_ACTIVITY, sm, by=_GPU_LABELS, aggregation="max"),
            "percentunit",
        ),
        (
            "memory",
            PROMQL.aggregate_gauge(semconv.GPU_MEMORY_UTILIZATION, by=_GPU_LABELS, aggregation="max"),
            "percentunit",
        ),
        ("power", PROMQL.aggregate_gauge(semconv.GPU_POWER, by=_GPU_LABELS, aggregation="max"), "watt"),
        (
            "temperature",
            PROMQL.aggregate_gauge(semconv.GPU_TEMPERATURE, by=_GPU_LABELS, aggregation="max"),
            "celsius",
        ),
        (
            "throttled",
            PROMQL.aggregate_gauge(semconv.GPU_THROTTLED, by=_GPU_LABELS, aggregation="max"),
            "bool",
        ),
    ]
    names = {
        label_name(semconv.HW_ID): "GPU",
        label_name(semconv.HW_NAME): "name",
        label_name(semconv.HW_MODEL): "model",
    }
    url = f"/d/{UID_PREFIX}gpu?${{datasource:queryparam}}&${{job:queryparam}}&var-gpu=${{__value.raw}}&${{__url_time_range}}"
    return DashboardRow(
        "All GPUs",
        [
            panels.table_panel(
                "GPUs",
                PanelDescription(
                    "One line per GPU, from NVML. Click an id to show that GPU alone.",
                    "other ranks wait for a GPU that is throttled, or that differs from the others.",
                ),
                columns,
                by=[label_name(attribute) for attribute in _GPU_LABELS],
                names=names,
                links={label_name(semconv.HW_ID): {"title": "Show only this GPU", "url": url}},
                empty=_NO_GPU,
            ),
        ],
    )


def _utilization_row() -> DashboardRow:
    gap = PROMQL.quantile(0.99, semconv.DEVICE_IDLE, by=BY_WORKER)
    queue = PROMQL.quantile(0.99, semconv.DEVICE_QUEUED, by=BY_WORKER)
    device = label_equals(semconv.CLOCK, semconv.CLOCK_DEVICE)
    busy = PROMQL.sum_rate(semconv.STEP_EXECUTION, device, by=BY_WORKER)
    return DashboardRow(
        "Utilization",
        [
            panels.timeseries_panel(
                "Busy time",
                PanelDescription(
                    "Share of time in which any kernel ran, however small. 100 % does not mean fully used.",
                    "it is no measure of load: check SM activity and the gaps between steps.",
                ),
                [PanelQuery(_max_by_gpu(semconv.GPU_UTILIZATION), _GPU_LEGEND)],
                unit="percentunit",
                axis_max=1,
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Activity by unit",
                PanelDescription(
                    "Share of cycles in which the units were active: multiprocessors, tensor cores, memory. Hopper and later.",
                    "high DRAM and low tensor activity is decoding with a small batch: more sequences per step cost almost nothing.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(
                            semconv.GPU_ACTIVITY, by=(*_BY_GPU, semconv.GPU_UNIT), aggregation="max"
                        ),
                        f"{_GPU_LEGEND} {legend_format(semconv.GPU_UNIT)}",
                    )
                ],
                unit="percentunit",
                axis_max=1,
                empty="not reported by this GPU",
            ),
            panels.timeseries_panel(
                "Time in engine steps",
                PanelDescription(
                    f"Share of time in which the device executed engine steps, by events on its stream: {GPU_TIMING_STATUS}.",
                    "far below 100 % while requests wait, the device is idle between steps and the host is the bottleneck. "
                    "Time within a step counts as executed, also where the host launches slowly or waits for a result.",
                ),
                [PanelQuery(busy, WORKER_LEGEND)],
                unit="percentunit",
                axis_max=1,
                empty="no GPU is timed",
            ),
            panels.timeseries_panel(
                "Idle between steps, p99",
                PanelDescription(
                    "Idle time of the device between two steps, including times without requests.",
                    "the host is slow: scheduling, sampling, detokenization or garbage collection on the engine's thread.",
                ),
                [PanelQuery(gap, WORKER_LEGEND)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed",
            ),
            panels.timeseries_panel(
                "Queue delay of launched steps, p99",
                PanelDescription(
                    "Time from the launch of a step until the device begins it.",
                    "a long delay is good: the device always has work. A short delay with long idle times: the host is late between steps. "
                    "A short delay alone is a host that launches slowly or waits for a result within a step.",
                ),
                [PanelQuery(queue, WORKER_LEGEND)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed",
            ),
        ],
    )


def _limits_row() -> DashboardRow:
    throttled = PROMQL.aggregate_gauge(
        semconv.GPU_THROTTLED, by=(*_BY_GPU, semconv.THROTTLE_REASON), aggregation="max"
    )
    # Several sidecars may report the same GPU, so its energy is a maximum over them.
    # Energy has no model label and tokens have no GPU label, so only the filters for servers apply to both.
    promql = PROMQL._replace(
        filters={key: pattern for key, pattern in PROMQL.filters.items() if key in TARGET_LABELS}
    )
    energy = f"sum ({promql.rate(semconv.GPU_ENERGY, by=(semconv.HW_ID,), aggregation='max')})"
    tokens = promql.rate(semconv.REQUEST_TOKENS, label_equals(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT))
    errors = PROMQL.rate(semconv.GPU_ERRORS, by=(*_BY_GPU, semconv.ERROR_TYPE))
    return DashboardRow(
        "Limits and errors",
        [
            panels.state_timeline_panel(
                "Clock throttling",
                PanelDescription(
                    "When clocks are throttled, and why. `power_cap` alone is common on cards with a power limit.",
                    "`hw_thermal`, `sw_thermal`: check cooling. `power_brake`, `hw_slowdown`: check the power supply.",
                ),
                PanelQuery(throttled, f"{legend_format(semconv.THROTTLE_REASON)} {_GPU_LEGEND}"),
                names={0: ("no", "green"), 1: ("throttled", "orange")},
                size=(24, 8),
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Power",
                PanelDescription("Mean power over one second.", "at its limit, clocks are throttled."),
                [PanelQuery(_max_by_gpu(semconv.GPU_POWER), _GPU_LEGEND)],
                unit="watt",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Temperature",
                PanelDescription("Temperature of the GPU.", "close to its limit, clocks are throttled."),
                [PanelQuery(_max_by_gpu(semconv.GPU_TEMPERATURE), _GPU_LEGEND)],
                unit="celsius",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Memory",
                PanelDescription(
                    "Memory used by all processes. Engines allocate most of it for the KV cache at start.",
                    "if it grows while the engine's memory does not, another process uses this GPU.",
                ),
                [
                    PanelQuery(_max_by_gpu(semconv.GPU_MEMORY_USAGE), _GPU_LEGEND),
                    PanelQuery(_max_by_gpu(semconv.GPU_MEMORY_LIMIT), f"{_GPU_LEGEND} total"),
                ],
                unit="bytes",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Energy per 1000 tokens",
                PanelDescription(
                    "Joules of all GPUs per 1000 output tokens, for any model or GPU selected above.",
                    "small batches need more energy per token.",
                ),
                [PanelQuery(ratio_or_absent(f"1000 * {energy}", tokens), "energy")],
                unit="joule",
                size=(12, 8),
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Errors",
                PanelDescription(
                    "Memory errors (ECC) and critical driver errors (Xid, by number) per second. Corrected errors are common.",
                    "uncorrected: take the GPU out of service. Xid: look up the number.",
                ),
                [PanelQuery(errors, f"{_GPU_LEGEND} {legend_format(semconv.ERROR_TYPE)}")],
                unit="ops",
                size=(12, 8),
                empty="not reported by this GPU",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """Returns the dashboard GPU."""
    description = "GPUs: busy time, activity, power, clocks and idle gaps. Empty on servers without a GPU."
    return Dashboard("gpu", "GPU", description, [_all_gpus_row(), _utilization_row(), _limits_row()])
