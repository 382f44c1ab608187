"""The encoder of servers that use transformers without another library."""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoTokenizer


class Encoder:
    """A BERT and its tokenizer. `encode` returns the mean of each text's last hidden states."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    def encode(self, texts: list[str]) -> list[list[float]]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=2048)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            vectors: list[list[float]] = self.model(**inputs).last_hidden_state.mean(dim=1).tolist()
        return vectors
