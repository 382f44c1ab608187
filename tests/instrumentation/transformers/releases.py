"""The supported releases of transformers, and the object attributes that hooks read."""

from __future__ import annotations

from otel_infer.instrumentation.transformers import instrumentor
from tests.support.releases import Library, wheel

RELEASES = (
    "5.5.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1", "5.9.0", "5.10.4", "5.11.0", "5.12.1", "5.13.1", "5.14.1",
    "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0",
)  # fmt: skip
_CB = "transformers.generation.continuous_batching"
RELIES: dict[str, tuple[str, ...]] = {
    f"{_CB}.scheduler:Scheduler": (
        "active_requests", "waiting_requests", "_requests_to_cancel", "_requests_to_fork", "cache",
        "clear_cancelled_requests",
    ),
    f"{_CB}.requests:RequestState": (
        "request_id", "initial_tokens", "generated_tokens", "tokens_to_process", "num_children", "status",
        "_eos_token_ids", "_true_initial_tokens",
    ),
    f"{_CB}.requests:FutureRequestState": ("state", "has_new_token"),
    f"{_CB}.cache:PagedAttentionCache": ("num_blocks", "compute_free_capacity get_num_free_blocks"),
    f"{_CB}.continuous_api:ContinuousBatchProcessor": ("scheduler",),
    f"{_CB}.continuous_api:ContinuousBatchingManager": ("model", "generation_config", "num_return_sequences"),
    f"{_CB}.input_outputs:ContinuousBatchingIOs": ("requests_in_batch", "total_seqlen_q", "cumulative_seqlens_q"),
    f"{_CB}.input_outputs:HostDeviceIOPair": ("host_io",),
    "transformers.cli.serving.utils:DirectStreamer": ("total_tokens",),
    "transformers.cli.serving.utils:CBStreamer": ("total_tokens",),
}  # fmt: skip

LIBRARY = Library(
    "transformers",
    instrumentor,
    RELEASES,
    RELIES,
    wheel,
    {"transformers.": "", "generation.continuous_batching": "…"},
)
