"""Prepares the processes that a server starts: what they record goes to the reader of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor

prepare_child: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
"""Exports to a process that is started meanwhile what it needs. Set by `_bootstrap`."""


@instrumentor.patch_hot_path("multiprocessing.process:BaseProcess.start", part="processes")
def _patch_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start(self: Any) -> Any:
        with ExitStack() as prepared:
            if hook.alive:
                try:
                    prepared.enter_context(prepare_child())
                except Exception as exc:
                    hook.mark_failed(exc)
            return original(self)

    return start
