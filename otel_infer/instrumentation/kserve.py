"""Records the hooks of KServe's models as stages of their request: `preprocess`, `predict` or `explain`, `postprocess hook`.

    Model.__call__ ─ preprocess ─ get_latency_ms ─ predict ─ get_latency_ms ─ postprocess ─ get_latency_ms

`get_latency_ms` is called at the end of each. It marks the stages, so no method of a user's model is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.request_span import RequestSpan

MODULE = "kserve.model"
EXPLAIN = "EXPLAIN"
"""Name of the verb of a call that is none of `predict`."""
POSTPROCESS_HOOK = "postprocess hook"
"""The stage `postprocess` contains it: from the model's result to the last byte."""

instrumentor = Instrumentor("kserve", "kserve", ("kserve",))


class ModelCall:
    """A call of a model. `left`: hooks that have not ended, the current one first. `began_at`: of that, monotonic ns."""

    __slots__ = ("began_at", "left", "model", "request")

    def __init__(self, model: Any, verb: Any, request: RequestSpan) -> None:
        self.model, self.request = model, request
        work = "explain" if getattr(verb, "name", "") == EXPLAIN else "predict"
        self.left = ["preprocess", work, "postprocess"]
        self.began_at = _clock.now()

    def end_stage(self, items: int = 0) -> None:
        """Records the current hook, unless it is the one of KServe that returns what it was given."""
        name = self.left.pop(0)
        if name in ("predict", "explain") or getattr(getattr(self.model, name), "__module__", "") != MODULE:
            stage = POSTPROCESS_HOOK if name == "postprocess" else name
            self.request.record_stage(stage, self.began_at, items)
        self.began_at = _clock.now()


_current: ContextVar[ModelCall | None] = ContextVar("otel_infer-kserve-call", default=None)


@instrumentor.patch_hot_path(f"{MODULE}:Model.__call__", reads=("body", "headers", "verb"))
def _patch_call(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def call(self: Any, body: Any, headers: Any = None, *args: Any, **kwargs: Any) -> Any:
        begun = _begin_call(self, args[0] if args else kwargs.get("verb"), hook) if hook.alive else None
        if begun is None:
            return await original(self, body, headers, *args, **kwargs)
        token = _current.set(begun)
        try:
            return await original(self, body, headers, *args, **kwargs)
        except Exception:
            _end_stage(begun, hook, events.RAISED)
            raise
        finally:
            _current.reset(token)

    return call


def _begin_call(model: Any, verb: Any, hook: Hook) -> ModelCall | None:
    try:
        request = start.current_request()
        return None if request is None else ModelCall(model, verb, request)
    except Exception as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path(f"{MODULE}:get_latency_ms", reads=("start", "end"))
def _patch_latency(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def get_latency_ms(*args: Any, **kwargs: Any) -> Any:
        begun = _current.get() if hook.alive else None
        if begun is not None:
            _end_stage(begun, hook)
        return original(*args, **kwargs)

    return get_latency_ms


def _end_stage(begun: ModelCall, hook: Hook, items: int = 0) -> None:
    try:
        if begun.left:
            begun.end_stage(items)
    except Exception as exc:
        hook.count_failure(exc)
