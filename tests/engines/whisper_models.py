"""A tiny Whisper for CTranslate2, made locally: random weights, and a tokenizer with Whisper's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END, BEGIN, ENGLISH = "<|endoftext|>", "<|startoftranscript|>", "<|en|>"
_TASKS = ("<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>")
NO_TIMES = "<|notimestamps|>"
TIMES = [f"<|{number * 0.02:.2f}|>" for number in range(1501)]
SAMPLES_A_SECOND = 16_000


def make_whisper(folder: Path) -> Path:
    """Writes the model; returns its folder."""
    from ctranslate2.converters import TransformersConverter

    source = folder / "source"
    tokens = _save_tokenizer(source)
    _save_model(source, tokens)
    target = folder / "tiny-whisper"
    TransformersConverter(str(source), copy_files=["tokenizer.json"]).convert(str(target))
    return target


def make_audio(seconds: float) -> Any:
    """Returns noise, at 16 kHz."""
    import numpy as np

    return np.random.default_rng(0).normal(size=int(SAMPLES_A_SECOND * seconds)).astype("float32") * 0.1


def _save_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 50, trainer)
    tokenizer.add_special_tokens([END, BEGIN, ENGLISH, *_TASKS, NO_TIMES, *TIMES])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, unk_token=END
    ).save_pretrained(folder)
    return tokenizer


def _save_model(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    number = tokenizer.token_to_id
    shared = {
        "decoder_start_token_id": number(BEGIN), "eos_token_id": number(END), "suppress_tokens": [],
        "begin_suppress_tokens": [number(END)],
    }  # fmt: skip
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, bos_token_id=number(END), pad_token_id=number(END),
        **shared,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config)
    languages = {token: number(token) for token in (ENGLISH, "<|de|>")}
    model.generation_config = GenerationConfig(
        lang_to_id=languages, alignment_heads=[[0, 0]], is_multilingual=True, no_timestamps_token_id=number(NO_TIMES), **shared
    )  # fmt: skip
    model.save_pretrained(folder)
