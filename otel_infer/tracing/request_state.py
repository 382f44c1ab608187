"""The fields of a request span that compiled code reads and writes as well.

They are attributes of a compiled base class where that was built, of a Python class elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.ringbuffer.native import native
from otel_infer.tracing.pending_spans import ProviderSpans
from otel_infer.tracing.span_ids import LazySpanIds, SpanIds


class PythonRequestState:
    """The fields, with values that most requests never change as class attributes: no store for each request.

    `*_at`, `*_ns`: monotonic ns; 0 = not yet. `has_server`: its parent is a SERVER span of this package.
    `inspect_next_chunk`: the next chunk of the response may be the first, or the first with a token.
    `sends_directly`: the response's chunks reach the server without a frame of ours. `on_token_reached`: called
    once, in any thread, when the first token has reached the part that serves the client. `is_named`,
    `has_forward_name`: its operation is known, or is a model's. `tokenizing`: the engine tokenizes now and
    records that itself. `queued_at`: when an item of it was put into a queue from which no worker has taken it yet.
    """

    _span_ids: SpanIds | LazySpanIds
    around: Context
    owner: str
    handle: int
    arrived_at: int
    has_server: bool
    provider_spans: ProviderSpans | None = None
    on_token_reached: Callable[[], None] | None = None
    _engine_error: str | None = None
    chunks = send_wait_ns = detokenize_ns = queued_at = _link_count = 0
    ended = inspect_next_chunk = responding = tokens_reached = first_token_sent = sends_directly = False
    _has_error_status = is_named = has_forward_name = tokenizing = False
    _operation_names = ("", "", "")
    ring: Any = None
    """The compiled ring in which the request was opened; None where it is not built."""

    @property
    def ids(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Returns trace id, request span id, parent span id and own SERVER span id; zeros = none."""
        return self._span_ids.ids

    def record_event(self, event: Any) -> None:
        """Records an event of this request. Not by `recorder.record`, which would be one more call per event."""
        self._record_event(event)

    def record_stage(self, name: str, started_at: int, items: int = 0) -> None:
        """Records that a stage ended now. `items`: how many it processed; 0 = unknown, or `events.RAISED`."""
        self._write_stage(_clock.now(), name, started_at, items)

    def record_stage_at(self, at: int, name: str, started_at: int, items: int) -> None:
        """Records that a stage ended at this instant, as `record_stage`."""
        self._write_stage(at, name, started_at, items)

    def record_names(self, names: tuple[str, str, str]) -> bool:
        """Records operation, provider and model, if that takes no Python code. Returns whether it is done, or was before."""
        return False

    def record_token_reached(self) -> None:
        """Records, once, that a token reached the part of the server that serves the client."""
        if not self.tokens_reached:
            self.tokens_reached = self.inspect_next_chunk = True
            self._write_token_reached(_clock.now())
            if self.on_token_reached is not None:
                self.on_token_reached()

    def _record_event(self, event: Any) -> None:
        raise NotImplementedError

    def _write_token_reached(self, at: int) -> None:
        raise NotImplementedError

    def _write_stage(self, at: int, name: str, started_at: int, items: int) -> None:
        raise NotImplementedError


if TYPE_CHECKING or native is None:
    RequestState = PythonRequestState
else:
    RequestState = native.RequestState
