"""Runs vLLM's real Scheduler without a model, with the hooks of the otel_infer that is imported first.

    python benchmarks/vllm_scheduler_turns.py MODEL

It takes one turn per line of input. A line is a JSON list: number running, whether one joins and one leaves per step, whether
something else uses the caches during the step, the number of steps. The reply is a pair of medians over the steps, in ns: the time in
the hooked functions minus the time in the originals inside them, and the same without hooks, which is the timer's own.

The module imports nothing of `benchmarks`, because it runs with older releases of otel_infer too.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS, BLOCK_TOKENS, MAX_TOKENS, PROMPT = 60_000, 16, 1900, 8
HOOKED: dict[type, tuple[str, ...]] = {
    Scheduler: ("schedule", "update_from_output", "add_request", "_free_request", "_preempt_request"),
    BlockPool: ("_maybe_evict_cached_block",),
}
WARM_UP_STEPS = 8
_now = time.perf_counter_ns


class HookTimer:
    """The time of hooks, ns: in the functions of `HOOKED`, without the originals inside them."""

    def __init__(self) -> None:
        self.ns = 0

    def add_time(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        """Returns the function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += sign * (_now() - began)

        return timed

    def wrap_all(self, sign: int) -> None:
        """Wraps the functions as they are now."""
        for owner, name, function in read_functions():
            setattr(owner, name, self.add_time(function, sign))


class ModelFreeEngine:
    """A scheduler, its requests, and results of one token each in place of a model."""

    def __init__(self, model: str) -> None:
        self.config = EngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            enforce_eager=True,
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.scheduler = Scheduler(
            self.config,
            KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._created = 0
        self._cache_users = list(range(400_000))
        random.Random(3).shuffle(self._cache_users)
        self._weights = torch.ones(2_000_000)

    def add_request(self, max_tokens: int, prompt: int) -> None:
        """Adds a request with a request of otel_infer in its trace headers."""
        self._created += 1
        trace_id, span_id = random.randbytes(16).hex(), random.randbytes(8).hex()
        headers = {
            "otel-infer-request": trace_id + span_id,
            "traceparent": f"00-{trace_id}-{span_id}-01",
        }
        tokens = [self._created * 4096 + position for position in range(prompt)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request_id = f"chatcmpl-{self._created:08d}-0"
        self.scheduler.add_request(
            Request(request_id, tokens, sampling, None, trace_headers=headers, block_hasher=self._hasher)
        )

    def schedule(self) -> SchedulerOutput:
        """Schedules a batch."""
        return self.scheduler.schedule()

    def update(self, output: SchedulerOutput) -> None:
        """Delivers one token per request of the batch."""
        ids = list(output.num_scheduled_tokens)
        indexes = {request_id: index for index, request_id in enumerate(ids)}
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(req_ids=ids, req_id_to_index=indexes, sampled_token_ids=[[5] for _ in ids]),
        )

    def use_caches(self) -> None:
        """Uses the processor's caches as a model does."""
        total = 0
        for number in self._cache_users[:60_000]:
            total += number
        self._weights.add_(1)

    def end_all(self) -> None:
        """Ends all requests."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.update(self.schedule())


def run_turn(engine: ModelFreeEngine, timer: HookTimer, turn: tuple[int, bool, bool, int]) -> list[int]:
    """Returns the timer's ns of each step."""
    size, changes, uses_caches, steps = turn
    for number in range(size):
        engine.add_request(
            number + 1 + WARM_UP_STEPS if changes else MAX_TOKENS, PROMPT + number % BLOCK_TOKENS
        )
    samples = []
    gc.disable()
    for number in range(WARM_UP_STEPS + steps):
        timer.ns = 0
        if changes and number > WARM_UP_STEPS:
            engine.add_request(size, PROMPT + number % BLOCK_TOKENS)
        output = engine.schedule()
        if uses_caches:
            engine.use_caches()
        engine.update(output)
        samples.append(timer.ns)
        assert len(output.num_scheduled_tokens) == size, (len(output.num_scheduled_tokens), size)
    gc.enable()
    engine.end_all()
    return samples[WARM_UP_STEPS:]


def install_hooks() -> Callable[[], int]:
    """Installs the hooks of the otel_infer that is imported; returns a function that returns how many hooks failed."""
    newer = importlib.util.find_spec("otel_infer.ringbuffer") is not None
    ring = importlib.import_module("otel_infer.ringbuffer.recorder" if newer else "otel_infer.ring.recorder")
    arena = importlib.import_module("otel_infer.ringbuffer.arena" if newer else "otel_infer.ring.write")
    ring.recorder.start(arena.MemoryArena, lambda: None, lambda reason: None)
    if newer:
        importlib.import_module("otel_infer.instrumentation.vllm").instrumentor.install()
        return importlib.import_module("otel_infer.instrumentation.hooks.probe").count_errors
    importlib.import_module("otel_infer.integrations.vllm._integration").integration.install()
    return importlib.import_module("otel_infer.patching").errors


def read_functions() -> list[tuple[type, str, Any]]:
    """Returns the functions of `HOOKED` as they are now."""
    return [(owner, name, getattr(owner, name)) for owner, names in HOOKED.items() for name in names]


def main() -> None:
    """Takes turns until the input ends."""
    engine, timer = ModelFreeEngine(sys.argv[1]), HookTimer()
    timer.wrap_all(-1)
    bare = read_functions()
    count_errors = install_hooks()
    hooked = read_functions()
    print("ready", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        results = []
        for functions in (hooked, bare):
            for owner, name, function in functions:
                setattr(owner, name, timer.add_time(function, 1))
            results.append(statistics.median(run_turn(engine, timer, turn)))
        if count_errors():
            raise RuntimeError("a hook raised and was disabled, so the measurement is invalid")
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
