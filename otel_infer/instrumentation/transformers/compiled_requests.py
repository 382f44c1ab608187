"""Lets compiled code record the requests of transformers' servers (`_requests.c`), where it was built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.detokenize_sample import DetokenizeSample
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import CANCELLED, ENGINE
from otel_infer.instrumentation.transformers.continuous_batching import remove_from_batch
from otel_infer.instrumentation.transformers.sequence_group import (
    PackedHandle,
    SequenceGroup,
    adding,
    record_finish,
)
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import context, request_span

OPERATION = "text_completion"
"""The operation of a request that no server names."""


def _make_requests() -> Any:
    if native is None or context.variable is None:
        return None
    return native.TransformersRequests(
        request_span.RequestSpan,
        SequenceGroup,
        DetokenizeSample,
        context.variable,
        request_span.REQUEST_KEY,
        PackedHandle,
        adding,
        ENGINE,
        OPERATION,
        *request_span.ID_KEYS,
        remove_from_batch,
        record_finish,
        CANCELLED,
    )


_requests: Any = _make_requests()
"""What compiled code knows about requests; None where it is not built."""


def compile_request_hook(
    place: str, original: Callable[..., Any], hook: Hook, call: Callable[..., Any], details: object = None
) -> Callable[..., Any]:
    """Returns a compiled form of the hook `call`, which calls it for all but the frequent case; or `call` itself."""
    return compile_hook(place, _requests, original, hook, call, details)
