"""transformers' continuous batching with the demo's model, in this process, on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from otel_infer.cli.demo.model import make_demo_model

LAYERS, HIDDEN = 1, 64
PROMPT = 16
BLOCK = 32


def make_model() -> Any:
    """Returns the demo's Llama with one layer: the shorter a step, the larger the share of the hooks."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make_demo_model(Path(folder), layers=LAYERS, hidden=HIDDEN)
        return AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32
        ).eval()


def make_manager(model: Any, running: int, tokens: int = 64) -> Any:
    """Returns a manager for this many sequences of this many tokens, not started."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
    blocks = running * (-(-(PROMPT + tokens) // BLOCK) + 1)
    sizes = {"block_size": BLOCK, "num_blocks": blocks, "max_batch_tokens": max(2 * running, 256)}
    options = {"use_async_batching": False, "use_cuda_graph": False, "allow_block_sharing": False}
    config = ContinuousBatchingConfig(max_requests_per_batch=running, **sizes, **options)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)


def make_prompt(number: int) -> list[int]:
    """Returns token ids, different for each number."""
    return [100 + (number * 7 + i * 13) % 1800 for i in range(PROMPT)]
