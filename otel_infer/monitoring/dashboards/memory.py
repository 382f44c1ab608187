"""How close KV cache and device memory are to the edge, beside what that does to the first token."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_matches, ratio_or_absent, ratio_or_zero
from otel_infer.semconv.prometheus import label_name

_NO_KV = "no KV cache is told of"
_NO_MEMORY = "no device memory is told of"
_BY_ENGINE = ("instance", semconv.ENGINE, semconv.PROCESS_PID)
_ENGINE_LEGEND = legend_format("instance", semconv.ENGINE, semconv.PROCESS_PID)
_BY_DEVICE = (semconv.HW_ID, semconv.PROCESS_PID)
_DEVICE_LEGEND = legend_format(semconv.HW_ID, semconv.PROCESS_PID)


def _memory_by_device(kind: str) -> str:
    return PROMQL.aggregate_gauge(
        semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, kind), by=_BY_DEVICE
    )


def _memory_kind_queries() -> list[PanelQuery]:
    """In bands that sum to what the devices have: what a process is told of a device is of all that use it."""

    def sum_of_kind(name: str) -> str:
        return PROMQL.aggregate_gauge(semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, name))

    def series_of_kind(name: str) -> str:
        return PROMQL.select_series(semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, name))

    device, own = label_name(semconv.HW_ID), sum_of_kind("reserved")
    taken = f"{series_of_kind('outside')} + ignoring ({label_name(semconv.MEMORY_KIND)}) {series_of_kind('reserved')}"
    return [
        PanelQuery(sum_of_kind("allocated"), "allocated"),
        PanelQuery(sum_of_kind("inactive_split"), "inactive_split"),
        PanelQuery(f"{own} - {sum_of_kind('allocated')} - {sum_of_kind('inactive_split')}", "cached"),
        PanelQuery(f"sum (max by ({device}) ({taken})) - {own}", "outside"),
        PanelQuery(f"sum (min by ({device}) ({series_of_kind('free')}))", "free"),
    ]


def _kv_cache_row() -> DashboardRow:
    used = PROMQL.aggregate_gauge(semconv.KV_UTILIZATION, by=_BY_ENGINE, take="max")
    left = f"{PROMQL.aggregate_gauge(semconv.KV_LIMIT, by=_BY_ENGINE)} - {PROMQL.aggregate_gauge(semconv.KV_USAGE, by=_BY_ENGINE)}"
    growth = f"sum by ({', '.join(map(label_name, _BY_ENGINE))}) (deriv({PROMQL.select_series(semconv.KV_USAGE)}[{PROMQL.window}]))"
    preempted = ratio_or_zero(PROMQL.rate(semconv.REQUEST_PREEMPTIONS), PROMQL.rate(semconv.REQUEST_DURATION))
    return DashboardRow(
        "KV cache",
        [
            panels.timeseries_panel(
                "KV cache in use, beside TTFT p99",
                PanelDescription(
                    "Share of blocks in use, by engine. Close to full is normal under load.",
                    "full, and TTFT rises with it: requests wait for blocks. Shorter outputs, more memory for the cache, or another replica.",
                ),
                [
                    PanelQuery(used, _ENGINE_LEGEND),
                    PanelQuery(
                        PROMQL.quantile(0.99, semconv.TIME_TO_FIRST_TOKEN), "TTFT p99", right_axis_unit="s"
                    ),
                ],
                unit="percentunit",
                size=(12, 9),
                empty=_NO_KV,
            ),
            panels.timeseries_panel(
                "Preemptions per request",
                PanelDescription(
                    "How often a running sequence was put back to free blocks, and computed again later.",
                    "over 0.1: fewer sequences at once, or more KV cache.",
                ),
                [PanelQuery(preempted, "preemptions")],
                unit="short",
                size=(12, 9),
            ),
            panels.timeseries_panel(
                "Blocks left",
                PanelDescription(
                    "What is not in use, by engine.", "it touches zero: who comes next waits or preempts."
                ),
                [PanelQuery(left, _ENGINE_LEGEND)],
                unit="short",
                empty=_NO_KV,
            ),
            panels.timeseries_panel(
                "Time until full",
                PanelDescription(
                    "Blocks left, by how fast they are being used up now; absent while they are not.",
                    "seconds: the next wave of requests will be preempted.",
                ),
                [PanelQuery(f"({left}) / ({growth} > 0)", _ENGINE_LEGEND)],
                unit="s",
                empty="it is not filling up",
            ),
            panels.timeseries_panel(
                "Steps until full",
                PanelDescription(
                    "Tokens that still fit, for each sequence that runs: what the batch of now may decode before somebody is put back. Where "
                    "layers differ in what they keep, an average.",
                    "below what answers are long (`max_tokens`): they will not all end without a preemption.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.KV_HEADROOM, by=_BY_ENGINE, take="min"), _ENGINE_LEGEND
                    )
                ],
                unit="short",
                empty="the engine does not say how large its blocks are",
            ),
            panels.timeseries_panel(
                "Prefix cache: hit ratio",
                PanelDescription(
                    "Share of prompt tokens that the cache had.",
                    "it falls: prompts begin differently, or blocks are evicted before they are used again.",
                ),
                [
                    PanelQuery(
                        ratio_or_absent(
                            PROMQL.rate(semconv.KV_PREFIX_HITS), PROMQL.rate(semconv.KV_PREFIX_QUERIES)
                        ),
                        "hits",
                    )
                ],
                unit="percentunit",
                most=1,
                empty="nothing was looked up",
            ),
            panels.timeseries_panel(
                "Prefix cache: evictions",
                PanelDescription(
                    "Blocks that it gave up for others, a second.",
                    "they rise while hits fall: the cache is too small for what is asked.",
                ),
                [PanelQuery(PROMQL.rate(semconv.KV_EVICTIONS), "blocks")],
                unit="short",
                empty="nothing was evicted",
            ),
            panels.timeseries_panel(
                "Waiting",
                PanelDescription(
                    "Requests that the engine has not taken up (queued); where its scheduler tells, what they wait for: room (capacity), or to be allowed at all.",
                    "capacity, with a full cache: they wait for blocks. grammar, kv_transfer: more room would not help.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(
                            semconv.REQUEST_ACTIVE, label_equals(semconv.REQUEST_STATE, semconv.STATE_QUEUED)
                        ),
                        "queued",
                    ),
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.ENGINE_WAITING, by=(semconv.WAIT_REASON,)),
                        legend_format(semconv.WAIT_REASON),
                    ),
                ],
                unit="short",
            ),
        ],
    )


def _device_memory_row() -> DashboardRow:
    fragmented = f"1 - {_memory_by_device('allocated')} / ({_memory_by_device('reserved')} > 0)"
    return DashboardRow(
        "Device memory, as processes of the server have it",
        [
            panels.timeseries_panel(
                "By kind",
                PanelDescription(
                    "Allocated: in use. Inactive split: held in pieces. Cached: held whole. Outside: neither free nor torch's. Free: as the driver says.",
                    "little free and much in pieces: fragmentation. Engines take most of it for the KV cache at their start: that is no leak.",
                ),
                _memory_kind_queries(),
                unit="bytes",
                stacked="normal",
                size=(12, 9),
                empty=_NO_MEMORY,
            ),
            panels.timeseries_panel(
                "Free",
                PanelDescription(
                    "By the driver, by device and process.", "near zero: the next large prompt may fail."
                ),
                [PanelQuery(_memory_by_device("free"), _DEVICE_LEGEND)],
                unit="bytes",
                size=(12, 9),
                empty=_NO_MEMORY,
            ),
            panels.timeseries_panel(
                "Reserved and not in use",
                PanelDescription(
                    "1 - allocated / reserved, of torch's allocator.",
                    "high together with retries: fragmentation. `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
                ),
                [PanelQuery(fragmented, _DEVICE_LEGEND)],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty=_NO_MEMORY,
            ),
            panels.timeseries_panel(
                "Allocator: retries and out of memory",
                PanelDescription(
                    "How often it gave back what it kept and asked again, or had no more, a second.",
                    "any `allocator_oom` is a request that failed; retries stop the device.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(
                            semconv.MARKS,
                            label_matches(semconv.MARK_NAME, "allocator_retry|allocator_oom"),
                            by=(semconv.MARK_NAME,),
                        ),
                        legend_format(semconv.MARK_NAME),
                    )
                ],
                unit="ops",
                size=(12, 8),
                empty="neither happened",
            ),
            panels.timeseries_panel(
                "Set apart: private pools, pinned memory",
                PanelDescription(
                    "Of the device, what CUDA graphs and pools of the application's own hold (torch 2.13 and later); of the host, what "
                    "is page-locked for copies.",
                    "pools that grow while serving: graphs are captured anew. Pinned memory that grows: each time, copies wait some ms.",
                ),
                [
                    PanelQuery(_memory_by_device("private_pools"), f"private pools {_DEVICE_LEGEND}"),
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.PINNED_MEMORY, by=("instance", semconv.PROCESS_PID)),
                        f"pinned {legend_format('instance', semconv.PROCESS_PID)}",
                    ),
                ],
                unit="bytes",
                size=(24, 8),
                empty=_NO_MEMORY,
            ),
        ],
    )


def build_dashboard() -> Dashboard:
    """The dashboard."""
    about = "KV cache, preemptions and device memory, beside the time to the first token."
    return Dashboard("memory", "KV cache and memory", about, [_kv_cache_row(), _device_memory_row()])
