"""The supported releases of vLLM, and the object attributes that hooks read."""

from __future__ import annotations

from otel_infer.instrumentation.vllm import instrumentor
from tests.support.releases import Library, sdist

RELEASES = (
    "0.17.1", "0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1",
    "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
RELIES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "running", "waiting", "requests", "kv_cache_manager", "connector", "num_spec_tokens",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_new_reqs", "scheduled_spec_decode_tokens",
        "scheduled_cached_reqs",
    ),
    "vllm.v1.core.sched.output:CachedRequestData": ("resumed_req_ids",),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool", "enable_caching"),
    "vllm.v1.core.block_pool:BlockPool": ("num_gpu_blocks", "get_num_free_blocks", "free_block_queue"),
    "vllm.v1.request:Request": (
        "request_id", "trace_headers", "num_output_tokens", "num_prompt_tokens", "num_preemptions",
        "skip_reading_prefix_cache", "get_finished_reason", "status", "structured_output_request", "is_finished",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": ("sampled_token_ids", "req_id_to_index", "pooler_output"),
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id", "external_req_id", "trace_headers", "prompt_token_ids", "sampling_params", "pooling_params",
        "lora_request",
    ),
    "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("request_states",),
    "vllm.v1.engine.output_processor:OutputProcessorOutput": ("reqs_to_abort",),
    "vllm.v1.engine.output_processor:RequestState": ("request_id", "detokenizer"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("output_token_ids", "update"),
    "vllm.v1.engine.parallel_sampling:ParentRequest": ("sampling_params",),
    "vllm.v1.engine.async_llm:AsyncLLM": ("output_processor", "model_config"),
    "vllm.v1.engine.llm_engine:LLMEngine": ("output_processor", "model_config"),
}  # fmt: skip

LIBRARY = Library("vllm", instrumentor, RELEASES, RELIES, sdist, {"vllm.v1.": "", "vllm.": ""})
