"""A request of a hand-written server, and its stages."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StageWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.manual._scope import ENGINE, TracedScope, log_unrecorded, resolve_device
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, request_span, start

DEFAULT_OPERATION = "inference"
_DEVICE_TIME = "a stage's time on the device"


class stage(TracedScope):  # noqa: N801 - used like a function
    """A named interval of the current request: `with`, `async with`, or a decorator of any kind of function.

    The name is part of the code, not data: it becomes a span name and a metric label. Without a current request it does
    nothing. A stage that raises is recorded all the same. Make a new one for each `with`.

    `gpu`: what this thread launches in it on its current stream is timed on the device as well, if the device is done with it
    before the request ends. True is the thread's current device; a model that is on another names that: `gpu=model.device`.
    Of all devices but the one that a thread uses first, the host's time alone is known.
    """

    def __init__(self, name: str, *, gpu: object = False) -> None:
        self.name, self._gpu = str(name), gpu
        self.new_scope = functools.partial(stage, name, gpu=gpu)
        self._request: request_span.RequestSpan | None = None
        self._started_at = 0
        self._timing_handle: Any = None

    def __enter__(self) -> stage:
        self._request = start.current_request()
        self._started_at = _clock.now()
        if self._gpu and self._request is not None:
            try:
                self._timing_handle = timing.begin(always=True, is_step=False, on=resolve_device(self._gpu))
            except Exception as exc:
                log_unrecorded(_DEVICE_TIME, exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._request is None:
            return
        if self._timing_handle is not None:
            try:
                timing.end(self._timing_handle, StageWork(self.name, self._request.handle))
            except Exception as exc:
                log_unrecorded(_DEVICE_TIME, exc)
        self._request.record_stage(self.name, self._started_at)


class request(TracedScope):  # noqa: N801 - used like a function
    """A request: `with`, `async with`, or a decorator. Under a server that is instrumented, the one that is there.

    `operation` and `model` are the served ones, never what a caller wrote: metrics name a model that `submitted` was called for,
    every other is `_OTHER`. `headers`: of the caller, for its context, and for who asks, where the settings want that known.
    Make a new one for each `with`.
    """

    attaches = True

    def __init__(
        self, operation: str = DEFAULT_OPERATION, *, model: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._operation, self._model, self._headers = str(operation), str(model), headers
        self.new_scope = functools.partial(request, operation, model=model, headers=headers)
        self._live: request_span.RequestSpan | None = None
        self._packed = bytes(4)
        self._owns_request = False
        self._token: Any = None

    def __enter__(self) -> request:
        try:
            self._live = start.current_request()
            self._owns_request = self._live is None
            live = self._live or self._open_request()
            if live is not None:
                self._live, self._packed = live, live.packed
                self._set_name(live)
        except Exception as exc:
            log_unrecorded("a request", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, where: TracebackType | None) -> None:
        if self._token is not None:
            start.detach(self._token)
        if self._live is not None and self._owns_request:
            self._live.close(*_error_to_outcome(error))

    def _open_request(self) -> request_span.RequestSpan | None:
        live = start.open_request(
            f"{self._operation} {self._model}".strip(),
            owner=ENGINE,
            headers=_add_lowercase_names(self._headers),
            server=self._headers is not None,
            operation=self._operation,
            provider=ENGINE,
            model=self._model,
        )
        if live is not None:
            self._token = live.attach()
            if self._headers is not None:
                caller.record_caller(live, _encode_headers(self._headers))
        return live

    def _set_name(self, live: request_span.RequestSpan) -> None:
        """What was said here goes before what engines say; where nothing was, they may."""
        if not self._model and self._operation == DEFAULT_OPERATION:
            return
        if not self._owns_request:
            live.set_operation(self._operation, ENGINE, self._model)
        live.is_named, live.operation = True, self._operation

    def submitted(self, *, input_tokens: int = 0, max_tokens: int = 0) -> None:
        """Handed over to the loop: from here to its first step it is in the queue."""
        if self._live is not None:
            self._live.record_submitted(ENGINE, 1, input_tokens, max_tokens)

    def received(self) -> None:
        """The loop saw it: until here the queue was a hidden one."""
        if self._live is not None:
            self._live.record_event(events.RequestReceived(_clock.now()))

    def token_reached(self) -> None:
        """The first token is with the code that talks to the reader: a time to first token nearer to them than its step's
        end. Call it for each token, or for the first; only the first counts."""
        if self._live is not None:
            self._live.record_token_reached()

    def preempted(self) -> None:
        """Taken out of the batch; its KV is gone."""
        if self._live is not None:
            self._live.record_event(events.RequestPreempted(_clock.now(), "recompute"))

    def finished(self, reason: str = "stop", output_tokens: int = 0) -> None:
        """The loop is done with it. `reason`: `stop`, `length`, or why it gave up: `abort` (it was told to stop, which is no
        error), `error`. `output_tokens` 0 = count those that its steps delivered."""
        if self._live is not None:
            self._live.record_event(
                events.EngineFinished(_clock.now(), str(reason), events.clamp_count(output_tokens))
            )

    def set_attribute(self, key: str, value: events.Value) -> None:
        """An attribute on the request span."""
        if self._live is not None:
            self._live.set_attribute(key, value)


def _add_lowercase_names(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """As propagators look them up: in lower case, or as they are."""
    if headers is None:
        return None
    return {**{str(name).lower(): value for name, value in headers.items()}, **headers}


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (str(name).encode("utf-8", "replace"), str(value).encode("utf-8", "replace"))
        for name, value in headers.items()
    ]


def _error_to_outcome(error: BaseException | None) -> tuple[int, str]:
    if error is None:
        return events.OK, ""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return events.ABORTED, "cancelled"
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return events.ABORTED, "timeout"
    return events.ERROR, type(error).__qualname__
