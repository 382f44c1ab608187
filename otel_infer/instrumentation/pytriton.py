"""Records the requests of PyTriton, where NVIDIA's Triton receives requests and a Python function of the user answers them.

    a client ─▶ tritonserver: receives, queues, builds batches ─▶ its Python stub ─ ZMQ ─▶ the user's process

    RequestsResponsesConnector.handle_requests, for each batch ─ preprocess ─▶ InferenceHandler.run_inference
      ─ `queue wait` ─▶ _handle_requests ─ `infer function` ─▶ send, for each response

tritonserver and its stub are other programs. A request is recorded since its batch reached the user's process. Triton
forwards the client's trace headers as parameters of the request, which `_patch_config` makes the default.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.config import tenancy
from otel_infer.instrumentation.batches import ALL_IN_QUEUE, WaitingItem, begin_batch
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.http_server.parent_context import extract_context
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange, can_record, encode_headers
from otel_infer.instrumentation.queue_states import leave_alone
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, context, start
from otel_infer.tracing.batch_request import combine_requests
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.request_span import RequestSpan

PROXY = "pytriton.proxy.inference"
SCOPE_KEY = "otel_infer"
"""Key of the batch in the `scope` that PyTriton passes through all calls for it."""
STAGE = "infer function"
OPERATION = "inference"
PATTERN_OPTIONS = "http-header-forward-pattern", "grpc-header-forward-pattern"

instrumentor = Instrumentor(events.PYTRITON, "nvidia-pytriton", ("pytriton",))

_forwarding: dict[str, frozenset[str]] = {}
"""Workspace of a Triton to which headers are forwarded for us ─▶ names of these headers, in lower case."""


class ModelExchange(ServerExchange):
    """One request to a model of Triton. `payload`: PyTriton's request."""

    __slots__ = ("model", "payload")
    owner = events.PYTRITON

    def __init__(self, model: str, payload: Any, hook: Hook, arrived_at: int) -> None:
        self.model, self.payload = model, payload
        super().__init__(hook, is_deferred=False, arrived_at=arrived_at)

    def name_span(self) -> str:
        return f"ModelInfer {self.model}"

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers((self.payload.parameters or {}).items())

    def find_path(self) -> str:
        return f"/v2/models/{self.model}/infer"

    def open_request(self) -> RequestSpan | None:
        """Opens the request, named after the model as Triton serves it."""
        request = self._open_below_own_span() or super().open_request()
        if request is not None:
            request.set_operation(OPERATION, self.owner, self.model)
            request.is_named = True
        return request

    def _open_below_own_span(self) -> RequestSpan | None:
        """Opens the request below the span of PyTriton's own telemetry, unless that is in another trace than the client's."""
        span = getattr(self.payload, "span", None)
        if span is None:
            return None
        headers = self.list_headers()
        client = context.span_context(extract_context(headers, Context()))
        if client.is_valid and client.trace_id != span.get_span_context().trace_id:
            return None
        around = trace.set_span_in_context(span, Context())
        self.request = start.open_request(
            self.name_span(), owner=self.owner, around=around, server=True, arrived_at=self.arrived_at
        )
        if self.request is not None and caller.caller_settings is not tenancy.NO_CALLER_SETTINGS:
            caller.record_caller(self.request, headers, self.find_path())
        return self.request

    def close_request(self, request: RequestSpan, exc: BaseException | None) -> None:
        request.close(*classify_exception(exc))


class InferenceBatch:
    """The requests for which the user's function is called once. `*_at`: monotonic ns. `error`: the client gets it."""

    __slots__ = ("arrived_at", "called_at", "error", "exchanges", "put_at")

    def __init__(self) -> None:
        self.arrived_at, self.put_at, self.called_at = _clock.now(), 0, 0
        self.exchanges: list[ModelExchange] = []
        self.error: BaseException | None = None

    def open_requests(self, model: str, payloads: Iterable[Any], hook: Hook) -> None:
        for payload in payloads:
            self.exchanges.append(ModelExchange(model, payload, hook, self.arrived_at))
        self.put_at = _clock.now()

    def list_requests(self) -> list[RequestSpan]:
        requests = [exchange.request for exchange in self.exchanges]
        return [request for request in requests if request is not None and not request.ended]

    def begin_call(self) -> Any:
        """Ends the wait of the requests, and makes them current. Returns the token for `detach`, or None."""
        items = [WaitingItem(request, self.put_at) for request in self.list_requests()]
        self.called_at = _clock.now()
        return begin_batch(items, ALL_IN_QUEUE)

    def end_call(self, error: BaseException | None) -> None:
        """Records the call of the user's function, until its last response."""
        self.error = self.error or error
        requests = self.list_requests()
        if requests:
            items = len(self.exchanges) if self.error is None else events.RAISED
            combine_requests(requests).record_stage(STAGE, self.called_at, items)

    def note_sent(self, payload: Any) -> None:
        """Notes what is sent to Triton. PyTriton sends an exception while it handles that."""
        self.error = self.error or sys.exc_info()[1]
        if self.error is None:
            at = _clock.now()
            for exchange in self.exchanges:
                exchange.record_chunk(payload, at)

    def end(self, exc: BaseException | None) -> None:
        for exchange in self.exchanges:
            exchange.end(self.error or exc)


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def list_read_headers() -> frozenset[str]:
    """Returns the headers that are read of a request, in lower case."""
    settings, names = caller.caller_settings, set(propagate.get_global_textmap().fields)
    if settings.tenant_source is not None and settings.tenant_source.kind == tenancy.HEADER:
        names.add(settings.tenant_source.name)
    if settings.traffic_rules is not None:
        names.add(settings.traffic_rules.header)
    return frozenset(name.lower() for name in names if name)


@instrumentor.patch_hot_path("pytriton.triton:Triton._prepare_triton_config", reads=("workspace",))
def _patch_config(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def prepare_triton_config(self: Any, workspace: Any) -> Any:
        result = original(self, workspace)
        if hook.alive:
            try:
                _forward_headers(self._triton_server_config, workspace)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return prepare_triton_config


def _forward_headers(config: Any, workspace: Any) -> None:
    """Lets Triton forward the headers that are read, unless the user has set what it forwards."""
    names = list_read_headers()
    if not names or any(option in config for option in PATTERN_OPTIONS):
        return
    for option in PATTERN_OPTIONS:
        config[option] = f"^(?i:{'|'.join(map(re.escape, sorted(names)))})$"
    _forwarding[workspace.path.as_posix()] = names


def _hide_headers(config: Any, payloads: Iterable[Any]) -> None:
    """Removes the parameters that are forwarded for us, because the user's function may use all parameters of a request."""
    names = _forwarding.get(config.backend_parameters["workspace-path"])
    if not names:
        return
    for payload in payloads:
        for name in [name for name in payload.parameters or () if name.lower() in names]:
            del payload.parameters[name]


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(
    f"{PROXY}:RequestsResponsesConnector.handle_requests", reads=("scope", "send"), part="requests"
)
def _patch_connector(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def handle_requests(self: Any, scope: Any, requests_payload: Any, send: Any) -> Any:
        batch = _note_batch(scope, hook) if can_record(hook) else None
        if batch is None:
            return await original(self, scope, requests_payload, send)
        try:
            result = await original(self, scope, requests_payload, _follow_send(send, batch, hook))
        except BaseException as exc:
            batch.end(exc)
            raise
        batch.end(None)
        return result

    return handle_requests


def _note_batch(scope: Any, hook: Hook) -> InferenceBatch | None:
    try:
        batch = scope[SCOPE_KEY] = InferenceBatch()
        return batch
    except Exception as exc:
        hook.count_failure(exc)
        return None


def _follow_send(send: Callable[..., Any], batch: InferenceBatch, hook: Hook) -> Callable[..., Any]:
    async def follow_send(scope: Any, flags: Any, payload: Any) -> Any:
        try:
            batch.note_sent(payload)
        except Exception as exc:
            hook.count_failure(exc)
        return await send(scope, flags, payload)

    return follow_send


@instrumentor.patch_hot_path(
    f"{PROXY}:RequestsResponsesConnector.send", reads=("scope", "responses"), part="requests"
)
def _patch_send(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def send(self: Any, scope: Any, flags: Any, responses: Any) -> Any:
        """Called by the handler's thread, while the requests are current: for responses, and with None or an exception at the end."""
        if hook.alive and SCOPE_KEY in scope:
            try:
                queue = self._responses_queues.get(scope["requests_id"])
                if queue is not None:
                    leave_alone(queue)
                if responses is None or isinstance(responses, BaseException):
                    scope[SCOPE_KEY].end_call(responses)
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, scope, flags, responses)

    return send


@instrumentor.patch_hot_path(
    f"{PROXY}:InferenceHandler.run_inference", reads=("scope", "requests"), part="requests"
)
def _patch_run(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_inference(self: Any, scope: Any, requests: Any) -> Any:
        if hook.alive:
            try:
                _open_requests(self._validator._model_config, scope.get(SCOPE_KEY), requests, hook)
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, scope, requests)

    return run_inference


def _open_requests(config: Any, batch: InferenceBatch | None, payloads: Any, hook: Hook) -> None:
    try:
        if batch is not None:
            batch.open_requests(config.model_name, payloads, hook)
    finally:
        _hide_headers(config, payloads)


@instrumentor.patch_hot_path(
    f"{PROXY}:InferenceHandler._handle_requests", reads=("scope", "requests"), part="requests"
)
def _patch_handler(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def handle_requests(self: Any, scope: Any, requests: Any) -> Any:
        batch: InferenceBatch | None = scope.get(SCOPE_KEY) if hook.alive else None
        if batch is None:
            return await original(self, scope, requests)
        token = _begin_call(batch, hook)
        try:
            return await original(self, scope, requests)
        finally:
            if token is not None:
                context.detach(token)

    return handle_requests


def _begin_call(batch: InferenceBatch, hook: Hook) -> Any:
    try:
        return batch.begin_call()
    except Exception as exc:
        hook.count_failure(exc)
        return None
