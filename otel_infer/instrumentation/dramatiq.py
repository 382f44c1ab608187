"""Records the messages of Dramatiq's workers.

Broker.emit_before("enqueue") ─ headers of the request are added ─▶ broker ─▶ process_message ─ the actor, as a request
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.job_exchange import NS_PER_MS, Job, add_headers, begin_job, read_put_at

OPTION = "otel_infer"
"""Option of a message that holds the headers."""
ERROR_ATTRIBUTE = "otel_infer_error"
"""Attribute of a message whose actor has raised."""

instrumentor = Instrumentor("dramatiq", "dramatiq", ("dramatiq",))


@instrumentor.patch_hot_path("dramatiq.broker:Broker.emit_before", part="client")
def _patch_emit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def emit_before(self: Any, signal: str, *args: Any, **kwargs: Any) -> Any:
        if hook.alive and signal == "enqueue" and args:
            try:
                headers = dict(args[0].options.get(OPTION) or {})  # of a message that is put again
                add_headers(headers)
                args[0].options[OPTION] = headers
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, signal, *args, **kwargs)

    return emit_before


@instrumentor.patch_hot_path("dramatiq.worker:WorkerThread.process_message", part="worker")
def _patch_process(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def process_message(self: Any, message: Any) -> Any:
        exchange = begin_job(hook, _describe_message, message)
        if exchange is None:
            return original(self, message)
        with exchange:
            result = original(self, message)
        exchange.end(getattr(message, ERROR_ATTRIBUTE, None))
        return result

    return process_message


@instrumentor.patch_hot_path("dramatiq.broker:MessageProxy.stuff_exception", part="worker")
def _patch_stuff(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def stuff_exception(self: Any, exception: BaseException) -> Any:
        if hook.alive:
            try:
                setattr(
                    self, ERROR_ATTRIBUTE, exception
                )  # Dramatiq removes its own before `process_message` returns
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, exception)

    return stuff_exception


def _describe_message(message: Any) -> Job:
    options = message.options
    headers = options.get(OPTION)
    headers = headers if isinstance(headers, Mapping) else {}
    put_at = max(read_put_at(headers), int(options.get("eta") or 0) * NS_PER_MS)
    return Job(
        "dramatiq", str(message.actor_name), str(message.queue_name), str(message.message_id), headers, put_at
    )
