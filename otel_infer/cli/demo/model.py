"""Makes a tiny language model locally, so that the demo and the tests need no download.

Its weights are random and its text is nonsense. Its architecture, tokenizer and chat template are like those
of a real Llama. It never emits an end token, and every token is readable text. A client that requests n
tokens therefore receives n pieces of text.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 0
VOCABULARY = 2048
POSITIONS = 4096
CORPUS_BYTES = 1_500_000
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>", "<mask>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROSE = "The quick brown fox jumps over the lazy dog. Hello world, how are you today? I am well, thank you. "


def make_demo_model(folder: Path, *, layers: int = 4, hidden: int = 256) -> Path:
    """Writes a random Llama of `layers` × `hidden` with its tokenizer into `folder`; the seed is fixed.

    Returns the folder, which `from_pretrained` and `transformers serve` accept as a model name. `hidden` must
    be a multiple of 64. Raises ImportError if torch, transformers or tokenizers is missing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config).eval()
    _suppress_tokens(model, tokenizer)
    save_model(folder, model, tokenizer)
    return folder


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Writes model and tokenizer into `folder`.

    Hides transformers' progress bar, which would overwrite ours.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def make_tokenizer() -> Any:
    """Trains a byte-level BPE tokenizer with a chat template, in about a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_read_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def _read_corpus() -> Iterator[str]:
    """Yields the text of Python's standard library.

    Every machine has it, with enough words for 2,000 merges.
    """
    yield PROSE * 50
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        yield text
        left -= len(text)
        if left <= 0:
            return


def _suppress_tokens(model: Any, tokenizer: Any) -> None:
    """Suppresses special tokens and tokens that are not printable text, e.g. half a character.

    The weights of the output layer are multiplied by 10, which spreads the logits. The row of a suppressed
    token is set to 0, which puts it about three standard deviations below the most likely tokens.
    """
    import torch

    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    unprintable = [token for token, text in enumerate(texts) if not text.isprintable() or "\ufffd" in text]
    suppressed = unprintable + list(range(len(SPECIAL_TOKENS)))
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
        model.lm_head.weight[suppressed] = 0
