"""Tiny random models, made here: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from otel_infer.cli.demo_model import make_demo_model, make_tokenizer, save


def make_model(folder: Path) -> Path:
    """A Llama of two layers with a BPE tokenizer and a chat template; returns its folder."""
    return make_demo_model(folder, layers=2, hidden=64)


def make_encoder(folder: Path) -> Path:
    """A BERT of two layers that embeds text and generates nothing; returns its folder."""
    import torch
    from transformers import BertConfig, BertModel

    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertModel(config).eval()
    save(folder, model, tokenizer)
    return folder
