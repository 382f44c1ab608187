"""Times the first outputs of a sequence in its detokenizer; later ones pass without a frame of ours.

A detokenizer belongs to one sequence. Its `update` is replaced on the instance, for as many outputs as a sample
takes. The time of all later tokens is estimated from the sample when the sequence ends.
"""

from __future__ import annotations

import contextlib
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.detokenize_sample import DetokenizeSample
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.tracing import request_span

_hook = Hook("vllm.v1.engine.detokenizer:IncrementalDetokenizer.update")


class DetokenizationSample:
    """The first outputs of a sequence of `request`."""

    __slots__ = ("_detokenizer", "_sample", "request")

    def __init__(self, detokenizer: Any, request: request_span.RequestSpan) -> None:
        self._detokenizer, self.request = detokenizer, request
        self._sample = DetokenizeSample()
        if _hook.alive:
            detokenizer.update = self.update

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `update` of the detokenizer, until the sample is full."""
        started_at = _clock.now()
        stop_string = type(self._detokenizer).update(self._detokenizer, *args, **kwargs)
        spent_ns = _clock.now() - started_at
        if _hook.alive:
            try:
                request, token_ids = self.request, args[0] if args else kwargs["new_token_ids"]
                request.detokenize_ns += spent_ns
                if token_ids:  # a request may end without a token
                    if not request.tokens_reached:
                        request.record_token_reached()
                    if self._sample.add_output(len(token_ids), spent_ns):
                        self._restore()
            except Exception as exc:
                _hook.mark_failed(exc)
        return stop_string

    def _restore(self) -> None:
        with contextlib.suppress(AttributeError):
            del self._detokenizer.update

    def count_tokens(self) -> int:
        """Returns the tokens of the sequence so far. vLLM discards those after a stop string."""
        return len(self._detokenizer.output_token_ids)

    def add_estimate(self) -> None:
        """Ends the sample. Adds the estimated time of the tokens after it to the request."""
        self._restore()
        self.request.detokenize_ns += self._sample.estimate_rest(self.count_tokens())
