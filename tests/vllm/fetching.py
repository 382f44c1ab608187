"""A KV connector as those of disaggregated servers are: blocks come from elsewhere, which takes a while.

What it brings is nothing: the blocks stay as they are, and a model with random weights has no better idea. Only prompts
longer than `AT_LEAST` tokens have anything elsewhere.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

AT_LEAST, TAKES_S = 64, 0.3


class Wanted(KVConnectorMetadata):
    """For the worker: whose blocks are to be fetched from now on."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids


class Slow(KVConnectorBase_V1):
    """Both of its halves: the scheduler's and the worker's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: list[str] = []
        self._due: dict[str, float] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        there = request.num_prompt_tokens - 1 - num_computed_tokens
        return (there, True) if request.num_prompt_tokens > AT_LEAST and there > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._asked.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Wanted:
        asked, self._asked = self._asked, []
        return Wanted(asked)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for who in self._get_connector_metadata().ids:  # type: ignore[attr-defined]
            self._due[who] = time.monotonic() + TAKES_S

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        here = {who for who, due in self._due.items() if due <= time.monotonic()}
        for who in here:
            del self._due[who]
        return None, here or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded layer by layer."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
