"""Runs vLLM's real Scheduler without a model, with the hooks of the otel_infer that is imported first.

    python benchmarks/vllm_scheduler_turns.py MODEL

The module imports nothing of the package `benchmarks`, because it runs with older releases of otel_infer too.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch
from scheduler_turns import HookTimer, take_turns
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS, BLOCK_TOKENS = 60_000, 16
HOOKED: dict[type, tuple[str, ...]] = {
    Scheduler: ("schedule", "update_from_output", "add_request", "_free_request", "_preempt_request"),
    BlockPool: ("_maybe_evict_cached_block",),
}


class ModelFreeEngine:
    """A scheduler, its requests, and results of one token each in place of a model."""

    timer: HookTimer

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

    def run_step(self, during: Callable[[], None]) -> int:
        """Schedules a batch, and delivers one token per request."""
        output = self.scheduler.schedule()
        during()
        ids = list(output.num_scheduled_tokens)
        indexes = {request_id: index for index, request_id in enumerate(ids)}
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(req_ids=ids, req_id_to_index=indexes, sampled_token_ids=[[5] for _ in ids]),
        )
        return len(ids)

    def end_all(self) -> None:
        """Ends all requests."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.run_step(lambda: None)


if __name__ == "__main__":
    take_turns(lambda: ModelFreeEngine(sys.argv[1]), HOOKED, "vllm")
