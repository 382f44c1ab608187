"""The classifier of the programs: as deep as DistilBERT and MiniLM-L6, and narrow, so that the host's work prevails.

MODEL names the folder of its tokenizer.
"""

from __future__ import annotations

import os

import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
)
classifier = BertForSequenceClassification(config).eval()


def classify_texts(texts: list[str]) -> list[int]:
    """Returns the classes of several texts."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        labels: list[int] = classifier(**inputs).logits.argmax(-1).tolist()
    return labels
