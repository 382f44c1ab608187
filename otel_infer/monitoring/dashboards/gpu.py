"""GPUs: which one is the odd one out, and what it was doing."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer._version import GPU_TIMING_STATUS
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, UID_PREFIX, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import TARGET_LABELS, label_equals, ratio_or_absent
from otel_infer.semconv.prometheus import label_name

_NO_GPU = "no GPU is told of"
_GPU_LABELS = (semconv.HW_ID, semconv.HW_NAME, semconv.HW_MODEL)
_GPU_LEGEND = legend_format(semconv.HW_NAME, semconv.HW_ID)
_BY_GPU = (semconv.HW_ID, semconv.HW_NAME)
_BY_WORKER = ("instance", semconv.ENGINE, semconv.PROCESS_PID, semconv.WORKER_RANK)
_WORKER_LEGEND = f"{legend_format('instance', semconv.ENGINE, semconv.PROCESS_PID)} rank {legend_format(semconv.WORKER_RANK)}"


def _max_by_gpu(metric: semconv.Metric, *matchers: str) -> str:
    return PROMQL.aggregate_gauge(metric, *matchers, by=_BY_GPU, take="max")


def _all_gpus_row() -> DashboardRow:
    sm = label_equals(semconv.GPU_UNIT, "sm")
    columns = [
        (
            "busy time",
            PROMQL.aggregate_gauge(semconv.GPU_UTILIZATION, by=_GPU_LABELS, take="max"),
            "percentunit",
        ),
        (
            "SM activity",
            PROMQL.aggregate_gauge(semconv.GPU_ACTIVITY, sm, by=_GPU_LABELS, take="max"),
            "percentunit",
        ),
        (
            "memory",
            PROMQL.aggregate_gauge(semconv.GPU_MEMORY_UTILIZATION, by=_GPU_LABELS, take="max"),
            "percentunit",
        ),
        ("power", PROMQL.aggregate_gauge(semconv.GPU_POWER, by=_GPU_LABELS, take="max"), "watt"),
        (
            "temperature",
            PROMQL.aggregate_gauge(semconv.GPU_TEMPERATURE, by=_GPU_LABELS, take="max"),
            "celsius",
        ),
        ("throttled", PROMQL.aggregate_gauge(semconv.GPU_THROTTLED, by=_GPU_LABELS, take="max"), "bool"),
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
                    "One line for each GPU, as NVML has it now. A click on an id shows it alone.",
                    "the one that differs from the others, or that is throttled, is what its peers wait for.",
                ),
                columns,
                by=[label_name(one) for one in _GPU_LABELS],
                names=names,
                links={label_name(semconv.HW_ID): {"title": "Only this GPU", "url": url}},
                empty=_NO_GPU,
            ),
        ],
    )


def _utilization_row() -> DashboardRow:
    gap = PROMQL.quantile(0.99, semconv.DEVICE_IDLE, by=_BY_WORKER)
    queue = PROMQL.quantile(0.99, semconv.DEVICE_QUEUED, by=_BY_WORKER)
    device = label_equals(semconv.CLOCK, semconv.CLOCK_DEVICE)
    busy = PROMQL.sum_rate(semconv.STEP_EXECUTION, device, by=_BY_WORKER)
    return DashboardRow(
        "What it does",
        [
            panels.timeseries_panel(
                "Busy time",
                PanelDescription(
                    "Share of the time in which any kernel ran, however small. 100 % is not full.",
                    "it is not a measure of load: look at SM activity, and at the gaps between steps.",
                ),
                [PanelQuery(_max_by_gpu(semconv.GPU_UTILIZATION), _GPU_LEGEND)],
                unit="percentunit",
                most=1,
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Activity by unit",
                PanelDescription(
                    "Share of cycles in which the units were at work: all multiprocessors, tensor cores, memory. Hopper and later.",
                    "much DRAM and little tensor is decoding with a small batch: more sequences per step are nearly free.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(
                            semconv.GPU_ACTIVITY, by=(*_BY_GPU, semconv.GPU_UNIT), take="max"
                        ),
                        f"{_GPU_LEGEND} {legend_format(semconv.GPU_UNIT)}",
                    )
                ],
                unit="percentunit",
                most=1,
                empty="this GPU does not tell",
            ),
            panels.timeseries_panel(
                "Busy with steps",
                PanelDescription(
                    f"Share of the time that the device was at steps of the engine, by marks on its stream: {GPU_TIMING_STATUS}.",
                    "far below 100 % while requests wait: the host does not keep up (launch-bound, or stalled).",
                ),
                [PanelQuery(busy, _WORKER_LEGEND)],
                unit="percentunit",
                most=1,
                empty="no GPU is timed here",
            ),
            panels.timeseries_panel(
                "Idle between steps, p99",
                PanelDescription(
                    "How long the device had nothing to do between two steps; also for want of requests.",
                    "the host is late: scheduling, sampling, detokenizing or garbage collection on the engine's thread.",
                ),
                [PanelQuery(gap, _WORKER_LEGEND)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed here",
            ),
            panels.timeseries_panel(
                "Launched and waiting, p99",
                PanelDescription(
                    "How long a step that was launched waited for the device.",
                    "long: the device is behind, which is what one wants; short while gaps are long: launch-bound.",
                ),
                [PanelQuery(queue, _WORKER_LEGEND)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed here",
            ),
        ],
    )


def _limits_row() -> DashboardRow:
    throttled = PROMQL.aggregate_gauge(
        semconv.GPU_THROTTLED, by=(*_BY_GPU, semconv.THROTTLE_REASON), take="max"
    )
    # Each process of a server may have a sidecar that looks at the same GPU.
    # Energy is of no model, and tokens are of no GPU: both of whatever servers are chosen.
    ask = PROMQL._replace(
        filters={key: chosen for key, chosen in PROMQL.filters.items() if key in TARGET_LABELS}
    )
    energy = f"sum ({ask.rate(semconv.GPU_ENERGY, by=(semconv.HW_ID,), take='max')})"
    tokens = ask.rate(semconv.REQUEST_TOKENS, label_equals(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT))
    errors = PROMQL.rate(semconv.GPU_ERRORS, by=(*_BY_GPU, semconv.ERROR_TYPE))
    return DashboardRow(
        "What holds it back",
        [
            panels.state_timeline_panel(
                "Clocks held down",
                PanelDescription(
                    "While its clocks are held down, and why. `power_cap` alone is common on cards with a limit.",
                    "`hw_thermal`, `sw_thermal`: cooling; `power_brake`, `hw_slowdown`: the power supply.",
                ),
                PanelQuery(throttled, f"{legend_format(semconv.THROTTLE_REASON)} {_GPU_LEGEND}"),
                names={0: ("no", "green"), 1: ("held down", "orange")},
                size=(24, 8),
            ),
            panels.timeseries_panel(
                "Power",
                PanelDescription("Over the last second.", "at its limit: see clocks."),
                [PanelQuery(_max_by_gpu(semconv.GPU_POWER), _GPU_LEGEND)],
                unit="watt",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Temperature",
                PanelDescription("Of the GPU.", "close to its limit the clocks are held down."),
                [PanelQuery(_max_by_gpu(semconv.GPU_TEMPERATURE), _GPU_LEGEND)],
                unit="celsius",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Memory",
                PanelDescription(
                    "In use by whomever. Engines take most of it at their start for the KV cache.",
                    "it grows while the engine is the same: something else uses this GPU.",
                ),
                [
                    PanelQuery(_max_by_gpu(semconv.GPU_MEMORY_USAGE), _GPU_LEGEND),
                    PanelQuery(_max_by_gpu(semconv.GPU_MEMORY_LIMIT), f"{_GPU_LEGEND} has"),
                ],
                unit="bytes",
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Energy per 1000 tokens",
                PanelDescription(
                    "Joules of all GPUs, by all tokens of the output, whichever model or GPU is chosen above.",
                    "small batches make tokens dear.",
                ),
                [PanelQuery(ratio_or_absent(f"1000 * {energy}", tokens), "energy")],
                unit="joule",
                size=(12, 8),
                empty=_NO_GPU,
            ),
            panels.timeseries_panel(
                "Errors",
                PanelDescription(
                    "A second: of its memory (ECC), and what its driver called critical (Xid, by number). Corrected ones are common.",
                    "uncorrected: take the GPU out of service. Xid: look the number up.",
                ),
                [PanelQuery(errors, f"{_GPU_LEGEND} {legend_format(semconv.ERROR_TYPE)}")],
                unit="ops",
                size=(12, 8),
                empty="this GPU does not tell",
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """The dashboard."""
    about = "GPUs: busy time, activity, power, clocks and gaps. Empty where the server has none."
    return Dashboard("gpu", "GPU", about, [_all_gpus_row(), _utilization_row(), _limits_row()])
