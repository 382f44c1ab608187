"""Records the wait in a dependency of FastAPI routes: a server's lock or limit, which lets few requests through at a time.

route ─ Depends(get_model) ─ another request holds the lock ─▶ `queue wait` ─ yield ─▶ the route runs
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.ringbuffer import events
from otel_infer.tracing import start


def wrap_queue_wait(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A factory for an async generator without parameters that yields once, when it has what a request waits for."""
    wait = contextlib.asynccontextmanager(original)

    async def wait_and_yield() -> AsyncIterator[Any]:
        request = call_safely(hook, start.current_request) if hook.alive else None
        queued_at = _clock.now()
        if request is not None:
            request.queued_at = queued_at  # recorded if it ends before
        async with wait() as found:
            if request is not None:
                request.queued_at = 0
                call_safely(hook, request.record_stage, events.QUEUE_WAIT, queued_at)
            yield found

    return wait_and_yield


def override_dependency(module: str, name: str) -> WrapperFactory:
    """Returns a factory for a function that makes an application. Its routes hold the dependency; they get the module's own."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def create_app(*args: Any, **kwargs: Any) -> Any:
            app = original(*args, **kwargs)
            current = getattr(sys.modules[module], name)
            app.dependency_overrides.setdefault(inspect.unwrap(current), current)
            return app

        return create_app

    return make_wrapper
