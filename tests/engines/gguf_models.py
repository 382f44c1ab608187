"""A tiny model in the format of llama.cpp, made locally: a Llama of two layers with random weights and our tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np


class Shape(NamedTuple):
    """The size of a model; `width` and `inner` of its layers, `context` in tokens."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    inner: int = 128
    context: int = 512


TINY = Shape()


def make_gguf(path: Path, tokenizer_folder: Path, shape: Shape = TINY) -> Path:
    """Writes the model with the tokenizer of a folder; returns its path."""
    tokenizer = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, shape)
    count = _add_tokenizer(writer, tokenizer)
    _add_weights(writer, count, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: Any, shape: Shape) -> None:
    writer.add_name("tiny")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
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


def _add_weights(writer: Any, vocabulary: int, shape: Shape) -> None:
    random, width, inner = np.random.default_rng(0), shape.width, shape.inner
    keys = shape.kv_heads * width // shape.heads

    def add(name: str, *sizes: int) -> None:
        is_norm = len(sizes) == 1
        weights = np.ones(sizes) if is_norm else random.standard_normal(sizes) * 0.05
        writer.add_tensor(name, weights.astype("float32" if is_norm else "float16"))

    add("token_embd.weight", vocabulary, width)
    add("output_norm.weight", width)
    add("output.weight", vocabulary, width)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        for name, sizes in (
            ("attn_norm", (width,)), ("ffn_norm", (width,)), ("attn_q", (width, width)), ("attn_k", (keys, width)),
            ("attn_v", (keys, width)), ("attn_output", (width, width)), ("ffn_gate", (inner, width)),
            ("ffn_up", (inner, width)), ("ffn_down", (width, inner)),
        ):  # fmt: skip
            add(f"{block}{name}.weight", *sizes)
