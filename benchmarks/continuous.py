"""transformers' continuous batching in this process, with the demo's model, on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from otel_infer.cli.demo.model import make_demo_model

LAYERS, HIDDEN = 1, 64
PROMPT = 16
BLOCK = 32


def tiny_model() -> Any:
    """The demo's Llama, one layer of it: the less a step costs, the more do hooks stand out."""
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


def manager(model: Any, running: int, tokens: int = 64) -> Any:
    """A manager with room for so many sequences of so many tokens at once; not started."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
    blocks = running * (-(-(PROMPT + tokens) // BLOCK) + 1)
    sizes = {"block_size": BLOCK, "num_blocks": blocks, "max_batch_tokens": max(2 * running, 256)}
    options = {"use_async_batching": False, "use_cuda_graph": False, "allow_block_sharing": False}
    config = ContinuousBatchingConfig(max_requests_per_batch=running, **sizes, **options)
    return model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)


def prompt(number: int) -> list[int]:
    """Token ids, different for each number."""
    return [100 + (number * 7 + i * 13) % 1800 for i in range(PROMPT)]
