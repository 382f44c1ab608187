"""GPUs: which one is the odd one out, and what it was doing."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer._version import GPU_TIMING
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, UID, Board, Row
from otel_infer.monitoring.dashboards.panels import Query, Reading, legend
from otel_infer.monitoring.promql import ALWAYS, equal, per
from otel_infer.semconv.prometheus import label

_NONE = "no GPU is told of"
_WHO = (semconv.HW_ID, semconv.HW_NAME, semconv.HW_MODEL)
_EACH = legend(semconv.HW_NAME, semconv.HW_ID)
_BY = (semconv.HW_ID, semconv.HW_NAME)
_WORKER = ("instance", semconv.ENGINE, semconv.PROCESS_PID, semconv.WORKER_RANK)
_RANK = f"{legend('instance', semconv.ENGINE, semconv.PROCESS_PID)} rank {legend(semconv.WORKER_RANK)}"


def _value(metric: semconv.Metric, *matchers: str) -> str:
    return ASK.value(metric, *matchers, by=_BY, take="max")


def _all() -> Row:
    sm = equal(semconv.GPU_UNIT, "sm")
    columns = [
        ("busy time", ASK.value(semconv.GPU_UTILIZATION, by=_WHO, take="max"), "percentunit"),
        ("SM activity", ASK.value(semconv.GPU_ACTIVITY, sm, by=_WHO, take="max"), "percentunit"),
        ("memory", ASK.value(semconv.GPU_MEMORY_UTILIZATION, by=_WHO, take="max"), "percentunit"),
        ("power", ASK.value(semconv.GPU_POWER, by=_WHO, take="max"), "watt"),
        ("temperature", ASK.value(semconv.GPU_TEMPERATURE, by=_WHO, take="max"), "celsius"),
        ("throttled", ASK.value(semconv.GPU_THROTTLED, by=_WHO, take="max"), "bool"),
    ]
    names = {label(semconv.HW_ID): "GPU", label(semconv.HW_NAME): "name", label(semconv.HW_MODEL): "model"}
    url = f"/d/{UID}gpu?${{datasource:queryparam}}&${{job:queryparam}}&var-gpu=${{__value.raw}}&${{__url_time_range}}"
    return Row(
        "All GPUs",
        [
            panels.table(
                "GPUs",
                Reading(
                    "One line for each GPU, as NVML has it now. A click on an id shows it alone.",
                    "the one that differs from the others, or that is throttled, is what its peers wait for.",
                ),
                columns,
                by=[label(one) for one in _WHO],
                names=names,
                links={label(semconv.HW_ID): {"title": "Only this GPU", "url": url}},
                empty=_NONE,
            ),
        ],
    )


def _work() -> Row:
    gap = ASK.quantile(0.99, semconv.DEVICE_IDLE, by=_WORKER)
    queue = ASK.quantile(0.99, semconv.DEVICE_QUEUED, by=_WORKER)
    device = equal(semconv.CLOCK, semconv.CLOCK_DEVICE)
    busy = ASK.spent(semconv.STEP_EXECUTION, device, by=_WORKER)
    return Row(
        "What it does",
        [
            panels.lines(
                "Busy time",
                Reading(
                    "Share of the time in which any kernel ran, however small. 100 % is not full.",
                    "it is not a measure of load: look at SM activity, and at the gaps between steps.",
                ),
                [Query(_value(semconv.GPU_UTILIZATION), _EACH)],
                unit="percentunit",
                most=1,
                empty=_NONE,
            ),
            panels.lines(
                "Activity by unit",
                Reading(
                    "Share of cycles in which the units were at work: all multiprocessors, tensor cores, memory. Hopper and later.",
                    "much DRAM and little tensor is decoding with a small batch: more sequences per step are nearly free.",
                ),
                [
                    Query(
                        ASK.value(semconv.GPU_ACTIVITY, by=(*_BY, semconv.GPU_UNIT), take="max"),
                        f"{_EACH} {legend(semconv.GPU_UNIT)}",
                    )
                ],
                unit="percentunit",
                most=1,
                empty="this GPU does not tell",
            ),
            panels.lines(
                "Busy with steps",
                Reading(
                    f"Share of the time that the device was at steps of the engine, by marks on its stream: {GPU_TIMING}.",
                    "far below 100 % while requests wait: the host does not keep up (launch-bound, or stalled).",
                ),
                [Query(busy, _RANK)],
                unit="percentunit",
                most=1,
                empty="no GPU is timed here",
            ),
            panels.lines(
                "Idle between steps, p99",
                Reading(
                    "How long the device had nothing to do between two steps; also for want of requests.",
                    "the host is late: scheduling, sampling, detokenizing or garbage collection on the engine's thread.",
                ),
                [Query(gap, _RANK)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed here",
            ),
            panels.lines(
                "Launched and waiting, p99",
                Reading(
                    "How long a step that was launched waited for the device.",
                    "long: the device is behind, which is what one wants; short while gaps are long: launch-bound.",
                ),
                [Query(queue, _RANK)],
                unit="s",
                size=(12, 8),
                empty="no GPU is timed here",
            ),
        ],
    )


def _limits() -> Row:
    throttled = ASK.value(semconv.GPU_THROTTLED, by=(*_BY, semconv.THROTTLE_REASON), take="max")
    # Each process of a server may have a sidecar that looks at the same GPU.
    # Energy is of no model, and tokens are of no GPU: both of whatever servers are chosen.
    ask = ASK._replace(where={key: chosen for key, chosen in ASK.where.items() if key in ALWAYS})
    energy = f"sum ({ask.rate(semconv.GPU_ENERGY, by=(semconv.HW_ID,), take='max')})"
    tokens = ask.rate(semconv.TOKENS, equal(semconv.TOKEN_TYPE, semconv.TOKEN_OUTPUT))
    errors = ASK.rate(semconv.GPU_ERRORS, by=(*_BY, semconv.ERROR_TYPE))
    return Row(
        "What holds it back",
        [
            panels.states(
                "Clocks held down",
                Reading(
                    "While its clocks are held down, and why. `power_cap` alone is common on cards with a limit.",
                    "`hw_thermal`, `sw_thermal`: cooling; `power_brake`, `hw_slowdown`: the power supply.",
                ),
                Query(throttled, f"{legend(semconv.THROTTLE_REASON)} {_EACH}"),
                names={0: ("no", "green"), 1: ("held down", "orange")},
                size=(24, 8),
            ),
            panels.lines(
                "Power",
                Reading("Over the last second.", "at its limit: see clocks."),
                [Query(_value(semconv.GPU_POWER), _EACH)],
                unit="watt",
                empty=_NONE,
            ),
            panels.lines(
                "Temperature",
                Reading("Of the GPU.", "close to its limit the clocks are held down."),
                [Query(_value(semconv.GPU_TEMPERATURE), _EACH)],
                unit="celsius",
                empty=_NONE,
            ),
            panels.lines(
                "Memory",
                Reading(
                    "In use by whomever. Engines take most of it at their start for the KV cache.",
                    "it grows while the engine is the same: something else uses this GPU.",
                ),
                [
                    Query(_value(semconv.GPU_MEMORY_USAGE), _EACH),
                    Query(_value(semconv.GPU_MEMORY_LIMIT), f"{_EACH} has"),
                ],
                unit="bytes",
                empty=_NONE,
            ),
            panels.lines(
                "Energy per 1000 tokens",
                Reading(
                    "Joules of all GPUs, by all tokens of the output, whichever model or GPU is chosen above.",
                    "small batches make tokens dear.",
                ),
                [Query(per(f"1000 * {energy}", tokens), "energy")],
                unit="joule",
                size=(12, 8),
                empty=_NONE,
            ),
            panels.lines(
                "Errors",
                Reading(
                    "A second: of its memory (ECC), and what its driver called critical (Xid, by number). Corrected ones are common.",
                    "uncorrected: take the GPU out of service. Xid: look the number up.",
                ),
                [Query(errors, f"{_EACH} {legend(semconv.ERROR_TYPE)}")],
                unit="ops",
                size=(12, 8),
                empty="this GPU does not tell",
            ),
        ],
    )


def board() -> Board:
    """The dashboard."""
    about = "GPUs: busy time, activity, power, clocks and gaps. Empty where the server has none."
    return Board("gpu", "GPU", about, [_all(), _work(), _limits()])
