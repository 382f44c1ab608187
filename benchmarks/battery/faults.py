"""The faults of the battery: what is done to a server, and the verdicts that are right for it.

A fault that a server cannot have is not drawn for it. Severity, timing and lengths are random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from benchmarks.battery.load import TimedRequest, change_some, draw_requests
from benchmarks.battery.servers import Server

SECONDS = 14.0


@dataclass(frozen=True)
class Case:
    """A drawn fault. `mistakes`: of the server. `database_s`: delay of its database; 0 = none. `hogs`: other processes.

    `niceness`: of the hogs. `log_kb_s`: how fast its log is read; 0 = it goes to a file. `arguments`, `variables`: added to
    its command and environment.
    """

    requests: list[TimedRequest]
    mistakes: dict[str, Any] = field(default_factory=dict)
    database_s: float = 0.0
    hogs: int = 0
    niceness: int = 0
    log_kb_s: float = 0.0
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class Fault(NamedTuple):
    """A row: what is right to say of it, how it is drawn, and the servers that can have it."""

    verdicts: tuple[str, ...]
    draw: Callable[[random.Random, Server], Case]
    servers: tuple[str, ...]


def draw_usual(rng: random.Random, server: Server, factor: float = 1.0) -> list[TimedRequest]:
    """Returns the load that the server bears, times a factor."""
    return draw_requests(rng, SECONDS, server.rate * factor, server.tokens)


def draw_crowd(rng: random.Random, server: Server, factor: float = 1.0) -> list[TimedRequest]:
    """Returns a load in which some requests run at the same time, times a factor."""
    return draw_requests(rng, SECONDS, (server.crowded_rate or server.rate) * factor, server.tokens)


def draw_light(rng: random.Random, server: Server) -> list[TimedRequest]:
    """Returns a load without waits. Requests come one by one where two cannot run at the same time."""
    requests = draw_usual(rng, server, rng.uniform(0.5, 1.0))
    if server.name not in (*BLOCKED, *ONE_AT_A_TIME):
        return requests
    return [replace(request, at=0.7 * i + rng.uniform(0, 0.1)) for i, request in enumerate(requests)]


def draw_nothing(rng: random.Random, server: Server) -> Case:
    return Case(draw_light(rng, server))


def draw_nothing_busy(rng: random.Random, server: Server) -> Case:
    """A busy machine, whose other processes yield to the server."""
    return Case(draw_light(rng, server), hogs=2, niceness=19)


def draw_missed_objective(rng: random.Random, server: Server) -> Case:
    """A load without waits, and an objective that the model cannot reach."""
    objective = {"OTEL_INFER_SLO": f"e2e={rng.randint(1, 10)}ms"}
    return Case(draw_light(rng, server), variables=objective)


def draw_lock(rng: random.Random, server: Server) -> Case:
    return Case(draw_crowd(rng, server, rng.uniform(2.0, 3.0)), {"lock": True})


def draw_semaphore(rng: random.Random, server: Server) -> Case:
    return Case(draw_crowd(rng, server, rng.uniform(2.0, 3.0)), {"semaphore": 1})


def draw_blocked_loop(rng: random.Random, server: Server) -> Case:
    if server.name == "generate-async":  # it blocks its loop itself
        return Case(draw_usual(rng, server, rng.uniform(3.0, 5.0)))
    mistakes = {"loop_ms": rng.uniform(150, 500), "loop_share": rng.uniform(0.15, 0.4)}
    return Case(draw_usual(rng, server), mistakes)


def draw_exhausted_pool(rng: random.Random, server: Server) -> Case:
    if server.name == "embeddings":
        case = draw_slow_database(rng, server)
        requests = draw_crowd(rng, server, 1.5)
        return replace(case, requests=requests, database_s=rng.uniform(0.2, 0.3), mistakes={"workers": 2})
    return Case(draw_crowd(rng, server, rng.uniform(2.0, 3.0)), {"workers": 1})


def draw_hogs(rng: random.Random, server: Server) -> Case:
    return Case(draw_usual(rng, server), hogs=rng.randint(4, 8))


def draw_busy_threads(rng: random.Random, server: Server) -> Case:
    return Case(draw_usual(rng, server), {"busy_threads": rng.randint(4, 8)})


def draw_slow_end(rng: random.Random, server: Server) -> Case:
    mistakes = {"after_ms": rng.uniform(300, 800), "after_share": rng.uniform(0.15, 0.3)}
    return Case(draw_usual(rng, server), mistakes)


def draw_slow_reader(rng: random.Random, server: Server) -> Case:
    """Answers of 8 MB, because the kernel takes up to 4 MB of an answer from the server (`net.ipv4.tcp_wmem`)."""
    requests = [replace(request, padding=8_000_000 // request.tokens) for request in draw_usual(rng, server)]
    return Case(change_some(rng, requests, rng.uniform(0.15, 0.3), reads_kb_s=rng.uniform(2000, 6000)))


def draw_slow_database(rng: random.Random, server: Server) -> Case:
    return Case(draw_usual(rng, server), {"database_port": -1}, database_s=rng.uniform(0.2, 0.6))


def draw_retry_storm(rng: random.Random, server: Server) -> Case:
    requests = draw_crowd(rng, server, rng.uniform(1.2, 1.6))
    tokens = 2 if server.kind != "embeddings" else 1
    return Case(
        [
            replace(request, tokens=request.tokens * tokens, deadline_s=rng.uniform(0.4, 0.8), retries=2)
            for request in requests
        ]
    )


def draw_gc_storm(rng: random.Random, server: Server) -> Case:
    mistakes = {"gc_objects": rng.randint(1_000_000, 2_000_000), "gc_every_ms": rng.uniform(600, 1200)}
    return Case(draw_usual(rng, server), mistakes)


def draw_stalled_steps(rng: random.Random, server: Server) -> Case:
    """Some decode steps of the engine wait for something else than the model."""
    delay = {
        "DELAY": "batch",
        "DELAY_S": f"{rng.uniform(0.15, 0.4):.3f}",
        "DELAY_SHARE": f"{rng.uniform(0.015, 0.03):.3f}",
    }
    return Case(draw_usual(rng, server), variables=delay)


def draw_memory_pressure(rng: random.Random, server: Server) -> Case:
    mistakes = {"fresh_mb": rng.randint(100, 200), "fresh_share": rng.uniform(0.15, 0.3)}
    return Case(draw_usual(rng, server), mistakes)


def draw_slow_log(rng: random.Random, server: Server) -> Case:
    """The log is read more slowly than it is written, so that requests wait once the pipe is full (64 KB)."""
    return Case(
        draw_usual(rng, server), {"log_bytes": 20_000}, log_kb_s=20 * server.rate * rng.uniform(0.5, 0.8)
    )


def draw_long_prompts(rng: random.Random, server: Server) -> Case:
    words, share = rng.randint(1000, 1400), rng.uniform(0.15, 0.3)
    if server.name in ENGINES:  # they compute a long prompt beside other work
        share += 0.15
    return Case(change_some(rng, draw_crowd(rng, server, 0.4), share, words=words))


def draw_long_window(rng: random.Random, server: Server) -> Case:
    return Case(draw_usual(rng, server), {"window_ms": rng.uniform(250, 600)})


def draw_burst(rng: random.Random, server: Server) -> Case:
    is_engine = server.name in ENGINES
    requests = draw_crowd(rng, server, 1.0 if is_engine else 0.5)
    at = SECONDS * rng.uniform(0.4, 0.6)
    size = rng.randint(25, 40) * (3 if server.kind == "embeddings" else 2 if is_engine else 1)
    burst = draw_requests(rng, 0.5, 2 * size, server.tokens)[:size]
    return Case(requests + [replace(request, at=at + request.at) for request in burst])


FEW_SEQUENCES = {"vllm": ("--max-num-seqs", "4"), "transformers-serve": ("--cb-num-blocks", "6")}
"""Engines that run few sequences at a time, or few long ones."""


def draw_heavy_among_light(rng: random.Random, server: Server) -> Case:
    light = draw_requests(rng, SECONDS, server.crowded_rate or server.rate, (4, 10))
    heavy = [
        TimedRequest(1.0 + 4.0 * turn + rng.uniform(0, 0.1), 40, rng.randint(250, 350))
        for turn in range(3)
        for _ in range(8)
    ]
    return Case(light + heavy, arguments=FEW_SEQUENCES.get(server.name, ()))


SMALL_CACHE = ("--block-size", "32", "--num-gpu-blocks-override", "24", "--max-model-len", "640")
"""768 tokens."""


def draw_full_cache(rng: random.Random, server: Server) -> Case:
    """So long prompts that the KV cache has room for one or two."""
    requests = draw_requests(rng, SECONDS, server.rate * rng.uniform(0.8, 1.2), (40, 80), (150, 250))
    return Case(requests, arguments=SMALL_CACHE)


def draw_preemption(rng: random.Random, server: Server) -> Case:
    """So long answers that the KV cache, which had room for their prompts, is full before they end."""
    requests = draw_requests(rng, SECONDS, server.rate * rng.uniform(0.5, 0.7), (200, 320), (12, 24))
    return Case(requests, arguments=SMALL_CACHE)


OTHERS = ("batcher", "flask-gunicorn")
"""Servers that answer with the result of one call."""
PROGRAMS = ("generate-threads", "generate-async", "embeddings")
STREAMS = ("generate-threads", "transformers-serve", "vllm")
ENGINES = ("transformers-serve", "vllm", "sglang")
ONE_AT_A_TIME = ("llama-cpp",)
"""Servers that let one request at a time have the model."""
ALL = (*PROGRAMS, *ENGINES, *ONE_AT_A_TIME, *OTHERS)
BLOCKED = ("generate-async",)
"""Each generation blocks the event loop, so what else happens also shows as waiting in the socket."""
UNBLOCKED = ("generate-threads", "embeddings")
WAITS = ("queueing", "peak", "head_of_line_blocking")

FAULTS = {
    "nothing": Fault(("healthy",), draw_nothing, ALL),
    "nothing, busy machine": Fault(("healthy", "not_enough_cpu"), draw_nothing_busy, ALL),
    "missed objective": Fault(
        ("slow_model",), draw_missed_objective, ("transformers-serve", *UNBLOCKED, "flask-gunicorn")
    ),
    "lock": Fault(WAITS, draw_lock, PROGRAMS),
    "semaphore": Fault(WAITS, draw_semaphore, PROGRAMS),
    "blocked loop": Fault(("pre_engine", "stutter"), draw_blocked_loop, (*PROGRAMS, *OTHERS)),
    "exhausted pool": Fault(WAITS, draw_exhausted_pool, ("generate-threads", "embeddings")),
    "hogs": Fault(("not_enough_cpu",), draw_hogs, ALL),
    "busy threads": Fault(("not_enough_cpu",), draw_busy_threads, (*PROGRAMS, *OTHERS)),
    "slow end": Fault(("late_end",), draw_slow_end, (*PROGRAMS, *OTHERS)),
    "slow reader": Fault(("slow_reader",), draw_slow_reader, ("generate-threads",)),
    "slow database": Fault(("pre_engine",), draw_slow_database, (*PROGRAMS, *OTHERS)),
    "retry storm": Fault(("abandoned_work",), draw_retry_storm, ("generate-threads",)),
    "retry storm, blocked loop": Fault(
        ("abandoned_work", "pre_engine"), draw_retry_storm, ("generate-async",)
    ),
    "gc storm": Fault(("stutter",), draw_gc_storm, (*UNBLOCKED, *ONE_AT_A_TIME, *OTHERS)),
    "stalled steps": Fault(("stutter",), draw_stalled_steps, ("sglang",)),
    "gc storm, blocked loop": Fault(("stutter", "pre_engine"), draw_gc_storm, BLOCKED),
    "memory pressure": Fault(("stutter", "pre_engine"), draw_memory_pressure, (*PROGRAMS, *OTHERS)),
    "slow log": Fault(("pre_engine", "stutter"), draw_slow_log, (*PROGRAMS, *OTHERS)),
    "long prompts": Fault(("prefill",), draw_long_prompts, (*UNBLOCKED, "flask-gunicorn")),
    "long prompts, one batch": Fault(("prefill", "stutter"), draw_long_prompts, ENGINES),
    "long prompts, one at a time": Fault(("prefill", *WAITS), draw_long_prompts, ONE_AT_A_TIME),
    "long prompts, blocked loop": Fault(("prefill", "pre_engine"), draw_long_prompts, BLOCKED),
    "burst": Fault(("peak", "too_many_at_once"), draw_burst, (*UNBLOCKED, "flask-gunicorn")),
    "burst, one batch": Fault(("peak", "batching"), draw_burst, (*ENGINES, "batcher")),
    "burst, one at a time": Fault(WAITS, draw_burst, ONE_AT_A_TIME),
    "burst, blocked loop": Fault(("peak", "pre_engine"), draw_burst, BLOCKED),
    "heavy among light": Fault(
        ("head_of_line_blocking", "too_many_at_once"), draw_heavy_among_light, STREAMS
    ),
    "long window": Fault(("batching",), draw_long_window, ("batcher",)),
    "full cache": Fault(WAITS, draw_full_cache, ("vllm",)),
    "preemption": Fault(("stutter", *WAITS), draw_preemption, ("vllm",)),
}
"""By name. Two verdicts are right where a fault has both effects: a blocked loop delays first tokens and later ones, a long
prompt is slow itself and delays its batch, and a cache that is full preempts some requests and lets others wait."""
