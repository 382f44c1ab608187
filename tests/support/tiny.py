"""Tiny random models, created locally: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from otel_infer.cli.demo.model import make_demo_model, make_tokenizer, save_model


def make_model(folder: Path) -> Path:
    """Creates a Llama of two layers with a BPE tokenizer and a chat template; returns its folder."""
    return make_demo_model(folder, layers=2, hidden=64)


def make_encoder(folder: Path) -> Path:
    """Creates a BERT of two layers that embeds text; returns its folder."""
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
    save_model(folder, model, tokenizer)
    return folder


def make_adapter(folder: Path, model: Path, rank: int = 8) -> Path:
    """Creates a LoRA adapter for a model of `make_model`; returns its folder."""
    import json

    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    outputs = {"q_proj": shape["num_attention_heads"] * head, "v_proj": shape["num_key_value_heads"] * head}
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, shape["hidden_size"]) * 0.01
            weights[f"{at}.lora_B.weight"] = torch.randn(size, rank) * 0.01
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none"}
    about |= {"lora_dropout": 0.0, "target_modules": list(outputs), "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
