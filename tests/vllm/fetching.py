"""A KV connector like those of disaggregated servers: loading remote blocks takes `TAKES_S` s.

It loads nothing: the blocks keep their content, which does not matter to a model with random weights. Only prompts
longer than `AT_LEAST` tokens have remote blocks.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

AT_LEAST, TAKES_S = 64, 0.3


class Wanted(KVConnectorMetadata):
    """Metadata for the worker: the requests whose blocks are to be fetched."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids


class Slow(KVConnectorBase_V1):
    """Both halves of the connector: the scheduler's and the worker's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending: list[str] = []
        self._due: dict[str, float] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        remote = request.num_prompt_tokens - 1 - num_computed_tokens
        return (remote, True) if request.num_prompt_tokens > AT_LEAST and remote > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._pending.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Wanted:
        pending, self._pending = self._pending, []
        return Wanted(pending)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id in self._get_connector_metadata().ids:  # type: ignore[attr-defined]
            self._due[request_id] = time.monotonic() + TAKES_S

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded = {request_id for request_id, due in self._due.items() if due <= time.monotonic()}
        for request_id in loaded:
            del self._due[request_id]
        return None, loaded or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Layers are not loaded one by one."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
