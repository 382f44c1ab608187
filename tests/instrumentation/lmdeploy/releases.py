"""The supported releases of LMDeploy, and the object attributes that hooks read."""

from __future__ import annotations

from otel_infer.instrumentation.lmdeploy import instrumentor
from tests.support.releases import Library, part_of_wheel

RELEASES = ("0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.0")
RELIES: dict[str, tuple[str, ...]] = {
    "lmdeploy.pytorch.engine.engine_instance:EngineInstance": ("engine",),
    "lmdeploy.messages:EngineOutput": ("status", "token_ids"),
    "lmdeploy.messages:GenerationConfig": ("max_new_tokens",),
    "lmdeploy.pytorch.messages:SchedulerSequence": (
        "session_id", "num_token_ids", "generated_ids", "cached_tokens",
    ),
    "lmdeploy.pytorch.model_inputs:ModelInputs": ("is_decoding",),
}  # fmt: skip

LIBRARY = Library("lmdeploy", instrumentor, RELEASES, RELIES, part_of_wheel, {"lmdeploy.": ""})
