"""Replaces the pass over a Llama by constant scores, so that a step of SGLang is its scheduler's work alone.

`sitecustomize` imports it where SGLANG_WITHOUT_MODEL is set.
"""

from __future__ import annotations

from typing import Any

import wrapt

TOKEN = 20
"""The most likely token, always."""


def replace_model() -> None:
    """Replaces it once the module of the model is imported."""
    wrapt.when_imported("sglang.srt.models.llama")(_replace_forward)


def _replace_forward(module: Any) -> None:
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    scores: dict[int, torch.Tensor] = {}

    def forward(
        self: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        count = forward_batch.batch_size
        if count not in scores:
            scores[count] = torch.zeros(count, self.config.vocab_size)
            scores[count][:, TOKEN] = 1.0
        return LogitsProcessorOutput(next_token_logits=scores[count].clone())

    module.LlamaForCausalLM.forward = forward
