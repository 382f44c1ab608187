"""Records the jobs of arq's workers.

enqueue_job ─ headers of the request are pickled with the job ─▶ Redis ─▶ Worker.run_job ─ the function, as a request
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.job_exchange import NS_PER_MS, Job, begin_job, list_headers

DATA_KEY = "otel_infer"
"""Key of the headers beside the function and its arguments. Workers without these hooks do not read it."""
FOLLOWED_ATTRIBUTE = "otel_infer_followed"

instrumentor = Instrumentor("arq", "arq", ("arq",))


class TakenJob(NamedTuple):
    """The job of a task of the worker. `due_at`: unix ms."""

    due_at: int
    headers: Mapping[str, str]


_taken: ContextVar[TakenJob | None] = ContextVar("otel_infer-arq-job", default=None)


@instrumentor.patch_hot_path("arq.connections:serialize_job", reads=("serializer",), part="client")
def _patch_serialize(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def serialize_job(*args: Any, serializer: Any = None, **kwargs: Any) -> Any:
        if not hook.alive:
            return original(*args, serializer=serializer, **kwargs)
        dump = serializer or pickle.dumps

        def dump_with_headers(data: Any) -> bytes:
            try:
                return bytes(dump({**data, DATA_KEY: list_headers()}))
            except Exception:  # the application's serializer may allow arq's own keys only
                return bytes(dump(data))

        return original(*args, serializer=dump_with_headers, **kwargs)

    return serialize_job


@instrumentor.patch_hot_path("arq.worker:deserialize_job_raw", reads=("deserializer",), part="worker")
def _patch_deserialize(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def deserialize_job_raw(data: bytes, *, deserializer: Any = None) -> Any:
        if not hook.alive:
            return original(data, deserializer=deserializer)
        load = deserializer or pickle.loads

        def load_and_note(raw: bytes) -> Any:
            fields = load(raw)
            if isinstance(fields, Mapping):
                headers = fields.get(DATA_KEY)
                _taken.set(TakenJob(fields.get("et") or 0, headers if isinstance(headers, Mapping) else {}))
            return fields

        return original(data, deserializer=load_and_note)

    return deserialize_job_raw


@instrumentor.patch_hot_path("arq.worker:func", part="worker")
def _patch_func(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def func(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)
        if hook.alive and not hasattr(function.coroutine, FOLLOWED_ATTRIBUTE):
            try:
                coroutine = _follow_function(function.name, function.coroutine, hook)
                return dataclasses.replace(function, coroutine=coroutine)
            except Exception as exc:
                hook.mark_failed(exc)
        return function

    return func


def _follow_function(
    name: str, coroutine: Callable[..., Awaitable[Any]], hook: Hook
) -> Callable[..., Awaitable[Any]]:
    """Returns a function of a worker that runs as a request. `ctx`: arq's, of the job."""

    async def follow_function(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = begin_job(hook, _describe_job, name, ctx)
        if exchange is None:
            return await coroutine(ctx, *args, **kwargs)
        with exchange:
            result = await coroutine(ctx, *args, **kwargs)
        exchange.end()
        return result

    setattr(follow_function, FOLLOWED_ATTRIBUTE, True)
    return follow_function


def _describe_job(name: str, ctx: Mapping[str, Any]) -> Job:
    taken = _taken.get()
    due_at = max(ctx.get("score") or 0, taken.due_at if taken is not None else 0)
    headers = taken.headers if taken is not None else {}
    return Job("arq", name, "", str(ctx.get("job_id") or ""), headers, int(due_at) * NS_PER_MS)
