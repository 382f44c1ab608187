"""The supported releases of LMDeploy, and the object attributes that hooks read."""

from __future__ import annotations

from pathlib import Path

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


def obtain(name: str, release: str, folder: Path) -> Path | None:
    """Downloads the modules with hooks."""
    modules = {hook.module for hook in LIBRARY.hooks} | {target.partition(":")[0] for target in RELIES}
    return part_of_wheel(name, release, folder, modules)


LIBRARY = Library("lmdeploy", instrumentor, RELEASES, RELIES, obtain, {"lmdeploy.": ""})
