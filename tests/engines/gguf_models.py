"""A tiny model in the format of llama.cpp, made locally: a Llama of two layers with random weights and our tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 2, 4, 2, 64, 128
CONTEXT = 512


def make_gguf(path: Path, tokenizer_folder: Path) -> Path:
    """Writes the model with the tokenizer of a folder of `tests.support.tiny`; returns its path."""
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer)
    count = _add_tokenizer(writer, tokenizer)
    _add_weights(writer, count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: Any) -> None:
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(1)  # half precision


def _add_tokenizer(writer: Any, tokenizer: Any) -> int:
    """Adds the tokenizer; returns the size of its vocabulary."""
    known = dict(tokenizer["model"]["vocab"])
    known |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = [word for word, _ in sorted(known.items(), key=lambda pair: pair[1])]
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if number in special else 1 for number in range(len(words))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    return len(words)


def _add_weights(writer: Any, vocabulary: int) -> None:
    random, keys = np.random.default_rng(0), KV_HEADS * WIDTH // HEADS

    def add(name: str, *shape: int) -> None:
        is_norm = len(shape) == 1
        weights = np.ones(shape) if is_norm else random.standard_normal(shape) * 0.05
        writer.add_tensor(name, weights.astype("float32" if is_norm else "float16"))

    add("token_embd.weight", vocabulary, WIDTH)
    add("output_norm.weight", WIDTH)
    add("output.weight", vocabulary, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name, shape in (
            ("attn_norm", (WIDTH,)), ("ffn_norm", (WIDTH,)), ("attn_q", (WIDTH, WIDTH)), ("attn_k", (keys, WIDTH)),
            ("attn_v", (keys, WIDTH)), ("attn_output", (WIDTH, WIDTH)), ("ffn_gate", (INNER, WIDTH)),
            ("ffn_up", (INNER, WIDTH)), ("ffn_down", (WIDTH, INNER)),
        ):  # fmt: skip
            add(f"{block}{name}.weight", *shape)
