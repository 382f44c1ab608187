"""The dashboard KV cache and memory: usage of both, preemptions, and their effect on TTFT."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import PROMQL, Dashboard, DashboardRow
from otel_infer.monitoring.dashboards.panels import PanelDescription, PanelQuery, legend_format
from otel_infer.monitoring.promql import label_equals, label_matches, ratio_or_absent, ratio_or_zero
from otel_infer.semconv.prometheus import label_name

_NO_KV = "no KV cache is reported"
_NO_MEMORY = "no device memory is reported"
_BY_ENGINE = ("instance", semconv.ENGINE, semconv.PROCESS_PID)
_ENGINE_LEGEND = legend_format("instance", semconv.ENGINE, semconv.PROCESS_PID)
_BY_DEVICE = (semconv.HW_ID, semconv.PROCESS_PID)
_DEVICE_LEGEND = legend_format(semconv.HW_ID, semconv.PROCESS_PID)


def _memory_by_device(kind: str) -> str:
    return PROMQL.aggregate_gauge(
        semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, kind), by=_BY_DEVICE
    )


def _memory_kind_queries() -> list[PanelQuery]:
    """Returns bands that sum to the memory of the devices.

    Free memory is per device, so it is counted once for all processes that use the device.
    """

    def sum_of_kind(name: str) -> str:
        return PROMQL.aggregate_gauge(semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, name))

    def series_of_kind(name: str) -> str:
        return PROMQL.select_series(semconv.DEVICE_MEMORY, label_equals(semconv.MEMORY_KIND, name))

    device = label_name(semconv.HW_ID)
    allocated, reserved = (
        sum_of_kind(semconv.MEMORY_KIND_ALLOCATED),
        sum_of_kind(semconv.MEMORY_KIND_RESERVED),
    )
    split, unused = sum_of_kind(semconv.MEMORY_KIND_INACTIVE_SPLIT), series_of_kind(semconv.MEMORY_KIND_FREE)
    used = (
        f"{series_of_kind(semconv.MEMORY_KIND_OUTSIDE)} + ignoring ({label_name(semconv.MEMORY_KIND)}) "
        f"{series_of_kind(semconv.MEMORY_KIND_RESERVED)}"
    )
    return [
        PanelQuery(allocated, semconv.MEMORY_KIND_ALLOCATED),
        PanelQuery(split, semconv.MEMORY_KIND_INACTIVE_SPLIT),
        PanelQuery(f"{reserved} - {allocated} - {split}", "cached"),
        PanelQuery(f"sum (max by ({device}) ({used})) - {reserved}", semconv.MEMORY_KIND_OUTSIDE),
        PanelQuery(f"sum (min by ({device}) ({unused}))", semconv.MEMORY_KIND_FREE),
    ]


def _kv_cache_row() -> DashboardRow:
    used = PROMQL.aggregate_gauge(semconv.KV_UTILIZATION, by=_BY_ENGINE, aggregation="max")
    free = f"{PROMQL.aggregate_gauge(semconv.KV_LIMIT, by=_BY_ENGINE)} - {PROMQL.aggregate_gauge(semconv.KV_USAGE, by=_BY_ENGINE)}"
    growth = f"sum by ({', '.join(map(label_name, _BY_ENGINE))}) (deriv({PROMQL.select_series(semconv.KV_USAGE)}[{PROMQL.window}]))"
    preempted = ratio_or_zero(PROMQL.rate(semconv.REQUEST_PREEMPTIONS), PROMQL.rate(semconv.REQUEST_DURATION))
    return DashboardRow(
        "KV cache",
        [
            panels.timeseries_panel(
                "KV cache in use, beside TTFT p99",
                PanelDescription(
                    "Share of KV blocks in use, by engine. Close to full is normal under load.",
                    "if TTFT rises while it is full, requests wait for blocks: shorten outputs, give the cache more memory, or add a replica.",
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
                    "How often running sequences were preempted to free blocks, per request.",
                    "above 0.1, allow fewer sequences per batch, or add KV cache.",
                ),
                [PanelQuery(preempted, "preemptions")],
                unit="short",
                size=(12, 9),
            ),
            panels.timeseries_panel(
                "Free KV blocks",
                PanelDescription(
                    "KV blocks not in use, by engine.", "at zero, the next request waits or preempts."
                ),
                [PanelQuery(free, _ENGINE_LEGEND)],
                unit="short",
                empty=_NO_KV,
            ),
            panels.timeseries_panel(
                "Time until full",
                PanelDescription(
                    "Free blocks divided by their current rate of use; absent while usage does not grow.",
                    "at a few seconds, preemptions follow soon.",
                ),
                [PanelQuery(f"({free}) / ({growth} > 0)", _ENGINE_LEGEND)],
                unit="s",
                empty="usage does not grow",
            ),
            panels.timeseries_panel(
                "Decode steps until full",
                PanelDescription(
                    "Tokens that still fit per running sequence: how many steps the current batch can decode before a preemption. An average "
                    "where layers differ in what they cache.",
                    "below the length of outputs (`max_tokens`), not all sequences end without a preemption.",
                ),
                [
                    PanelQuery(
                        PROMQL.aggregate_gauge(semconv.KV_HEADROOM, by=_BY_ENGINE, aggregation="min"),
                        _ENGINE_LEGEND,
                    )
                ],
                unit="short",
                empty="the engine does not report its block size",
            ),
            panels.timeseries_panel(
                "Prefix cache: hit ratio",
                PanelDescription(
                    "Share of prompt tokens found in the prefix cache.",
                    "if it falls, prompts begin differently, or blocks are evicted before they are used again.",
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
                axis_max=1,
                empty="no prefix lookups",
            ),
            panels.timeseries_panel(
                "Prefix cache: evictions",
                PanelDescription(
                    "Evicted blocks per second.",
                    "if evictions rise while hits fall, the cache is too small for the traffic.",
                ),
                [PanelQuery(PROMQL.rate(semconv.KV_EVICTIONS), "blocks")],
                unit="short",
                empty="no evictions",
            ),
            panels.timeseries_panel(
                "Waiting requests",
                PanelDescription(
                    "Queued requests, and the reason of the wait if the scheduler reports it: capacity, or another condition.",
                    "capacity with a full cache: they wait for KV blocks. grammar, kv_transfer: more capacity does not help.",
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
        "Device memory by server process",
        [
            panels.timeseries_panel(
                "By kind",
                PanelDescription(
                    "Allocated: in use. Inactive split: cached in fragments. Cached: cached in whole blocks. Outside: used outside torch. Free: by the driver.",
                    "little free memory with much inactive split is fragmentation. Engines allocate most memory for the KV cache at start: that is no leak.",
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
                    "Free memory by the driver, by device and process.",
                    "near zero, the next large prompt may fail.",
                ),
                [PanelQuery(_memory_by_device("free"), _DEVICE_LEGEND)],
                unit="bytes",
                size=(12, 9),
                empty=_NO_MEMORY,
            ),
            panels.timeseries_panel(
                "Reserved but unused",
                PanelDescription(
                    "1 - allocated / reserved, of torch's allocator.",
                    "a high share with retries is fragmentation: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
                ),
                [PanelQuery(fragmented, _DEVICE_LEGEND)],
                unit="percentunit",
                size=(12, 8),
                axis_max=1,
                empty=_NO_MEMORY,
            ),
            panels.timeseries_panel(
                "Allocator: retries and out of memory",
                PanelDescription(
                    "Per second: how often the allocator freed its cache and retried, or ran out of memory.",
                    "each `allocator_oom` is a failed request. Each retry stops the device.",
                ),
                [
                    PanelQuery(
                        PROMQL.rate(
                            semconv.MARKS,
                            label_matches(
                                semconv.MARK_NAME,
                                f"{semconv.MARK_ALLOCATOR_RETRY}|{semconv.MARK_ALLOCATOR_OOM}",
                            ),
                            by=(semconv.MARK_NAME,),
                        ),
                        legend_format(semconv.MARK_NAME),
                    )
                ],
                unit="ops",
                size=(12, 8),
                empty="no retry, not out of memory",
            ),
            panels.timeseries_panel(
                "Private pools and pinned memory",
                PanelDescription(
                    "Private pools: device memory of CUDA graphs and of the application's memory pools (torch 2.13 and later). Pinned: "
                    "host memory that is page-locked for copies.",
                    "pools that grow while serving show new captures of graphs. Each growth of pinned memory delays copies by several ms.",
                ),
                [
                    PanelQuery(
                        _memory_by_device(semconv.MEMORY_KIND_PRIVATE_POOLS),
                        f"private pools {_DEVICE_LEGEND}",
                    ),
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
    """Returns the dashboard KV cache and memory."""
    description = "KV cache, preemptions and device memory, with the time to first token."
    return Dashboard("memory", "KV cache and memory", description, [_kv_cache_row(), _device_memory_row()])
