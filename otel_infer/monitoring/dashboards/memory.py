"""How close KV cache and device memory are to the edge, beside what that does to the first token."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.monitoring.dashboards import panels
from otel_infer.monitoring.dashboards.dashboard import ASK, Board, Row
from otel_infer.monitoring.dashboards.panels import Query, Reading, legend
from otel_infer.monitoring.promql import equal, matches, per, share
from otel_infer.semconv.prometheus import label

_NO_KV = "no KV cache is told of"
_NO_MEMORY = "no device memory is told of"
_ENGINE = ("instance", semconv.ENGINE, semconv.PROCESS_PID)
_EACH = legend("instance", semconv.ENGINE, semconv.PROCESS_PID)
_BY_DEVICE = (semconv.HW_ID, semconv.PROCESS_PID)
_DEVICE = legend(semconv.HW_ID, semconv.PROCESS_PID)


def _memory(kind: str) -> str:
    return ASK.value(semconv.DEVICE_MEMORY, equal(semconv.MEMORY_KIND, kind), by=_BY_DEVICE)


def _kinds() -> list[Query]:
    """In bands that sum to what the devices have: what a process is told of a device is of all that use it."""

    def kind(name: str) -> str:
        return ASK.value(semconv.DEVICE_MEMORY, equal(semconv.MEMORY_KIND, name))

    def each(name: str) -> str:
        return ASK.pick(semconv.DEVICE_MEMORY, equal(semconv.MEMORY_KIND, name))

    device, own = label(semconv.HW_ID), kind("reserved")
    taken = f"{each('outside')} + ignoring ({label(semconv.MEMORY_KIND)}) {each('reserved')}"
    return [
        Query(kind("allocated"), "allocated"),
        Query(kind("inactive_split"), "inactive_split"),
        Query(f"{own} - {kind('allocated')} - {kind('inactive_split')}", "cached"),
        Query(f"sum (max by ({device}) ({taken})) - {own}", "outside"),
        Query(f"sum (min by ({device}) ({each('free')}))", "free"),
    ]


def _kv() -> Row:
    used = ASK.value(semconv.KV_UTILIZATION, by=_ENGINE, take="max")
    left = f"{ASK.value(semconv.KV_LIMIT, by=_ENGINE)} - {ASK.value(semconv.KV_USAGE, by=_ENGINE)}"
    growth = f"sum by ({', '.join(map(label, _ENGINE))}) (deriv({ASK.pick(semconv.KV_USAGE)}[{ASK.window}]))"
    preempted = share(ASK.rate(semconv.REQUEST_PREEMPTIONS), ASK.rate(semconv.REQUEST_DURATION))
    return Row(
        "KV cache",
        [
            panels.lines(
                "KV cache in use, beside TTFT p99",
                Reading(
                    "Share of blocks in use, by engine. Close to full is normal under load.",
                    "full, and TTFT rises with it: requests wait for blocks. Shorter outputs, more memory for the cache, or another replica.",
                ),
                [
                    Query(used, _EACH),
                    Query(ASK.quantile(0.99, semconv.TIME_TO_FIRST_TOKEN), "TTFT p99", axis="s"),
                ],
                unit="percentunit",
                size=(12, 9),
                empty=_NO_KV,
            ),
            panels.lines(
                "Preemptions per request",
                Reading(
                    "How often a running sequence was put back to free blocks, and computed again later.",
                    "over 0.1: fewer sequences at once, or more KV cache.",
                ),
                [Query(preempted, "preemptions")],
                unit="short",
                size=(12, 9),
            ),
            panels.lines(
                "Blocks left",
                Reading(
                    "What is not in use, by engine.", "it touches zero: who comes next waits or preempts."
                ),
                [Query(left, _EACH)],
                unit="short",
                empty=_NO_KV,
            ),
            panels.lines(
                "Time until full",
                Reading(
                    "Blocks left, by how fast they are being used up now; absent while they are not.",
                    "seconds: the next wave of requests will be preempted.",
                ),
                [Query(f"({left}) / ({growth} > 0)", _EACH)],
                unit="s",
                empty="it is not filling up",
            ),
            panels.lines(
                "Steps until full",
                Reading(
                    "Tokens that still fit, for each sequence that runs: what the batch of now may decode before somebody is put back. Where "
                    "layers differ in what they keep, an average.",
                    "below what answers are long (`max_tokens`): they will not all end without a preemption.",
                ),
                [Query(ASK.value(semconv.KV_HEADROOM, by=_ENGINE, take="min"), _EACH)],
                unit="short",
                empty="the engine does not say how large its blocks are",
            ),
            panels.lines(
                "Prefix cache: hit ratio",
                Reading(
                    "Share of prompt tokens that the cache had.",
                    "it falls: prompts begin differently, or blocks are evicted before they are used again.",
                ),
                [Query(per(ASK.rate(semconv.KV_PREFIX_HITS), ASK.rate(semconv.KV_PREFIX_QUERIES)), "hits")],
                unit="percentunit",
                most=1,
                empty="nothing was looked up",
            ),
            panels.lines(
                "Prefix cache: evictions",
                Reading(
                    "Blocks that it gave up for others, a second.",
                    "they rise while hits fall: the cache is too small for what is asked.",
                ),
                [Query(ASK.rate(semconv.KV_EVICTIONS), "blocks")],
                unit="short",
                empty="nothing was evicted",
            ),
            panels.lines(
                "Waiting",
                Reading(
                    "Requests that the engine has not taken up (queued); where its scheduler tells, what they wait for: room (capacity), or to be allowed at all.",
                    "capacity, with a full cache: they wait for blocks. grammar, kv_transfer: more room would not help.",
                ),
                [
                    Query(
                        ASK.value(semconv.REQUEST_ACTIVE, equal(semconv.REQUEST_STATE, semconv.STATE_QUEUED)),
                        "queued",
                    ),
                    Query(
                        ASK.value(semconv.ENGINE_WAITING, by=(semconv.WAIT_REASON,)),
                        legend(semconv.WAIT_REASON),
                    ),
                ],
                unit="short",
            ),
        ],
    )


def _device() -> Row:
    fragmented = f"1 - {_memory('allocated')} / ({_memory('reserved')} > 0)"
    return Row(
        "Device memory, as processes of the server have it",
        [
            panels.lines(
                "By kind",
                Reading(
                    "Allocated: in use. Inactive split: held in pieces. Cached: held whole. Outside: neither free nor torch's. Free: as the driver says.",
                    "little free and much in pieces: fragmentation. Engines take most of it for the KV cache at their start: that is no leak.",
                ),
                _kinds(),
                unit="bytes",
                stacked="normal",
                size=(12, 9),
                empty=_NO_MEMORY,
            ),
            panels.lines(
                "Free",
                Reading(
                    "By the driver, by device and process.", "near zero: the next large prompt may fail."
                ),
                [Query(_memory("free"), _DEVICE)],
                unit="bytes",
                size=(12, 9),
                empty=_NO_MEMORY,
            ),
            panels.lines(
                "Reserved and not in use",
                Reading(
                    "1 - allocated / reserved, of torch's allocator.",
                    "high together with retries: fragmentation. `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
                ),
                [Query(fragmented, _DEVICE)],
                unit="percentunit",
                size=(12, 8),
                most=1,
                empty=_NO_MEMORY,
            ),
            panels.lines(
                "Allocator: retries and out of memory",
                Reading(
                    "How often it gave back what it kept and asked again, or had no more, a second.",
                    "any `allocator_oom` is a request that failed; retries stop the device.",
                ),
                [
                    Query(
                        ASK.rate(
                            semconv.MARKS,
                            matches(semconv.MARK, "allocator_retry|allocator_oom"),
                            by=(semconv.MARK,),
                        ),
                        legend(semconv.MARK),
                    )
                ],
                unit="ops",
                size=(12, 8),
                empty="neither happened",
            ),
            panels.lines(
                "Set apart: private pools, pinned memory",
                Reading(
                    "Of the device, what CUDA graphs and pools of the application's own hold (torch 2.13 and later); of the host, what "
                    "is page-locked for copies.",
                    "pools that grow while serving: graphs are captured anew. Pinned memory that grows: each time, copies wait some ms.",
                ),
                [
                    Query(_memory("private_pools"), f"private pools {_DEVICE}"),
                    Query(
                        ASK.value(semconv.PINNED_MEMORY, by=("instance", semconv.PROCESS_PID)),
                        f"pinned {legend('instance', semconv.PROCESS_PID)}",
                    ),
                ],
                unit="bytes",
                size=(24, 8),
                empty=_NO_MEMORY,
            ),
        ],
    )


def board() -> Board:
    """The dashboard."""
    about = "KV cache, preemptions and device memory, beside the time to the first token."
    return Board("memory", "KV cache and memory", about, [_kv(), _device()])
