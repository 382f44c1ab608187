"""`request` and `stage` of the manual API."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StageWork
from otel_infer.gpu.timing import timing
from otel_infer.instrumentation.manual._scope import ENGINE, TracedScope, resolve_device
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, request_span, start
from otel_infer.tracing.context import detach
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.user_mistakes import ignore_mistakes, report_mistake, to_name

DEFAULT_OPERATION = "inference"
_DEVICE_TIME = "a stage's time on the device"


class stage(TracedScope):  # noqa: N801 - used like a function
    """A named interval of the current request: `with`, `async with`, or a decorator of any kind of function.

    The name becomes a span name and a metric label, so it must be a constant of the code, not data. Without a
    current request a stage does nothing. A stage that raises is recorded too. Make a new one for each `with`.

    `gpu`: also measures device time of the work that this thread launches in the stage on its current stream.
    The device must complete the work before the request ends. True means the thread's current device.
    For a model on another device pass that device: `gpu=model.device`.
    Only the device that a thread used first is timed; for any other device only host time is recorded.
    """

    def __init__(self, name: str, *, gpu: object = False) -> None:
        self.name, self._gpu = to_name(name, events.OTHER), gpu
        self.new_scope = functools.partial(stage, name, gpu=gpu)
        self._request: request_span.RequestSpan | None = None
        self._started_at = 0
        self._timing_handle: Any = None

    def __enter__(self) -> stage:
        self._request = start.current_request()
        self._started_at = _clock.now()
        if self._request is not None:
            try:
                if self._gpu:
                    on = resolve_device(self._gpu)
                    self._timing_handle = timing.begin(always=True, is_step=False, on=on)
            except Exception as exc:
                report_mistake(_DEVICE_TIME, exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._request is None:
            return
        if self._timing_handle is not None:
            try:
                timing.end(self._timing_handle, StageWork(self.name, self._request.handle))
            except Exception as exc:
                report_mistake(_DEVICE_TIME, exc)
        is_raised = error is not None and not isinstance(error, GeneratorExit)  # a stream may be closed early
        self._request.record_stage(self.name, self._started_at, events.RAISED if is_raised else 0)


class request(TracedScope):  # noqa: N801 - used like a function
    """A request: `with`, `async with`, or a decorator. Below an instrumented server: the server's request.

    `operation` and `model` are the served ones, never text from the client. Metrics have a model as label if
    `submitted` was called; any other model becomes `_OTHER`.
    `headers`: the caller's headers, for its trace context and, if configured, for its tenant and traffic
    class. Make a new one for each `with`.
    """

    attaches = True

    def __init__(
        self, operation: str = DEFAULT_OPERATION, *, model: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self._operation = to_name(operation, DEFAULT_OPERATION)
        self._model, self._headers = to_name(model, events.OTHER), headers
        self.new_scope = functools.partial(request, operation, model=model, headers=headers)
        self._live: request_span.RequestSpan | None = None
        self._packed = bytes(4)
        self.misses_steps = False
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
            report_mistake("a request", exc)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._token is not None:
            detach(self._token)
        if self._live is not None and self._owns_request:
            try:
                self._live.close(*classify_exception(error))
            except Exception as exc:
                report_mistake("the end of a request", exc)

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
        """Sets the given operation and model, which no engine overrides. Defaults leave that to engines."""
        if not self._model and self._operation == DEFAULT_OPERATION:
            return
        if not self._owns_request:
            live.set_operation(self._operation, ENGINE, self._model)
        live.is_named, live.operation = True, self._operation

    @ignore_mistakes("a submission")
    def submitted(self, *, input_tokens: int = 0, max_tokens: int = 0) -> None:
        """Records the hand-over to the loop. From here to its first step the request is queued.

        `input_tokens`, `max_tokens`: 0 = unknown.
        """
        if self._live is not None:
            self._live.record_submitted(ENGINE, 1, input_tokens, max_tokens)

    @ignore_mistakes("a receipt")
    def received(self) -> None:
        """Records that the loop received the request. Until here it was in the hidden queue."""
        if self._live is not None:
            self._live.record_event(events.RequestReceived(_clock.now()))

    @ignore_mistakes("a token")
    def token_reached(self) -> None:
        """Records that the first token reached the code that sends the response.

        The time to first token then ends here, closer to the client than at the end of the step.
        Call it for each token or only for the first; only the first call counts.
        """
        if self._live is not None:
            self._live.record_token_reached()

    @ignore_mistakes("a preemption")
    def preempted(self) -> None:
        """Records a preemption: the request left the batch and lost its KV blocks."""
        if self._live is not None:
            self._live.record_event(events.RequestPreempted(_clock.now(), "recompute"))

    @ignore_mistakes("the end of a request")
    def finished(self, reason: str = "stop", output_tokens: int = 0) -> None:
        """Records that the loop finished the request.

        `reason`: `stop`, `length`, `abort` (cancelled on demand, which is no error) or `error`.
        `output_tokens`: 0 = the tokens that its steps delivered are counted.
        """
        if self._live is not None:
            self._live.record_event(
                events.EngineFinished(_clock.now(), str(reason), events.clamp_count(output_tokens))
            )

    @ignore_mistakes("an attribute")
    def set_attribute(self, key: str, value: events.Value) -> None:
        """Sets an attribute on the request span."""
        if self._live is not None:
            self._live.set_attribute(key, value)


def _add_lowercase_names(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Returns the headers under their own and their lower-case names, because propagators look up either."""
    if headers is None:
        return None
    return {**{str(name).lower(): value for name, value in headers.items()}, **headers}


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (str(name).encode("utf-8", "replace"), str(value).encode("utf-8", "replace"))
        for name, value in headers.items()
    ]
