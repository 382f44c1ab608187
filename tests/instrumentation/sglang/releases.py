"""The supported releases of SGLang, and the object attributes that hooks read."""

from __future__ import annotations

from otel_infer.instrumentation.sglang import instrumentor
from tests.support.releases import Library, part_of_wheel

RELEASES = (
    "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
_MANAGERS = "sglang.srt.managers"
RELIES: dict[str, tuple[str, ...]] = {
    f"{_MANAGERS}.tokenizer_manager:TokenizerManager": ("rid_to_state", "served_model_name"),
    f"{_MANAGERS}.tokenizer_manager:ReqState": ("obj", "time_stats"),
    f"{_MANAGERS}.io_struct:TokenizedGenerateReqInput": ("input_ids", "sampling_params"),
    f"{_MANAGERS}.io_struct:AbortReq": ("rid",),
    f"{_MANAGERS}.schedule_batch:Req": (
        "origin_input_ids", "output_ids", "finished_reason", "is_retracted", "inflight_middle_chunks", "time_stats",
        "finished_len",
    ),
    f"{_MANAGERS}.schedule_batch:ScheduleBatch": (
        "reqs", "forward_mode", "extend_lens", "prefix_lens", "forward_iter", "spec_algorithm",
    ),
    f"{_MANAGERS}.scheduler:Scheduler": (
        "forward_ct", "waiting_queue", "running_batch", "token_to_kv_pool_allocator", "tree_cache", "max_total_num_tokens",
    ),
}  # fmt: skip

LIBRARY = Library("sglang", instrumentor, RELEASES, RELIES, part_of_wheel, {"sglang.srt.": ""})
