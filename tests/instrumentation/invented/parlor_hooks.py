"""Records the calls of a Parlor server as requests, the waits in its deque, and its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange, can_record, encode_headers
from otel_infer.instrumentation.manual.batches import batch, item
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.request_span import RequestSpan

PARLOR = "tests.instrumentation.invented.parlor"
Function = Callable[..., Any]
instrumentor = Instrumentor("parlor", "parlor", (PARLOR,))


class ParlorExchange(ServerExchange):
    """One call of a client, and its answer."""

    __slots__ = ("headers", "method")
    owner = "parlor"

    def __init__(self, server: Any, call: Any, hook: Hook) -> None:
        is_known = isinstance(call.method, str) and call.method in server.batchers
        self.method = call.method if is_known else "_OTHER"  # clients can invent any number of names
        self.headers = call.headers if isinstance(call.headers, dict) else {}
        super().__init__(hook, is_deferred=False)

    def name_span(self) -> str:
        return f"parlor {self.method}"

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers((name, value) for name, value in self.headers.items() if isinstance(value, str))

    def find_path(self) -> str:
        return self.method

    def close_request(self, request: RequestSpan, exc: BaseException | None) -> None:
        request.close(*classify_exception(exc))


@instrumentor.patch_hot_path(f"{PARLOR}:Server.serve_call", reads=("call",))
def patch_serve_call(original: Function, hook: Hook) -> Function:
    def serve_call(self: Any, call: Any) -> Any:
        try:
            exchange = ParlorExchange(self, call, hook) if can_record(hook) else None
        except Exception as exc:  # one odd call, and the server must not notice
            hook.count_failure(exc)
            exchange = None
        if exchange is None:
            return original(self, call)
        with exchange:
            answer = original(self, call)
        exchange.end()
        return answer

    return serve_call


@instrumentor.patch_hot_path(f"{PARLOR}:Batcher.put", reads=("call",), part="batches")
def patch_put(original: Function, hook: Hook) -> Function:
    def put(self: Any, call: Any) -> None:
        if hook.alive:
            call.otel_infer_item = item()
        original(self, call)

    return put


@instrumentor.patch_hot_path(f"{PARLOR}:Batcher.run_batch", reads=("calls",), part="batches")
def patch_run_batch(original: Function, hook: Hook) -> Function:
    def run_batch(self: Any, calls: list[Any]) -> None:
        with batch(call.otel_infer_item for call in calls if hasattr(call, "otel_infer_item")):
            original(self, calls)

    return run_batch
