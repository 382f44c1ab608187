"""The state of one `generate` call while it runs, and its events: steps, tokens and the end."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.timed_work import StepWork
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.detokenize_sample import DetokenizeSample
from otel_infer.instrumentation.transformers import kv_cache
from otel_infer.instrumentation.transformers._instrumentor import CANCELLED, ENGINE
from otel_infer.instrumentation.transformers.generation_arguments import tensor_shape
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import request_span
from otel_infer.tracing.outcome import classify_exception


def on_device_timed() -> None:
    """Called where a device times steps; `generate` puts its function here, which installs another hook."""


class PythonGenerationState:
    """The fields of a run that each step reads or writes; compiled code does too, where it was built.

    `has_plain_steps`: each step after the first delivers one token of one row. `stepping`: a loop runs, whose
    steps are recorded. `writer`: None while steps are not recorded. `is_detokenizing_sampled`: enough outputs
    of a streamer were timed.
    """

    iterations: int
    step: int
    tokens: int
    timing_due_at: int
    writer: BatchWriter | None
    timing_handle: Any
    has_plain_steps: bool
    stepping: bool
    is_detokenizing_sampled: bool


if TYPE_CHECKING or native is None:
    GenerationState = PythonGenerationState
else:
    GenerationState = native.GenerationState


class BatchMember(NamedTuple):
    """A request of a batch that one call generates for. `packed`: its handle as steps have it."""

    packed: bytes


class GenerationRun(GenerationState):
    """One outermost `generate` call while it runs, for one request or for a batch of them.

    `prompt_tokens`: tokens per row, 0 = unknown. `prefill_tokens`: tokens that the first forward pass computes,
    summed over all rows.
    """

    def __init__(
        self, request: request_span.RequestSpan, own: bool, writer: BatchWriter | None, rows: int, prompt: int
    ) -> None:
        """`own`: the request was opened for this call, so the call closes it. `prompt`: tokens per row."""
        self.request, self.owns_request, self.writer = request, own, writer
        self.packed = request.packed
        self.rows = self.computed_rows = rows
        self.prompt_tokens, self.start_length, self.max_new_tokens = prompt, prompt, 0
        self.began_at = _clock.now()
        self.members: list[Any] = [
            BatchMember(member.packed) for member in getattr(request, "members", ())
        ] or [self]
        self.stepping = self.drafting = self.prefilled = self.has_plain_steps = False
        self.accepted_tokens = 1
        self.pid = os.getpid()
        self.detokenize_sample, self.is_detokenizing_sampled = DetokenizeSample(), False
        self.timing_handle = UNTIMED
        self.device: Any = None
        self.has_waited = False
        self.timing_due_at = 0
        self.cache: Any = None
        self.iterations = self.step = self.tokens = self.prefill_tokens = 0

    def begin_loop(self, model: Any, input_ids: Any, arguments: Mapping[str, Any]) -> None:
        """Reads rows, start and maximum length when a decoding loop begins, because only then they are final.

        A custom loop may run several of these. `arguments`: the loop's arguments by name.
        """
        timing.cancel(self.timing_handle)
        self.timing_handle, self.iterations, self.prefilled, self.accepted_tokens = UNTIMED, 0, False, 1
        config = arguments["generation_config"]
        self.computed_rows, start = (int(size) for size in input_ids.shape[:2])
        if not self.stepping:  # a later loop may continue from the tokens of an earlier one
            self.start_length = start
        copies, beams = (
            events.clamp_count(count) or 1 for count in (config.num_return_sequences, config.num_beams)
        )
        prompts = self.computed_rows // max(copies, beams)
        self.rows = prompts * copies
        self.prompt_tokens = self.prompt_tokens or self.start_length
        self.max_new_tokens = events.clamp_count(config.max_length) - self.start_length
        if getattr(model.config, "is_encoder_decoder", False):
            self.prefill_tokens = self.prompt_tokens * prompts
        else:
            self.prefill_tokens = self._count_uncached(arguments, prompts, start) * self.computed_rows
        # Inputs may stay on the host. An offloaded model reports the device `meta`, where nothing is.
        device = getattr(model, "device", None)
        self.device = input_ids.device if device is None or device.type == "meta" else device
        self.cache = kv_cache.find_cache(arguments)
        self.stepping = True

    def _count_uncached(self, arguments: Mapping[str, Any], prompts: int, start: int) -> int:
        """Returns the prompt tokens per row to compute, without those in a cache that the caller passed."""
        whole, mask = start or self.prompt_tokens, arguments.get("attention_mask")
        mask_length = getattr(arguments["generation_config"], "_mask_length", 0)
        masked = (mask_length,) if mask is None else tensor_shape(mask)[1:2]
        is_whole = masked == (start,) or arguments.get("inputs_embeds") is not None
        if not is_whole:  # the input lacks the cached tokens already
            return whole
        cached = min(kv_cache.cached_tokens(kv_cache.find_cache(arguments)), max(whole - 1, 0))
        if cached and not self.stepping:
            self.request.record_event(events.PrefixRead(_clock.now(), whole * prompts, cached * prompts))
        return whole - cached

    @property
    def has_one_row(self) -> bool:
        """Returns whether the loop computes and returns one row, and its steps are recorded."""
        return self.rows == self.computed_rows == 1 and self.writer is not None and self.members == [self]

    def _divide_tokens(self, tokens: int) -> bytes:
        """Returns the tokens of a step as a column, in equal parts for the requests; empty if each has one."""
        count = len(self.members)
        return b"" if tokens == count else array("I", (tokens // count,) * count).tobytes()

    def begin_step(self, tokens: int) -> None:
        """Records that a forward pass over all rows begins; `tokens` is their sum over the rows."""
        if self.writer is not None:
            column = self._divide_tokens(tokens)
            self.step = self.writer.write_scheduled(self.members, (), column, running=len(self.members))
            self.begin_timing(_clock.now(), self.iterations < 2)

    def begin_unchanged_step(self) -> None:
        """Records that a step of one token begins, with the whole batch."""
        if self.writer is not None:
            self.step = self.writer.write_scheduled(self.members, running=len(self.members))

    def begin_timing(self, at: int, always: bool) -> None:
        """Begins to time the step, if it is one of the sample."""
        self.timing_handle = timing.begin(always=always, on=self.device)
        if timing.is_device_timed:
            self.timing_due_at = 0  # each step counts for the sample of a device
            on_device_timed()
        else:
            self.timing_due_at = at + timing.host_interval_ns

    def mark_launched(self, has_waited: bool = False) -> None:
        """Ends the device timing of the step. `has_waited`: the host has already waited for the device."""
        handle, self.timing_handle = self.timing_handle, UNTIMED
        if self.writer is not None:
            timing.end(handle, StepWork(ENGINE, self.pid, 0, self.step, self.writer.number), has_waited)

    def end_step(self) -> None:
        """Records that the tokens of the step are known on the host."""
        tokens = self.rows * self.accepted_tokens
        self.tokens += tokens
        if self.writer is not None:
            self.writer.write_done(self.step, self._divide_tokens(tokens), len(self.members))

    def advance_iteration(self, goes_on: bool) -> None:
        """Ends the running step, and begins the next if the loop continues (`goes_on`)."""
        self.iterations += 1
        if self.iterations > 1:
            self.end_step()
        if self.iterations == 2:
            kv_cache.record_size(self.request, self.cache)
        if goes_on and (self.iterations > 1 or not self.prefilled):
            self.begin_step(self.computed_rows if self.iterations > 1 else self.prefill_tokens)

    def record_result(self, result: Any) -> None:
        """Records the normal end of the call: generated tokens, finish reason and cache size."""
        kv_cache.record_size(self.request, self.cache)
        shape = tensor_shape(getattr(result, "sequences", result))
        length = max(shape[1] - self.start_length, 0) if len(shape) == 2 else 0
        requests = len(self.members)
        tokens = (length * self.rows or self.tokens) // requests
        if self.writer is None or not self.stepping:
            self.request.record_event(events.RequestScheduled(self.began_at))
            self.request.record_stage(events.DECODE, self.began_at, tokens)
        # A row that stops at exactly the maximum length also gets "length".
        reason = "length" if 0 < self.max_new_tokens <= length else "stop"
        self.request.record_event(events.EngineFinished(_clock.now(), reason, tokens))
        # One finish per row shows that all rows are over. Steps do not show it: beams end before the last
        # step, and a request may call `generate` again.
        for _ in range(self.rows // requests - 1):
            self.request.record_event(events.EngineFinished(_clock.now(), "", 0))
        self.request.set_engine_error("")
        sample = self.detokenize_sample
        self.request.detokenize_ns += sample.spent_ns + sample.estimate_rest(self.iterations)
        if self.owns_request:
            self.request.close()

    def record_failure(self, exc: BaseException) -> None:
        """Records that the call failed, or that it was cancelled."""
        timing.cancel(self.timing_handle)
        kv_cache.record_size(self.request, self.cache)
        outcome, error_type = classify_exception(exc)
        if type(exc).__name__ == CANCELLED:
            outcome, error_type = events.ABORTED, events.CANCELLED
        reason = "error" if outcome == events.ERROR else "abort"
        self.request.record_event(events.EngineFinished(_clock.now(), reason, self.tokens))
        if self.owns_request:
            self.request.close(outcome, error_type)
        elif outcome == events.ERROR:
            self.request.set_engine_error(error_type)


class _GenerationThreadState(threading.local):
    """The run of the `generate` call on this thread.

    `next_run`: the run of the call that is about to begin.
    """

    run: GenerationRun | None = None
    next_run: GenerationRun | None = None


thread_state = _GenerationThreadState()

compiled_state = None if native is None else (thread_state, GenerationRun, UNTIMED)
"""What compiled code knows about runs; None where it is not built."""
