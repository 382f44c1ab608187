"""Adds a delay to one of SGLang's own functions, in the process that has it; `sitecustomize` imports it.

DELAY names the stage, and DELAY_S is its length. With DELAY_FILE only the call that finds this file is delayed, and removes it;
with DELAY_SHARE this share of the calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import wrapt

_RUNNER = "sglang.srt.model_executor.model_runner"
PLACES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "tokenize": ("sglang.srt.managers.tokenizer_manager", "TokenizerManager._tokenize_texts", lambda *_: True),
    "queue": ("sglang.srt.managers.scheduler", "Scheduler.get_new_batch_prefill", lambda it, *_: it.waiting_queue),
    "prefill": (_RUNNER, "ModelRunner.forward", lambda it, batch, *_: is_pass(batch, 1)),
    "decode": (_RUNNER, "ModelRunner.forward", lambda it, batch, *_: is_pass(batch, 3)),
    "batch": (_RUNNER, "ModelRunner.forward", lambda it, batch, *_: batch.forward_mode.is_decode()),
    "postprocess": (
        "sglang.srt.entrypoints.openai.serving_completions", "OpenAIServingCompletion._build_completion_response",
        lambda *_: True,
    ),
}  # fmt: skip
"""By stage: module and function, and whether a call of it is delayed. With overlap scheduling the second pass over the model begins
before the first token is sent, which it would delay."""
_passes = [0]


def is_pass(batch: Any, number: int) -> bool:
    """Returns whether this pass over the model is the `number`th since the last prompt."""
    _passes[0] = 1 if batch.forward_mode.is_extend() else _passes[0] + 1
    return _passes[0] == number


def add_delay() -> None:
    """Adds the delay once the module of its function is imported."""
    module, path, is_delayed = PLACES[os.environ["DELAY"]]
    owner_name, name = path.split(".")

    def patch(imported: Any) -> None:
        owner = getattr(imported, owner_name)
        original = getattr(owner, name)

        @functools.wraps(original)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if is_delayed(*args) and is_due():
                time.sleep(float(os.environ["DELAY_S"]))
            return original(*args, **kwargs)

        setattr(owner, name, delayed)

    wrapt.when_imported(module)(patch)


def is_due() -> bool:
    """Returns whether a delay is due, by its file or by chance."""
    path = os.environ.get("DELAY_FILE")
    if not path:
        return random.random() < float(os.environ.get("DELAY_SHARE", "1"))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False
