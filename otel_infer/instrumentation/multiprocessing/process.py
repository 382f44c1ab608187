"""Prepares the processes that a server starts: what they record goes to the reader of this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor

prepare_child: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
"""Exports to a process that is spawned meanwhile what it needs. Set by `_bootstrap`. A forked one inherits it."""


@instrumentor.patch_hot_path("multiprocessing.process:BaseProcess.start", part="processes")
def _patch_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start(self: Any) -> Any:
        with ExitStack() as prepared:
            if hook.alive and not _is_forked(self):
                try:
                    prepared.enter_context(prepare_child())
                except Exception as exc:
                    hook.mark_failed(exc)
            return original(self)

    return start


def _is_forked(process: Any) -> bool:
    """Returns whether this process will be forked, by its own start method or else by the default one."""
    method = getattr(process, "_start_method", None)
    multiprocessing = sys.modules.get("multiprocessing")
    if method is None and multiprocessing is not None:
        method = multiprocessing.get_start_method(allow_none=True)
    return bool(method == "fork")
