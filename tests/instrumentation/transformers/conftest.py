"""Tiny models, and a recording of their `generate` calls and batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.instrumentation.transformers.recorded import Recorded


@pytest.fixture(scope="session")
def loaded(tiny_llama: Path) -> Any:
    """Returns the model; its weights are read once."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        tiny_llama, attn_implementation="sdpa", dtype=torch.float32
    ).eval()


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    """Returns the tiny Llama with greedy decoding; the test may change its generation settings."""
    import copy

    config = loaded.generation_config
    loaded.generation_config = copy.deepcopy(config)
    loaded.generation_config.do_sample = False
    yield loaded
    loaded.generation_config = config


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Records events; checks at the end of the test that no hook raised."""
    recorded = Recorded()
    yield recorded
    recorded.stop()
    assert recorded.raised == []
