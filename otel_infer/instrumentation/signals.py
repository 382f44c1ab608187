"""Gives way to the program where it takes the signal on which the stacks of this process are written.

signal.signal(NUMBER, …), faulthandler.register(NUMBER, …) ─▶ ours moves to another signal ─▶ the original
"""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.stack_signal import stack_signal

instrumentor = Instrumentor("signals", "python", (signal.__name__,))


def _give_way(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def take_signal(*args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            number = args[0] if args else kwargs.get("signalnum", kwargs.get("signum"))
            if isinstance(number, int):
                try:
                    stack_signal.yield_signal(number)
                except Exception as exc:  # the program gets its signal in any case
                    hook.mark_failed(exc)
        return original(*args, **kwargs)

    return take_signal


for _target, _part in (
    (f"{signal.__name__}:signal", "signal"),
    (f"{faulthandler.__name__}:register", "faulthandler"),
):
    instrumentor.patch_hot_path(_target, optional=True, part=_part)(_give_way)
